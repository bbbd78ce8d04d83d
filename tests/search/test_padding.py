"""Padding: never a token of the step, and sent where the trainer sends it."""

from dataclasses import replace

import numpy as np
import pytest
from edits import said
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import padded_counts_slow, step_ns_slow
from strategies import TOPOLOGIES, make_batch, make_spec, make_tables

from profiler import RoutePackError, Topology
from search import PlannerParams, build_problem, check_plan, evaluate, plan_step
from search.params import padding_experts

SMALL = PlannerParams(max_iterations=4096, placement_swaps=200, starts=1)
TOPOLOGY, CAP = TOPOLOGIES[2], 256


def make_case(lengths, seed=0, unknown=0, topology=TOPOLOGY, spec=None):
    rng, spec = np.random.default_rng(seed), spec or make_spec()
    batch = make_batch(rng, spec, lengths, skew=1.0, unknown=unknown)
    return batch, make_tables(np.random.default_rng(1), spec, topology, CAP), spec, topology, CAP


def test_padding_is_no_token_of_the_step():
    """195 real tokens once read 320 under an alignment of 64: a loss divided by that is too small by a third."""
    case = make_case([35, 70, 40, 50], topology=Topology())
    for alignment, padding in ((1, 0), (16, 45), (64, 125)):
        plan = plan_step(*case, replace(SMALL, sequence_alignment=alignment))
        assert plan.to_dict()["denominators"] == {"num_samples": 4, "num_tokens": 195}
        assert plan.counters["padding_tokens"] == padding
        assert plan.total_tokens == case[0].lengths.sum()


@given(
    st.lists(st.integers(1, 60), min_size=8, max_size=16),
    st.integers(1, 64),
    st.sampled_from(("average", "none", "constant")),
)
@settings(max_examples=8, deadline=None)
def test_denominators_do_not_change_with_the_alignment(lengths, alignment, routes):
    case = make_case(lengths)
    params = replace(SMALL, sequence_alignment=alignment, padding_routes=routes, max_iterations=1)
    plan, refused = said(lambda: plan_step(*case, params))
    if plan is None:
        assert "cannot give each" in refused or "No packing" in refused
        return
    assert plan.to_dict()["denominators"] == {"num_samples": len(lengths), "num_tokens": sum(lengths)}
    padded = -(-np.array(lengths) // alignment) * alignment
    assert plan.counters["padding_tokens"] == padded.sum() - sum(lengths)
    check_plan(plan, padded, 8)


@given(st.integers(0, 1000), st.sampled_from(("none", "constant", "constant 0", "constant 5 2")), st.integers(0, 2))
@settings(max_examples=10, deadline=None)
def test_counts_and_price_agree_with_the_slow_definition(seed, routes, unknown):
    rng = np.random.default_rng(seed)
    case = make_case(rng.integers(3, 30, 12), seed, unknown)
    params = replace(SMALL, sequence_alignment=16, padding_routes=routes, max_iterations=1)
    problem, bare = build_problem(*case, params), build_problem(*case)
    expected = padded_counts_slow(bare.counts, problem.lengths - case[0].lengths, padding_experts(routes, 2))
    assert (problem.counts == expected).all()
    plan = plan_step(*case, params)
    slow_ns, _ = step_ns_slow(problem, plan.row_N, plan.slot_N, plan.placement_LE, plan.num_rows)
    assert round(plan.predicted.step_time_s * 1e9) == slow_ns


def test_average_padding_is_as_before():
    case = make_case(np.arange(5, 29), unknown=1)
    aligned = build_problem(*case, replace(SMALL, sequence_alignment=16))
    longer = build_problem(replace(case[0], lengths=aligned.lengths), *case[1:])
    assert (aligned.counts == longer.counts).all()


def test_constant_padding_counts_on_its_rank():
    """25 samples of 40 tokens padded to 48, top-8 of 64 experts on 8 ranks: 1600 rows go to experts 0 to 7."""
    spec = make_spec(layers=1, experts=64, top_k=8)
    topology = Topology(data_parallel_size=8, expert_model_parallel_size=8)
    case = make_case([40] * 25, topology=topology, spec=spec)
    params = {routes: replace(SMALL, sequence_alignment=48, padding_routes=routes) for routes in ("none", "constant")}
    none, constant = (build_problem(*case, one) for one in params.values())
    assert (constant.counts - none.counts).sum(axis=(0, 1)).tolist() == [200] * 8 + [0] * 56
    cell = np.arange(25) % 8
    in_place = np.arange(64)[None]
    rows = [evaluate(one, cell * 0, cell, in_place, 1).rank_rows_RBPL.sum(axis=(0, 1, 3)) for one in (none, constant)]
    assert (rows[1] - rows[0]).tolist() == [1600, 0, 0, 0, 0, 0, 0, 0]
    # A limit that a plan just keeps without these rows is broken by them: they are planned for, or nothing is.
    free = plan_step(*case, params["none"])
    hottest = [
        int(evaluate(one, free.row_N, free.slot_N, free.placement_LE, free.num_rows).rank_rows_RBPL.max())
        for one in (none, constant)
    ]
    assert hottest[1] > hottest[0]
    kept = plan_step(*case, replace(params["constant"], max_received_rows=hottest[0]))
    priced = evaluate(constant, kept.row_N, kept.slot_N, kept.placement_LE, kept.num_rows)
    assert priced.rank_rows_RBPL.max() <= hottest[0]
    with pytest.raises(RoutePackError, match="above max_received_rows"):
        plan_step(*case, replace(params["constant"], max_received_rows=100))


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        ("average", "routed like average tokens"),
        ("none", "sent to no expert"),
        ("constant", "sent to experts 0, 1"),
        ("constant 3", "sent to experts 3"),
    ],
)
def test_notes_say_what_was_taken(routes, said):
    case = make_case(np.arange(5, 29))
    params = replace(SMALL, sequence_alignment=16, padding_routes=routes)
    plan = plan_step(*case, params)
    tokens = plan.counters["padding_tokens"]
    assert f"{tokens} padding tokens are taken as {said} (planner.padding_routes)." in plan.notes
    unpadded = plan_step(*case, replace(params, sequence_alignment=1))
    assert not [note for note in unpadded.notes if "padding" in note]


@pytest.mark.parametrize("routes", ["constant 8", "constant 0 1 2", "constant 1048576"])
def test_experts_that_the_model_has_not_are_refused(routes):
    with pytest.raises(RoutePackError, match="at most top_k = 2 of tiny's experts 0 to 7"):
        build_problem(*make_case([8] * 8), replace(SMALL, padding_routes=routes))

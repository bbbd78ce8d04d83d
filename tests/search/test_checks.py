"""No kernel sees an index that was not checked: batches, tables, packings and placements made by hand."""

from dataclasses import asdict, replace

import numpy as np
import pytest
from strategies import TOPOLOGIES, make_batch, make_spec, make_tables

from profiler import RoutePackError, Topology
from search import PlannerParams, StreamingPlanner, build_problem, check_plan, evaluate, place_baseline, plan_step
from search.baselines.catalog import price_packing
from search.checks import check_times
from search.placement.lpt import identity_placement

SMALL = PlannerParams(max_iterations=4096, placement_swaps=200, starts=1)
TOPOLOGY, CAP = TOPOLOGIES[2], 64


def make_case(seed=0):
    rng, spec = np.random.default_rng(seed), make_spec()
    batch = make_batch(rng, spec, rng.integers(5, 30, 24), skew=1.5, unknown=1)
    return batch, make_tables(np.random.default_rng(1), spec, TOPOLOGY, CAP), spec, TOPOLOGY, CAP


CASE = make_case()
BATCH, TABLES, SPEC = CASE[:3]
PLAN = plan_step(*CASE, SMALL)


def changed(name, value, *place):
    array = np.array(getattr(BATCH, name))
    array[place] = value
    return {name: array}


WRONG_BATCHES = {
    "negative count": (changed("expert_counts", -1, 0, 0, 0), "negative count -1"),
    "count above the tokens": (changed("expert_counts", 2**30, 0, 0, 0), "add up to|of .* tokens"),
    "counts of 64 bits": ({"expert_counts": BATCH.expert_counts.astype(np.uint64) + 2**63}, "tokens|add up"),
    "length 0": (changed("lengths", 0, 3), "has length 0"),
    "length beyond the tables": (changed("lengths", 65, 3), "above max_tokens_per_microbatch|add up"),
    "length of 64 bits": (
        {"lengths": np.where(np.arange(24) == 3, 2**64 - 5, BATCH.lengths.astype(np.uint64))},
        "above max_tokens_per_microbatch|add up",
    ),
    "known above the length": (changed("known_tokens", 99, 3), "outside 0"),
    "known negative": (changed("known_tokens", -1, 3), "outside 0"),
    "ids twice": (changed("sample_ids", "s1", 3), "'s1' occurs twice"),
    "lengths short": ({"lengths": BATCH.lengths[:-1]}, "the shape"),
    "lengths as a matrix": ({"lengths": BATCH.lengths[None]}, "the shape"),
    "lengths as floats": ({"lengths": BATCH.lengths * 1.0}, "to hold integers, got float64"),
    "lengths as a list": ({"lengths": BATCH.lengths.tolist()}, "to be a numpy array, got list"),
    "known short": ({"known_tokens": BATCH.known_tokens[:-1]}, "known_tokens of the shape"),
    "counts of fewer samples": ({"expert_counts": BATCH.expert_counts[:-1]}, "expert_counts of the shape"),
    "counts of fewer layers": ({"expert_counts": BATCH.expert_counts[:, :1]}, "1 layers x 8 experts"),
    "counts without layers": ({"expert_counts": BATCH.expert_counts[:, 0]}, "0 layers x 0 experts"),
    "counts as floats": ({"expert_counts": BATCH.expert_counts * 1.0}, "to hold integers, got float64"),
    "counts as objects": ({"expert_counts": BATCH.expert_counts.astype(object)}, "to hold integers, got object"),
}


@pytest.mark.parametrize("kind", WRONG_BATCHES)
def test_batches_made_by_hand_are_refused_before_any_kernel(kind):
    change, words = WRONG_BATCHES[kind]
    with pytest.raises(RoutePackError, match=words):
        plan_step(replace(BATCH, **change), *CASE[1:], SMALL)


def test_narrow_types_plan_the_same():
    narrow = replace(
        BATCH,
        lengths=BATCH.lengths.astype(np.uint8),
        known_tokens=BATCH.known_tokens.astype(np.uint8),
        expert_counts=BATCH.expert_counts.astype(np.uint8),
    )
    assert plan_step(narrow, *CASE[1:], SMALL).to_dict() == PLAN.to_dict()


@pytest.mark.parametrize("batch", [None, {}, "step.npz"])
def test_what_is_no_batch_is_refused(batch):
    with pytest.raises(RoutePackError, match="Expected a StepBatch, got"):
        plan_step(batch, *CASE[1:], SMALL)


WRONG_TABLES = {
    "MoE layers": ({"num_moe_layers": 3}, "num_moe_layers 3, not 2"),
    "top-k": ({"top_k": 8, "slots_per_block": 1}, "top_k 8, not 2"),  # as many rows
    "block": ({"top_k": 8, "slots_per_block": 1}, "slots_per_block 1, not 4"),
    "stages": ({"pipeline_stages": 7}, "pipeline_stages 7, not 1"),
    "cap": (asdict(make_tables(np.random.default_rng(1), SPEC, TOPOLOGY, 32)), "cells of 1 to 32 tokens, not up to 64"),
    "layers of a class": ({"class_layers": np.array([2, 1])}, "1 layers backward"),
    "directions": ({"class_names": ("full/moe/forward", "full/moe/sideways")}, "layers sideways"),
    "no MoE": ({"class_names": ("full/dense/forward", "full/dense/backward")}, "0 of them MoE"),
}


@pytest.mark.parametrize("kind", WRONG_TABLES)
def test_tables_of_something_else_are_refused(kind):
    change, words = WRONG_TABLES[kind]
    with pytest.raises(RoutePackError, match=words):
        plan_step(BATCH, replace(TABLES, **change), *CASE[2:], SMALL)
    with pytest.raises(RoutePackError, match=words):
        StreamingPlanner(replace(TABLES, **change), *CASE[2:], SMALL)


@pytest.mark.parametrize("name", ["cell_ns", "sequence_ns", "expert_rank_ns"])
def test_times_beyond_any_step_are_refused(name):
    long = replace(TABLES, **{name: np.full_like(getattr(TABLES, name), 2**53)})
    check_times(long, SPEC.num_moe_layers, 8, TOPOLOGY)
    with pytest.raises(RoutePackError, match="beyond any step"):
        check_times(long, SPEC.num_moe_layers, 2**12, TOPOLOGY)


def test_a_cap_beyond_the_tables_is_refused():
    for cap in (65, 0, -1, 2**40):
        with pytest.raises(RoutePackError, match="cells of 1 to 64 tokens"):
            plan_step(BATCH, TABLES, SPEC, TOPOLOGY, cap, SMALL)


WRONG_PLACEMENTS = {
    "far below": (lambda p: np.where(np.arange(8) == 0, -(2**40), p), "not a bijection"),
    "just above": (lambda p: np.where(np.arange(8) == 0, 8, p), "not a bijection"),
    "32 bits": (lambda p: np.where(np.arange(8) == 0, 2**31, p), "not a bijection"),
    "a layer less": (lambda p: p[:1], r"of the shape \[2, 8\], got \[1, 8\]"),
    "an expert less": (lambda p: p[:, :7], r"got \[2, 7\]"),
    "flat": (lambda p: p.ravel(), r"got \[16\]"),
    "floats": (lambda p: p * 1.0, "to hold integers"),
    "a list": (lambda p: p.tolist(), "to be a numpy array"),
}


@pytest.mark.parametrize("kind", WRONG_PLACEMENTS)
def test_placements_made_by_hand_are_refused(kind):
    problem = build_problem(*CASE)
    make, words = WRONG_PLACEMENTS[kind]
    wrong = make(PLAN.placement_LE)
    packing = PLAN.row_N, PLAN.slot_N, PLAN.num_rows
    for use in (
        lambda: evaluate(problem, PLAN.row_N, PLAN.slot_N, wrong, PLAN.num_rows),
        lambda: price_packing(problem, packing, wrong),
        lambda: place_baseline(problem, "first-fit decreasing + LPT", wrong),
    ):
        with pytest.raises(RoutePackError, match=words):
            use()
    with pytest.raises(RoutePackError, match=words + r"|MoE layers but|layers x experts|experts do not divide|shape"):
        check_plan(replace(PLAN, placement_LE=wrong), BATCH.lengths, 8)


@pytest.mark.parametrize(
    "start", [np.zeros((2, 8), np.int64), np.full((2, 8), 2**40), np.arange(8), [[0] * 8] * 2, np.zeros((2, 8))]
)
def test_starts_made_by_hand_are_refused(start):
    with pytest.raises(RoutePackError, match=r"equally many experts|ranks of experts \[MoE layers, experts\]"):
        plan_step(*CASE, SMALL, start=start)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"row_N": PLAN.row_N + 2**33}, "is in no cell"),
        ({"row_N": PLAN.row_N - 1}, "is in no cell"),
        ({"slot_N": PLAN.slot_N + 1}, "is in no cell"),
        ({"slot_N": PLAN.slot_N[:-1]}, "the shape|Plan holds"),
        ({"slot_N": PLAN.slot_N * 1.0}, "integers"),
        ({"num_rows": 2**31}, "cannot each hold one of 24 samples"),
        ({"num_rows": 0}, "or are none"),
        ({"num_rows": -1}, "or are none"),
    ],
)
def test_packings_made_by_hand_are_refused(change, words):
    wrong = replace(PLAN, **change)
    problem = build_problem(*CASE)
    with pytest.raises(RoutePackError, match=words):
        evaluate(problem, wrong.row_N, wrong.slot_N, wrong.placement_LE, wrong.num_rows)
    with pytest.raises(RoutePackError, match=words):
        check_plan(wrong, BATCH.lengths, 8)


def test_a_cell_beyond_the_tables_is_refused():
    problem = build_problem(*CASE)
    one_row = np.zeros(24, np.int64)
    with pytest.raises(RoutePackError, match="A cell holds"):
        evaluate(problem, one_row, np.arange(24) % 4 // 3 * 3, identity_placement(problem), 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"starts": 600}, "starts to be an integer from 1 to 64, got 600"),
        ({"starts": 2.0}, "starts to be an integer"),
        ({"starts": True}, "starts to be an integer"),
        ({"equal_samples": 1}, "equal_samples to be true or false"),
        ({"hot_temperature": "3"}, "hot_temperature to be a number"),
        ({"hot_temperature": float("nan")}, "hot_temperature to be a number"),
        ({"sequence_alignment": 2**62}, "sequence_alignment to be an integer"),
        ({"max_received_rows": 2**41}, "max_received_rows to be"),
        ({"placement_swaps": 10**18}, "placement_swaps to be"),
        ({"stickiness": float("inf")}, "stickiness to be"),
        ({"link_gbytes_per_s": 1e-300}, "link_gbytes_per_s to be 0 or at least"),
        ({"padding_routes": "spread"}, "padding_routes 'average', 'none', 'constant'"),
        ({"padding_routes": ""}, "padding_routes 'average'"),
        ({"padding_routes": "constant 0 0"}, "distinct experts"),
        ({"padding_routes": "constant -1"}, "distinct experts"),
        ({"padding_routes": None}, "padding_routes to be one line"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        PlannerParams(**settings)


@pytest.mark.parametrize(
    "extreme",
    [
        {"starts": 64, "max_iterations": 1, "alternations": 2},
        {"stickiness": 1e12, "horizon_steps": 0.0, "link_gbytes_per_s": 0.001},
        {"hot_temperature": 1e6, "cold_temperature": 1e3},
        {"placement_temperature": 1e3, "alternations": 2},
        {"max_received_rows": 2**40, "receive_slack": 0.99},
        {"extra_rows": 4096},
    ],
)
def test_settings_at_their_limits_plan(extreme):
    plan = plan_step(*CASE, replace(SMALL, **extreme), previous=PLAN)
    check_plan(plan, BATCH.lengths, 8)
    assert plan.predicted.step_time_s > 0


@pytest.mark.parametrize(
    "sizes", [{"data_parallel_size": 2**62}, {"data_parallel_size": 2**15, "tensor_model_parallel_size": 2**15}]
)
def test_absurd_topologies_are_refused_at_once(sizes):
    with pytest.raises(ValueError, match="1048576"):
        Topology(**sizes)

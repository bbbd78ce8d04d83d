"""The planner as a whole: constraints always hold, plans are pure functions, bounds are bounds."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given, reject, settings
from hypothesis import strategies as st
from oracles import best_step_ns, step_ns_slow
from strategies import TOPOLOGIES, capped_packing, jobs, make_batch, make_spec, make_tables, possible_rows, problems

from profiler import RoutePackError, Topology
from search import (
    BASELINES,
    Plan,
    PlannerParams,
    StopCriterion,
    build_problem,
    check_plan,
    evaluate,
    lower_bound_ns,
    plan_step,
    price_baseline,
)
from search.bounds import convex_minorant
from search.joint import row_candidates
from search.placement.lpt import first_ranks, lpt_placement
from search.problem import row_range

SMALL = PlannerParams(max_iterations=20_000, placement_swaps=500, starts=2)


def make_case(seed, topology, samples=24, cap=64, layers=2, skew=1.0):
    rng = np.random.default_rng(seed)
    spec = make_spec(layers=layers)
    lengths = np.clip(np.exp(rng.normal(2.5, 0.8, samples)), 1, cap).astype(int)
    batch = make_batch(rng, spec, lengths, skew=skew, unknown=1)
    return batch, make_tables(rng, spec, topology, cap), spec, topology, cap


@given(st.integers(0, 10_000), st.sampled_from(TOPOLOGIES))
@example(4179, Topology(data_parallel_size=4, expert_model_parallel_size=4))
@settings(max_examples=12)
def test_plan_keeps_constraints_and_states_its_own_price(seed, topology):
    case = make_case(seed, topology)
    plan = plan_step(*case, replace(SMALL, max_iterations=4096), seed=seed)
    batch, tables, spec, _, _ = case
    check_plan(plan, batch.lengths, spec.num_experts)
    problem = build_problem(*case)
    slow_ns, _ = step_ns_slow(problem, plan.row_N, plan.slot_N, plan.placement_LE, plan.num_rows)
    assert plan.predicted.step_time_s == pytest.approx(slow_ns * 1e-9 / tables.pipeline_stages, rel=1e-12)
    assert plan.lower_bound_s <= plan.predicted.step_time_s
    assert plan.gap >= 0


def test_plan_beats_every_published_baseline():
    case = make_case(3, TOPOLOGIES[2], samples=60, skew=1.5)
    plan, problem = plan_step(*case, SMALL), build_problem(*case)
    for name in BASELINES:
        priced, _ = price_baseline(problem, name)
        assert plan.predicted.step_time_s < priced.step_time().step_time_s, name


@pytest.mark.parametrize("topology", [TOPOLOGIES[0], Topology()])
@pytest.mark.parametrize("seed", range(3))
def test_bound_optimum_plan_are_in_order_on_tiny_instances(seed, topology):
    rng = np.random.default_rng(seed)
    spec = make_spec(layers=1, experts=4)
    batch = make_batch(rng, spec, rng.integers(2, 12, 5), skew=1.5)
    cap = int(batch.lengths.max()) + 8
    tables = make_tables(rng, spec, topology, cap)
    problem = build_problem(batch, tables, spec, topology, cap)
    optimum = best_step_ns(problem, max_rows=2)
    plan = plan_step(batch, tables, spec, topology, cap, SMALL)
    ours = round(plan.predicted.step_time_s * 1e9)
    assert lower_bound_ns(problem) <= optimum
    if plan.num_rows <= 2:
        assert optimum <= ours
    assert ours <= optimum * 1.02


@given(problems(max_samples=24))
@settings(max_examples=40)
def test_bound_is_below_plans_of_every_number_of_rows(drawn):
    """A convex cost falls when more rows share it: the bound must hold for all row counts, not for the least alone."""
    problem, rng = drawn
    bound = lower_bound_ns(problem)
    for rows in possible_rows(problem):
        if (cell := capped_packing(rng, problem, rows)) is None:
            continue
        row_N, slot_N = cell // problem.num_slots, cell % problem.num_slots
        assert bound <= evaluate(problem, row_N, slot_N, lpt_placement(problem), rows).step_ns


@given(jobs(max_samples=24))
@settings(max_examples=25)
def test_no_plan_under_binding_caps_goes_below_its_bound(drawn):
    *case, params = drawn[0]
    problem = build_problem(*case, params)
    try:
        plan = plan_step(*case, replace(params, max_iterations=4096, placement_swaps=200, starts=1))
    except RoutePackError as error:  # refused aloud: such a cap cannot be kept, or a row lacks samples
        if any(reason in str(error) for reason in ("max_received_rows", "cannot give each", "No packing of")):
            reject()
        raise
    slow_ns, _ = step_ns_slow(problem, plan.row_N, plan.slot_N, plan.placement_LE, plan.num_rows)
    assert plan.predicted.step_time_s == pytest.approx(slow_ns * 1e-9 / problem.tables.pipeline_stages, rel=1e-12)
    assert plan.lower_bound_s <= plan.predicted.step_time_s
    check_plan(plan, problem.lengths, problem.num_experts)


@given(jobs(max_samples=24))
@settings(max_examples=15)
def test_a_receive_cap_that_does_not_bind_changes_nothing(drawn):
    *case, params = drawn[0]
    params = replace(params, max_iterations=4096, placement_swaps=200, starts=1, max_received_rows=0)
    assume(row_range(problem := build_problem(*case, params)))
    try:
        free = plan_step(*case, params)
    except RoutePackError:  # no packing found under the token cap
        reject()
    loose = plan_step(*case, replace(params, max_received_rows=int(problem.counts.sum())))
    assert loose.plan_hash == free.plan_hash
    assert (loose.predicted, loose.default, loose.lower_bound_s) == (free.predicted, free.default, free.lower_bound_s)


def test_convex_minorant_is_below_and_convex():
    rng = np.random.default_rng(0)
    table = np.cumsum(rng.integers(0, 100, 50)).astype(np.int64)
    hull = convex_minorant(table)
    assert (hull <= table + 1e-9).all()
    assert (np.diff(hull, 2) >= -1e-9).all()
    assert hull[0] == table[0]
    assert hull[-1] == table[-1]


def test_same_bytes_from_any_threads():
    case = make_case(5, TOPOLOGIES[1])
    plans = [plan_step(*case, SMALL, seed=3, num_threads=threads) for threads in (1, 2, 3)]
    assert len({json.dumps(plan.to_dict()) for plan in plans}) == 1
    assert plan_step(*case, SMALL, seed=4).plan_hash != plans[0].plan_hash


PROCESS = """
import sys; sys.path[:0] = {path!r}
import json, numpy as np
from strategies import make_batch, make_spec, make_tables
from profiler import Topology
from search import plan_step, PlannerParams
topology = Topology(data_parallel_size=4, expert_model_parallel_size=4)
rng = np.random.default_rng(0)
spec = make_spec()
batch = make_batch(rng, spec, [8] * 24, skew=0)
counts = np.full_like(batch.expert_counts, 2)  # every load ties
batch = type(batch)(batch.lengths, counts, batch.sample_ids, batch.known_tokens)
tables = make_tables(rng, spec, topology, 64)
plan = plan_step(batch, tables, spec, topology, 64, PlannerParams(max_iterations=8000, placement_swaps=200))
print(json.dumps(plan.to_dict()))
"""


def test_same_bytes_from_other_processes_and_hash_seeds_with_all_loads_tied():
    program = PROCESS.format(path=[p for p in sys.path if p])
    outputs = set()
    for hash_seed, threads in (("1", "1"), ("2", "2")):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "NUMBA_NUM_THREADS": threads}
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert json.loads(outputs.pop())["plan_hash"]


def test_cap_is_hard_where_bins_of_the_mean_overflow():
    """Five samples of 6 under a cap of 10: ceil(30 / 10) = 3 bins cannot hold them, five can (verl 7553)."""
    spec, topology = make_spec(), Topology()
    rng = np.random.default_rng(0)
    batch = make_batch(rng, spec, [6] * 5)
    tables = make_tables(rng, spec, topology, 10)
    plan = plan_step(batch, tables, spec, topology, 10, SMALL)
    assert plan.num_rows == 5
    problem = build_problem(batch, tables, spec, topology, 10)
    assert price_baseline(problem, "Karmarkar-Karp on FLOPs + LPT")[1] == 5


def test_every_slot_has_the_same_number_of_microbatches():
    """[900, 900, 900] and [100, 100, 100] on two ranks: one global plan (verl 6176)."""
    spec, topology = make_spec(), TOPOLOGIES[0]
    rng = np.random.default_rng(0)
    batch = make_batch(rng, spec, [90, 90, 90, 10, 10, 10])
    plan = plan_step(batch, make_tables(rng, spec, topology, 100), spec, topology, 100, SMALL)
    assert {len(rows) for rows in plan.micro_batches()} == {plan.num_rows}
    assert all(cell for rows in plan.micro_batches() for cell in rows)


def test_caller_order_survives_packing():
    """Plan, then inverse: the caller's order (SkyRL 1865)."""
    case = make_case(9, TOPOLOGIES[1])
    data = plan_step(*case, SMALL).to_dict()
    values = np.arange(len(data["sample_ids"])) * 7
    packed = values[data["packed_order"]]
    assert (packed[data["inverse_order"]] == values).all()
    flat = [i for rows in data["micro_batches"] for cell in rows for i in cell]
    assert flat == data["packed_order"]
    p2l, l2p = np.array(data["physical_to_logical"]), np.array(data["logical_to_physical"])
    assert (np.take_along_axis(p2l, l2p, axis=1) == np.arange(p2l.shape[1])).all()


def test_rows_are_a_multiple_under_a_virtual_pipeline():
    topology = Topology(data_parallel_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2,
                        expert_model_parallel_size=2)  # fmt: skip
    case = make_case(2, topology)
    plan = plan_step(*case, SMALL)
    assert plan.num_rows % 2 == 0
    assert all(rows % 2 == 0 for rows in row_candidates(build_problem(*case), 6))


def test_equal_loads_move_nothing_and_a_better_map_must_pay():
    case = make_case(11, TOPOLOGIES[2], samples=40, skew=1.5)
    first = plan_step(*case, SMALL)
    again = plan_step(*case, replace(SMALL, stickiness=1e12), previous=first, seed=5)
    assert (again.placement_LE == first.placement_LE).all()
    free = plan_step(*case, replace(SMALL, stickiness=0.0), previous=first, seed=5)
    assert free.predicted.step_time_s <= first.predicted.step_time_s * 1.02


def test_previous_plan_of_another_job_is_refused():
    case = make_case(1, TOPOLOGIES[0])
    other = make_case(1, TOPOLOGIES[2], layers=3)
    with pytest.raises(RoutePackError, match="of the same job"):
        plan_step(*case, SMALL, previous=plan_step(*other, SMALL))


def test_too_few_samples_for_the_rows_is_said_before_the_search():
    spec, topology = make_spec(), Topology(data_parallel_size=4, expert_model_parallel_size=4)
    rng = np.random.default_rng(0)
    batch = make_batch(rng, spec, [60, 60, 60, 60, 60])
    with pytest.raises(RoutePackError, match="5 samples cannot give each of 4 DP slots"):
        plan_step(batch, make_tables(rng, spec, topology, 64), spec, topology, 64, SMALL)


def test_plan_file_round_trip_and_damage(tmp_path):
    plan = plan_step(*make_case(4, TOPOLOGIES[1]), SMALL)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.to_dict() == plan.to_dict()
    data = plan.to_dict()
    data["micro_batches"][0][0], data["micro_batches"][1][0] = data["micro_batches"][1][0], data["micro_batches"][0][0]
    with pytest.raises(RoutePackError, match="its plan_hash does not match the other parts"):
        Plan.from_dict(data)
    with pytest.raises(RoutePackError, match="schema_version 9"):
        Plan.from_dict({**plan.to_dict(), "schema_version": 9})
    del data["denominators"]
    with pytest.raises(RoutePackError, match="denominators"):
        Plan.from_dict(data)


def test_check_plan_names_what_is_broken():
    batch, *_ = case = make_case(4, TOPOLOGIES[1])
    plan = plan_step(*case, SMALL)
    broken = [
        (replace(plan, max_tokens=5), "cap 5"),
        (replace(plan, row_N=np.where(plan.row_N == 0, 1, plan.row_N)), "is empty|tokens, cap"),
        (replace(plan, row_N=plan.row_N + 99), "is in no cell"),
        (replace(plan, placement_LE=np.zeros_like(plan.placement_LE)), "not a bijection"),
        (replace(plan, row_N=plan.row_N[:-1]), "Plan holds"),
    ]
    for bad, message in broken:
        with pytest.raises(RoutePackError, match=message):
            check_plan(bad, batch.lengths, 8)


def test_a_guard_of_wall_time_that_is_far_leaves_the_plan_as_it_is():
    case = make_case(3, Topology(data_parallel_size=4, expert_model_parallel_size=4))
    guarded = StopCriterion(max_iterations=20_000, max_runtime=3600)
    plain, plan = (plan_step(*case, SMALL, stop=stop) for stop in (StopCriterion(max_iterations=20_000), guarded))
    for name in ("row_N", "slot_N", "placement_LE"):
        assert (getattr(plan, name) == getattr(plain, name)).all()


def test_more_budget_is_no_worse_and_runtime_stops():
    case = make_case(8, TOPOLOGIES[1], samples=60)
    plan = plan_step(*case, SMALL, stop=StopCriterion(max_runtime=0.2))
    assert plan.provenance["stopped_by"] == "max_runtime"
    short = plan_step(*case, SMALL, stop=StopCriterion(max_iterations=1))
    long = plan_step(*case, SMALL, stop=StopCriterion(max_iterations=200_000))
    assert long.predicted.step_time_s <= short.predicted.step_time_s


def test_evaluation_of_the_plan_is_reported_by_part():
    case = make_case(8, TOPOLOGIES[1])
    plan = plan_step(*case, SMALL)
    priced = evaluate(build_problem(*case), plan.row_N, plan.slot_N, plan.placement_LE, plan.num_rows)
    assert plan.predicted == priced.step_time()
    assert set(plan.counters) == {
        "unknown_tokens", "unknown_samples", "padding_tokens", "extrapolated_lengths", "extrapolated_rank_loads"
    }  # fmt: skip


JOB_OPTIONS = {
    "equal_samples": {"equal_samples": True},
    "coupled blocks": {"couple_blocks": True},
    "alignment": {"sequence_alignment": 8},
    "nodes": {"ranks_per_node": 2},
}


@pytest.mark.parametrize("options", JOB_OPTIONS.values(), ids=JOB_OPTIONS.keys())
@pytest.mark.parametrize("seed", range(3))
def test_job_options_hold_and_are_priced(options, seed):
    topology = Topology(data_parallel_size=4, expert_model_parallel_size=4 if "ranks_per_node" in options else 2)
    case = make_case(seed, topology, samples=26)
    params = replace(SMALL, max_iterations=8000, **options)
    plan, problem = plan_step(*case, params, seed=seed), build_problem(*case, params)
    slow_ns, _ = step_ns_slow(problem, plan.row_N, plan.slot_N, plan.placement_LE, plan.num_rows)
    assert round(plan.predicted.step_time_s * 1e9) == slow_ns
    assert lower_bound_ns(problem) <= slow_ns
    counts = np.bincount(plan.slot_N, minlength=4)
    if "equal_samples" in options:
        assert counts.max() - counts.min() <= 1
    if "sequence_alignment" in options:
        assert (problem.lengths % 8 == 0).all()
        assert plan.counters["padding_tokens"] == (problem.lengths - case[0].lengths).sum() > 0


def test_seven_samples_over_four_slots_differ_by_one():
    spec, topology = make_spec(), Topology(data_parallel_size=4, expert_model_parallel_size=4)
    rng = np.random.default_rng(0)
    batch = make_batch(rng, spec, [30, 20, 20, 10, 10, 5, 5])
    plan = plan_step(
        batch, make_tables(rng, spec, topology, 64), spec, topology, 64, replace(SMALL, equal_samples=True)
    )
    assert sorted(np.bincount(plan.slot_N)) == [1, 2, 2, 2]


def test_first_placement_balances_nodes_first():
    case = make_case(6, TOPOLOGIES[2], samples=40, skew=1.5)
    problem = build_problem(*case)
    totals, ranks = problem.counts.sum(axis=0), first_ranks(problem, 2)
    for layer in range(problem.num_layers):
        assert (np.bincount(ranks[layer], minlength=4) == 2).all()
        nodes = [totals[layer][ranks[layer] // 2 == node].sum() for node in range(2)]
        assert max(nodes) <= sum(nodes) / 2 + totals[layer].max()
    with pytest.raises(RoutePackError, match="ranks_per_node = 3 does not divide"):
        first_ranks(problem, 3)

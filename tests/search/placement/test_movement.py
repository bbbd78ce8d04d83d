"""Experts move only where it pays: nothing at equal loads, no flapping, residents keep their places."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import TOPOLOGIES, make_batch, make_spec, make_tables

from profiler import RoutePackError, Topology
from profiler.model_spec import STATE_BYTES
from search import PlannerParams, plan_step
from search.placement.lpt import placement_of_ranks, ranks_of_slots
from search.placement.placer import (
    expert_move_ns,
    list_moves,
    move_price_note,
    relabelled,
    residence_of,
    stage_of_layers,
)
from search.problem import build_problem

PARAMS = PlannerParams(max_iterations=20_000, placement_swaps=1000, starts=2)
TOPOLOGY = TOPOLOGIES[2]


def make_case(seed=0, skew=1.0, samples=40):
    rng = np.random.default_rng(seed)
    spec = make_spec()
    lengths = rng.integers(5, 30, samples)
    return make_batch(rng, spec, lengths, skew=skew), make_tables(np.random.default_rng(1), spec, TOPOLOGY, 64), spec


def plan(case, **options):
    params = replace(PARAMS, **options.pop("params", {}))
    return plan_step(*case, TOPOLOGY, 64, params, **options)


def test_equal_loads_move_nothing():
    case = make_case()
    first = plan(case, params={"max_iterations": 200_000, "placement_swaps": 20_000})
    again = plan(case, previous=first, seed=1, params={"stickiness": 3.0})
    assert again.moves.experts == ()
    assert (again.moves.bytes, again.moves.seconds) == (0, 0.0)
    assert (again.placement_LE == first.placement_LE).all()


def test_moves_are_listed_and_priced():
    first = plan(make_case(0))
    case = make_case(5, skew=2.0)
    moved = plan(case, previous=first, params={"stickiness": 0.0})
    assert moved.moves.experts
    for layer, expert, old, new in moved.moves.experts:
        assert first.placement_LE[layer, expert] == old != new == moved.placement_LE[layer, expert]
    away = sum(old // 2 != new // 2 for _, _, old, new in moved.moves.experts)
    assert moved.moves.bytes == away * 3 * 64 * 32 * STATE_BYTES
    assert moved.moves.seconds > 0
    kept = plan(case, previous=first, params={"stickiness": 1e9})
    assert kept.moves.experts == ()


def test_stages_move_at_the_same_time():
    topology = Topology(data_parallel_size=2, expert_model_parallel_size=2, pipeline_model_parallel_size=2)
    spec = make_spec(layers=4)
    assert stage_of_layers(spec, topology).tolist() == [0, 0, 1, 1]
    interleaved = replace(topology, virtual_pipeline_model_parallel_size=2)
    assert stage_of_layers(spec, interleaved).tolist() == [0, 1, 0, 1]
    old = np.tile(np.arange(8), (4, 1))
    new = old.copy()
    new[0] = new[1] = np.roll(old[0], 4)  # every rank receives four
    new[2, [0, 4]] = 4, 0  # and here one
    each_s = 3 * 64 * 32 * STATE_BYTES / 1e9
    for stages, one_after_another in ((topology, max(4 + 4, 1)), (TOPOLOGIES[0], 4 + 4 + 1)):
        tables, params = make_tables(np.random.default_rng(1), spec, stages, 64), replace(PARAMS, link_gbytes_per_s=1.0)
        batch = make_batch(np.random.default_rng(0), spec, [8] * 4)
        problem = build_problem(batch, tables, spec, stages, 64, params)
        moves, assumed = list_moves(old, new, problem)
        assert moves.seconds == pytest.approx(one_after_another * each_s)
        assert assumed == []


@given(st.integers(0, 9), st.sampled_from((1, 2, 4)))
def test_a_move_costs_a_stage_as_much_as_it_takes(seed, stages):
    """In the objective, a sum over stages, an expert's move counts once: as wall time it is shared by the stages."""
    topology = replace(TOPOLOGY, pipeline_model_parallel_size=stages)
    spec = make_spec(layers=4)
    tables = make_tables(np.random.default_rng(1), spec, topology, 64)
    batch = make_batch(np.random.default_rng(seed), spec, [8] * 20)
    params = replace(PARAMS, stickiness=1.0, horizon_steps=1.0, link_gbytes_per_s=1.0)
    problem = build_problem(batch, tables, spec, topology, 64, params)
    first = plan_step(batch, tables, spec, topology, 64, replace(PARAMS, max_iterations=100, placement_swaps=10))
    home = residence_of(first, problem)
    assert home.move_ns == spec.expert_bytes(1) * problem.num_blocks


def test_an_assumed_link_is_said():
    first = plan(make_case(0))
    assumed = plan(make_case(5), previous=first)
    assert any("assumed 25 GB/s" in note for note in assumed.notes)
    stated = plan(make_case(5), previous=first, params={"link_gbytes_per_s": 25.0})
    assert not any("assumed 25 GB/s" in note for note in stated.notes)


def test_moves_are_priced_at_the_settings_then_as_measured_then_as_stated_then_at_25():
    spec, bytes_of_one = make_spec(), make_spec().expert_bytes(1)
    bare = make_tables(np.random.default_rng(1), spec, TOPOLOGY, 64)
    stated, measured = replace(bare, link_gbytes_per_s=450.0), replace(bare, link_gbytes_per_s=450.0, expert_move_ns=77)
    own = PlannerParams(link_gbytes_per_s=50.0)
    for tables, params, move_ns, said in (
        (bare, PlannerParams(), bytes_of_one / 25.0, "an assumed 25 GB/s"),
        (stated, PlannerParams(), bytes_of_one / 450.0, "450 GB/s, stated by the device's facts and not measured"),
        (measured, PlannerParams(), 77.0, ""),
        (measured, own, bytes_of_one / 50.0, ""),
        (stated, own, bytes_of_one / 50.0, ""),
    ):
        assert expert_move_ns(spec, TOPOLOGY, tables, params) == pytest.approx(move_ns)
        assert [said in note for note in move_price_note(tables, params)] == [True] * bool(said)


def test_a_higher_price_moves_fewer_experts():
    first, case = plan(make_case(0)), make_case(5, skew=2.0)
    bytes_moved = [
        plan(case, previous=first, params={"stickiness": stickiness, "link_gbytes_per_s": 5e-3}).moves.bytes
        for stickiness in (0.0, 1.0, 30.0, 1e6)
    ]
    assert bytes_moved == sorted(bytes_moved, reverse=True)
    assert bytes_moved[0] > bytes_moved[-1] == 0


def test_two_blocks_and_a_warm_start_keep_experts_home_when_moving_is_dear():
    topology, spec = TOPOLOGIES[1], make_spec()
    tables = make_tables(np.random.default_rng(1), spec, topology, 64)
    first, second = (make_batch(np.random.default_rng(k), spec, [20] * 40, skew=2.0) for k in (0, 5))
    before = plan_step(first, tables, spec, topology, 64, PARAMS)
    elsewhere = ranks_of_slots(np.flip(before.placement_LE, axis=1), 2)  # a start away from home
    moved = [
        plan_step(second, tables, spec, topology, 64, replace(PARAMS, stickiness=stickiness, link_gbytes_per_s=5e-3),
                  previous=before, start=elsewhere).moves.bytes
        for stickiness in (0.0, 1e6)
    ]  # fmt: skip
    assert moved[0] > moved[1] == 0


def test_alternating_loads_do_not_flap():
    """Ten steps between loads A and B whose difference does not pay for moving there and back."""
    a, b = make_case(0), make_case(3)
    current, moved = plan(a), []
    for step in range(10):
        current = plan((a, b)[step % 2], previous=current, seed=step, params={"link_gbytes_per_s": 1e-2})
        moved.append(current.moves.bytes)
    assert sum(moved[4:]) == 0


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_relabelling_keeps_groups_and_loses_no_resident(seed):
    rng = np.random.default_rng(seed)
    ranks, home = (np.stack([rng.permutation(np.repeat(np.arange(4), 2)) for _ in range(3)]) for _ in range(2))
    named = relabelled(ranks, home, 4)
    assert (named == home).sum() >= (ranks == home).sum()
    for layer in range(3):
        groups = {tuple(np.flatnonzero(ranks[layer] == p)) for p in range(4)}
        assert {tuple(np.flatnonzero(named[layer] == p)) for p in range(4)} == groups
    slots = placement_of_ranks(named, 4, home * 2 + np.argsort(np.argsort(home, axis=1, kind="stable"), axis=1) % 2)
    assert (ranks_of_slots(slots, 4) == named).all()
    assert (np.sort(slots, axis=1) == np.arange(8)).all()


def test_relabelling_recovers_a_renamed_placement():
    home = np.array([[0, 0, 1, 1, 2, 2, 3, 3]])
    assert (relabelled((home + 1) % 4, home, 4) == home).all()


def test_previous_plan_of_other_ranks_is_refused():
    first = plan(make_case())
    batch, _, spec = make_case()
    other = TOPOLOGIES[1]
    with pytest.raises(RoutePackError, match=r"expert_model_parallel_size 4\).*expert_model_parallel_size 2\)"):
        plan_step(
            batch, make_tables(np.random.default_rng(1), spec, other, 64), spec, other, 64, PARAMS, previous=first
        )

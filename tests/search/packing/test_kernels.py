"""The first law: delta = re-evaluation, for every move of packing and placement."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from oracles import wall_ns_slow
from strategies import (
    TOPOLOGIES,
    make_batch,
    make_spec,
    make_tables,
    problems,
    random_packing,
    random_placement,
    random_rows,
)

from search import build_problem
from search.evaluate import evaluate
from search.kernels import random_below, random_threshold, sample_rank_rows, seed_state
from search.packing.kernels import fill_state, objective
from search.packing.moves import anneal
from search.packing.packer import pack_costs, pack_state
from search.placement.kernels import LayerCosts, fill_layer, improve_layer, swap_apply, swap_delta_ns
from search.placement.lpt import lpt_layer, placement_of_ranks, ranks_of_slots
from search.placement.placer import layer_costs


def in_problem_order(costs, cell_of):
    cells = np.empty_like(cell_of)
    cells[costs.order] = cell_of
    return cells


def objective_of(problem, cell_of, placement, rows):
    priced = evaluate(problem, cell_of // problem.num_slots, cell_of % problem.num_slots, placement, rows)
    blocks = priced.block_ns + wall_ns_slow(problem, priced.rank_rows_RBPL)
    return len(blocks) * int(blocks.max()) + int(blocks.sum())


def start(drawn):
    problem, rng = drawn
    rows = random_rows(rng, problem)
    placement = random_placement(rng, problem)
    costs = pack_costs(problem, ranks_of_slots(placement, problem.num_ranks))
    state = pack_state(problem, costs, random_packing(rng, problem, rows), rows)
    return problem, rng, rows, placement, costs, state


KINDS = {
    "one": (300, 300, 0, 0, 0),
    "within": (0, 0, 1024, 0, 0),
    "two": (0, 0, 0, 1024, 0),
    "cells": (0,) * 4 + (1024,),
}
ANY = (300, 300, 50, 50, 50)
"""Shares of moves."""


def copied(state):
    return type(state)(*(np.copy(part) for part in state))


def draw(problem, costs, state, rng, kind, temperature=10**15):
    """Draw one move: (priced or not, made or not, the objective after it, the price it was refused at)."""
    limits, after, refused = np.array([problem.max_tokens, *KINDS[kind], 0]), np.array([1 << 62]), np.zeros(1, np.int64)
    priced, made = anneal(costs, state, state.cell_of.copy(), rng, temperature, 1, limits, after, refused)
    return priced, made, int(after[0]), int(refused[0])


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Compile outside of Hypothesis, which slows it down."""
    rng, spec = np.random.default_rng(0), make_spec()
    batch, tables = make_batch(rng, spec, [9] * 8), make_tables(rng, spec, TOPOLOGIES[0], 64)
    drawn = build_problem(batch, tables, spec, TOPOLOGIES[0], 64), rng
    problem, _, _, _, costs, state = start(drawn)
    # Narrow loads last: other files compile those, and by then they may lie in the cache.
    for loads in (costs.loads.astype(np.int32), costs.loads):
        draw(problem, costs._replace(loads=loads), state, seed_state(1), "one")


@given(problems())
@settings(max_examples=30)
def test_every_packing_move_equals_reevaluation(drawn):
    problem, rng, rows, placement, costs, state = start(drawn)
    state_rng = seed_state(int(rng.integers(1 << 30)))
    for turn in range(48):
        before = objective_of(problem, in_problem_order(costs, state.cell_of), placement, rows)
        assert before == objective(costs, state)
        _, made, after, _ = draw(problem, costs, state, state_rng, list(KINDS)[turn % 4])
        if made:
            assert objective_of(problem, in_problem_order(costs, state.cell_of), placement, rows) == after
            assert np.bincount(state.cell_of, minlength=rows * problem.num_slots).min() >= 1
    derived = copied(state)
    fill_state(costs, state)
    for name, was, now in zip(state._fields, derived, state, strict=True):
        if name not in ("members", "place_of"):
            assert (was == now).all(), name


@given(problems())
@settings(max_examples=30)
def test_an_exchange_is_priced_exactly_up_to_what_it_may_cost(drawn):
    problem, rng, _, _, costs, state = start(drawn)
    unit = 10**15
    for turn in range(40):
        seeded, before = seed_state(int(rng.integers(1 << 30))), objective(costs, state)
        moved = copied(state)
        _, made, after, _ = draw(problem, costs, moved, seeded.copy(), "one")
        if not made:
            continue
        delta, largest = after - before, random_threshold(seeded.copy(), unit)
        for wanted in (0, delta - 1, delta, delta + 1, delta // 2):
            temperature = max(1, unit * max(0, wanted) // largest)
            affordable = random_threshold(seeded.copy(), temperature)
            _, made, after, price = draw(problem, costs, copied(state), seeded.copy(), "one", temperature)
            assert made == (delta <= affordable)
            assert after == before + delta if made else affordable < price <= delta
        if turn % 4 == 0:
            state = moved


@given(problems())
@settings(max_examples=15)
def test_equal_count_mode_never_changes_a_slots_count(drawn):
    problem, _, _, _, costs, state = start(drawn)
    slots = problem.num_slots
    before = np.bincount(state.cell_of % slots, minlength=slots)
    best_cell_of, best = state.cell_of.copy(), np.array([objective(costs, state)])
    limits = np.array([problem.max_tokens, 300, 300, 100, 100, 100, slots])
    anneal(costs, state, best_cell_of, seed_state(3), 10**6, 500, limits, best, np.zeros(9, np.int64))
    assert (np.bincount(state.cell_of % slots, minlength=slots) == before).all()


@given(problems())
@settings(max_examples=20)
def test_annealing_keeps_cap_and_cells_and_reports_its_best(drawn):
    problem, _, rows, placement, costs, state = start(drawn)
    cap = int(state.cell_tokens.max())
    best_cell_of, best = state.cell_of.copy(), np.array([objective(costs, state)])
    first = int(best[0])
    limits = np.array([cap, *ANY, 0])
    anneal(costs, state, best_cell_of, seed_state(1), 2000, 500, limits, best, np.zeros(9, np.int64))
    assert best[0] <= first
    assert best[0] == objective_of(problem, in_problem_order(costs, best_cell_of), placement, rows)
    for cell_of in (in_problem_order(costs, best_cell_of), in_problem_order(costs, state.cell_of)):
        tokens = np.bincount(cell_of, weights=problem.lengths, minlength=rows * problem.num_slots)
        assert tokens.max() <= cap
        assert np.bincount(cell_of, minlength=rows * problem.num_slots).min() >= 1


@given(problems())
@settings(max_examples=5)
def test_loads_too_large_for_16_bits_are_packed_the_same(drawn):
    problem, _, _, placement, costs, state = start(drawn)
    assert costs.loads.dtype == np.uint16
    ranks, many = ranks_of_slots(placement, problem.num_ranks), replace(problem, counts=problem.counts << 16)
    assert pack_costs(many, ranks).loads.dtype == np.int32
    limits, found = np.array([int(state.cell_tokens.max()), *ANY, 0]), []
    for given_costs in (costs, costs._replace(loads=costs.loads.astype(np.int32))):
        again, best = copied(state), np.array([objective(costs, state)])
        best_cell_of = again.cell_of.copy()
        anneal(given_costs, again, best_cell_of, seed_state(1), 2000, 500, limits, best, np.zeros(9, np.int64))
        found.append(best_cell_of.tolist())
    assert found[0] == found[1]


def layer_ns(problem, costs, rank_of):
    return int(fill_layer(costs, rank_of, problem.num_ranks).unit_ns.sum())


@given(problems())
@settings(max_examples=30)
def test_every_placement_swap_equals_reevaluation(drawn):
    problem, rng, rows, placement, _, state = start(drawn)
    ranks = ranks_of_slots(placement, problem.num_ranks)
    for costs, rank_of in zip(layer_costs(problem, state.cell_of, rows), ranks, strict=True):
        state = fill_layer(costs, rank_of, problem.num_ranks)
        for _ in range(20):
            e1, e2 = rng.choice(problem.num_experts, 2, replace=False)
            if rank_of[e1] == rank_of[e2]:
                continue
            before = layer_ns(problem, costs, rank_of)
            pair = (int(e1), int(rank_of[e1]), int(e2), int(rank_of[e2]))
            delta = swap_delta_ns(costs, state, pair)
            swap_apply(costs, state, rank_of, pair)
            assert layer_ns(problem, costs, rank_of) == before + delta
            for kept, afresh in zip(state, fill_layer(costs, rank_of, problem.num_ranks), strict=True):
                assert (kept[[0, 2, 4]] == afresh[[0, 2, 4]]).all() if kept is state.top else (kept == afresh).all()


@given(problems())
@settings(max_examples=15)
def test_improved_layer_is_no_worse_and_a_bijection(drawn):
    problem, rng, rows, placement, _, state = start(drawn)
    ranks, move_ns = ranks_of_slots(placement, problem.num_ranks), int(rng.integers(0, 200))
    for costs, rank_of in zip(layer_costs(problem, state.cell_of, rows), ranks, strict=True):
        home = rng.permutation(rank_of)
        before = layer_ns(problem, costs, rank_of) + move_ns * (rank_of != home).sum()
        price = improve_layer(costs, rank_of, home, seed_state(2), (problem.num_ranks, 300, 2e-3, move_ns))
        assert price == layer_ns(problem, costs, rank_of) + move_ns * (rank_of != home).sum() <= before
        assert (np.bincount(rank_of) == problem.num_experts // problem.num_ranks).all()


@given(problems())
@settings(max_examples=15)
def test_layers_sum_to_the_experts_share_of_the_plan(drawn):
    problem, _, rows, placement, costs, state = start(drawn)
    assume(problem.blocks_per_unit == 1)  # coupled blocks wait for one another: the layers' sum is only a guide there
    cell_of = in_problem_order(costs, state.cell_of)
    layers, ranks = layer_costs(problem, cell_of, rows), ranks_of_slots(placement, problem.num_ranks)
    total = sum(layer_ns(problem, *layer) for layer in zip(layers, ranks, strict=True))
    priced = evaluate(problem, cell_of // problem.num_slots, cell_of % problem.num_slots, placement, rows)
    wall_ns = wall_ns_slow(problem, priced.rank_rows_RBPL).sum()
    assert total == int((priced.experts_RB + priced.exchange_RB).sum()) + wall_ns


@given(problems())
@settings(max_examples=15)
def test_sample_loads_equal_a_loop(drawn):
    problem, rng = drawn
    ranks = ranks_of_slots(random_placement(rng, problem), problem.num_ranks)
    order = rng.permutation(problem.num_samples)
    loads = sample_rank_rows(problem.counts, order, ranks, problem.num_ranks)
    slow = np.zeros_like(loads)
    for k, layer, expert in np.ndindex(problem.counts.shape):
        slow[k, ranks[layer, expert], layer] += problem.counts[order[k], layer, expert]
    assert (loads == slow).all()


def test_lpt_is_longest_processing_time_first_with_equal_counts():
    assert lpt_layer(np.array([9, 1, 8, 2]), 2).tolist() == [0, 0, 1, 1]
    assert lpt_layer(np.array([5, 5, 5, 5]), 2).tolist() == [0, 1, 0, 1]
    assert placement_of_ranks(np.array([[0, 1, 0, 1]]), 2).tolist() == [[0, 2, 1, 3]]


def test_experts_that_stay_keep_their_slot():
    previous = np.array([[3, 2, 1, 0]])
    ranks = np.array([[1, 0, 1, 0]])
    placement = placement_of_ranks(ranks, 2, previous)
    assert sorted(placement[0].tolist()) == [0, 1, 2, 3]
    assert (ranks_of_slots(placement, 2) == ranks).all()
    assert placement[0, 0] == 3  # expert 0 stays on rank 1
    assert placement[0, 3] == 0  # expert 3 stays on rank 0


def test_random_draws_are_in_range_and_near_their_law():
    rng = seed_state(7)
    draws = np.array([random_below(rng, 10) for _ in range(5000)])
    assert draws.min() == 0
    assert draws.max() == 9
    thresholds = np.array([random_threshold(rng, 1_000_000) for _ in range(20000)])
    assert thresholds.min() >= 0
    assert 0.85e6 < thresholds.mean() < 1.15e6  # exponential: mean = temperature


def test_layer_time_of_no_rows_is_the_floor():
    costs = LayerCosts(
        np.zeros((2, 3), np.int32), np.zeros(3, np.int32), np.array([9, 13, 7, 9]), np.array([2, 4]), 4, 0, 0
    )
    assert fill_layer(costs, np.array([0, 1]), 2).unit_ns.tolist() == [9, 9, 9]

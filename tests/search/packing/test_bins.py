"""Published heuristics, each on an instance worked out by hand."""

import numpy as np
import pytest
from strategies import TOPOLOGIES, make_batch, make_spec, make_tables

from profiler import RoutePackError, Topology
from search import build_problem
from search.packing.bins import (
    fill_bins,
    first_fit_decreasing,
    karmarkar_karp,
    pack_balanced,
    pack_ffd,
    pack_karmarkar_karp,
    pack_staircase,
    sample_flops,
)
from search.placement.lpt import lpt_placement
from search.problem import row_range


def make_problem(lengths, cap, topology=TOPOLOGIES[0]):
    rng = np.random.default_rng(0)
    spec = make_spec()
    return build_problem(make_batch(rng, spec, lengths), make_tables(rng, spec, topology, cap), spec, topology, cap)


def test_first_fit_decreasing():
    assert first_fit_decreasing(np.array([4, 8, 1, 4, 2, 1]), 10) == [[1, 4], [0, 3, 2, 5]]


def test_karmarkar_karp_differencing():
    bins = karmarkar_karp(np.array([8, 7, 6, 5, 4]), 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in b) for b in bins) == [14, 16]  # the textbook's result
    bins = karmarkar_karp(np.array([6] * 5), 3)
    assert sorted(len(b) for b in bins) == [1, 2, 2]


def test_bins_are_split_until_every_slot_has_one():
    lengths = np.array([5, 4, 3, 2])
    assert sorted(map(sorted, fill_bins([[0, 1, 2, 3]], lengths, 2))) == [[0, 3], [1, 2]]
    with pytest.raises(RoutePackError, match="multiple of 4"):
        fill_bins([[0], [1], [2]], lengths, 4)


@pytest.mark.parametrize("pack", [pack_ffd, lambda p: pack_karmarkar_karp(p, sample_flops(p))])
def test_packings_keep_the_cap_and_fill_every_cell(pack):
    rng = np.random.default_rng(2)
    problem = make_problem(rng.integers(1, 60, 40), 64, TOPOLOGIES[1])
    row_N, slot_N, rows = pack(problem)
    cell = row_N * 4 + slot_N
    assert np.bincount(cell, weights=problem.lengths, minlength=rows * 4).max() <= 64
    assert np.bincount(cell, minlength=rows * 4).min() >= 1
    assert rows >= row_range(problem).start


@pytest.mark.parametrize("pack", [pack_balanced, pack_staircase])
def test_seed_packings_keep_the_cap_or_are_none(pack):
    problem = make_problem([40, 40, 40, 10, 10, 10], 64)
    cell_of = pack(problem, 2)
    assert np.bincount(cell_of, weights=problem.lengths, minlength=4).max() <= 64
    assert sorted(set(cell_of.tolist())) == [0, 1, 2, 3]
    assert pack(problem, 1) is None
    assert pack(problem, 4) is None


def test_staircase_puts_long_samples_together():
    problem = make_problem([60, 55, 5, 5, 5, 5, 5, 5], 64)
    cell_of = pack_staircase(problem, 2)
    assert set(cell_of[:2].tolist()) == {0, 1}  # both in the first row


def test_least_rows_counts_tokens_and_big_samples():
    assert row_range(make_problem([40, 40, 40, 10, 10, 10], 64)).start == 2
    assert row_range(make_problem([10] * 8, 64)).start == 1
    topology = Topology(data_parallel_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2,
                        expert_model_parallel_size=2)  # fmt: skip
    assert row_range(make_problem([40] * 6, 64, topology)).start == 4


def test_lpt_balances_the_step_totals_better_than_identity():
    problem = make_problem([20] * 10, 64)
    totals = problem.counts.sum(axis=0)
    ranks = lpt_placement(problem) // 4

    def worst(rank_LE):
        return max(totals[layer][rank_LE[layer] == p].sum() for layer in range(2) for p in range(2))

    identity = np.tile(np.arange(8) // 4, (2, 1))
    assert worst(ranks) < worst(identity)
    assert (np.sort(lpt_placement(problem), axis=1) == np.arange(8)).all()

"""Published packings, placements and their names, each on an instance worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
from strategies import TOPOLOGIES, make_batch, make_spec, make_tables

from profiler import RoutePackError, Topology
from search import (
    BASELINES,
    SEARCH_BASELINES,
    SHOWN_BASELINES,
    StopCriterion,
    build_problem,
    evaluate,
    price_baseline,
)
from search.baselines.catalog import PACKINGS, PLACEMENTS, price_packing
from search.baselines.frameworks import (
    anneal_totals,
    beyond_cap,
    largest_cell_tokens,
    mindspeed_placement,
    modified_first_fit_decreasing,
    pack_areal,
    pack_mffd,
    pack_slime,
    pack_verl,
    rank_variation,
    relibra_placement,
)
from search.kernels import seed_state
from search.packing.bins import karmarkar_karp
from search.placement.lpt import identity_placement, lpt_layer, lpt_placement, ranks_of_slots
from search.problem import row_range


def make_problem(lengths, cap, topology=TOPOLOGIES[0], skew=1.0):
    rng = np.random.default_rng(0)
    spec = make_spec()
    batch = make_batch(rng, spec, lengths, skew=skew)
    return build_problem(batch, make_tables(rng, spec, topology, cap), spec, topology, cap)


def cells(problem, packing):
    """Samples of each (row, slot)."""
    row_N, slot_N, rows = packing
    return [
        [np.flatnonzero((row_N == r) & (slot_N == d)).tolist() for d in range(problem.num_slots)] for r in range(rows)
    ]


# Packings


def test_modified_first_fit_pairs_small_samples_under_a_large_one():
    # Cap 24, classes above 12, 8, 4: beside 13 fit the shortest small (the second 5) and then the 6, not the 7.
    assert modified_first_fit_decreasing(np.array([13, 7, 6, 5, 5]), 24) == [[0, 4, 2], [1, 3]]


def test_modified_first_fit_prefers_the_longest_medium_sample_that_fits():
    # Cap 12. 8 and 7 open bins; 5 (medium) fits beside 7 only; two of the small 3s do not fit beside 8, one 4 does.
    lengths = np.array([7, 8, 5, 4, 3, 3, 4, 2, 1])
    assert modified_first_fit_decreasing(lengths, 12) == [[1, 3], [0, 2], [6, 4, 5, 7], [8]]


def test_nemo_rl_pops_samples_from_the_bin_with_most_and_deals_bins_in_turn():
    problem = make_problem([13, 7, 6, 5, 5, 11, 9, 8, 4], 24)
    # Bins 13+11; then 9+8+7, 6+5+5+4: the last holds most samples and gives its last one to a fourth bin.
    assert cells(problem, pack_mffd(problem)) == [[[0, 5], [1, 6, 7]], [[2, 3, 4], [8]]]
    with pytest.raises(RoutePackError, match="3 samples on 2 DP slots"):
        pack_mffd(make_problem([20, 20, 20], 24))


def slow_karmarkar_karp(weights, num_bins, equal_size):
    """Largest differencing on plain lists."""
    if equal_size:
        order = [None] * (-len(weights) % num_bins) + sorted(range(len(weights)), key=lambda i: weights[i])
        groups = [order[k : k + num_bins] for k in range(0, len(order), num_bins)]
    else:
        groups = [[None] * (num_bins - 1) + [i] for i in range(len(weights))]
    states = [[(0, []) if i is None else (int(weights[i]), [i]) for i in group] for group in groups]
    while len(states) > 1:
        states.sort(key=lambda parts: (parts[0][0] - parts[-1][0], min(i for _, members in parts for i in members)))
        a, b, *states = states
        merged = [(x[0] + y[0], x[1] + y[1]) for x, y in zip(a, reversed(b), strict=True)]
        states.append(sorted(merged, key=lambda part: (part[0], part[1][:1])))
    return [sorted(members) for _, members in states[0]]


@pytest.mark.parametrize("equal_size", [False, True])
def test_karmarkar_karp_equals_the_plain_version(equal_size):
    rng = np.random.default_rng(1)
    for _ in range(60):
        weights, num_bins = rng.integers(1, rng.choice([3, 1000]), rng.integers(1, 30)), int(rng.integers(1, 9))
        bins = karmarkar_karp(weights, num_bins, equal_size=equal_size)
        assert bins == slow_karmarkar_karp(weights, num_bins, equal_size)
        if equal_size:
            assert max(map(len, bins)) - min(map(len, bins)) <= 1


def test_karmarkar_karp_with_equal_sizes():
    # (1, 2) and (3, 4) give 1+4 and 2+3; of these equals the later meets the 5 of (5, 6), the earlier its 6.
    assert karmarkar_karp(np.array([1, 2, 3, 4, 5, 6]), 2, equal_size=True) == [[1, 2, 4], [0, 3, 5]]


def test_verl_packs_ranks_first_and_runs_small_ends():
    problem = make_problem([9, 8, 2, 1, 7, 3], 10)
    # (3, 7) with (8, 9): 3+9 and 7+8, then with (1, 2): ranks 3+9+2 and 7+8+1. Both need two microbatches.
    packing = pack_verl(problem, problem.lengths)
    assert cells(problem, packing) == [[[0], [1]], [[2, 5], [3, 4]]]
    # Microbatches of 9, 8, 7 and 6 in one rank: every second one from the light end, then the others.
    alone = make_problem([9, 8, 7, 6], 9, Topology())
    assert [row[0] for row in cells(alone, pack_verl(alone, alone.lengths))] == [[2], [0], [1], [3]]


def test_verl_raises_the_count_on_every_rank_until_the_cap_holds():
    """Ten samples of 6 under a cap of 10 on two ranks: ceil(30 / 10) = 3 does not hold five samples, 5 does (FC-11)."""
    problem = make_problem([6] * 10, 10)
    packing = pack_verl(problem, problem.lengths)
    assert packing[2] == 5
    assert largest_cell_tokens(problem, packing) == 6


def test_verl_counts_differ_by_at_most_one_where_samples_do_not_divide():
    """Seven samples over four ranks, one rank gets one sample (FC-13); one row is then all they can do."""
    problem = make_problem([5, 4, 3, 3, 2, 2, 1], 10, TOPOLOGIES[1])
    _, slot_N, rows = pack_verl(problem, problem.lengths)
    assert sorted(np.bincount(slot_N)) == [1, 2, 2, 2]
    assert rows == 1
    with pytest.raises(RoutePackError, match="without empty cells"):
        pack_verl(make_problem([9, 9, 9, 9, 9], 10), np.full(5, 9))


def test_slime_exceeds_the_cap_and_is_priced_all_the_same():
    """ceil(60 / 10) = 6 bins for ten samples of 6: four bins hold 12 tokens (FC-11, flagged V)."""
    problem = make_problem([6] * 10, 10)
    packing = pack_slime(problem, problem.lengths)
    assert packing[2] == 3
    assert largest_cell_tokens(problem, packing) == 12
    assert price_packing(problem, packing, identity_placement(problem)).step_ns > 0
    roomy = make_problem([6] * 10, 20)
    kept = pack_slime(roomy, roomy.lengths)
    assert largest_cell_tokens(roomy, kept) <= 20
    direct = evaluate(roomy, kept[0], kept[1], identity_placement(roomy), kept[2])
    assert price_packing(roomy, kept, identity_placement(roomy)).step_ns == direct.step_ns


def test_slime_deals_bins_to_ranks_by_weight_in_equal_numbers():
    problem = make_problem([10, 9, 8, 3], 10)
    # Three bins of KK: 10, 9, 8+3; the largest splits into 8 and 3. Ranks: (10, 3) and (9, 8).
    packing = pack_slime(problem, problem.lengths)
    assert sorted(sorted(problem.lengths[np.flatnonzero(packing[1] == d)].tolist()) for d in range(2)) == [
        [3, 10],
        [8, 9],
    ]


def test_tables_beyond_the_cap_go_on_along_their_last_step():
    problem = make_problem([6] * 10, 10)
    longer = beyond_cap(problem, 40)
    for name in ("cell_ns", "expert_ns", "exchange_ns"):
        old, new = getattr(problem, name), getattr(longer, name)
        assert new.shape[-1] > old.shape[-1]
        assert (new[..., : old.shape[-1]] == old).all()
        steps = np.diff(new, axis=-1)[..., old.shape[-1] - 2 :]
        assert (steps == steps[..., :1]).all()
    assert (beyond_cap(problem, 10).cell_ns == problem.cell_ns).all()


def test_areal_deals_equal_counts_and_fits_by_fewest_samples():
    problem = make_problem([6, 5, 4, 3, 2, 2], 10)
    # Ranks 6+3+2 and 5+4+2; both need two microbatches, opened beforehand: 6, 3, then 2 to the first.
    assert cells(problem, pack_areal(problem)) == [[[0, 4], [1, 5]], [[3], [2]]]
    with pytest.raises(RoutePackError, match="without empty cells"):
        pack_areal(make_problem([9, 9, 9], 10))


@pytest.mark.parametrize("name", [name for name in PACKINGS if not name.startswith("slime")])
@pytest.mark.parametrize("topology", TOPOLOGIES[:3])
def test_packings_keep_the_cap_and_fill_every_cell(name, topology):
    rng = np.random.default_rng(2)
    problem = make_problem(rng.integers(1, 60, 41), 64, topology)
    row_N, slot_N, rows = PACKINGS[name](problem)
    cell = row_N * problem.num_slots + slot_N
    assert largest_cell_tokens(problem, (row_N, slot_N, rows)) <= 64
    assert np.bincount(cell, minlength=rows * problem.num_slots).min() >= 1
    assert cell.max() < rows * problem.num_slots
    assert rows >= row_range(problem).start


@pytest.mark.parametrize("name", [name for name in PACKINGS if name != "Karmarkar-Karp on tokens"])
def test_rows_are_a_multiple_under_a_virtual_pipeline(name):
    topology = Topology(data_parallel_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2,
                        expert_model_parallel_size=2)  # fmt: skip
    problem = make_problem(np.random.default_rng(3).integers(1, 60, 40), 64, topology)
    assert PACKINGS[name](problem)[2] % 2 == 0


# Placements


def with_totals(totals_LE, num_ranks=2):
    """A problem whose experts have these step totals."""
    totals_LE = np.array(totals_LE)
    layers, experts = totals_LE.shape
    topology = Topology(data_parallel_size=num_ranks, expert_model_parallel_size=num_ranks)
    spec, rng = make_spec(layers=layers, experts=experts), np.random.default_rng(0)
    problem = build_problem(make_batch(rng, spec, [4] * num_ranks), make_tables(rng, spec, topology, 64), spec,
                            topology, 64)  # fmt: skip
    counts = np.zeros_like(problem.counts)
    counts[0] = totals_LE
    return replace(problem, counts=counts)


def test_mindspeed_moves_only_layers_whose_variation_drops_enough():
    # Layer 0: 17 and 3 in place, 10 and 10 by LPT. Layer 1: 10 and 11 both ways, though LPT would reorder it.
    problem = with_totals([[9, 8, 1, 2], [5, 5, 5, 6]])
    assert rank_variation(problem, identity_placement(problem)) == pytest.approx([0.7, 0.5 / 10.5])
    placement = mindspeed_placement(problem)
    assert (placement[0] == lpt_placement(problem)[0]).all()
    assert placement[1].tolist() == [0, 1, 2, 3]
    assert (lpt_placement(problem)[1] != placement[1]).any()
    assert (mindspeed_placement(problem, cv_drop=0.71) == identity_placement(problem)).all()
    assert (mindspeed_placement(problem, cv_drop=0.0) == lpt_placement(problem)).all()


def smoothed_peak(totals, rank_of, num_ranks):
    return anneal_totals(totals, rank_of.copy(), num_ranks, 0, seed_state(0))  # no swap: the objective as it is


def test_smoothed_peak_is_the_sixteenth_power_mean():
    totals, rank_of = np.array([3, 1]), np.array([0, 1])
    assert smoothed_peak(totals, rank_of, 2) == pytest.approx(1.5**16 + 0.5**16)


def test_relibra_finds_what_lpt_misses():
    totals = np.array([8, 7, 6, 5, 5, 1])
    rank_of = lpt_layer(totals, 2)
    assert np.bincount(rank_of, weights=totals).max() == 18  # 8+5+1, 7+6+5
    best = anneal_totals(totals, rank_of, 2, 2000, seed_state(0))
    assert np.bincount(rank_of, weights=totals).tolist() == [16, 16]  # 8+7+1 against 6+5+5
    assert best == pytest.approx(2.0)
    assert best == pytest.approx(smoothed_peak(totals, rank_of, 2))


def test_relibra_is_no_worse_than_lpt_and_repeats():
    problem = make_problem([20] * 10, 64, TOPOLOGIES[2])
    totals = problem.counts.sum(axis=0, dtype=np.int64)
    lpt, found = (ranks_of_slots(p, 4) for p in (lpt_placement(problem), relibra_placement(problem, seed=3)))
    for layer in range(problem.num_layers):
        assert smoothed_peak(totals[layer], found[layer], 4) <= smoothed_peak(totals[layer], lpt[layer], 4)
    assert (relibra_placement(problem, seed=3) == relibra_placement(problem, seed=3)).all()


@pytest.mark.parametrize("place", [*PLACEMENTS.values(), relibra_placement])
@pytest.mark.parametrize("totals", [[100, 1, 1, 1], [7, 7, 7, 7], [50, 50, 0, 0]])
def test_every_expert_has_one_place_and_every_rank_its_number(place, totals):
    """The hottest expert takes one slot, no expert is on a rank twice and none is lost (FC-18 without replicas)."""
    placement = place(with_totals([totals]))
    assert sorted(placement[0].tolist()) == [0, 1, 2, 3]


# The registries


def test_names_are_priced_and_refused():
    problem = make_problem(np.random.default_rng(7).integers(1, 60, 40), 64)
    assert set(SHOWN_BASELINES) < set(BASELINES)
    for name in BASELINES:
        priced, rows = price_baseline(problem, name)
        assert priced.step_ns > 0
        assert rows >= row_range(problem).start
    for solve in SEARCH_BASELINES.values():
        first, again = (solve(problem, StopCriterion(max_iterations=500), seed=1) for _ in range(2))
        assert price_packing(problem, *first).step_ns == price_packing(problem, *again).step_ns > 0
        assert first[0][2] >= row_range(problem).start
    assert (
        price_packing(problem, *SEARCH_BASELINES["RoutePack"](problem, StopCriterion(max_runtime=0.05), seed=1)).step_ns
        > 0
    )

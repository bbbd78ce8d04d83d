"""RoutePack and the other swapping searches: kernels against their definition, seeds and population by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
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

from profiler import RoutePackError, Topology
from search import StepBatch, StopCriterion, build_problem, evaluate
from search.baselines.frameworks import largest_cell_tokens
from search.baselines.routepack import (
    BEST_FIT,
    FIRST_FIT,
    UNIT_J,
    RoutePackParams,
    SwapChain,
    _fit,
    _insert_by_peaks,
    attention_proxy,
    drop_near_duplicates,
    fill_empty_cells,
    proxy_costs,
    proxy_state,
    seed_layouts,
    sketch_directions,
    sketch_layout,
    solve_open_instruct,
    solve_routepack,
    systematic_resample,
    windowed_order,
)
from search.baselines.routepack_kernels import (
    _propose_swap,
    fill_proxy_state,
    layout_score,
    max_j_delta,
    swap_apply,
    swap_chain,
    swap_delta,
)
from search.kernels import seed_state
from search.packing.bins import pack_ffd
from search.placement.lpt import identity_placement, lpt_placement, ranks_of_slots
from search.problem import row_range

SMALL = RoutePackParams(population=4, seed_tries=2)


def make_problem(lengths, cap, topology=TOPOLOGIES[0], skew=1.0):
    rng = np.random.default_rng(0)
    spec = make_spec()
    batch = make_batch(rng, spec, lengths, skew=skew)
    return build_problem(batch, make_tables(rng, spec, topology, cap), spec, topology, cap)


def opposed_routes(topology=TOPOLOGIES[0]):
    """Four samples that each fill a cell; the first two use expert 0 alone, the others expert 1: two rows of two."""
    spec = make_spec(layers=1, experts=2, top_k=1)
    counts = np.array([[[8, 0]], [[8, 0]], [[0, 8]], [[0, 8]]])
    lengths = np.array([8, 8, 8, 8])
    batch = StepBatch(lengths, counts, np.array(list("abcd")), lengths)
    return build_problem(batch, make_tables(np.random.default_rng(0), spec, topology, 8), spec, topology, 8)


def slow_score(problem, costs, cell_of, num_rows, rank_LE):
    """(max U, sum U, max J) by the definition."""
    slots, blocks = problem.num_slots, problem.num_blocks
    units = [[] for _ in range(num_rows * blocks)]
    for unit in range(num_rows * blocks):
        j = 0
        members = [i for i in range(problem.num_samples) if cell_of[i] // (slots // blocks) == unit]
        for c in range(costs.works.shape[1]):
            j += max(sum(costs.works[i, c] for i in members if cell_of[i] == d) for d in set(cell_of[members]))
        peaks = 0
        for layer in range(problem.num_layers):
            rows = [0] * problem.num_ranks
            for i in members:
                for expert in range(problem.num_experts):
                    rows[rank_LE[layer, expert]] += int(problem.counts[i, layer, expert])
            peaks += max(rows)
        units[unit] = int(j) + (peaks * int(costs.scalars[3]) >> 20)
    block_u = [sum(units[b::blocks]) for b in range(blocks)]
    return max(block_u), sum(block_u), max(units)


def start(drawn, proxies=1):
    problem, rng = drawn
    rows = random_rows(rng, problem)
    rank_LE = ranks_of_slots(random_placement(rng, problem), problem.num_ranks)
    works_NC = np.column_stack([attention_proxy(problem), problem.lengths])[:, :proxies]
    shares = (*(0.3, 0.2)[:proxies], 0.5)
    costs = proxy_costs(problem, rank_LE, rows, works_NC, shares, 0.5)
    cell_of = random_packing(rng, problem, rows)
    return problem, rows, rank_LE, costs, proxy_state(problem, costs, cell_of, rows)


def draw(costs, state, rng):
    return _propose_swap(
        costs.lengths, costs.by_length, costs.length_rank, state.cell_of, state.cell_tokens, costs.scalars[0], 512, rng
    )


@given(problems())
@settings(max_examples=20)
def test_every_swap_equals_rescoring(drawn):
    problem, rows, rank_LE, costs, state = start(drawn, proxies=2)
    rng = seed_state(int(drawn[1].integers(1 << 30)))
    for _ in range(20):
        before = layout_score(state)
        assert before == slow_score(problem, costs, state.cell_of, rows, rank_LE)
        i, j = draw(costs, state, rng)
        if i < 0:
            continue
        priced = swap_delta(costs, state, i, j)
        most_j = max_j_delta(costs, state, i, j, priced[2], priced[3])
        swap_apply(costs, state, i, j, priced)
        after = layout_score(state)
        assert after == (before[0] + priced[0], before[1] + priced[1], before[2] + most_j)
    derived = [np.copy(part) for part in state]
    fill_proxy_state(costs, state)
    for name, was, now in zip(state._fields, derived, state, strict=True):
        if name != "peak":
            assert (was == now).all(), name


@given(problems())
@settings(max_examples=15)
def test_a_chain_keeps_cap_and_counts_and_reports_its_best(drawn):
    problem, rows, rank_LE, costs, state = start(drawn)
    costs.scalars[0] = cap = int(state.cell_tokens.max())
    counts = np.bincount(state.cell_of, minlength=rows * problem.num_slots)
    best_cell_of, best = state.cell_of.copy(), np.array(layout_score(state))
    first = tuple(best)
    swap_chain(costs, state, best_cell_of, best, seed_state(1), UNIT_J // 10, 400)
    assert tuple(best) <= first
    assert tuple(best) == slow_score(problem, costs, best_cell_of, rows, rank_LE)
    for cell_of in (best_cell_of, state.cell_of):
        assert np.bincount(cell_of, weights=problem.lengths).max() <= cap
        assert (np.bincount(cell_of, minlength=rows * problem.num_slots) == counts).all()


def test_a_balanced_unit_costs_one_and_the_opposed_routes_one_and_a_half():
    problem = opposed_routes()
    rank_LE = ranks_of_slots(lpt_placement(problem), 2)
    costs = proxy_costs(problem, rank_LE, 2, attention_proxy(problem)[:, None], (0.5, 0.5), 0.5)
    apart = proxy_state(problem, costs, np.array([0, 1, 2, 3]), 2)  # row 0 on rank 0 alone
    mixed = proxy_state(problem, costs, np.array([0, 2, 1, 3]), 2)
    assert layout_score(apart) == (3 * UNIT_J, 3 * UNIT_J, 3 * UNIT_J // 2)
    assert layout_score(mixed) == (2 * UNIT_J, 2 * UNIT_J, UNIT_J)
    chain = SwapChain(problem, costs, np.array([0, 1, 2, 3]), 2, seed_state(0))
    chain.run(0, 200)
    assert tuple(chain.best) == layout_score(mixed)


def test_two_blocks_are_scored_by_the_slower_one():
    # Two blocks of two slots: equal swaps inside the faster block change the sum alone.
    problem = make_problem([9, 8, 7, 6, 5, 4, 3, 2], 64, TOPOLOGIES[1])
    rank_LE = ranks_of_slots(lpt_placement(problem), 2)
    costs = proxy_costs(problem, rank_LE, 2, attention_proxy(problem)[:, None], (0.5, 0.5), 0.5)
    state = proxy_state(problem, costs, np.arange(8), 2)
    fast = int(np.argmin(state.block_u))
    i, j = 2 * fast, 4 + 2 * fast
    priced = swap_delta(costs, state, i, j)
    slower = int(state.block_u.max())
    assert priced[0] == max(0, int(state.block_u[fast]) + priced[1] - slower)


# RoutePack's seeds and population


def test_windows_shuffle_only_near_the_length_order():
    lengths = np.array([3, 9, 1, 7, 5, 8])
    rng = np.random.default_rng(0)
    assert windowed_order(lengths, 1, rng).tolist() == [1, 5, 3, 4, 0, 2]
    order = windowed_order(lengths, 2, rng)
    assert [sorted(order[k : k + 2].tolist()) for k in (0, 2, 4)] == [[1, 5], [3, 4], [0, 2]]


def test_first_and_best_fit():
    lengths = np.array([6, 5, 4, 4, 1])
    order = np.arange(5)
    assert _fit(lengths, order, 3, 10, FIRST_FIT, seed_state(0)).tolist() == [0, 1, 0, 1, 1]
    assert _fit(lengths, order, 2, 9, FIRST_FIT, seed_state(0))[0] == -1
    seen = {tuple(_fit(lengths, order, 2, 12, BEST_FIT, seed_state(k)).tolist()) for k in range(40)}
    assert (0, 0, 1, 1, 0) in seen  # the fullest bin with room: 6+5, 4+4, and the 1 closes the first
    assert len(seen) > 1


def test_insertion_mixes_opposed_routes():
    problem = opposed_routes()
    costs = proxy_costs(problem, ranks_of_slots(lpt_placement(problem), 2), 2, attention_proxy(problem)[:, None],
                        (0.5, 0.5), 0.5)  # fmt: skip
    # The second sample raises either row's peak by 8 and goes to the emptier; the others raise none.
    assert _insert_by_peaks(problem.lengths, costs.loads, np.arange(4), 4, 2, 8).tolist() == [0, 2, 1, 3]
    assert _insert_by_peaks(problem.lengths, costs.loads, np.arange(4), 4, 2, 7)[0] == -1


def test_empty_cells_take_the_shortest_sample_of_the_fullest():
    cell_of, lengths = np.array([0, 0, 0, 1]), np.array([5, 2, 3, 9])
    assert fill_empty_cells(cell_of, lengths, 3)
    assert cell_of.tolist() == [0, 2, 0, 1]
    assert not fill_empty_cells(np.array([0, 1]), lengths[:2], 3)


def test_sketch_forgets_the_order_of_rows_and_tells_layouts_apart():
    problem = make_problem([9, 8, 7, 6, 5, 4, 3, 2], 64)
    rank_LE = ranks_of_slots(lpt_placement(problem), 2)
    costs = proxy_costs(problem, rank_LE, 2, attention_proxy(problem)[:, None], (0.5, 0.5), 0.5)
    directions = sketch_directions(problem.num_layers, np.random.default_rng(0))
    layouts = np.array([[0, 1, 2, 3, 0, 1, 2, 3], [2, 3, 0, 1, 2, 3, 0, 1], [0, 0, 1, 1, 2, 2, 3, 3]])
    sketches = [sketch_layout(costs, proxy_state(problem, costs, one, 2), directions) for one in layouts]
    assert np.allclose(sketches[0], sketches[1])
    assert drop_near_duplicates(sketches, 1e-3) == [0, 2]
    assert drop_near_duplicates(sketches, 1e3) == [0]


def test_systematic_resampling():
    weights = np.array([1.0, 1.0, 2.0, 0.0])
    assert systematic_resample(weights, 0.5).tolist() == [0, 1, 2, 2]
    assert systematic_resample(weights, 0.0).tolist() == [0, 1, 2, 2]
    assert systematic_resample(np.array([0.0, 0.0, 1.0]), 0.9).tolist() == [2, 2, 2]
    assert systematic_resample(np.ones(5), 0.3).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_seed_layouts_keep_the_cap_and_fill_every_cell(topology):
    problem = make_problem(np.random.default_rng(4).integers(1, 60, 40), 64, topology)
    rows = row_range(problem).start + 1
    rank_LE = ranks_of_slots(lpt_placement(problem), problem.num_ranks)
    costs = proxy_costs(problem, rank_LE, rows, attention_proxy(problem)[:, None], (0.5, 0.5), 0.5)
    layouts = list(seed_layouts(problem, costs, rows, np.random.default_rng(0), 4))
    assert len(layouts) == 12
    for cell_of in layouts:
        assert np.bincount(cell_of, weights=problem.lengths).max() <= 64
        assert np.bincount(cell_of, minlength=rows * problem.num_slots).min() >= 1


# Whole searches


def test_routepack_takes_the_least_rows_that_pack_and_keeps_the_cap():
    problem = make_problem(np.random.default_rng(5).integers(1, 60, 60), 64, TOPOLOGIES[1])
    (row_N, slot_N, rows), placement_LE = solve_routepack(problem, StopCriterion(max_iterations=2000), SMALL)
    assert rows == row_range(problem).start
    assert largest_cell_tokens(problem, (row_N, slot_N, rows)) <= 64
    assert np.bincount(row_N * 4 + slot_N, minlength=rows * 4).min() >= 1
    assert (placement_LE == lpt_placement(problem)).all()
    first_fit = pack_ffd(problem)
    ours = evaluate(problem, row_N, slot_N, placement_LE, rows).step_ns
    assert ours < evaluate(problem, first_fit[0], first_fit[1], placement_LE, first_fit[2]).step_ns
    five = make_problem([6] * 5, 10, Topology())
    assert solve_routepack(five, StopCriterion(max_iterations=10), SMALL)[0][2] == 5  # the bound by tokens is 3 (FC-11)
    with pytest.raises(RoutePackError, match="without empty cells"):
        solve_routepack(make_problem([6] * 5, 10), StopCriterion(max_iterations=10), SMALL)


def test_routepack_mixes_opposed_routes():
    problem = opposed_routes()
    (row_N, _, rows), _ = solve_routepack(problem, StopCriterion(max_iterations=64), SMALL)
    assert rows == 2
    assert row_N[0] != row_N[1]
    assert row_N[2] != row_N[3]


def test_routepack_repeats_whatever_the_threads():
    problem = make_problem(np.random.default_rng(6).integers(1, 60, 60), 64, TOPOLOGIES[1])
    found = [
        solve_routepack(problem, StopCriterion(max_iterations=3000), SMALL, seed=seed, num_threads=threads)[0]
        for seed, threads in ((1, 1), (1, 3), (2, 2))
    ]
    assert all((a == b).all() for a, b in zip(found[0][:2], found[1][:2], strict=True))
    assert any((a != b).any() for a, b in zip(found[0][:2], found[2][:2], strict=True))


def test_open_instruct_swaps_only_improve_and_leave_experts_in_place():
    problem = opposed_routes()
    packing, placement_LE = solve_open_instruct(problem)
    assert pack_ffd(problem)[0].tolist() == [0, 0, 1, 1]
    assert packing[0][0] != packing[0][1]  # one swap levels both rows
    assert (placement_LE == identity_placement(problem)).all()
    none, _ = solve_open_instruct(problem, proposals=0)
    assert (none[0] == pack_ffd(problem)[0]).all()

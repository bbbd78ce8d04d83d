"""RoutePack (arXiv 2608.12146), written from its description: what the project must reproduce and then beat.

Experts are placed once, per layer by LPT on step totals. In the least rows that a capped packing is found for, diverse
layouts become a population of swap chains at one temperature, which falls while their end states are resampled
(population annealing). Layouts are scored by unit-free proxies (``search/baselines/routepack_kernels.py``).
Open-instruct's much shorter search, at the end, swaps samples by the same kernels.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product

import numpy as np

from costmodels import compiled
from search.baselines.routepack_kernels import ProxyCosts, ProxyState, fill_proxy_state, layout_score, swap_chain
from search.kernels import random_below, sample_rank_rows, seed_state
from search.packing.bins import Packing, heavy_first, pack_ffd
from search.params import StopCriterion
from search.placement.lpt import identity_placement, lpt_placement, ranks_of_slots
from search.problem import Problem, no_packing, row_range

OPEN_INSTRUCT_PROPOSALS = 1024
UNIT_J = 1 << 30
"""J of a forced-balanced unit whose proxies' shares sum to 1."""
WINDOWS = (1, 4, 16, 64)
"""Widths of the windows of the length-sorted order that are shuffled; 1 leaves it as it is."""
FILLS = (0.02, 0.1, 0.3, 1.0)
"""How far between the mean cell and the cap a cell may be filled; the first that packs everything is taken."""
FIRST_FIT, BEST_FIT, LEAST_PEAKS = range(3)
SKETCH_DIRECTIONS = 16


@dataclass(frozen=True, slots=True)
class RoutePackParams:
    """Hold RoutePack's settings."""

    population: int = 8
    """Chains that run side by side (K)."""
    seed_tries: int = 8
    """Layouts of each of the three kinds that are made before near-duplicates are dropped."""
    duplicate_distance: float = 0.003
    """Layouts whose sketches are nearer than this, in shares of a mean unit, count as the same."""
    attention_share: float = 0.5
    """Weight of the attention proxy in J; the experts' proxy has the rest."""
    similar_share: float = 0.5
    """Share of swaps proposed between samples of similar length."""
    hot_temperature: float = 1e-3
    """First temperature, as a share of a balanced unit's J."""
    cold_temperature: float = 1e-5
    """Last temperature, likewise."""
    leg: int = 4096
    """Proposals of each chain at one temperature; fewer where the budget would not allow for 16 temperatures."""


def proxy_costs(
    problem: Problem, rank_LE: np.ndarray, num_rows: int, works_NC: np.ndarray, shares: Sequence[float], similar: float
) -> ProxyCosts:
    """Return the kernels' constants; of J in a balanced step each cell proxy has its share, the experts' the last."""
    by_length = np.argsort(problem.lengths, kind="stable")
    mean_C = works_NC.sum(axis=0, dtype=np.float64) / (num_rows * problem.num_slots)
    mean_peaks = int(problem.counts.sum(dtype=np.int64)) / (num_rows * problem.num_blocks * problem.num_ranks)
    peak_scale = round(shares[-1] * UNIT_J * (1 << 20) / mean_peaks)
    per_unit, near = problem.num_slots // problem.num_blocks, round(1024 * similar)
    return ProxyCosts(
        lengths=problem.lengths,
        works=np.rint(works_NC * (UNIT_J * np.array(shares[:-1]) / mean_C)).astype(np.int64),
        loads=sample_rank_rows(problem.counts, np.arange(problem.num_samples), rank_LE, problem.num_ranks),
        by_length=by_length,
        length_rank=np.argsort(by_length),
        scalars=np.array([problem.max_tokens, per_unit, problem.num_blocks, peak_scale, near], np.int64),
    )


def attention_proxy(problem: Problem) -> np.ndarray:
    """Return ``8192 * length + length ** 2``, [N] int64: verl's workload without the FFN's 16 of 24 h^2."""
    return 8192 * problem.lengths + problem.lengths**2


def proxy_state(problem: Problem, costs: ProxyCosts, cell_of: np.ndarray, num_rows: int) -> ProxyState:
    """Return the state of a layout given by the cell of each sample, [N]."""
    cells, units = num_rows * problem.num_slots, num_rows * problem.num_blocks
    state = ProxyState(
        cell_of=cell_of.astype(np.int64),
        cell_tokens=np.zeros(cells, np.int64),
        cell_works=np.zeros((cells, costs.works.shape[1]), np.int64),
        unit_rows=np.zeros((units, problem.num_ranks, problem.num_layers), np.int32),
        unit_peaks=np.zeros(units, np.int64),
        unit_j=np.zeros(units, np.int64),
        block_u=np.zeros(problem.num_blocks, np.int64),
        peak=np.zeros(problem.num_layers, np.int32),
    )
    fill_proxy_state(costs, state)
    return state


class SwapChain:
    """One member of the population; ``best_cell_of`` is the best layout it or its ancestors have seen."""

    def __init__(
        self, problem: Problem, costs: ProxyCosts, cell_of: np.ndarray, num_rows: int, rng: np.ndarray
    ) -> None:
        self.costs, self.rng = costs, rng
        self.state = proxy_state(problem, costs, cell_of, num_rows)
        self.best_cell_of = self.state.cell_of.copy()
        self.best = np.array(layout_score(self.state), np.int64)
        self.priced = 0

    def run(self, temperature: int, proposals: int) -> None:
        """Swap at one temperature, in 2**-30 of a balanced unit."""
        priced, _ = swap_chain(self.costs, self.state, self.best_cell_of, self.best, self.rng, temperature, proposals)
        self.priced += priced


def windowed_order(lengths: np.ndarray, width: int, rng: np.random.Generator) -> np.ndarray:
    """Return samples from long to short, shuffled inside windows of ``width``, [N]."""
    order = np.argsort(-lengths, kind="stable")
    return np.concatenate([rng.permutation(order[k : k + width]) for k in range(0, len(order), width)])


def seed_layouts(
    problem: Problem, costs: ProxyCosts, num_rows: int, rng: np.random.Generator, tries: int
) -> Iterator[np.ndarray]:
    """Yield layouts that find room under the cap, ``tries`` of each kind in turn.

    First fit in a windowed order, randomized best fit by occupancy, and insertion where peaks of ranks grow least.
    """
    cells, per_unit = num_rows * problem.num_slots, problem.num_slots // problem.num_blocks
    mean = -(-int(problem.lengths.sum()) // cells)
    least = min(max(mean, int(problem.lengths.max())), problem.max_tokens)
    for k, kind in product(range(tries), (FIRST_FIT, BEST_FIT, LEAST_PEAKS)):
        order = windowed_order(problem.lengths, 1 if kind == BEST_FIT else WINDOWS[k % len(WINDOWS)], rng)
        for most in (least + round(fill * (problem.max_tokens - least)) for fill in FILLS):
            if kind == LEAST_PEAKS:
                cell_of = _insert_by_peaks(costs.lengths, costs.loads, order, cells, per_unit, most)
            else:
                state = rng.integers(1, 1 << 62, 1).astype(np.uint64)
                cell_of = _fit(problem.lengths, order, cells, most, kind, state)
            if cell_of[0] >= 0 and fill_empty_cells(cell_of, problem.lengths, cells):
                # Packed bin by bin, cells of like attention then share a row.
                yield cell_of if kind == LEAST_PEAKS else heavy_first(cell_of, costs.works[:, 0], cells)
                break


def fill_empty_cells(cell_of: np.ndarray, lengths: np.ndarray, num_cells: int) -> bool:
    """Give every empty cell the shortest sample of the cell that holds most; say whether there were enough."""
    counts = np.bincount(cell_of, minlength=num_cells)
    for empty in np.flatnonzero(counts == 0):
        donor = int(np.argmax(counts))
        if counts[donor] < 2:
            return False
        members = np.flatnonzero(cell_of == donor)
        cell_of[members[np.argmin(lengths[members])]] = empty
        counts[donor] -= 1
        counts[empty] = 1
    return True


@compiled
def _fit(lengths, order, cells, most, rule, rng):
    """Return the cell of each sample packed in ``order`` up to ``most`` tokens, first entry -1 where one has no room.

    First fit takes the first cell with room; best fit the fullest one, or in a third of the draws the second fullest.
    """
    cell_of = np.full(lengths.size, -1, np.int64)
    tokens = np.zeros(cells, np.int64)
    for i in order:
        first, second = -1, -1
        for k in range(cells):
            if tokens[k] + lengths[i] > most:
                continue
            if rule == FIRST_FIT:
                first = k
                break
            if first < 0 or tokens[k] > tokens[first]:
                first, second = k, first
            elif second < 0 or tokens[k] > tokens[second]:
                second = k
        if first < 0:
            cell_of[0] = -1
            return cell_of
        if second >= 0 and random_below(rng, 3) == 0:
            first = second
        cell_of[i] = first
        tokens[first] += lengths[i]
    return cell_of


@compiled
def _insert_by_peaks(lengths, loads, order, cells, per_unit, most):
    """Return the cell of each sample inserted in ``order`` where the unit's peaks grow least, -1 first without room.

    A unit's growth is summed over layers; ties go to the unit with fewer tokens, and there to its emptiest cell.
    """
    cell_of = np.full(lengths.size, -1, np.int64)
    tokens = np.zeros(cells, np.int64)
    units, ranks, layers = cells // per_unit, loads.shape[1], loads.shape[2]
    rows, peak = np.zeros((units, ranks, layers), np.int32), np.zeros((units, layers), np.int32)
    grown = np.zeros(layers, np.int32)
    for i in order:
        chosen, chosen_cell, least_growth, least_tokens = -1, -1, np.int64(0), np.int64(0)
        for u in range(units):
            cell, held = u * per_unit, np.int64(0)
            for k in range(u * per_unit, (u + 1) * per_unit):
                held += tokens[k]
                if tokens[k] < tokens[cell]:
                    cell = k
            if tokens[cell] + lengths[i] > most:
                continue
            grown[:] = peak[u]
            for p in range(ranks):
                for m in range(layers):
                    grown[m] = max(grown[m], np.int32(rows[u, p, m] + loads[i, p, m]))
            growth = grown.sum() - peak[u].sum()
            if chosen < 0 or growth < least_growth or (growth == least_growth and held < least_tokens):
                chosen, chosen_cell, least_growth, least_tokens = u, cell, growth, held
        if chosen < 0:
            cell_of[0] = -1
            return cell_of
        cell_of[i] = chosen_cell
        tokens[chosen_cell] += lengths[i]
        for p in range(ranks):
            for m in range(layers):
                rows[chosen, p, m] += loads[i, p, m]
                peak[chosen, m] = max(peak[chosen, m], rows[chosen, p, m])
    return cell_of


def drop_near_duplicates(sketches: list[np.ndarray], threshold: float) -> list[int]:
    """Return the indices of layouts kept: each further than ``threshold`` from all kept before it."""
    kept: list[int] = []
    for k, sketch in enumerate(sketches):
        if all(np.abs(sketch - sketches[other]).mean() > threshold for other in kept):
            kept.append(k)
    return kept


def sketch_layout(costs: ProxyCosts, state: ProxyState, directions_FS: np.ndarray) -> np.ndarray:
    """Return a layout's units as sorted projections of their features, [U, S]: a sliced-Wasserstein sketch.

    Features are the unit's heaviest cell, its tokens and each layer's peak over ranks, over their mean. Two sketches
    differ by the Wasserstein-1 distance of their units, averaged over directions, whatever the order of rows.
    """
    units = len(state.unit_j)
    heaviest = state.cell_works[:, 0].reshape(units, -1).max(axis=1)
    tokens = state.cell_tokens.reshape(units, -1).sum(axis=1)
    features_UF = np.column_stack([heaviest, tokens, state.unit_rows.max(axis=1)]).astype(np.float64)
    features_UF /= np.maximum(features_UF.mean(axis=0), 1.0)
    return np.sort(features_UF @ directions_FS, axis=0)


def sketch_directions(num_layers: int, rng: np.random.Generator) -> np.ndarray:
    """Return random unit vectors over the features of a unit, [F, S]."""
    directions = rng.standard_normal((2 + num_layers, SKETCH_DIRECTIONS))
    return directions / np.linalg.norm(directions, axis=0)


def solve_routepack(
    problem: Problem,
    stop: StopCriterion,
    params: RoutePackParams | None = None,
    *,
    seed: int = 0,
    num_threads: int | None = None,
) -> tuple[Packing, np.ndarray]:
    """Return RoutePack's packing (row [N], slot [N], number of rows) and placement [L, E].

    Under an iteration budget (proposals of one chain) the result does not depend on threads or time.
    """
    params = params or RoutePackParams()
    stop.reset()
    placement_LE, rng = lpt_placement(problem), np.random.default_rng(seed)
    chains, num_rows = _population(problem, ranks_of_slots(placement_LE, problem.num_ranks), params, seed, rng)
    _anneal_population(chains, stop, params, rng, num_threads or os.cpu_count() or 1)
    best = min(chains, key=lambda chain: tuple(chain.best.tolist()))
    return (*np.divmod(best.best_cell_of, problem.num_slots), num_rows), placement_LE


def _population(
    problem: Problem, rank_LE: np.ndarray, params: RoutePackParams, seed: int, rng: np.random.Generator
) -> tuple[list[SwapChain], int]:
    """Return chains that start from the best layouts without near-duplicates, in the fewest rows that pack."""
    attention, shares = attention_proxy(problem)[:, None], (params.attention_share, 1.0 - params.attention_share)
    for rows in row_range(problem):
        costs = proxy_costs(problem, rank_LE, rows, attention, shares, params.similar_share)
        layouts = list(seed_layouts(problem, costs, rows, rng, params.seed_tries))
        if layouts:
            directions_FS = sketch_directions(problem.num_layers, rng)
            states = sorted((proxy_state(problem, costs, cell_of, rows) for cell_of in layouts), key=layout_score)
            sketches = [sketch_layout(costs, state, directions_FS) for state in states]
            kept = drop_near_duplicates(sketches, params.duplicate_distance)[: params.population]
            starts = [states[kept[k % len(kept)]].cell_of for k in range(params.population)]
            return [SwapChain(problem, costs, one, rows, seed_state(seed, k)) for k, one in enumerate(starts)], rows
    raise no_packing(problem)


def _anneal_population(
    chains: list[SwapChain], stop: StopCriterion, params: RoutePackParams, rng: np.random.Generator, threads: int
) -> None:
    """Run all chains at one temperature, lower it, resample their end states; until the budget is spent."""
    hot, cold = params.hot_temperature * UNIT_J, params.cold_temperature * UNIT_J
    proposals, leg, now = 0, params.leg, stop.progress(0)
    while leg > 1 and stop.progress(leg) > now + 1 / 16:
        leg //= 2
    with ThreadPoolExecutor(threads) as pool:
        while now < 1.0:
            temperature = hot * (cold / hot) ** now
            list(pool.map(lambda chain, t=int(temperature): chain.run(t, leg), chains))
            proposals += leg
            now = stop.progress(proposals)
            lower = hot * (cold / hot) ** min(1.0, now)
            energies = np.array([int(chain.state.block_u.max()) for chain in chains], np.float64)
            weights = np.exp(-(energies - energies.min()) * (1 / lower - 1 / temperature))
            parents = systematic_resample(weights, rng.random()).tolist()
            dead = [k for k in range(len(chains)) if k not in parents]
            twice = [k for n, k in enumerate(parents) if n and k == parents[n - 1]]
            for k, parent in zip(dead, twice, strict=True):  # bests and random numbers stay
                for mine, theirs in zip(chains[k].state, chains[parent].state, strict=True):
                    mine[:] = theirs


def systematic_resample(weights_K: np.ndarray, offset: float) -> np.ndarray:
    """Return the K members that survive, [K] ascending: member k about K times its share of the weights.

    One random ``offset`` in [0, 1) places K equally spaced pointers on the cumulated weights.
    """
    edges = np.cumsum(weights_K) / weights_K.sum()
    pointers = (np.arange(len(weights_K)) + offset) / len(weights_K)
    return np.minimum(np.searchsorted(edges, pointers, side="right"), len(weights_K) - 1)


def solve_open_instruct(
    problem: Problem, *, seed: int = 0, proposals: int = OPEN_INSTRUCT_PROPOSALS
) -> tuple[Packing, np.ndarray]:
    """Return open-instruct's bounded sample swaps from first-fit decreasing, improvements only, and identity, [L, E].

    Three proxies of equal weight, summed over rows, fall: the most tokens of a rank, the most squared tokens of a rank
    (attention) and the most routed rows of an EP rank, averaged over layers; each relative to its mean.
    """
    row_N, slot_N, num_rows = pack_ffd(problem)
    placement_LE, works_NC = identity_placement(problem), np.column_stack([problem.lengths, problem.lengths**2])
    rank_LE = ranks_of_slots(placement_LE, problem.num_ranks)
    costs = proxy_costs(problem, rank_LE, num_rows, works_NC, shares=(1 / 3, 1 / 3, 1 / 3), similar=0.0)
    chain = SwapChain(problem, costs, row_N * problem.num_slots + slot_N, num_rows, seed_state(seed))
    chain.run(0, proposals)
    return (*np.divmod(chain.best_cell_of, problem.num_slots), num_rows), placement_LE

"""RoutePack (arXiv 2608.12146), written from its description: what the project must reproduce and then beat.

Open-instruct's much shorter search, at the end, swaps samples by the same kernels.

Experts are placed once, per layer by LPT on step totals. The number of rows is the least for which a capped packing is
found. Diverse layouts become a population of swap chains at one temperature, which falls while their end states are
resampled systematically (population annealing); an archive keeps the best layout any chain has seen.

Layouts are scored by unit-free proxies, not by time (``search/baselines/routepack_kernels.py``).
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from search.baselines.routepack_kernels import ProxyCosts, ProxyState, fill_proxy_state, layout_score, swap_chain
from search.baselines.routepack_seeds import drop_near_duplicates, seed_layouts, sketch_directions, sketch_layout
from search.kernels import sample_rank_rows, seed_state
from search.packing.bins import Packing, pack_ffd
from search.placement.lpt import identity_placement, lpt_placement, ranks_of_slots
from search.problem import Problem, no_packing, row_range
from search.stop import StopCriterion

OPEN_INSTRUCT_PROPOSALS = 1024
UNIT_J = 1 << 30
"""J of a forced-balanced unit whose proxies' shares sum to 1."""


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
    problem: Problem,
    rank_LE: np.ndarray,
    num_rows: int,
    works_NC: np.ndarray,
    shares: tuple[float, ...],
    similar: float,
) -> ProxyCosts:
    """Return the kernels' constants: cell proxies with their ``shares``, and the experts' proxy with the last share.

    A share is what the proxy adds to J where every cell (or rank) of every row holds the mean.
    """
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
    """Return ``8192 * length + length ** 2``, [N] int64: verl's analytic workload without the FFN's two thirds.

    Of the 24 h^2 a token costs in a dense layer 8 h^2 are attention's projections; the FFN is the experts' here.
    """
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
    with ThreadPoolExecutor(num_threads or os.cpu_count() or 1) as pool:
        _anneal_population(chains, stop, params, rng, pool)
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
    chains: list[SwapChain],
    stop: StopCriterion,
    params: RoutePackParams,
    rng: np.random.Generator,
    pool: ThreadPoolExecutor,
) -> None:
    """Run all chains at one temperature, lower it, resample their end states; until the budget is spent."""
    hot, cold = params.hot_temperature * UNIT_J, params.cold_temperature * UNIT_J
    proposals, leg, now = 0, params.leg, stop.progress(0)
    while leg > 1 and stop.progress(leg) > now + 1 / 16:
        leg //= 2
    while now < 1.0:
        temperature = hot * (cold / hot) ** now
        list(pool.map(lambda chain, t=int(temperature): chain.run(t, leg), chains))
        proposals += leg
        now = stop.progress(proposals)
        lower = hot * (cold / hot) ** min(1.0, now)
        energies = np.array([int(chain.state.block_u.max()) for chain in chains], np.float64)
        weights = np.exp(-(energies - energies.min()) * (1 / lower - 1 / temperature))
        _take_parents(chains, systematic_resample(weights, rng.random()))


def systematic_resample(weights_K: np.ndarray, offset: float) -> np.ndarray:
    """Return the K members that survive, [K] ascending: member k about K times its share of the weights.

    One random ``offset`` in [0, 1) places K equally spaced pointers on the cumulated weights.
    """
    edges = np.cumsum(weights_K) / weights_K.sum()
    pointers = (np.arange(len(weights_K)) + offset) / len(weights_K)
    return np.minimum(np.searchsorted(edges, pointers, side="right"), len(weights_K) - 1)


def _take_parents(chains: list[SwapChain], parents_K: np.ndarray) -> None:
    """Let members that died take the state of those that survive more than once; bests and random numbers stay."""
    survivors = set(parents_K.tolist())
    extra = [k for k in sorted(survivors) for _ in range(int((parents_K == k).sum()) - 1)]
    for dead, parent in zip([k for k in range(len(chains)) if k not in survivors], extra, strict=True):
        for mine, theirs in zip(chains[dead].state, chains[parent].state, strict=True):
            mine[:] = theirs


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

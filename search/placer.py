"""Place experts for the rows of a given packing, layer by layer.

Shape suffixes: U units (row x EP block), L MoE layers, E experts, P EP ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from profiler import RoutePackError
from search.construct import slots_of_ranks
from search.load_kernels import unit_expert_rows
from search.params import PlannerParams
from search.placement_kernels import improve_layer, layer_ns, layer_rank_rows, lpt_layer
from search.problem import Problem


class LayerLoads:
    """Hold what the placement of every layer depends on, for one packing."""

    def __init__(self, problem: Problem, unit_N: np.ndarray, sent_U: np.ndarray) -> None:
        units = unit_expert_rows(problem.counts, unit_N, len(sent_U))
        self.counts_LEU = np.ascontiguousarray(units.transpose(1, 2, 0), dtype=np.int64)
        self.sent_U = np.ascontiguousarray(sent_U, dtype=np.int64)
        self.tables = np.stack([problem.expert_ns, problem.exchange_ns, problem.expert_ns + problem.exchange_ns])
        self.shift = problem.tables.rows_shift
        self.num_ranks = problem.num_ranks

    def layer_ns(self, layer: int, rank_of: np.ndarray) -> int:
        """Return the time of one layer over all units under a placement (rank of each expert, [E])."""
        rows = layer_rank_rows(self.counts_LEU[layer], rank_of, self.num_ranks)
        return int(layer_ns(self.tables, self.shift, rows, self.sent_U))

    def improve(self, layer: int, rank_of: np.ndarray, params: PlannerParams, seed: int) -> tuple[int, np.ndarray]:
        """Return the time and ranks of a layer after swap search from ``rank_of``; never worse than it."""
        start_ns = self.layer_ns(layer, rank_of)
        mean_ns = start_ns // len(self.sent_U)
        hot_ns = int(mean_ns * params.placement_temperature)
        schedule = (self.num_ranks, params.placement_swaps, hot_ns, hot_ns // 100)
        better = rank_of.copy()
        rng = seed_state(seed, layer)
        time_ns = improve_layer(self.tables, self.shift, self.counts_LEU[layer], better, self.sent_U, rng, schedule)
        return int(time_ns), better


def seed_state(*numbers: int) -> np.ndarray:
    """Return a non-zero xorshift state mixed from integers (splitmix64), [1] uint64."""
    state, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    for number in numbers:
        state = (state ^ (number & mask)) * 0xBF58476D1CE4E5B9 & mask
        state ^= state >> 27
        state = state * 0x94D049BB133111EB + 0x9E3779B97F4A7C15 & mask
        state ^= state >> 31
    return np.array([state or 1], np.uint64)


def first_ranks(problem: Problem, ranks_per_node: int = 0) -> np.ndarray:
    """Return the rank of every expert by LPT on step totals, [L, E]; nodes first, then ranks, where nodes are given.

    Raises
    ------
    RoutePackError
        If nodes do not divide the EP ranks.
    """
    totals, ranks = problem.counts.sum(axis=0, dtype=np.int64), problem.num_ranks
    if ranks_per_node in (0, ranks):
        return np.stack([lpt_layer(layer, ranks) for layer in totals])
    if ranks % ranks_per_node:
        raise RoutePackError(f"ranks_per_node = {ranks_per_node} does not divide the {ranks} EP ranks of a block.")
    rank_LE = np.empty(totals.shape, np.int64)
    for layer, loads in enumerate(totals):
        node_of = lpt_layer(loads, ranks // ranks_per_node)
        for node in range(ranks // ranks_per_node):
            experts = np.flatnonzero(node_of == node)
            rank_LE[layer, experts] = node * ranks_per_node + lpt_layer(loads[experts], ranks_per_node)
    return rank_LE


def place_rows(
    loads: LayerLoads,
    starts: Iterable[np.ndarray],
    params: PlannerParams,
    seed: int,
    pool: ThreadPoolExecutor,
) -> np.ndarray:
    """Return the best rank of every expert, [L, E], from several starting placements [L, E].

    Layers are independent, so the result does not depend on the number of threads.
    """
    starts = list(starts)

    def best_of(layer: int) -> np.ndarray:
        results = [loads.improve(layer, ranks[layer], params, seed) for ranks in starts]
        return min(results, key=lambda result: result[0])[1]

    return np.stack(list(pool.map(best_of, range(len(loads.counts_LEU)))))


def ranks_of_slots(placement_LE: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return the EP rank of each expert, [L, E], from its physical slot."""
    return placement_LE // (placement_LE.shape[1] // num_ranks)


def placement_of_ranks(rank_LE: np.ndarray, num_ranks: int, previous_LE: np.ndarray | None = None) -> np.ndarray:
    """Return physical slots [L, E]; experts that stay on their rank keep the slot of ``previous_LE``."""
    if previous_LE is None:
        return np.stack([slots_of_ranks(ranks, num_ranks) for ranks in rank_LE])
    per_rank = rank_LE.shape[1] // num_ranks
    placement = np.where(previous_LE // per_rank == rank_LE, previous_LE, -1)
    for layer in range(len(rank_LE)):
        for rank in range(num_ranks):
            arrivals = np.flatnonzero((rank_LE[layer] == rank) & (placement[layer] < 0))
            if arrivals.size:
                free = np.setdiff1d(np.arange(rank * per_rank, (rank + 1) * per_rank), placement[layer])
                placement[layer, arrivals] = free
    return placement


def keep_what_pays(
    loads: LayerLoads, new_LE: np.ndarray, old_LE: np.ndarray, move_ns: float, params: PlannerParams
) -> np.ndarray:
    """Return ranks in which a layer leaves ``old_LE`` only if the gain over the horizon pays for the experts it moves.

    ``move_ns`` is the time one rank needs to receive one expert with its optimizer state; a layer costs as much as its
    busiest receiver.
    """
    kept = new_LE.copy()
    for layer in range(len(new_LE)):
        moved = np.flatnonzero(new_LE[layer] != old_LE[layer])
        if moved.size == 0:
            continue
        busiest = int(np.bincount(new_LE[layer, moved]).max())
        gain = loads.layer_ns(layer, old_LE[layer]) - loads.layer_ns(layer, new_LE[layer])
        if gain * params.horizon_steps <= busiest * move_ns * params.stickiness:
            kept[layer] = old_LE[layer]
    return kept

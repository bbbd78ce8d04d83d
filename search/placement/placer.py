"""Place experts for the rows of a given packing, layer by layer.

Shape suffixes: U units (row x EP block), L MoE layers, E experts, P EP ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from profiler import RoutePackError
from search.load_kernels import unit_expert_rows
from search.params import PlannerParams
from search.placement.kernels import LayerCosts, fill_layer, improve_layer
from search.placement.lpt import lpt_layer
from search.placement.movement import Residence
from search.problem import Problem
from search.random_bits import seed_state

PLACEMENT_SHARE = 0.1
"""Most of a wall-clock budget that one placement pass may take."""


class LayerLoads:
    """Hold what the placement of every layer depends on, for one packing."""

    def __init__(self, problem: Problem, unit_N: np.ndarray, sent_U: np.ndarray) -> None:
        cap, row_ns = problem.receive_wall
        units = unit_expert_rows(problem.counts, unit_N, len(sent_U))
        self._costs = LayerCosts(
            counts=np.ascontiguousarray(units.transpose(1, 2, 0)),  # [L, E, U] here, one layer at a time below
            sent=np.asarray(sent_U, np.int32),
            layer_ns=np.concatenate([problem.expert_ns + problem.exchange_ns, problem.expert_ns]),
            exchange_ns=problem.exchange_ns,
            shift=problem.tables.rows_shift,
            cap=cap,
            over_cap_ns=row_ns,
        )
        self.num_layers, self.num_ranks, self.num_units = problem.num_layers, problem.num_ranks, len(sent_U)

    def costs(self, layer: int) -> LayerCosts:
        """Return what the kernels need of one layer."""
        return self._costs._replace(counts=self._costs.counts[layer])

    def layer_ns(self, layer: int, rank_of: np.ndarray) -> int:
        """Return the time of one layer over all units under a placement (rank of each expert, [E])."""
        return int(fill_layer(self.costs(layer), rank_of, self.num_ranks).unit_ns.sum())

    def improve(
        self, layer: int, rank_of: np.ndarray, home: np.ndarray | None, move_ns: int, params: PlannerParams, seed: int
    ) -> tuple[int, np.ndarray]:
        """Return the price and ranks of a layer after swap search from ``rank_of``; never worse than it.

        The price is the layer's time plus ``move_ns`` for every expert away from ``home``, [E] (None: moves are free).
        """
        mean_ns = self.layer_ns(layer, rank_of) // self.num_units
        hot_ns = int(mean_ns * params.placement_temperature)
        schedule = (self.num_ranks, params.placement_swaps, hot_ns, hot_ns // 100, 0 if home is None else move_ns)
        better, rng = rank_of.copy(), seed_state(seed, layer)
        home = better if home is None else home
        return int(improve_layer(self.costs(layer), better, home, rng, schedule)), better


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
    residence: Residence | None,
    params: PlannerParams,
    seed: int,
    spent: Callable[[], float] = lambda: 0.0,
    room: float = 0.0,
) -> np.ndarray:
    """Return the best rank of every expert, [L, E], from several starting placements [L, E].

    Layers are independent. ``spent`` tells the share of the search's wall time gone by: where the first layer shows
    that all would take less than ``room`` of it, or more than ``PLACEMENT_SHARE``, each proposes more or fewer swaps.
    Under a budget of iterations no such time passes, and every layer gets what ``params`` say.
    """

    def best_of(layer: int, starts: Sequence[np.ndarray], params: PlannerParams) -> np.ndarray:
        home, move_ns = (None, 0) if residence is None else (residence.rank_LE[layer], residence.move_ns)
        results = [loads.improve(layer, ranks, home, move_ns, params, seed) for ranks in starts]
        return min(results, key=lambda result: result[0])[1]

    layers = list(zip(*starts, strict=True))
    began = spent()
    first = best_of(0, layers[0], params)
    whole = len(layers) * (spent() - began)
    wanted = min(max(whole, room), PLACEMENT_SHARE)
    if wanted != whole and whole > 0:
        params = replace(params, placement_swaps=max(1, int(params.placement_swaps * wanted / whole)))
    if 0 < whole < wanted:
        first = best_of(0, [first], params)
    return np.stack([first, *(best_of(layer, layers[layer], params) for layer in range(1, len(layers)))])

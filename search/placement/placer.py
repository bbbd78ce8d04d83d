"""Place experts for the rows of a given packing, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from search.kernels import seed_state, unit_expert_rows
from search.placement.kernels import LayerCosts, fill_layer, improve_layer
from search.placement.movement import Residence
from search.problem import Problem

HOT = 2e-3
"""First temperature, as a share of a layer's mean time in one (row, block); the last is a hundredth of it."""
PLACEMENT_SHARE = 0.1
"""Most of a wall-clock budget that one placement pass may take."""


class LayerLoads:
    """Hold what the placement of every layer depends on, for one packing (the cell of each sample, [N])."""

    def __init__(self, problem: Problem, cell_of: np.ndarray, num_rows: int) -> None:
        cap, row_ns = problem.receive_wall
        self._problem, self._units = problem, num_rows * problem.num_blocks
        sent = problem.sent_rows(problem.cell_tokens(cell_of, num_rows)).reshape(self._units, -1).max(axis=1)
        rows = unit_expert_rows(problem.counts, cell_of // (problem.num_slots // problem.num_blocks), self._units)
        self._costs = LayerCosts(
            counts=np.ascontiguousarray(rows.transpose(1, 2, 0)),  # [L, E, U] here, one layer at a time below
            sent=sent.astype(np.int32),
            layer_ns=np.concatenate([problem.expert_ns + problem.exchange_ns, problem.expert_ns]),
            exchange_ns=problem.exchange_ns,
            shift=problem.tables.rows_shift,
            cap=cap,
            over_cap_ns=row_ns,
        )

    def costs(self, layer: int) -> LayerCosts:
        """Return what the kernels need of one layer."""
        return self._costs._replace(counts=self._costs.counts[layer])

    def layer_ns(self, layer: int, rank_of: np.ndarray) -> int:
        """Return the time of one layer over all units under a placement (rank of each expert, [E])."""
        return int(fill_layer(self.costs(layer), rank_of, self._problem.num_ranks).unit_ns.sum())

    def improve(
        self, layer: int, rank_of: np.ndarray, residence: Residence | None, swaps: int, seed: int
    ) -> tuple[int, np.ndarray]:
        """Return the price and ranks of a layer after swap search from ``rank_of``; never worse than it.

        The price is the layer's time plus the residence's price of every expert away from home.
        """
        better, rng = rank_of.copy(), seed_state(seed, layer)
        home, move_ns = (better, 0) if residence is None else (residence.rank_LE[layer], residence.move_ns)
        mean_ns = self.layer_ns(layer, rank_of) // self._units
        hot_ns = int(mean_ns * HOT)
        schedule = (self._problem.num_ranks, swaps, hot_ns, hot_ns // 100, move_ns)
        return int(improve_layer(self.costs(layer), better, home, rng, schedule)), better


def place_rows(
    loads: LayerLoads,
    starts: Iterable[np.ndarray],
    residence: Residence | None,
    swaps: int,
    seed: int,
    spent: Callable[[], float] = lambda: 0.0,
    room: float = 0.0,
) -> np.ndarray:
    """Return the best rank of every expert, [L, E], by ``swaps`` proposals a layer from each placement of ``starts``.

    Layers are independent. ``spent`` tells the share of the search's wall time gone by: where the first layer shows
    that all would take less than ``room`` of it, or more than ``PLACEMENT_SHARE``, each proposes more or fewer swaps.
    Under a budget of iterations no such time passes.
    """

    def best_of(layer: int, starts: Iterable[np.ndarray]) -> np.ndarray:
        results = [loads.improve(layer, ranks, residence, swaps, seed) for ranks in starts]
        return min(results, key=lambda result: result[0])[1]

    layers = list(zip(*starts, strict=True))
    began = spent()
    first = best_of(0, layers[0])
    whole = len(layers) * (spent() - began)
    wanted = min(max(whole, room), PLACEMENT_SHARE)
    if wanted != whole and whole > 0:
        swaps = max(1, int(swaps * wanted / whole))
    if 0 < whole < wanted:
        first = best_of(0, [first])
    return np.stack([first, *(best_of(layer, layers[layer]) for layer in range(1, len(layers)))])

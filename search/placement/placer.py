"""Place experts for the rows of a given packing, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from search.kernels import seed_state, unit_expert_rows
from search.placement.kernels import LayerCosts, improve_layer
from search.placement.movement import Residence
from search.problem import Problem

PLACEMENT_SHARE = 0.1
"""Most of a wall-clock budget that one placement pass may take."""


def layer_costs(problem: Problem, cell_of: np.ndarray, num_rows: int) -> list[LayerCosts]:
    """Return what the placement of every layer depends on, for one packing (the cell of each sample, [N])."""
    (cap, row_ns), units = problem.receive_wall, num_rows * problem.num_blocks
    sent = problem.sent_rows(problem.cell_tokens(cell_of, num_rows)).reshape(units, -1).max(axis=1)
    rows = unit_expert_rows(problem.counts, cell_of // (problem.num_slots // problem.num_blocks), units)
    common = LayerCosts(
        counts=np.empty((0, 0), np.int32),
        sent=sent.astype(np.int32),
        layer_ns=np.concatenate([problem.expert_ns + problem.exchange_ns, problem.expert_ns]),
        exchange_ns=problem.exchange_ns,
        shift=problem.tables.rows_shift,
        cap=cap,
        over_cap_ns=row_ns,
    )
    return [common._replace(counts=counts) for counts in np.ascontiguousarray(rows.transpose(1, 2, 0))]


def improved(
    costs: LayerCosts, num_ranks: int, residence: Residence | None, seed: int, layer: int, ranks: np.ndarray, swaps: int
) -> tuple[int, np.ndarray]:
    """Return the price and ranks of a layer after swap search from ``ranks`` [E]; never worse than it.

    The price is the layer's time plus the residence's price of every expert away from home.
    """
    better = ranks.copy()
    home, move_ns = (better, 0) if residence is None else (residence.rank_LE[layer], residence.move_ns)
    return int(improve_layer(costs, better, home, seed_state(seed, layer), (num_ranks, swaps, move_ns))), better


def place_rows(
    improve: Callable[[int, np.ndarray, int], tuple[int, np.ndarray]],
    starts: Iterable[np.ndarray],
    swaps: int,
    spent: Callable[[], float] = lambda: 0.0,
    room: float = 0.0,
) -> np.ndarray:
    """Return the best rank of every expert, [L, E], by ``swaps`` proposals a layer from each placement of ``starts``.

    Layers are independent: ``improve(layer, ranks, swaps)`` returns price and ranks. ``spent`` tells the share of the
    search's wall time gone by: where the first layer shows that all would take less than ``room`` of it, or more than
    ``PLACEMENT_SHARE``, each proposes more or fewer swaps. Under a budget of iterations no such time passes.
    """

    def best_of(layer: int, starts: Iterable[np.ndarray]) -> np.ndarray:
        return min((improve(layer, ranks, swaps) for ranks in starts), key=lambda result: result[0])[1]

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

"""Layouts that RoutePack's population starts from, and the sketch that drops near-duplicates among them.

A layout is the cell of each sample, [N], with cell = unit * S + slot in block and unit = row * B + block.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
from numba import njit

from search.baselines.routepack_kernels import ProxyCosts, ProxyState
from search.kernels import random_below
from search.packing.seeds import heavy_first
from search.problem import Problem

WINDOWS = (1, 4, 16, 64)
"""Widths of the windows of the length-sorted order that are shuffled; 1 leaves it as it is."""
FILLS = (0.02, 0.1, 0.3, 1.0)
"""How far between the mean cell and the cap a cell may be filled; the first that packs everything is taken."""
FIRST_FIT, BEST_FIT, LEAST_PEAKS = range(3)
SKETCH_DIRECTIONS = 16


def windowed_order(lengths: np.ndarray, width: int, rng: np.random.Generator) -> np.ndarray:
    """Return samples from long to short, shuffled inside windows of ``width``, [N]."""
    order = np.argsort(-lengths, kind="stable")
    return np.concatenate([rng.permutation(order[k : k + width]) for k in range(0, len(order), width)])


def seed_layouts(
    problem: Problem, costs: ProxyCosts, num_rows: int, rng: np.random.Generator, tries: int
) -> Iterator[np.ndarray]:
    """Yield layouts of the three kinds in turn, ``tries`` of each, leaving out those that find no room under the cap.

    First fit in a windowed order, randomized best fit by occupancy, and insertion where the per-layer peaks of the
    block's ranks grow least.
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


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def _insert_by_peaks(lengths, loads, order, cells, per_unit, most):
    """Return the cell of each sample inserted in ``order`` where the unit's peaks grow least, -1 first without room.

    The increment of a unit is the growth of its ranks' peaks summed over layers; ties go to the unit with fewer tokens.
    Inside the unit the emptiest cell takes the sample.
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

    Features are the unit's heaviest cell, its tokens and each layer's peak over ranks, over their mean. The mean
    absolute difference of two sketches is the Wasserstein-1 distance of their units, averaged over the directions:
    renumbering rows or blocks changes nothing.
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

"""Packings from scratch: published heuristics, seeds for the search and baselines to beat, and seeds of our own.

Cells are numbered ``unit * S + slot in block``; a unit is one (row, EP block) with S cells.
"""

from __future__ import annotations

import heapq

import numpy as np

from costmodels import compiled
from profiler import RoutePackError
from search.problem import Problem, no_packing, row_range

Bins = list[list[int]]
Packing = tuple[np.ndarray, np.ndarray, int]
"""Row and slot of each sample, [N] each, and the number of rows."""


def first_fit_decreasing(
    lengths: np.ndarray, max_tokens: int, members: np.ndarray | None = None, *, opened: int = 0, fewest: bool = False
) -> Bins:
    """Pack ``members`` (all) longest first, each into the first bin with room (AReaL, prime-rl: hard cap).

    With ``fewest``, into the bin with room that holds fewest samples. So many bins are ``opened`` beforehand.
    """
    chosen = np.arange(len(lengths)) if members is None else members
    bins: Bins = [[] for _ in range(opened)]
    room = [max_tokens] * opened
    for i in chosen[np.argsort(-lengths[chosen], kind="stable")].tolist():
        length = int(lengths[i])
        fitting = (b for b, free in enumerate(room) if length <= free)
        b = min(fitting, key=lambda b: len(bins[b]), default=-1) if fewest else next(fitting, -1)
        if b < 0:
            bins.append([])
            room.append(max_tokens)
        bins[b].append(i)
        room[b] -= length
    return bins


def karmarkar_karp(weights: np.ndarray, num_bins: int, *, equal_size: bool = False) -> Bins:
    """Partition into ``num_bins`` bins of nearly equal weight by largest differencing (verl, slime, ROLL); no cap.

    Ties go to the least sample index. With ``equal_size`` the numbers of samples of two bins differ by at most one.
    """
    width = num_bins if equal_size else 1
    order = np.argsort(weights, kind="stable") if equal_size else np.arange(len(weights))
    order = np.concatenate([np.full(-len(order) % width, -1), order])
    # A partition is the weight of each part, light to heavy, and one sample of it that names it (-1: none).
    partitions: list[tuple[np.ndarray, np.ndarray]] = []
    heap: list[tuple[int, int, int]] = []
    for start in range(0, len(order), width):
        names, sums = np.full(num_bins, -1), np.zeros(num_bins, np.int64)
        names[-width:] = order[start : start + width]
        sums[names >= 0] = weights[names[names >= 0]]
        heap.append((int(sums[0] - sums[-1]), int(names[names >= 0].min()), len(partitions)))
        partitions.append((sums, names))
    joined_to = np.arange(len(weights))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, first, a), (_, second, b) = heapq.heappop(heap), heapq.heappop(heap)
        (sums, names), (other_sums, other_names) = partitions[a], partitions[b]
        sums, other_names = sums + other_sums[::-1], other_names[::-1]  # lightest meets heaviest
        both = (names >= 0) & (other_names >= 0)
        joined_to[other_names[both]] = names[both]
        names = np.where(names >= 0, names, other_names)
        order = np.lexsort((names, sums))
        heapq.heappush(heap, (int(sums[order[0]] - sums[order[-1]]), min(first, second), len(partitions)))
        partitions.append((sums[order], names[order]))
    while (joined_to[joined_to] != joined_to).any():
        joined_to = joined_to[joined_to]
    return [np.flatnonzero(joined_to == name).tolist() for name in partitions[-1][1]]


def fill_bins(bins: Bins, lengths: np.ndarray, multiple: int) -> Bins:
    """Split bins until their number is a multiple of ``multiple`` and none is empty.

    The fullest bin of two samples or more is halved, longest first to the lighter half (slime, prime-rl).
    """
    bins = [list(b) for b in bins if b]
    while len(bins) % multiple:
        wide = [k for k, b in enumerate(bins) if len(b) > 1]
        if not wide:
            raise RoutePackError(
                f"{sum(map(len, bins))} samples cannot fill a multiple of {multiple} microbatches. "
                "Collect more samples a step, or lower data_parallel_size."
            )
        k = max(wide, key=lambda k: (int(lengths[bins[k]].sum()), -k))
        halves: Bins = [[], []]
        for i in sorted(bins[k], key=lambda i: (-int(lengths[i]), i)):
            min(halves, key=lambda half: int(lengths[half].sum())).append(i)
        bins[k : k + 1] = halves
    return bins


def cells_of_bins(bins: Bins, problem: Problem, weights: np.ndarray | None = None) -> Packing:
    """Deal bin k to row k // D and slot k % D, and return the packing.

    With ``weights`` [N] bins are first sorted by falling weight, so that the cells of a row resemble one another.
    """
    slots = problem.num_slots
    if weights is not None:
        bins = sorted(bins, key=lambda b: (-int(weights[b].sum()), b[0]))
    row_N, slot_N = np.zeros(problem.num_samples, np.int64), np.zeros(problem.num_samples, np.int64)
    for k, members in enumerate(bins):
        row_N[members], slot_N[members] = k // slots, k % slots
    return row_N, slot_N, len(bins) // slots


def sample_flops(problem: Problem) -> np.ndarray:
    """Return verl's analytic workload ``24576 * length + length ** 2`` (a 7B dense model's constants), [N] int64."""
    return 24576 * problem.lengths + problem.lengths**2


def pack_ffd(problem: Problem) -> Packing:
    """First-fit decreasing over the whole step, bins dealt in order of creation (AReaL, prime-rl)."""
    bins = first_fit_decreasing(problem.lengths, problem.max_tokens)
    multiple = problem.num_slots * problem.topology.row_multiple
    return cells_of_bins(fill_bins(bins, problem.lengths, multiple), problem)


def pack_karmarkar_karp(problem: Problem, weights: np.ndarray) -> Packing:
    """Karmarkar-Karp over all cells; rows are added until the cap holds (verl); cells by falling weight (slime)."""
    for rows in row_range(problem):
        bins = karmarkar_karp(weights, rows * problem.num_slots)
        if all(bins) and max(int(problem.lengths[b].sum()) for b in bins) <= problem.max_tokens:
            return cells_of_bins(bins, problem, weights)
    raise no_packing(problem)


def sample_weights(problem: Problem) -> np.ndarray:
    """Return what each sample adds to its cell's attention and dense work, all layers, in nanoseconds, [N] int64."""
    span = (problem.cell_ns.shape[1] - 1) << problem.tables.tokens_shift
    per_token = int((problem.cell_ns[:, -1] - problem.cell_ns[:, 0]).sum()) // span
    return problem.sequence_ns.sum(axis=1) + per_token * problem.lengths


def equalised(problem: Problem, cell_of: np.ndarray, num_rows: int) -> np.ndarray | None:
    """Return a packing in which sample counts of DP slots differ by at most one, or None where short moves do not do.

    Full cells of each (row, block) go to slots with few samples; then the shortest samples move, as the cap allows.
    """
    slots, per_block = problem.num_slots, problem.num_slots // problem.num_blocks
    count = np.bincount(cell_of, minlength=num_rows * slots)
    totals, renamed = np.zeros(slots, np.int64), np.empty(num_rows * slots, np.int64)
    for first in range(0, num_rows * slots, per_block):
        cells = first + np.argsort(-count[first : first + per_block], kind="stable")
        block = first % slots
        places = block + np.argsort(totals[block : block + per_block], kind="stable")
        renamed[cells] = first - block + places
        totals[places] += count[cells]
    cell_of = renamed[cell_of]
    tokens = problem.cell_tokens(cell_of, num_rows)
    count = np.bincount(cell_of, minlength=num_rows * slots)
    by_length = np.argsort(problem.lengths, kind="stable")
    while totals.max() - totals.min() > 1:
        most, least = int(np.argmax(totals)), int(np.argmin(totals))
        roomiest = least + slots * int(np.argmin(tokens[least::slots]))
        movable = by_length[(cell_of[by_length] % slots == most) & (count[cell_of[by_length]] > 1)]
        if movable.size == 0 or tokens[roomiest] + problem.lengths[movable[0]] > problem.max_tokens:
            return None
        i = movable[0]
        tokens[cell_of[i]] -= problem.lengths[i]
        tokens[roomiest] += problem.lengths[i]
        count[cell_of[i]] -= 1
        count[roomiest] += 1
        cell_of[i] = roomiest
        totals[most] -= 1
        totals[least] += 1
    return cell_of


def pack_balanced(problem: Problem, num_rows: int) -> np.ndarray | None:
    """Return the cell of each sample, [N], in so many rows, or None: longest first, to the lightest cell with room.

    Where none has room first-fit decreasing decides. Cells of like weight then share a unit.
    """
    cells, weights = num_rows * problem.num_slots, sample_weights(problem)
    order = np.argsort(-problem.lengths, kind="stable")
    cell_of = _fill_lightest(problem.lengths, weights, order, cells, problem.max_tokens)
    if cell_of[0] < 0:
        bins = first_fit_decreasing(problem.lengths, problem.max_tokens)
        if len(bins) > cells or cells > problem.num_samples:
            return None
        try:
            while len(bins) < cells:
                bins = fill_bins(bins, problem.lengths, len(bins) + 1)
        except RoutePackError:
            return None
        for k, members in enumerate(bins):
            cell_of[members] = k
    return heavy_first(cell_of, weights, cells)


def heavy_first(cell_of: np.ndarray, weights: np.ndarray, cells: int) -> np.ndarray:
    """Return a packing with its cells numbered by falling weight, so that like ones share a unit, [N]."""
    totals = np.bincount(cell_of, weights=weights, minlength=cells)
    return np.argsort(np.argsort(-totals, kind="stable"), kind="stable")[cell_of]


def pack_staircase(problem: Problem, num_rows: int) -> np.ndarray | None:
    """Return the cell of each sample, [N], filling unit after unit from long samples to short, or None.

    A unit waits for its heaviest cell: each opens its cells with the longest samples left and fills every cell up to
    the weight of the first. Long samples share units, the last ones are light.
    """
    cells = num_rows * problem.num_slots
    if cells > problem.num_samples:
        return None
    per_unit = problem.num_slots // problem.num_blocks
    order = np.argsort(problem.lengths, kind="stable")
    sorted_weights = np.maximum.accumulate(sample_weights(problem)[order])
    cell_of = _fill_staircase(problem.lengths[order], sorted_weights, cells, per_unit, problem.max_tokens)
    if cell_of[0] < 0:
        return None
    result = np.empty_like(cell_of)
    result[order] = cell_of
    return result


@compiled
def _fill_lightest(lengths, weights, order, cells, max_tokens):
    """Return the cell of each sample, first entry -1 where a sample finds no room or a cell stays empty."""
    cell_of = np.full(lengths.size, -1, np.int64)
    tokens, loads = np.zeros(cells, np.int64), np.zeros(cells, np.int64)
    for i in order:
        lightest = -1
        for k in range(cells):
            if tokens[k] + lengths[i] <= max_tokens and (lightest < 0 or loads[k] < loads[lightest]):
                lightest = k
        if lightest < 0:
            cell_of[0] = -1
            return cell_of
        cell_of[i] = lightest
        tokens[lightest] += lengths[i]
        loads[lightest] += weights[i]
    if tokens.min() == 0:
        cell_of[0] = -1
    return cell_of


@compiled
def _fill_staircase(lengths, weights, cells, per_unit, max_tokens):
    """Return the cell of each sample, sorted from short to long; first entry -1 where one finds no room."""
    n = lengths.size
    cell_of, left = np.full(n, -1, np.int64), n
    tokens, loads = np.zeros(cells, np.int64), np.zeros(cells, np.int64)
    for first in range(0, cells - per_unit, per_unit):
        longest = n - 1
        for cell in range(first, first + per_unit):
            while cell_of[longest] >= 0:
                longest -= 1
            cell_of[longest], tokens[cell], loads[cell] = cell, lengths[longest], weights[longest]
            left -= 1
        for cell in range(first, first + per_unit):
            for i in range(longest, -1, -1):
                if left <= cells - first - per_unit:
                    break
                fits = tokens[cell] + lengths[i] <= max_tokens and loads[cell] + weights[i] <= loads[first]
                if cell_of[i] < 0 and fits:
                    cell_of[i] = cell
                    tokens[cell] += lengths[i]
                    loads[cell] += weights[i]
                    left -= 1
    for i in range(n - 1, -1, -1):
        if cell_of[i] < 0:
            chosen = -1
            # The last unit takes what is left, lightest cell first; then any cell with room, from the end.
            for k in range(cells - 1, -1, -1):
                room = tokens[k] + lengths[i] <= max_tokens
                if room and (chosen < 0 or (k >= cells - per_unit and loads[k] < loads[chosen])):
                    chosen = k
            if chosen < 0:
                cell_of[0] = -1
                return cell_of
            cell_of[i] = chosen
            tokens[chosen] += lengths[i]
            loads[chosen] += weights[i]
    if tokens.min() == 0:
        cell_of[0] = -1
    return cell_of

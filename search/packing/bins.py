"""Published heuristics, written from their descriptions: seeds for the search and baselines to beat.

Shape suffixes: N samples, R rows, D DP slots, L MoE layers, E experts, P EP ranks. Bins are lists of sample indices.
"""

from __future__ import annotations

import heapq

import numpy as np

from profiler import RoutePackError
from search.problem import Problem, least_rows

Bins = list[list[int]]


def first_fit_decreasing(lengths: np.ndarray, max_tokens: int) -> Bins:
    """Pack longest first, each sample into the first bin with room (AReaL, prime-rl: hard cap)."""
    bins: Bins = []
    room: list[int] = []
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        for b, free in enumerate(room):
            if length <= free:
                bins[b].append(i)
                room[b] = free - length
                break
        else:
            bins.append([i])
            room.append(max_tokens - length)
    return bins


def karmarkar_karp(weights: np.ndarray, num_bins: int, *, equal_size: bool = False) -> Bins:
    """Partition into ``num_bins`` bins of nearly equal weight by largest differencing (verl, slime, ROLL).

    Knows no cap. Ties are broken by the least sample index. With ``equal_size`` the numbers of samples of two bins
    differ by at most one (verl's split over DP ranks): samples enter ``num_bins`` at a time, one for each bin.
    """
    partials = _first_partials(weights, num_bins, equal_size=equal_size)
    joins: list[tuple[int, int, np.ndarray]] = []
    heap = [(int(sums[0] - sums[-1]), int(members[members >= 0].min()), k)
            for k, (sums, members) in enumerate(partials)]  # fmt: skip
    leaves = [members for _, members in partials]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, first, a), (_, second, b) = heapq.heappop(heap), heapq.heappop(heap)
        sums = partials[a][0] + partials[b][0][::-1]  # lightest meets heaviest
        named = np.where(partials[a][1] >= 0, partials[a][1], partials[b][1][::-1])
        order = np.lexsort((named, sums))
        partials.append((sums[order], named[order]))
        joins.append((a, b, order))
        heapq.heappush(heap, (int(sums[order[0]] - sums[order[-1]]), min(first, second), len(partials) - 1))
    return _bins_of_joins(leaves, joins, num_bins)


def _first_partials(weights: np.ndarray, num_bins: int, *, equal_size: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the partitions that differencing starts from: weight and sample (-1: none) of each part, light to heavy.

    One sample each, or with ``equal_size`` one for every part, from the lightest on; the first may lack some.
    """
    order = np.argsort(weights, kind="stable")
    width = num_bins if equal_size else 1
    order = np.concatenate([np.full(-len(order) % width, -1), order]) if equal_size else np.arange(len(weights))
    partials = []
    for start in range(0, len(order), width):
        members, sums = np.full(num_bins, -1), np.zeros(num_bins, np.int64)
        members[-width:] = order[start : start + width]
        sums[members >= 0] = weights[members[members >= 0]]
        partials.append((sums, members))
    return partials


def _bins_of_joins(leaves: list[np.ndarray], joins: list[tuple[int, int, np.ndarray]], num_bins: int) -> Bins:
    """Undo the joins from the last to the first: which final bin each part of each starting partition is in."""
    label = [np.zeros(0, np.int64)] * (len(leaves) + len(joins))
    label[-1] = np.arange(num_bins)
    for k in range(len(joins) - 1, -1, -1):
        a, b, order = joins[k]
        label[a] = np.empty(num_bins, np.int64)
        label[a][order] = label[len(leaves) + k]
        label[b] = label[a][::-1]
    bins: Bins = [[] for _ in range(num_bins)]
    for members, bin_of in zip(leaves, label, strict=False):
        for part in np.flatnonzero(members >= 0):
            bins[bin_of[part]].append(int(members[part]))
    return [sorted(members) for members in bins]


def fill_bins(bins: Bins, lengths: np.ndarray, multiple: int) -> Bins:
    """Split bins until their number is a multiple of ``multiple`` and none is empty.

    The bin with most tokens among those of two samples or more is halved, longest first to the lighter half (what slime
    and prime-rl do to equalise microbatch counts).
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
        halves: tuple[list[int], list[int]] = ([], [])
        totals = [0, 0]
        for i in sorted(bins[k], key=lambda i: (-int(lengths[i]), i)):
            side = 0 if totals[0] <= totals[1] else 1
            halves[side].append(i)
            totals[side] += int(lengths[i])
        bins[k : k + 1] = [halves[0], halves[1]]
    return bins


def cells_of_bins(
    bins: Bins, problem: Problem, weights: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, int]:
    """Deal bins to (row, slot) and return (row [N], slot [N], number of rows).

    In order of creation bin k becomes row k // D on slot k % D; with ``weights`` [N] the bins are first sorted by
    falling total weight, so that the cells of a row resemble one another.
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


def pack_ffd(problem: Problem) -> tuple[np.ndarray, np.ndarray, int]:
    """First-fit decreasing over the whole step, bins dealt in order of creation (AReaL, prime-rl)."""
    bins = first_fit_decreasing(problem.lengths, problem.max_tokens)
    multiple = problem.num_slots * problem.topology.row_multiple
    return cells_of_bins(fill_bins(bins, problem.lengths, multiple), problem)


def pack_karmarkar_karp(problem: Problem, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Karmarkar-Karp over all cells of the step; rows are added until the cap holds (verl 0.9.1's rule).

    Cells are dealt to rows by falling weight, as slime's balanced deal does.
    """
    multiple = problem.topology.row_multiple
    rows = least_rows(problem)
    while True:
        cells = rows * problem.num_slots
        if cells > problem.num_samples:
            raise RoutePackError(
                f"Karmarkar-Karp finds no packing under the cap of {problem.max_tokens} tokens without empty cells. "
                "Raise the cap or lower data_parallel_size."
            )
        bins = karmarkar_karp(weights, cells)
        if all(bins) and max(int(problem.lengths[b].sum()) for b in bins) <= problem.max_tokens:
            return cells_of_bins(bins, problem, weights)
        rows += multiple

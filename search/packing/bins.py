"""Published heuristics, written from their descriptions: seeds for the search and baselines to beat."""

from __future__ import annotations

import heapq

import numpy as np

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
    """Partition into ``num_bins`` bins of nearly equal weight by largest differencing (verl, slime, ROLL).

    Knows no cap. Ties are broken by the least sample index. With ``equal_size`` the numbers of samples of two bins
    differ by at most one (verl's split over DP ranks): samples enter ``num_bins`` at a time, one for each bin.
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
    """Karmarkar-Karp over all cells of the step; rows are added until the cap holds (verl 0.9.1's rule).

    Cells are dealt to rows by falling weight, as slime's balanced deal does.
    """
    for rows in row_range(problem):
        bins = karmarkar_karp(weights, rows * problem.num_slots)
        if all(bins) and max(int(problem.lengths[b].sum()) for b in bins) <= problem.max_tokens:
            return cells_of_bins(bins, problem, weights)
    raise no_packing(problem)

"""Packings to start from, made for a given number of rows under the cap.

Cells are numbered ``unit * S + slot in block``; a unit is one (row, EP block) with S cells.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from profiler import RoutePackError
from search.packing.bins import fill_bins, first_fit_decreasing
from search.problem import Problem


def sample_weights(problem: Problem) -> np.ndarray:
    """Return what each sample adds to its cell's attention and dense work, all layers, in nanoseconds, [N] int64."""
    span = (problem.cell_ns.shape[1] - 1) << problem.tables.tokens_shift
    per_token = int((problem.cell_ns[:, -1] - problem.cell_ns[:, 0]).sum()) // span
    return problem.sequence_ns.sum(axis=1) + per_token * problem.lengths


def equalised(problem: Problem, cell_of: np.ndarray, num_rows: int) -> np.ndarray | None:
    """Return a packing in which sample counts of DP slots differ by at most one, or None where short moves do not do.

    First the cells of each (row, block) are dealt so that full ones go to slots with few samples; then the shortest
    samples move from slots with most to slots with least, where the cap has room.
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
    """Return the cell of each sample, [N], for exactly ``num_rows`` rows, or None where none is found.

    Longest first, each sample to the lightest cell with room; where none has, first-fit decreasing decides. Cells are
    then sorted by weight, so that a unit holds cells of the same weight.
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
    """Return a packing with its cells numbered by falling weight, so that cells of like weight share a unit, [N]."""
    totals = np.bincount(cell_of, weights=weights, minlength=cells)
    return np.argsort(np.argsort(-totals, kind="stable"), kind="stable")[cell_of]


def pack_staircase(problem: Problem, num_rows: int) -> np.ndarray | None:
    """Return the cell of each sample, [N], filling unit after unit from long samples to short, or None.

    A unit waits for its heaviest cell, and one long sample makes a cell heavy: so each unit opens its cells with the
    longest samples left and fills every cell up to the weight of the first. Long samples share units, the last ones are
    light.
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


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def _fill_staircase(lengths, weights, cells, per_unit, max_tokens):
    """Return the cell of each sample, samples being sorted from short to long; first entry -1 where one finds no
    room."""
    n = lengths.size
    cell_of = np.full(n, -1, np.int64)
    tokens, loads = np.zeros(cells, np.int64), np.zeros(cells, np.int64)
    left = n
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

"""Numba kernels of the published searches that swap samples between microbatches under unit-free proxies.

No nanoseconds here: a *unit* (one row of one EP block) costs ``J``, in 2**-30 of a forced-balanced unit,

    J = sum over cell proxies c of max over cells d of works_c + sum over layers l of max over EP ranks p of rows

each term relative to what it is when every cell and rank holds its mean, times its share. ``U_b`` is the sum of J over
block b's units. Layouts are compared by ``(max_b U_b, sum_b U_b, max J)``, the first that differs decides.

Shape suffixes: N samples, U units, D cells of all units together (cell = unit * S + slot), S cells of a unit, C cell
proxies, P EP ranks, L MoE layers.

Invariants: no cell above the cap; every cell keeps its number of samples (only swaps are made); every stored sum is
exact, integers throughout.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from costmodels import compiled
from search.kernels import random_below, random_threshold


class ProxyCosts(NamedTuple):
    """Hold what does not change while swapping."""

    lengths: np.ndarray  # [N] int64
    works: np.ndarray  # [N, C] int64, cell proxies in 2**-30 of a balanced unit
    loads: np.ndarray  # [N, P, L] int32, routed rows of each sample on each EP rank
    by_length: np.ndarray  # [N] int64, sample ids from short to long
    length_rank: np.ndarray  # [N] int64, inverse of by_length
    scalars: np.ndarray  # [5] int64: see P_* below


P_CAP, P_CELLS_PER_UNIT, P_BLOCKS, P_PEAK_SCALE, P_SIMILAR = range(5)
"""Cap in tokens, S, B, 2**-50 of a balanced unit per row of a layer's peak, share of near-length swaps in 1/1024."""


class ProxyState(NamedTuple):
    """Hold one layout and everything derived from it."""

    cell_of: np.ndarray  # [N] int64
    cell_tokens: np.ndarray  # [D] int64
    cell_works: np.ndarray  # [D, C] int64
    unit_rows: np.ndarray  # [U, P, L] int32
    unit_peaks: np.ndarray  # [U] int64, sum over layers of the most loaded rank
    unit_j: np.ndarray  # [U] int64
    block_u: np.ndarray  # [B] int64
    peak: np.ndarray  # [L] int32, scratch


@compiled(inline="always")
def _peaks(rows, peak):
    """Return the sum over layers of the most loaded of ``rows`` [P, L]."""
    peak[:] = 0
    for p in range(rows.shape[0]):
        for m in range(peak.size):
            peak[m] = max(peak[m], rows[p, m])
    return peak.sum()


@compiled(inline="always")
def _swapped_peaks(rows, minus, plus, peak):
    """Return ``_peaks(rows - minus + plus)`` without storing it."""
    peak[:] = 0
    for p in range(rows.shape[0]):
        for m in range(peak.size):
            peak[m] = max(peak[m], np.int32(rows[p, m] - minus[p, m] + plus[p, m]))
    total = np.int64(0)
    for m in range(peak.size):
        total += peak[m]
    return total


@compiled(inline="always")
def _cells_j(costs, state, unit, cell_a, cell_b, out_a, in_a):
    """Return the cell proxies of a unit after cell a gives ``out_a`` for ``in_a`` and cell b the reverse (-1: none)."""
    first = unit * costs.scalars[P_CELLS_PER_UNIT]
    total = np.int64(0)
    for c in range(costs.works.shape[1]):
        change = np.int64(0) if out_a < 0 else costs.works[in_a, c] - costs.works[out_a, c]
        most = np.int64(0)
        for cell in range(first, first + costs.scalars[P_CELLS_PER_UNIT]):
            work = state.cell_works[cell, c]
            if cell == cell_a:
                work += change
            elif cell == cell_b:
                work -= change
            most = max(most, work)
        total += most
    return total


@compiled(inline="always")
def _experts_j(costs, peaks):
    return (peaks * costs.scalars[P_PEAK_SCALE]) >> 20


@compiled
def swap_delta(costs, state, i, j):
    """Price swapping samples i and j of different cells; the caller has checked the cap.

    Returns (change of max U, change of sum U, J of i's unit, J of j's unit, peaks of i's unit, peaks of j's unit).
    """
    cells, blocks = costs.scalars[P_CELLS_PER_UNIT], costs.scalars[P_BLOCKS]
    cell_i, cell_j = state.cell_of[i], state.cell_of[j]
    unit_i, unit_j = cell_i // cells, cell_j // cells
    peaks_i, peaks_j = state.unit_peaks[unit_i], state.unit_peaks[unit_j]
    if unit_i != unit_j:
        load_i, load_j = costs.loads[i], costs.loads[j]
        peaks_i = _swapped_peaks(state.unit_rows[unit_i], load_i, load_j, state.peak)
        peaks_j = _swapped_peaks(state.unit_rows[unit_j], load_j, load_i, state.peak)
    new_i = _cells_j(costs, state, unit_i, cell_i, cell_j, i, j) + _experts_j(costs, peaks_i)
    delta_i, delta_j = new_i - state.unit_j[unit_i], np.int64(0)
    new_j = new_i
    if unit_i != unit_j:
        new_j = _cells_j(costs, state, unit_j, cell_i, cell_j, i, j) + _experts_j(costs, peaks_j)
        delta_j = new_j - state.unit_j[unit_j]
    old_max, new_max = np.int64(0), np.int64(0)
    for b in range(blocks):
        value = state.block_u[b]
        old_max = max(old_max, value)
        if b == unit_i % blocks:
            value += delta_i
        if b == unit_j % blocks:
            value += delta_j
        new_max = max(new_max, value)
    return new_max - old_max, delta_i + delta_j, new_i, new_j, peaks_i, peaks_j


@compiled
def max_j_delta(costs, state, i, j, new_i, new_j):
    """Return the change of the largest J when the units of i and j come to cost ``new_i`` and ``new_j``."""
    cells = costs.scalars[P_CELLS_PER_UNIT]
    unit_i, unit_j = state.cell_of[i] // cells, state.cell_of[j] // cells
    most = max(new_i, new_j)
    for unit in range(state.unit_j.size):
        if unit != unit_i and unit != unit_j:
            most = max(most, state.unit_j[unit])
    return most - state.unit_j.max()


@compiled
def swap_apply(costs, state, i, j, priced):
    """Make the swap that ``swap_delta`` priced."""
    cells, blocks = costs.scalars[P_CELLS_PER_UNIT], costs.scalars[P_BLOCKS]
    cell_i, cell_j = state.cell_of[i], state.cell_of[j]
    state.cell_of[i], state.cell_of[j] = cell_j, cell_i
    longer = costs.lengths[i] - costs.lengths[j]
    state.cell_tokens[cell_i] -= longer
    state.cell_tokens[cell_j] += longer
    for c in range(costs.works.shape[1]):
        more = costs.works[i, c] - costs.works[j, c]
        state.cell_works[cell_i, c] -= more
        state.cell_works[cell_j, c] += more
    unit_i, unit_j = cell_i // cells, cell_j // cells
    if unit_i != unit_j:
        rows_i, rows_j, load_i, load_j = (
            state.unit_rows[unit_i],
            state.unit_rows[unit_j],
            costs.loads[i],
            costs.loads[j],
        )
        for p in range(rows_i.shape[0]):
            for m in range(rows_i.shape[1]):
                more_rows = load_i[p, m] - load_j[p, m]
                rows_i[p, m] -= more_rows
                rows_j[p, m] += more_rows
        state.block_u[unit_j % blocks] += priced[3] - state.unit_j[unit_j]
        state.unit_j[unit_j], state.unit_peaks[unit_j] = priced[3], priced[5]
    state.block_u[unit_i % blocks] += priced[2] - state.unit_j[unit_i]
    state.unit_j[unit_i], state.unit_peaks[unit_i] = priced[2], priced[4]


@compiled
def fill_proxy_state(costs, state):
    """Derive everything else from ``state.cell_of``."""
    cells, blocks = costs.scalars[P_CELLS_PER_UNIT], costs.scalars[P_BLOCKS]
    state.cell_tokens[:] = 0
    state.cell_works[:] = 0
    state.unit_rows[:] = 0
    state.block_u[:] = 0
    for i in range(state.cell_of.size):
        cell = state.cell_of[i]
        state.cell_tokens[cell] += costs.lengths[i]
        for c in range(costs.works.shape[1]):
            state.cell_works[cell, c] += costs.works[i, c]
        rows = state.unit_rows[cell // cells]
        for p in range(rows.shape[0]):
            for m in range(rows.shape[1]):
                rows[p, m] += costs.loads[i, p, m]
    for unit in range(state.unit_j.size):
        state.unit_peaks[unit] = _peaks(state.unit_rows[unit], state.peak)
        experts = _experts_j(costs, state.unit_peaks[unit])
        state.unit_j[unit] = _cells_j(costs, state, unit, -1, -1, -1, -1) + experts
        state.block_u[unit % blocks] += state.unit_j[unit]


@compiled
def layout_score(state):
    """Return ``(max_b U_b, sum_b U_b, max J)``."""
    return state.block_u.max(), state.block_u.sum(), state.unit_j.max()


@compiled(inline="always")
def _propose_swap(lengths, by_length, length_rank, cell_of, cell_tokens, cap, similar, rng):
    """Draw two samples of different cells whose swap keeps the cap; (-1, -1) when the draw does not."""
    i = random_below(rng, lengths.size)
    if random_below(rng, 1024) < similar:
        place = length_rank[i] + 1 + random_below(rng, np.int64(1) << random_below(rng, 7))
        j = by_length[place] if place < lengths.size else i
    else:
        j = random_below(rng, lengths.size)
    longer = lengths[i] - lengths[j]
    blocked = cell_tokens[cell_of[i]] - longer > cap or cell_tokens[cell_of[j]] + longer > cap
    if cell_of[i] == cell_of[j] or blocked:
        i, j = np.int64(-1), np.int64(-1)
    return i, j


@compiled
def swap_chain(costs, state, best_cell_of, best, rng, temperature, proposals):
    """Make ``proposals`` draws at one temperature (in J); keep the best layout seen in ``best_cell_of``, ``best`` [3].

    A swap that makes the layout worse by delta, in the first part of its score that changes, is made with probability
    exp(-delta / temperature). Returns (swaps priced, swaps made).
    """
    lengths, by_length, length_rank = costs.lengths, costs.by_length, costs.length_rank
    cell_of, cell_tokens = state.cell_of, state.cell_tokens
    cap, similar = costs.scalars[P_CAP], costs.scalars[P_SIMILAR]
    most_u, sum_u, most_j = layout_score(state)
    priced_count, made = 0, 0
    for _ in range(proposals):
        i, j = _propose_swap(lengths, by_length, length_rank, cell_of, cell_tokens, cap, similar, rng)
        if i < 0:
            continue
        priced_count += 1
        priced = swap_delta(costs, state, i, j)
        delta = priced[0]
        if delta == 0:
            delta = priced[1]
        if delta == 0:
            delta = max_j_delta(costs, state, i, j, priced[2], priced[3])
        if delta > 0 and (temperature <= 0 or delta > random_threshold(rng, temperature)):
            continue
        swap_apply(costs, state, i, j, priced)
        made += 1
        most_u += priced[0]
        sum_u += priced[1]
        if most_u > best[0] or (most_u == best[0] and sum_u > best[1]):
            continue
        most_j = state.unit_j.max()
        if most_u < best[0] or sum_u < best[1] or most_j < best[2]:
            best[0], best[1], best[2] = most_u, sum_u, most_j
            best_cell_of[:] = cell_of
    return priced_count, made

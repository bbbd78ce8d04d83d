"""Numba kernels that change a packing and know exactly what the change costs.

A *unit* is one (row, EP block): the cells whose ranks exchange tokens with one another. ``PackState`` keeps, for every
unit, the routed rows of its EP ranks; a proposal touches at most two units, and its delta is the difference of their
costs, integer nanoseconds, equal to re-evaluating the whole plan.

Shape suffixes: N samples, U units, D cells of all units together (cell = unit * S + slot), S cells of a unit, P EP
ranks, L MoE layers, C attention classes, K nodes of a table. Loads run [P, L], layers last, so that maxima over ranks
are vector instructions.

Objective: ``B * max_b T_b + sum_b T_b`` over blocks b with T_b the sum of the block's units (rows): the slowest block
decides, the others break ties and guide.

To add a move: write ``x_delta_ns(costs, state, ...)`` and ``x_apply(costs, state, ...)`` as a pair built on
``_unit_after_ns``, call it from ``anneal``, and add its name to tests/search/test_packing_kernels.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from costmodels import lookup_ns


class PackCosts(NamedTuple):
    """Hold what does not change while packing: samples, their loads under the placement, and tables."""

    lengths: np.ndarray  # [N] int64
    loads: np.ndarray  # [N, P, L] int32, routed rows of each sample on each EP rank
    sequence_ns: np.ndarray  # [N, C] int64
    cell_ns: np.ndarray  # [C, K] int64
    expert_ns: np.ndarray  # [K] int64
    exchange_ns: np.ndarray  # [K] int64
    both_ns: np.ndarray  # [K] int64, expert_ns + exchange_ns
    by_length: np.ndarray  # [N] int64, sample ids from short to long
    length_rank: np.ndarray  # [N] int64, inverse of by_length
    scalars: np.ndarray  # [7] int64: see S_* below


S_TOKENS_SHIFT, S_ROWS_SHIFT, S_SENT_NUM, S_SENT_DEN, S_CELLS_PER_UNIT, S_BLOCKS, S_FIXED = range(7)


NOTHING = (-1, -1, -1, -1, -1, -1)


class PackState(NamedTuple):
    """Hold one packing and everything derived from it."""

    cell_of: np.ndarray  # [N] int64
    members: np.ndarray  # [D, N'] int64, first cell_count[d] entries valid
    place_of: np.ndarray  # [N] int64, index inside members
    cell_count: np.ndarray  # [D] int64
    cell_tokens: np.ndarray  # [D] int64
    core_ns: np.ndarray  # [D, C] int64, sum of sequence_ns
    cell_ns: np.ndarray  # [C, D] int64, attention of each cell: core and dense work
    unit_rows: np.ndarray  # [U, P, L] int32
    unit_ns: np.ndarray  # [U] int64
    unit_experts: np.ndarray  # [U, 3] int64: experts' time, rows sent, rows of the least hot layer's slowest rank
    block_ns: np.ndarray  # [B] int64
    peak: np.ndarray  # [L] int32, scratch


@njit(cache=True, nogil=True, inline="always")
def next_random(rng):
    """Advance a xorshift64* generator (state [1] uint64, never 0) and return 64 random bits."""
    x = rng[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    rng[0] = x
    return x * np.uint64(0x2545F4914F6CDD1D)


@njit(cache=True, nogil=True, inline="always")
def random_below(rng, n):
    """Return a random integer in [0, n), n < 2**31."""
    return np.int64(((next_random(rng) >> np.uint64(33)) * np.uint64(n)) >> np.uint64(31))


@njit(cache=True, nogil=True, inline="always")
def random_threshold(rng, temperature_ns):
    """Return temperature x an exponential variate, from integer operations so that every machine agrees.

    -log2(u) is read off the leading zeros and a linear mantissa: within 9% of the exponential, which annealing ignores.
    """
    x = next_random(rng) >> np.uint64(1)
    zeros = np.int64(0)
    top = np.uint64(1) << np.uint64(62)
    while zeros < 60 and x < (top >> np.uint64(zeros)):
        zeros += 1
    mantissa = np.float64(x) / np.float64(top >> np.uint64(zeros))
    return np.int64(temperature_ns * 0.6931471805599453 * (zeros + 2.0 - mantissa))


@njit(cache=True, nogil=True, inline="always")
def sent_rows(costs, tokens):
    """Return the rows one rank of a slot sends when its cell holds ``tokens``."""
    return tokens * costs.scalars[S_SENT_NUM] // costs.scalars[S_SENT_DEN]


@njit(cache=True, nogil=True, inline="always")
def experts_ns(costs, rows, sent, peak):
    """Return the time of all MoE layers of a unit whose ranks hold ``rows`` [P, L], with ``sent`` rows at most sent."""
    peak[:] = 0
    for p in range(rows.shape[0]):
        for m in range(peak.size):
            peak[m] = max(peak[m], rows[p, m])
    return _peaks_ns(costs, peak, sent)


@njit(cache=True, nogil=True, inline="always")
def _swapped_experts_ns(costs, rows, minus, plus, sent, peak):
    """Return ``experts_ns(rows - minus + plus)`` without storing it."""
    peak[:] = 0
    for p in range(rows.shape[0]):
        for m in range(peak.size):
            peak[m] = max(peak[m], np.int32(rows[p, m] - minus[p, m] + plus[p, m]))
    return _peaks_ns(costs, peak, sent)


@njit(cache=True, nogil=True, inline="always")
def _moved_experts_ns(costs, rows, change, sign, sent, peak):
    """Return ``experts_ns(rows + sign * change)`` without storing it."""
    peak[:] = 0
    factor = np.int32(sign)
    for p in range(rows.shape[0]):
        for m in range(peak.size):
            peak[m] = max(peak[m], np.int32(rows[p, m] + factor * change[p, m]))
    return _peaks_ns(costs, peak, sent)


@njit(cache=True, nogil=True, inline="always")
def _peaks_ns(costs, peak, sent):
    """Return the time of all MoE layers, given the rows of each layer's slowest rank."""
    shift = costs.scalars[S_ROWS_SHIFT]
    total = np.int64(0)
    for m in range(peak.size):
        rows = np.int64(peak[m])
        if rows >= sent:
            total += lookup_ns(costs.both_ns, shift, rows)
        else:
            total += lookup_ns(costs.expert_ns, shift, rows) + lookup_ns(costs.exchange_ns, shift, sent)
    return total


@njit(cache=True, nogil=True, inline="always")
def attention_ns(costs, state, unit, change):
    """Return the attention of a unit and its most tokens of a cell, after a proposed change of up to two cells.

    ``change`` holds (cell a, minus a, plus a, cell b, minus b, plus b): sample ids, -1 for none.
    """
    first = unit * costs.scalars[S_CELLS_PER_UNIT]
    last = first + costs.scalars[S_CELLS_PER_UNIT]
    shift = costs.scalars[S_TOKENS_SHIFT]
    total = np.int64(0)
    for c in range(costs.cell_ns.shape[0]):
        slowest = np.int64(0)
        for cell in range(first, last):
            if cell != change[0] and cell != change[3]:
                slowest = max(slowest, state.cell_ns[c, cell])
        for side in range(0, 6, 3):
            cell = change[side]
            if first <= cell < last:
                core = state.core_ns[cell, c] + _signed(costs.sequence_ns[:, c], change[side + 1], change[side + 2])
                tokens = state.cell_tokens[cell] + _signed(costs.lengths, change[side + 1], change[side + 2])
                slowest = max(slowest, core + lookup_ns(costs.cell_ns[c], shift, tokens))
        total += slowest
    most = np.int64(0)
    for cell in range(first, last):
        if cell != change[0] and cell != change[3]:
            most = max(most, state.cell_tokens[cell])
    for side in range(0, 6, 3):
        if first <= change[side] < last:
            tokens = state.cell_tokens[change[side]] + _signed(costs.lengths, change[side + 1], change[side + 2])
            most = max(most, tokens)
    return total, most


@njit(cache=True, nogil=True, inline="always")
def _signed(values, minus, plus):
    """Return ``values[plus] - values[minus]`` where -1 stands for nothing."""
    total = np.int64(0)
    if minus >= 0:
        total -= values[minus]
    if plus >= 0:
        total += values[plus]
    return total


@njit(cache=True, nogil=True, inline="always")
def _objective_delta(state, blocks, block_a, delta_a, block_b, delta_b):
    """Return the change of the objective when two blocks change by so much (deltas add when they are the same)."""
    if blocks == 1:
        return 2 * (delta_a + delta_b)
    old = np.int64(0)
    new = np.int64(0)
    for b in range(blocks):
        value = state.block_ns[b]
        old = max(old, value)
        if b == block_a:
            value += delta_a
        if b == block_b:
            value += delta_b
        new = max(new, value)
    return blocks * (new - old) + delta_a + delta_b


@njit(cache=True, nogil=True, inline="always")
def exchange_delta_ns(costs, state, i, j, target):
    """Price moving sample i to cell ``target`` and, where j >= 0, sample j from there to i's cell.

    Returns the change of the objective. The caller has checked the cap. Inside one unit the loads of ranks stay as they
    are, so that only attention is priced.
    """
    cells, blocks = costs.scalars[S_CELLS_PER_UNIT], costs.scalars[S_BLOCKS]
    source = state.cell_of[i]
    unit_a, unit_b = source // cells, target // cells
    change = (source, i, j, target, j, i)
    attention_a, most_a = attention_ns(costs, state, unit_a, change)
    sent_a = sent_rows(costs, most_a)
    if unit_a == unit_b:
        experts, sent, least = state.unit_experts[unit_a]
        if sent_a != sent and max(sent_a, sent) > least:
            experts = experts_ns(costs, state.unit_rows[unit_a], sent_a, state.peak)
        delta_a = attention_a + experts + costs.scalars[S_FIXED] - state.unit_ns[unit_a]
        return _objective_delta(state, blocks, unit_a % blocks, delta_a, np.int64(-1), np.int64(0))
    attention_b, most_b = attention_ns(costs, state, unit_b, change)
    sent_b = sent_rows(costs, most_b)
    rows_a, rows_b = state.unit_rows[unit_a], state.unit_rows[unit_b]
    load_i, peak = costs.loads[i], state.peak
    if j >= 0:
        load_j = costs.loads[j]
        experts_a = _swapped_experts_ns(costs, rows_a, load_i, load_j, sent_a, peak)
        experts_b = _swapped_experts_ns(costs, rows_b, load_j, load_i, sent_b, peak)
    else:
        experts_a = _moved_experts_ns(costs, rows_a, load_i, -1, sent_a, peak)
        experts_b = _moved_experts_ns(costs, rows_b, load_i, 1, sent_b, peak)
    delta_a = attention_a + experts_a + costs.scalars[S_FIXED] - state.unit_ns[unit_a]
    delta_b = attention_b + experts_b + costs.scalars[S_FIXED] - state.unit_ns[unit_b]
    return _objective_delta(state, blocks, unit_a % blocks, delta_a, unit_b % blocks, delta_b)


@njit(cache=True, nogil=True)
def exchange_apply(costs, state, i, j, target):
    """Make the move that ``exchange_delta_ns`` priced."""
    cells = costs.scalars[S_CELLS_PER_UNIT]
    source = state.cell_of[i]
    _take_out(costs, state, i)
    if j >= 0:
        _take_out(costs, state, j)
        _put_in(costs, state, j, source)
    _put_in(costs, state, i, target)
    _refresh_cell(costs, state, source)
    _refresh_cell(costs, state, target)
    _refresh_unit(costs, state, source // cells)
    if target // cells != source // cells:
        _refresh_unit(costs, state, target // cells)


@njit(cache=True, nogil=True)
def _take_out(costs, state, i):
    cell = state.cell_of[i]
    last = state.members[cell, state.cell_count[cell] - 1]
    state.members[cell, state.place_of[i]] = last
    state.place_of[last] = state.place_of[i]
    state.cell_count[cell] -= 1
    _shift_cell(costs, state, i, cell, -1)


@njit(cache=True, nogil=True)
def _put_in(costs, state, i, cell):
    state.members[cell, state.cell_count[cell]] = i
    state.place_of[i] = state.cell_count[cell]
    state.cell_count[cell] += 1
    state.cell_of[i] = cell
    _shift_cell(costs, state, i, cell, 1)


@njit(cache=True, nogil=True)
def _shift_cell(costs, state, i, cell, sign):
    state.cell_tokens[cell] += sign * costs.lengths[i]
    for c in range(state.core_ns.shape[1]):
        state.core_ns[cell, c] += sign * costs.sequence_ns[i, c]
    rows = state.unit_rows[cell // costs.scalars[S_CELLS_PER_UNIT]]
    load = costs.loads[i]
    for p in range(rows.shape[0]):
        for m in range(rows.shape[1]):
            rows[p, m] += np.int32(sign) * load[p, m]


@njit(cache=True, nogil=True)
def _refresh_cell(costs, state, cell):
    for c in range(costs.cell_ns.shape[0]):
        dense_ns = lookup_ns(costs.cell_ns[c], costs.scalars[S_TOKENS_SHIFT], state.cell_tokens[cell])
        state.cell_ns[c, cell] = state.core_ns[cell, c] + dense_ns


@njit(cache=True, nogil=True)
def _refresh_unit(costs, state, unit):
    attention, most = attention_ns(costs, state, unit, NOTHING)
    sent = sent_rows(costs, most)
    experts = experts_ns(costs, state.unit_rows[unit], sent, state.peak)
    state.unit_experts[unit, 0], state.unit_experts[unit, 1] = experts, sent
    state.unit_experts[unit, 2] = state.peak.min()
    total = attention + experts + costs.scalars[S_FIXED]
    state.block_ns[unit % costs.scalars[S_BLOCKS]] += total - state.unit_ns[unit]
    state.unit_ns[unit] = total


@njit(cache=True, nogil=True)
def fill_state(costs, state):
    """Derive everything else from ``state.cell_of``."""
    state.cell_count[:] = 0
    state.cell_tokens[:] = 0
    state.core_ns[:] = 0
    state.unit_rows[:] = 0
    state.unit_ns[:] = 0
    state.block_ns[:] = 0
    for i in range(state.cell_of.size):
        _put_in(costs, state, i, state.cell_of[i])
    for cell in range(state.cell_count.size):
        _refresh_cell(costs, state, cell)
    for unit in range(state.unit_ns.size):
        _refresh_unit(costs, state, unit)


@njit(cache=True, nogil=True)
def objective(costs, state):
    """Return ``B * max_b + sum_b`` over the blocks' times."""
    return costs.scalars[S_BLOCKS] * state.block_ns.max() + state.block_ns.sum()


@njit(cache=True, nogil=True, inline="always")
def propose(lengths, by_length, length_rank, cell_of, cell_tokens, cell_count, limits, rng):
    """Draw a move (i, j, target cell) that keeps the cap; i = -1 when the draw does not fit.

    ``limits`` holds the cap and, in 1/1024, the share of relocations and of swaps with a sample of similar length (the
    rest: any sample). Arrays come one by one: reaching into a tuple costs a reference count, three times this function.
    """
    cap = limits[0]
    i = random_below(rng, lengths.size)
    source = cell_of[i]
    kind = random_below(rng, 1024)
    j = np.int64(-1)
    if kind < limits[1]:
        target = random_below(rng, cell_count.size)
        if cell_count[source] == 1 or cell_tokens[target] + lengths[i] > cap:
            target = source
    else:
        if kind < limits[1] + limits[2]:
            reach = np.int64(1) << random_below(rng, 7)
            place = length_rank[i] + 1 + random_below(rng, reach)
            j = by_length[place] if place < lengths.size else i
        else:
            j = random_below(rng, lengths.size)
        target = cell_of[j]
        difference = lengths[i] - lengths[j]
        if cell_tokens[source] - difference > cap or cell_tokens[target] + difference > cap:
            target = source
    if target == source:
        i = np.int64(-1)
    return i, j, target


@njit(cache=True, nogil=True)
def anneal(costs, state, best_cell_of, rng, temperature_ns, proposals, limits, best):
    """Make ``proposals`` draws at one temperature; keep the best packing seen in ``best_cell_of`` and ``best`` [1].

    ``limits`` is for ``propose``. Returns (moves priced, moves made).
    """
    current = objective(costs, state)
    lengths, by_length, length_rank = costs.lengths, costs.by_length, costs.length_rank
    cell_of, cell_tokens, cell_count = state.cell_of, state.cell_tokens, state.cell_count
    priced = 0
    made = 0
    for _ in range(proposals):
        i, j, target = propose(lengths, by_length, length_rank, cell_of, cell_tokens, cell_count, limits, rng)
        if i < 0:
            continue
        priced += 1
        delta = exchange_delta_ns(costs, state, i, j, target)
        if delta > 0 and (temperature_ns <= 0 or delta > random_threshold(rng, temperature_ns)):
            continue
        exchange_apply(costs, state, i, j, target)
        made += 1
        current += delta
        if current < best[0]:
            best[0] = current
            best_cell_of[:] = state.cell_of
    return priced, made

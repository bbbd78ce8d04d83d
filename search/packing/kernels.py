"""Numba kernels that change a packing and know exactly what the change costs.

A *group* is the cells of one (row, EP block): their ranks exchange tokens with one another. A *unit* is what waits as
one: a group, or all groups of a row where blocks are coupled layer by layer (FSDP). ``PackState`` keeps the routed rows
of every group's EP ranks; a proposal changes two cells, hence at most two groups, and its delta is the difference of
their units' costs, integer nanoseconds, equal to re-evaluating the whole plan.

Every move is an exchange between two cells a and b: samples leave each for the other. Relocation, swap, two for one
and the swap of whole cells differ only in how they fill ``Move``, what cell a gains and cell b loses.

Shape suffixes: N samples, G groups, U units, D cells of all groups together (cell = group * S + slot in block), S cells
of a group, P EP ranks, L MoE layers, C attention classes, K nodes of a table. Loads run [P, L], layers last, so that
maxima over ranks are vector instructions.

Objective: ``B * max_b T_b + sum_b T_b`` over what meets at the end of the step (blocks; one where they are coupled),
T_b being the sum of b's units: the slowest decides, the others break ties and guide.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from costmodels import compiled, lookup_ns
from search.kernels import layer_time_ns, over_cap_ns


class PackCosts(NamedTuple):
    """Hold what does not change while packing: samples, their loads under the placement, and tables."""

    order: np.ndarray  # [N] int64, the problem's samples from short to long: a sample's number here is its place
    lengths: np.ndarray  # [N] int64, ascending
    loads: np.ndarray  # [N + 1, P, L] uint16 or int32, routed rows of each sample on each EP rank; zeros last
    sequence_ns: np.ndarray  # [N + 1, C] int64; zeros last: sample -1 is none
    cell_ns: np.ndarray  # [C, K] int64
    exchange_ns: np.ndarray  # [K] int64, dispatch and combine of one MoE layer
    layer_ns: np.ndarray  # [2 K] int64, experts and exchange, then experts alone
    tokens_shift: int  # tokens between two nodes of the tables, as a power of two; likewise rows
    rows_shift: int
    sent_num: int  # a rank of a slot sends tokens * sent_num // sent_den rows
    sent_den: int
    group_cells: int  # cells of a group
    unit_groups: int  # groups of a unit
    blocks: int  # what meets at the end of the step
    fixed_ns: int  # cost of a row
    cap: int  # rows that a rank may receive
    over_cap_ns: int  # the search's charge for each row above the cap; 0 for no cap


class PackState(NamedTuple):
    """Hold one packing and everything derived from it."""

    cell_of: np.ndarray  # [N] int64
    members: np.ndarray  # [D, N'] int64, first cell_count[d] entries valid
    place_of: np.ndarray  # [N] int64, index inside members
    cell_count: np.ndarray  # [D] int64
    cell_tokens: np.ndarray  # [D] int64
    core_ns: np.ndarray  # [D, C] int64, sum of sequence_ns
    cell_ns: np.ndarray  # [C, D] int64, attention of each cell: core and dense work
    group_rows: np.ndarray  # [G, P, L] int32
    group_peak: np.ndarray  # [G, L] int32, rows of the hottest rank
    group_hot: np.ndarray  # [G, L] int32, the hottest rank
    unit_ns: np.ndarray  # [U] int64
    unit_experts: np.ndarray  # [U, 3] int64: experts' time, rows sent, rows of the least hot layer's slowest rank
    block_ns: np.ndarray  # [B] int64


class Move(NamedTuple):
    """Hold a proposal: samples that leave two cells for one another, and what cell a gains (and b loses) by it."""

    cells: np.ndarray  # [2] int64: cells a and b; a is -1 where the draw does not fit
    samples: np.ndarray  # [4] int64: two that leave a, two that leave b, -1 for none; -2 first: whole cells
    diff: np.ndarray  # [P, L] int32, rows
    core: np.ndarray  # [C] int64, core time
    tokens: np.ndarray  # [1] int64
    peak: np.ndarray  # [L] int32, scratch


@compiled(inline="always")
def sent_rows(costs, tokens):
    """Return the rows one rank of a slot sends when its cell holds ``tokens``."""
    return tokens * costs.sent_num // costs.sent_den


@compiled(inline="always")
def _peaks_ns(costs, peak, sent):
    """Return the time of all MoE layers, given the rows of each layer's slowest rank, and the charge above the cap."""
    shift, layer_ns = costs.rows_shift, costs.layer_ns
    cap, row_ns = costs.cap, costs.over_cap_ns
    sent_ns = lookup_ns(costs.exchange_ns, shift, sent)
    total = np.int64(0)
    for m in range(peak.size):
        total += layer_time_ns(layer_ns, shift, np.int64(peak[m]), sent, sent_ns)
    if row_ns > 0:
        for m in range(peak.size):
            total += over_cap_ns(np.int64(peak[m]), cap, row_ns)
    return total


@compiled(inline="always")
def _changed_experts_ns(costs, state, move, unit, sent):
    """Return the time of a unit's MoE layers after the move."""
    groups = costs.unit_groups
    group_a, group_b = move.cells[0] // costs.group_cells, move.cells[1] // costs.group_cells
    peak, diff, rows, others = move.peak, move.diff, state.group_rows, state.group_peak
    for m in range(peak.size):
        peak[m] = 0
    for group in range(unit * groups, unit * groups + groups):
        if group == group_a:
            for p in range(diff.shape[0]):
                for m in range(peak.size):
                    peak[m] = max(peak[m], np.int32(rows[group, p, m] + diff[p, m]))
        elif group == group_b:
            for p in range(diff.shape[0]):
                for m in range(peak.size):
                    peak[m] = max(peak[m], np.int32(rows[group, p, m] - diff[p, m]))
        else:
            for m in range(peak.size):
                peak[m] = max(peak[m], others[group, m])
    return _peaks_ns(costs, peak, sent)


@compiled(inline="always")
def _changed_attention_ns(costs, state, move, unit):
    """Return the attention of a unit and its most tokens of a cell after the move."""
    first = unit * costs.group_cells * costs.unit_groups
    last = first + costs.group_cells * costs.unit_groups
    shift = costs.tokens_shift
    a, b, gained = move.cells[0], move.cells[1], move.tokens[0]
    total = np.int64(0)
    for c in range(costs.cell_ns.shape[0]):
        slowest = np.int64(0)
        for cell in range(first, last):
            if cell != a and cell != b:
                slowest = max(slowest, state.cell_ns[c, cell])
        if first <= a < last:
            dense = lookup_ns(costs.cell_ns[c], shift, state.cell_tokens[a] + gained)
            slowest = max(slowest, state.core_ns[a, c] + move.core[c] + dense)
        if first <= b < last:
            dense = lookup_ns(costs.cell_ns[c], shift, state.cell_tokens[b] - gained)
            slowest = max(slowest, state.core_ns[b, c] - move.core[c] + dense)
        total += slowest
    most = np.int64(0)
    for cell in range(first, last):
        tokens = state.cell_tokens[cell]
        if cell == a:
            tokens += gained
        elif cell == b:
            tokens -= gained
        most = max(most, tokens)
    return total, most


@compiled(inline="always")
def _objective_delta(state, blocks, block_a, delta_a, block_b, delta_b):
    """Return the change of the objective when two blocks change by so much (deltas add when they are the same)."""
    if blocks == 1:
        return 2 * (delta_a + delta_b)
    old, new = np.int64(0), np.int64(0)
    for b in range(blocks):
        value = state.block_ns[b]
        old = max(old, value)
        if b == block_a:
            value += delta_a
        if b == block_b:
            value += delta_b
        new = max(new, value)
    return blocks * (new - old) + delta_a + delta_b


@compiled(inline="always")
def _least_experts_ns(costs, state, group, gained, lost, sent):
    """Bound from below the time of a group's MoE layers after it gains one sample and loses another.

    The rank that is hottest now gives the least of the hottest then; the charge above the receive cap only adds.
    """
    loads, rows, hot = costs.loads, state.group_peak, state.group_hot
    shift, layer_ns = costs.rows_shift, costs.layer_ns
    sent_ns = lookup_ns(costs.exchange_ns, shift, sent)
    total = np.int64(0)
    for m in range(rows.shape[1]):
        p = np.uint32(hot[group, m])
        peak = rows[group, m] + np.int32(loads[gained, p, m]) - np.int32(loads[lost, p, m])
        total += layer_time_ns(layer_ns, shift, np.int64(peak), sent, sent_ns)
    return total


@compiled(inline="always")
def move_delta_ns(costs, state, move, threshold, filled):
    """Return the change of the objective by a move that keeps the cap, exact up to ``threshold``, else any above it.

    Most exchanges of a cold search cost more than they may and are told by attention and today's hottest ranks:
    ``move.diff`` is filled only for the others. Moves of more samples come ``filled`` and are priced whole. Inside one
    group the loads of ranks stay, so that only attention is priced.
    """
    cells, groups, blocks = costs.group_cells, costs.unit_groups, costs.blocks
    group_a, group_b = move.cells[0] // cells, move.cells[1] // cells
    unit_a, unit_b = group_a // groups, group_b // groups
    attention, most = _changed_attention_ns(costs, state, move, unit_a)
    sent_a, sent_b = sent_rows(costs, most), np.int64(0)
    delta_a = attention + costs.fixed_ns - state.unit_ns[unit_a]
    delta_b = np.int64(0)
    if group_a == group_b:
        experts, old_sent, least = state.unit_experts[unit_a]
        if sent_a != old_sent and max(sent_a, old_sent) > least:
            experts = _peaks_ns(costs, _unit_peak(costs, state, unit_a, move.peak), sent_a)
        return _objective_delta(state, blocks, unit_a % blocks, delta_a + experts, np.int64(-1), delta_b)
    block_a, block_b = unit_a % blocks, np.int64(-1)
    if unit_a != unit_b:
        attention, most = _changed_attention_ns(costs, state, move, unit_b)
        sent_b, block_b = sent_rows(costs, most), unit_b % blocks
        delta_b = attention + costs.fixed_ns - state.unit_ns[unit_b]
    if not filled:
        if groups == 1:
            i, j = move.samples[0], move.samples[2]
            least_a = delta_a + _least_experts_ns(costs, state, unit_a, j, i, sent_a)
            least_b = delta_b + _least_experts_ns(costs, state, unit_b, i, j, sent_b)
            least = _objective_delta(state, blocks, block_a, least_a, block_b, least_b)
            if least > threshold:
                return least
        fill_rows(costs, move)
    for k in range(1 if unit_a == unit_b else 2):
        experts = _changed_experts_ns(costs, state, move, unit_a if k == 0 else unit_b, sent_a if k == 0 else sent_b)
        if k == 0:
            delta_a += experts
        else:
            delta_b += experts
    return _objective_delta(state, blocks, block_a, delta_a, block_b, delta_b)


@compiled(inline="always")
def fill_rows(costs, move):
    """Fill ``move.diff`` from the two samples that change places."""
    i, j, diff, loads = move.samples[0], move.samples[2], move.diff, costs.loads
    for p in range(diff.shape[0]):
        for m in range(diff.shape[1]):
            diff[p, m] = np.int32(loads[j, p, m]) - np.int32(loads[i, p, m])


@compiled(inline="always")
def _unit_peak(costs, state, unit, peak):
    """Fill and return ``peak`` [L] with the rows of each layer's slowest rank in a unit as it is."""
    groups, rows = costs.unit_groups, state.group_peak
    for m in range(peak.size):
        peak[m] = rows[unit * groups, m]
    for group in range(unit * groups + 1, unit * groups + groups):
        for m in range(peak.size):
            peak[m] = max(peak[m], rows[group, m])
    return peak


@compiled(inline="always")
def move_apply(costs, state, move):
    """Make a move."""
    a, b = move.cells
    if move.samples[0] == -2:
        _swap_cells(state, a, b)
    else:
        for k in range(4):
            i = move.samples[k]
            if i >= 0:
                _take_out(state, i)
        for k in range(4):
            i = move.samples[k]
            if i >= 0:
                _put_in(state, i, b if k < 2 else a)
    state.cell_tokens[a] += move.tokens[0]
    state.cell_tokens[b] -= move.tokens[0]
    for c in range(move.core.size):
        state.core_ns[a, c] += move.core[c]
        state.core_ns[b, c] -= move.core[c]
    _refresh_cell(costs, state, a)
    _refresh_cell(costs, state, b)
    cells, groups = costs.group_cells, costs.unit_groups
    if a // cells != b // cells:
        _add_rows(state, a // cells, move.diff, 1)
        _add_rows(state, b // cells, move.diff, -1)
    _refresh_unit(costs, state, a // cells // groups, move.peak)
    if a // cells // groups != b // cells // groups:
        _refresh_unit(costs, state, b // cells // groups, move.peak)


@compiled(inline="always")
def _take_out(state, i):
    cell = state.cell_of[i]
    last = state.members[cell, state.cell_count[cell] - 1]
    state.members[cell, state.place_of[i]] = last
    state.place_of[last] = state.place_of[i]
    state.cell_count[cell] -= 1


@compiled(inline="always")
def _put_in(state, i, cell):
    state.members[cell, state.cell_count[cell]] = i
    state.place_of[i] = state.cell_count[cell]
    state.cell_count[cell] += 1
    state.cell_of[i] = cell


@compiled(inline="always")
def _swap_cells(state, a, b):
    for k in range(max(state.cell_count[a], state.cell_count[b])):
        state.members[a, k], state.members[b, k] = state.members[b, k], state.members[a, k]
    state.cell_count[a], state.cell_count[b] = state.cell_count[b], state.cell_count[a]
    for k in range(state.cell_count[a]):
        state.cell_of[state.members[a, k]] = a
    for k in range(state.cell_count[b]):
        state.cell_of[state.members[b, k]] = b


@compiled(inline="always")
def _refresh_cell(costs, state, cell):
    for c in range(costs.cell_ns.shape[0]):
        dense_ns = lookup_ns(costs.cell_ns[c], costs.tokens_shift, state.cell_tokens[cell])
        state.cell_ns[c, cell] = state.core_ns[cell, c] + dense_ns


@compiled(inline="always")
def _add_rows(state, group, diff, sign):
    """Add ``sign`` times ``diff`` [P, L] to a group's rows. Plain loops: array expressions cost four times as much."""
    rows = state.group_rows
    for p in range(diff.shape[0]):
        for m in range(diff.shape[1]):
            rows[group, p, m] += np.int32(sign * diff[p, m])
    _refresh_group(state, group)


@compiled(inline="always")
def _refresh_group(state, group):
    rows, peak, hot = state.group_rows, state.group_peak, state.group_hot
    for m in range(peak.shape[1]):
        peak[group, m] = -1
    for p in range(rows.shape[1]):
        for m in range(peak.shape[1]):
            hot[group, m] = p if rows[group, p, m] > peak[group, m] else hot[group, m]
            peak[group, m] = max(peak[group, m], rows[group, p, m])


@compiled(inline="always")
def _refresh_unit(costs, state, unit, peak):
    cells = costs.group_cells * costs.unit_groups
    attention, most = np.int64(0), np.int64(0)
    for c in range(costs.cell_ns.shape[0]):
        slowest = np.int64(0)
        for cell in range(unit * cells, unit * cells + cells):
            slowest = max(slowest, state.cell_ns[c, cell])
        attention += slowest
    for cell in range(unit * cells, unit * cells + cells):
        most = max(most, state.cell_tokens[cell])
    sent = sent_rows(costs, most)
    peak = _unit_peak(costs, state, unit, peak)
    experts = _peaks_ns(costs, peak, sent)
    least = peak[0]
    for m in range(peak.size):
        least = min(least, peak[m])
    state.unit_experts[unit, 0], state.unit_experts[unit, 1], state.unit_experts[unit, 2] = experts, sent, least
    total = attention + experts + costs.fixed_ns
    state.block_ns[unit % costs.blocks] += total - state.unit_ns[unit]
    state.unit_ns[unit] = total


@compiled
def fill_state(costs, state):
    """Derive everything else from ``state.cell_of``."""
    state.cell_count[:] = 0
    state.cell_tokens[:] = 0
    state.core_ns[:] = 0
    state.group_rows[:] = 0
    state.unit_ns[:] = 0
    state.block_ns[:] = 0
    for i in range(state.cell_of.size):
        cell = state.cell_of[i]
        _put_in(state, i, cell)
        state.cell_tokens[cell] += costs.lengths[i]
        state.core_ns[cell] += costs.sequence_ns[i]
        state.group_rows[cell // costs.group_cells] += costs.loads[i]
    for cell in range(state.cell_count.size):
        _refresh_cell(costs, state, cell)
    for group in range(state.group_peak.shape[0]):
        _refresh_group(state, group)
    peak = np.zeros(state.group_peak.shape[1], np.int32)
    for unit in range(state.unit_ns.size):
        _refresh_unit(costs, state, unit, peak)


@compiled
def objective(costs, state):
    """Return ``B * max_b + sum_b`` over the blocks' times."""
    return costs.blocks * state.block_ns.max() + state.block_ns.sum()

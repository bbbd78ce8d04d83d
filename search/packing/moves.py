"""Numba kernels that draw moves and anneal a packing with them.

To add a move: fill ``Move`` in a function like ``propose_two`` and draw it in ``anneal``. Then add it to
tests/search/packing/test_kernels.py. Shape suffixes as in ``search/packing/kernels.py``.
"""

from __future__ import annotations

import numpy as np

from costmodels import compiled
from search.kernels import random_below, random_threshold
from search.packing.kernels import Move, fill_rows, move_apply, move_delta_ns, objective

RELOCATE, SIMILAR, WITHIN, TWO, CELLS, SAME_SLOT = range(1, 7)
"""Places in ``limits``, after the cap: the shares of moves, in 1/1024, and D where samples must stay on their DP slot
unless swapped one for one, else 0."""
TRIES = 4
"""Partners tried in turn for a sample drawn, while its loads are in the cache."""


@compiled
def new_move(costs):
    """Return an empty move with its scratch."""
    ranks, layers = costs.loads.shape[1], costs.loads.shape[2]
    cells, samples, core = np.zeros(2, np.int64), np.zeros(4, np.int64), np.zeros(costs.sequence_ns.shape[1], np.int64)
    diff, peak = np.zeros((ranks, layers), np.int32), np.zeros(layers, np.int32)
    return Move(cells, samples, diff, core, np.zeros(1, np.int64), peak)


@compiled(inline="always")
def propose(i, lengths, cell_of, cell_tokens, cell_count, limits, rng):
    """Draw an exchange of sample i for one or none: (i, j or -1, target cell); i = -1 when the draw does not fit.

    Arrays come one by one: reaching into a tuple costs a reference count, three times this function.
    """
    cap = limits[0]
    source = cell_of[i]
    kind = random_below(rng, 1024)
    j = np.int64(-1)
    if kind < limits[RELOCATE]:
        target = random_below(rng, cell_count.size)
        if limits[SAME_SLOT] > 0:
            target += source % limits[SAME_SLOT] - target % limits[SAME_SLOT]
        if cell_count[source] == 1 or cell_tokens[target] + lengths[i] > cap:
            target = source
    else:
        if kind < limits[RELOCATE] + limits[SIMILAR]:
            reach = np.int64(1) << random_below(rng, 7)
            j = min(i + 1 + random_below(rng, reach), lengths.size - 1)
        else:
            j = random_below(rng, lengths.size)
        target = cell_of[j]
        difference = lengths[i] - lengths[j]
        if cell_tokens[source] - difference > cap or cell_tokens[target] + difference > cap:
            target = source
    if target == source:
        i = np.int64(-1)
    return i, j, target


@compiled(inline="always")
def propose_within(costs, state, move, limits, rng):
    """Draw a swap or relocation between two cells of one group: ranks' loads stay, so that only attention is priced."""
    i = random_below(rng, costs.lengths.size)
    source = state.cell_of[i]
    target = source - source % costs.group_cells + random_below(rng, costs.group_cells)
    move.cells[0] = -1
    j = state.members[target, random_below(rng, state.cell_count[target])]
    if limits[SAME_SLOT] == 0 and state.cell_count[source] > 1 and random_below(rng, 4) == 0:
        j = np.int64(-1)
    gained = -costs.lengths[i] + (costs.lengths[j] if j >= 0 else 0)
    fits = state.cell_tokens[source] + gained <= limits[0] and state.cell_tokens[target] - gained <= limits[0]
    if fits and target != source:
        fill_exchange(costs, move, source, i, j, target)


@compiled(inline="always")
def propose_two(costs, state, move, limits, rng):
    """Draw a sample of one cell against two of another (also: what a sample ejects where the cap blocks it)."""
    i = random_below(rng, costs.lengths.size)
    source, target = state.cell_of[i], random_below(rng, state.cell_count.size)
    move.cells[0] = -1
    count = state.cell_count[target]
    if limits[SAME_SLOT] > 0:
        target += source % limits[SAME_SLOT] - target % limits[SAME_SLOT]
        count = state.cell_count[target]
    if target == source or count < 2:
        return
    k = random_below(rng, count)
    j, j2 = state.members[target, k], state.members[target, (k + 1 + random_below(rng, count - 1)) % count]
    gained = costs.lengths[j] + costs.lengths[j2] - costs.lengths[i]
    if state.cell_tokens[source] + gained > limits[0] or state.cell_tokens[target] - gained > limits[0]:
        return
    fill_exchange(costs, move, source, i, j, target)
    fill_rows(costs, move)
    move.samples[3], move.tokens[0] = j2, gained
    for c in range(move.core.size):
        move.core[c] += costs.sequence_ns[j2, c]
    _add_rows(costs, move, j2, 1)


@compiled(inline="always")
def propose_cells(costs, state, move, limits, rng):
    """Draw two whole cells of different groups to change places."""
    a, b = random_below(rng, state.cell_count.size), random_below(rng, state.cell_count.size)
    move.cells[0] = -1
    if limits[SAME_SLOT] > 0:
        b += a % limits[SAME_SLOT] - b % limits[SAME_SLOT]
    if a // costs.group_cells == b // costs.group_cells:
        return
    move.cells[0], move.cells[1], move.samples[0] = a, b, -2
    move.tokens[0] = state.cell_tokens[b] - state.cell_tokens[a]
    for c in range(move.core.size):
        move.core[c] = state.core_ns[b, c] - state.core_ns[a, c]
    move.diff[:] = 0
    for k in range(state.cell_count[a]):
        _add_rows(costs, move, state.members[a, k], -1)
    for k in range(state.cell_count[b]):
        _add_rows(costs, move, state.members[b, k], 1)


@compiled(inline="always")
def _add_rows(costs, move, i, sign):
    diff, loads = move.diff, costs.loads
    for p in range(diff.shape[0]):
        for m in range(diff.shape[1]):
            diff[p, m] += np.int32(sign * np.int32(loads[i, p, m]))


@compiled(inline="always")
def fill_exchange(costs, move, source, i, j, target):
    """Fill a move, but for its rows, with i leaving ``source`` for ``target``, j (or none, -1) the other way."""
    move.cells[0], move.cells[1] = source, target
    move.samples[0], move.samples[1], move.samples[2], move.samples[3] = i, -1, j, -1
    move.tokens[0] = (costs.lengths[j] if j >= 0 else 0) - costs.lengths[i]
    core, sequence_ns = move.core, costs.sequence_ns
    for c in range(core.size):
        core[c] = sequence_ns[j, c] - sequence_ns[i, c]


@compiled
def anneal(costs, state, best_cell_of, rng, temperature_ns, proposals, limits, best, refused):
    """Make ``proposals`` draws at one temperature; keep the best packing seen in ``best_cell_of`` and ``best`` [1].

    ``refused`` [any] takes the last prices (or lower bounds of them) that were too high; ``limits`` [7] is
    the cap, then see RELOCATE. Returns (moves priced, moves made).
    """
    current = objective(costs, state)
    move = new_move(costs)
    lengths = costs.lengths
    cell_of, cell_tokens, cell_count = state.cell_of, state.cell_tokens, state.cell_count
    drawn, tries = np.int64(0), 0
    priced, made = 0, 0
    special = limits[WITHIN] + limits[TWO] + limits[CELLS]
    for _ in range(proposals):
        affordable = random_threshold(rng, temperature_ns) if temperature_ns > 0 else np.int64(0)
        kind = random_below(rng, 1024)
        if kind < special:
            if kind < limits[WITHIN]:
                propose_within(costs, state, move, limits, rng)
            elif kind < limits[WITHIN] + limits[TWO]:
                propose_two(costs, state, move, limits, rng)
            else:
                propose_cells(costs, state, move, limits, rng)
            if move.cells[0] < 0:
                continue
        else:
            if tries == 0:
                drawn, tries = random_below(rng, lengths.size), TRIES
            tries -= 1
            i, j, target = propose(drawn, lengths, cell_of, cell_tokens, cell_count, limits, rng)
            if i < 0:
                continue
            fill_exchange(costs, move, cell_of[i], i, j, target)
        priced += 1
        delta = move_delta_ns(costs, state, move, affordable, kind < special)
        if delta > affordable:
            refused[(priced - made) % refused.size] = delta
            continue
        move_apply(costs, state, move)
        made += 1
        current += delta
        if current < best[0]:
            best[0] = current
            best_cell_of[:] = state.cell_of
    return priced, made

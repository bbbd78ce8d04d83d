"""Numba kernels for the placement of one layer: which EP rank holds which expert, given who is packed with whom.

Given a packing, a layer's share of the step is ``sum over units u of cost(max over ranks p of W[u, p])``: layers
separate, so each is a small problem of its own. A swap of two experts on different ranks changes two ranks in every
unit; keeping the three hottest ranks of each unit makes its delta O(U).

Shape suffixes: U units (row x EP block), E experts, P EP ranks.

Invariants: ``rank_of`` always holds exactly E / P experts of each rank (only swaps are made); ``LayerState`` is what
``fill_layer`` would derive from ``rank_of``, but for which of several equal ranks it names.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from costmodels import compiled, lookup_ns
from search.kernels import layer_time_ns, over_cap_ns, random_below, random_threshold

SIMILAR_OF_8 = 7
"""Of eight swaps, how many are drawn between experts of similar load; the others between any two."""
WINDOW_SHARE = 16
"""Similar is an expert among the next E / 16 by load: others change their ranks by more than a good placement bears."""


class LayerCosts(NamedTuple):
    """Hold what does not change while one layer is placed."""

    counts: np.ndarray  # [E, U] int32, routed rows of every expert
    sent: np.ndarray  # [U] int32, most rows that a rank sends
    layer_ns: np.ndarray  # [2 K] int64, experts and exchange, then experts alone
    exchange_ns: np.ndarray  # [K] int64
    shift: int  # rows between two nodes of the tables, as a power of two
    cap: int  # rows that a rank may receive
    over_cap_ns: int  # the search's charge for each row above the cap; 0 for no cap


class LayerState(NamedTuple):
    """Hold what a placement of one layer makes of it."""

    rows: np.ndarray  # [P, U] int32
    top: np.ndarray  # [5, U] int32: rows and number of the hottest rank, of the second, rows of the third
    unit_ns: np.ndarray  # [U] int64
    sent_ns: np.ndarray  # [U] int64, the exchange of what is sent


@compiled
def fill_layer(costs, rank_of, num_ranks):
    """Return the :class:`LayerState` of a placement, the rank of each expert, [E]."""
    counts, sent = costs.counts, costs.sent
    units = counts.shape[1]
    rows = np.zeros((num_ranks, units), np.int32)
    for e in range(counts.shape[0]):
        for u in range(units):
            rows[rank_of[e], u] += counts[e, u]
    sent_ns = np.zeros(units, np.int64)
    state = LayerState(rows, np.zeros((5, units), np.int32), np.zeros(units, np.int64), sent_ns)
    for u in range(units):
        sent_ns[u] = lookup_ns(costs.exchange_ns, costs.shift, np.int64(sent[u]))
        _refresh_unit(costs, state, u)
    return state


@compiled(inline="always")
def _refresh_unit(costs, state, u):
    rows, top = state.rows, state.top
    first, second, third = np.int32(-1), np.int32(-1), np.int32(-1)
    first_rank, second_rank = np.int32(-1), np.int32(-1)
    for p in range(rows.shape[0]):
        value = rows[p, u]
        if value > first:
            third = second
            second, second_rank = first, first_rank
            first, first_rank = value, np.int32(p)
        elif value > second:
            third = second
            second, second_rank = value, np.int32(p)
        elif value > third:
            third = value
    top[0, u], top[1, u], top[2, u], top[3, u], top[4, u] = first, first_rank, second, second_rank, third
    state.unit_ns[u] = _unit_ns(costs, state, first, u)


@compiled(inline="always")
def _unit_ns(costs, state, peak, u):
    """Return the time of a unit whose slowest rank has ``peak`` rows."""
    time_ns = layer_time_ns(costs.layer_ns, costs.shift, np.int64(peak), np.int64(costs.sent[u]), state.sent_ns[u])
    return time_ns + over_cap_ns(np.int64(peak), np.int64(costs.cap), np.int64(costs.over_cap_ns))


@compiled(inline="always")
def swap_delta_ns(costs, state, pair):
    """Price swapping the experts of ``pair`` (e1, rank of e1, e2, rank of e2), ranks distinct. No branch: a vector."""
    e1, p1, e2, p2 = pair
    counts, rows, top, unit_ns = costs.counts, state.rows, state.top, state.unit_ns
    delta = np.int64(0)
    for u in range(unit_ns.size):
        shifted = counts[e2, u] - counts[e1, u]
        first, second = (top[1, u] == p1) | (top[1, u] == p2), (top[3, u] == p1) | (top[3, u] == p2)
        other = (top[4, u] if second else top[2, u]) if first else top[0, u]
        peak = max(other, max(rows[p1, u] + shifted, rows[p2, u] - shifted))
        delta += _unit_ns(costs, state, peak, u) - unit_ns[u]
    return delta


@compiled(inline="always")
def swap_apply(costs, state, rank_of, pair):
    """Make the swap that ``swap_delta_ns`` priced."""
    e1, p1, e2, p2 = pair
    counts, rows = costs.counts, state.rows
    for u in range(rows.shape[1]):
        shifted = counts[e2, u] - counts[e1, u]
        colder = max(rows[p1, u], rows[p2, u])
        rows[p1, u] += shifted
        rows[p2, u] -= shifted
        # The three hottest stay what they are where neither rank is, or becomes, one of them.
        if max(colder, max(rows[p1, u], rows[p2, u])) >= state.top[4, u]:
            _refresh_unit(costs, state, u)
    rank_of[e1], rank_of[e2] = p2, p1


@compiled
def _more_away(home, pair):
    """Return by how many the experts away from home grow when the pair is swapped, -2 to 2."""
    e1, p1, e2, p2 = pair
    after = np.int64(home[e1] != p2) + np.int64(home[e2] != p1)
    return after - np.int64(home[e1] != p1) - np.int64(home[e2] != p2)


@compiled
def _by_load(counts):
    """Return the experts from light to heavy, and each one's place among them, [E] each."""
    total = np.zeros(counts.shape[0], np.int64)
    for e in range(counts.shape[0]):
        for u in range(counts.shape[1]):
            total[e] += counts[e, u]
    order = np.argsort(total, kind="mergesort")
    place = np.empty_like(order)
    for k in range(order.size):
        place[order[k]] = k
    return order, place


@compiled
def improve_layer(costs, rank_of, home, rng, schedule):
    """Anneal the placement of one layer in place and return its price; ``rank_of`` ends as the best placement seen.

    ``home`` [E] is the rank where each expert's weights lie now; ``schedule`` = (ranks, proposals, first temperature as
    a share of a unit's mean time, price ns of one away from home). The price is the layer's time plus that of moving
    experts, so that only moves that pay are made.
    """
    num_ranks, proposals, hot, move_ns = schedule
    state = fill_layer(costs, rank_of, num_ranks)
    hot_ns = np.int64(state.unit_ns.sum() // state.unit_ns.size * hot)
    cold_ns = hot_ns // 100
    order, place = _by_load(costs.counts)
    current = state.unit_ns.sum() + move_ns * np.int64((rank_of != home).sum())
    best, best_rank_of = current, rank_of.copy()
    experts = rank_of.size
    window = max(1, experts // WINDOW_SHARE)
    for step in range(proposals):
        e1 = random_below(rng, experts)
        if random_below(rng, 8) < SIMILAR_OF_8:
            k = place[e1] + 1 + random_below(rng, window)
            if k >= experts:
                continue
            e2 = order[k]
        else:
            e2 = random_below(rng, experts)
        if rank_of[e1] == rank_of[e2]:
            continue
        pair = (e1, rank_of[e1], e2, rank_of[e2])
        delta = swap_delta_ns(costs, state, pair)
        if move_ns > 0:
            delta += move_ns * _more_away(home, pair)
        temperature = hot_ns + (cold_ns - hot_ns) * step // max(1, proposals)
        if delta > 0 and (temperature <= 0 or delta > random_threshold(rng, temperature)):
            continue
        swap_apply(costs, state, rank_of, pair)
        current += delta
        if current < best:
            best = current
            best_rank_of[:] = rank_of
    rank_of[:] = best_rank_of
    return best

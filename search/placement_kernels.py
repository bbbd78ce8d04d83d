"""Numba kernels for the placement of one layer: which EP rank holds which expert, given who is packed with whom.

Given a packing, a layer's share of the step is ``sum over units u of cost(max over ranks p of W[u, p])``: layers
separate, so each is a small problem of its own. A swap of two experts on different ranks changes two ranks in every
unit; keeping the three hottest ranks of each unit makes its delta O(U).

Shape suffixes: U units (row x EP block), E experts, P EP ranks.

Invariant: ``rank_of`` always holds exactly E / P experts of each rank (only swaps are made).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from costmodels import lookup_ns
from search.random_bits import random_below, random_threshold


@njit(cache=True, nogil=True)
def layer_unit_ns(tables, shift, rows, sent):
    """Return the time of one layer in one unit: ``tables`` [3, K] are experts, exchange and their sum."""
    if rows >= sent:
        return lookup_ns(tables[2], shift, rows)
    return lookup_ns(tables[0], shift, rows) + lookup_ns(tables[1], shift, sent)


@njit(cache=True, nogil=True)
def lpt_layer(totals, num_ranks):
    """Place one layer by its step totals [E]: heaviest expert first, to the lightest rank with a free place.

    Longest processing time first with equal counts (RoutePack's and EPLB's rule without replicas); ties by id. Returns
    the rank of each expert, [E].
    """
    experts = totals.size
    rank_of = np.zeros(experts, np.int64)
    load = np.zeros(num_ranks, np.int64)
    count = np.zeros(num_ranks, np.int64)
    order = np.argsort(-totals, kind="mergesort")
    for e in order:
        lightest = -1
        for p in range(num_ranks):
            if count[p] < experts // num_ranks and (lightest < 0 or load[p] < load[lightest]):
                lightest = p
        rank_of[e] = lightest
        load[lightest] += totals[e]
        count[lightest] += 1
    return rank_of


@njit(cache=True, nogil=True)
def layer_rank_rows(counts, rank_of, num_ranks):
    """Return the rows of each rank in each unit, [P, U], from the counts [E, U]."""
    rows = np.zeros((num_ranks, counts.shape[1]), np.int64)
    for e in range(counts.shape[0]):
        for u in range(counts.shape[1]):
            rows[rank_of[e], u] += counts[e, u]
    return rows


@njit(cache=True, nogil=True)
def layer_ns(tables, shift, rows, sent):
    """Return the time of one layer over all units, from its rank rows [P, U]."""
    total = np.int64(0)
    for u in range(rows.shape[1]):
        peak = np.int64(0)
        for p in range(rows.shape[0]):
            peak = max(peak, rows[p, u])
        total += layer_unit_ns(tables, shift, peak, sent[u])
    return total


@njit(cache=True, nogil=True)
def _hottest(rows, top):
    """Fill ``top`` [5, U]: value and rank of the hottest, value and rank of the second, value of the third."""
    for u in range(rows.shape[1]):
        _hottest_of(rows, top, u)


@njit(cache=True, nogil=True)
def _hottest_of(rows, top, u):
    first, second, third = np.int64(-1), np.int64(-1), np.int64(-1)
    first_rank, second_rank = np.int64(-1), np.int64(-1)
    for p in range(rows.shape[0]):
        value = rows[p, u]
        if value > first:
            third = second
            second, second_rank = first, first_rank
            first, first_rank = value, p
        elif value > second:
            third = second
            second, second_rank = value, p
        elif value > third:
            third = value
    top[0, u], top[1, u], top[2, u], top[3, u], top[4, u] = first, first_rank, second, second_rank, third


@njit(cache=True, nogil=True)
def swap_delta_ns(tables, shift, counts, rows, top, sent, pair):
    """Price swapping the experts of ``pair`` (e1, rank of e1, e2, rank of e2), ranks distinct."""
    e1, p1, e2, p2 = pair
    delta = np.int64(0)
    for u in range(rows.shape[1]):
        shifted = counts[e2, u] - counts[e1, u]
        if shifted == 0:
            continue
        if top[1, u] != p1 and top[1, u] != p2:
            other = top[0, u]
        elif top[3, u] != p1 and top[3, u] != p2:
            other = top[2, u]
        else:
            other = top[4, u]
        peak = max(other, max(rows[p1, u] + shifted, rows[p2, u] - shifted))
        if peak != top[0, u]:
            delta += layer_unit_ns(tables, shift, peak, sent[u]) - layer_unit_ns(tables, shift, top[0, u], sent[u])
    return delta


@njit(cache=True, nogil=True)
def swap_apply(counts, rows, top, rank_of, pair):
    """Make the swap that ``swap_delta_ns`` priced."""
    e1, p1, e2, p2 = pair
    for u in range(rows.shape[1]):
        shifted = counts[e2, u] - counts[e1, u]
        colder = max(rows[p1, u], rows[p2, u])
        rows[p1, u] += shifted
        rows[p2, u] -= shifted
        # The three hottest stay what they are where neither rank is, or becomes, one of them.
        if max(colder, max(rows[p1, u], rows[p2, u])) >= top[4, u]:
            _hottest_of(rows, top, u)
    rank_of[e1], rank_of[e2] = p2, p1


@njit(cache=True, nogil=True)
def _more_away(home, pair):
    """Return by how many the experts away from home grow when the pair is swapped, -2 to 2."""
    e1, p1, e2, p2 = pair
    after = np.int64(home[e1] != p2) + np.int64(home[e2] != p1)
    return after - np.int64(home[e1] != p1) - np.int64(home[e2] != p2)


@njit(cache=True, nogil=True)
def improve_layer(tables, shift, counts, rank_of, home, sent, rng, schedule):
    """Anneal the placement of one layer in place and return its price; ``rank_of`` ends as the best placement seen.

    ``counts`` [E, U] int64; ``home`` [E] is the rank where each expert's weights lie now; ``schedule`` = (ranks,
    proposals, first temperature ns, last temperature ns, price ns of an expert away from home). The price is the
    layer's time plus that of moving experts, so that only moves that pay are made, one by one.
    """
    num_ranks, proposals, hot_ns, cold_ns, move_ns = schedule
    rows = layer_rank_rows(counts, rank_of, num_ranks)
    top = np.zeros((5, rows.shape[1]), np.int64)
    _hottest(rows, top)
    current = layer_ns(tables, shift, rows, sent) + move_ns * np.int64((rank_of != home).sum())
    best = current
    best_rank_of = rank_of.copy()
    experts = rank_of.size
    for step in range(proposals):
        e1, e2 = random_below(rng, experts), random_below(rng, experts)
        if rank_of[e1] == rank_of[e2]:
            continue
        pair = (e1, rank_of[e1], e2, rank_of[e2])
        delta = swap_delta_ns(tables, shift, counts, rows, top, sent, pair)
        if move_ns > 0:
            delta += move_ns * _more_away(home, pair)
        temperature = hot_ns + (cold_ns - hot_ns) * step // max(1, proposals)
        if delta > 0 and (temperature <= 0 or delta > random_threshold(rng, temperature)):
            continue
        swap_apply(counts, rows, top, rank_of, pair)
        current += delta
        if current < best:
            best = current
            best_rank_of[:] = rank_of
    rank_of[:] = best_rank_of
    return best

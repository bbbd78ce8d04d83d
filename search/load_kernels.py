"""Numba kernels that add up routed rows, per unit and expert or per sample and EP rank, and price a layer by them.

Shape suffixes: N samples, U units (row x EP block), L MoE layers, E experts, P EP ranks.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def unit_expert_rows(counts, unit_of, num_units):
    """Return the rows of every logical expert in every unit, [U, L, E] int32, from ``counts`` [N, L, E]."""
    rows = np.zeros((num_units, counts.shape[1], counts.shape[2]), np.int32)
    for i in range(counts.shape[0]):
        target = rows[unit_of[i]]
        for m in range(counts.shape[1]):
            for e in range(counts.shape[2]):
                target[m, e] += counts[i, m, e]
    return rows


@njit(cache=True, nogil=True)
def sample_rank_rows(counts, order, rank_of, num_ranks):
    """Return the rows on every EP rank of the samples in ``order``, given the rank of each expert, [L, E].

    [N + 1, P, L] int32: the last is no sample, all zeros.
    """
    rows = np.zeros((order.size + 1, num_ranks, counts.shape[1]), np.int32)
    for k in range(order.size):
        for m in range(counts.shape[1]):
            for e in range(counts.shape[2]):
                rows[k, rank_of[m, e], m] += counts[order[k], m, e]
    return rows


@njit(cache=True, nogil=True, inline="always")
def over_cap_ns(peak, cap, row_ns):
    """Return what the search charges for rows above the receive cap (:attr:`search.problem.Problem.receive_wall`)."""
    return max(np.int64(0), peak - cap) * row_ns


@njit(cache=True, nogil=True, inline="always")
def layer_time_ns(layer_ns, shift, rows, sent, sent_ns):
    """Return the time of one MoE layer whose slowest rank has ``rows``, while some rank sends ``sent``.

    ``layer_ns`` [2 K] is the table of experts and exchange, then that of experts alone; ``sent_ns`` the exchange of
    ``sent``. Without a branch, so that loops over layers or units become vectors: below ``sent`` the second half
    is read.
    """
    node = rows >> shift
    place = np.uint64(node + (layer_ns.size >> 1 if rows < sent else 0))
    low = layer_ns[place]
    partly = ((layer_ns[place + np.uint64(1)] - low) * (rows - (node << shift))) >> shift
    return low + partly + (sent_ns if rows < sent else np.int64(0))

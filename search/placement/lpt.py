"""Placements by step totals alone, and the two ways to write a placement: ranks and physical slots.

Shape suffixes: L MoE layers, E experts.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from search.problem import Problem


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


def lpt_placement(problem: Problem) -> np.ndarray:
    """Place every layer by the step's totals, heaviest first (RoutePack's placement; EPLB without replicas), [L, E]."""
    totals = problem.counts.sum(axis=0, dtype=np.int64)
    return np.stack([slots_of_ranks(lpt_layer(layer, problem.num_ranks), problem.num_ranks) for layer in totals])


def identity_placement(problem: Problem) -> np.ndarray:
    """Return experts in place: expert e in physical slot e, [L, E]."""
    return np.tile(np.arange(problem.num_experts), (problem.num_layers, 1))


def slots_of_ranks(rank_of: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return the physical slot of each expert, experts of a rank in order of id, [E]."""
    per_rank = rank_of.size // num_ranks
    slots = np.empty(rank_of.size, np.int64)
    for p in range(num_ranks):
        slots[np.flatnonzero(rank_of == p)] = p * per_rank + np.arange(per_rank)
    return slots


def ranks_of_slots(placement_LE: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return the EP rank of each expert, [L, E], from its physical slot."""
    return placement_LE // (placement_LE.shape[1] // num_ranks)

"""ReLibra's expert reordering (arXiv 2605.08639), written from its description: swap annealing on step totals.

Each layer is placed by its experts' totals over the step. Two experts of different ranks swap; the objective is a
smooth stand-in for the most loaded rank, so that levelling the others counts too. Rows of the step play no part, and
replicas, the second half of the method, are none of this problem's.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit

from search.kernels import random_below, random_threshold, seed_state
from search.placement.lpt import lpt_layer, placement_of_ranks
from search.problem import Problem

SWAPS = 20_000
"""Swaps proposed for each layer."""
SQUARINGS = 4
"""The objective is the sum over ranks of (load / mean) ** 16: four squarings."""
HOT, COLD = 0.05, 1e-5
"""First and last temperature, as shares of the objective of an even layer (P)."""


def relibra_placement(problem: Problem, *, seed: int = 0, swaps: int = SWAPS) -> np.ndarray:
    """Return ReLibra's placement, [L, E]; never above LPT's smoothed objective, from which each layer starts."""
    totals_LE = problem.counts.sum(axis=0, dtype=np.int64)

    def place(layer: int) -> np.ndarray:
        rank_of = lpt_layer(totals_LE[layer], problem.num_ranks)
        anneal_totals(totals_LE[layer], rank_of, problem.num_ranks, swaps, seed_state(seed, layer))
        return rank_of

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        ranks = list(pool.map(place, range(problem.num_layers)))
    return placement_of_ranks(np.stack(ranks), problem.num_ranks)


@njit(cache=True, nogil=True, inline="always")
def _power(ratio):
    for _ in range(SQUARINGS):
        ratio *= ratio
    return ratio


@njit(cache=True, nogil=True)
def smoothed_peak(totals, rank_of, num_ranks):
    """Return the sum over ranks of (load / mean) ** 16; its 16th root lies within P ** (1 / 16) of the largest."""
    loads = np.zeros(num_ranks, np.int64)
    for e in range(totals.size):
        loads[rank_of[e]] += totals[e]
    mean, total = totals.sum() / num_ranks, 0.0
    for p in range(num_ranks):
        total += _power(loads[p] / mean)
    return total


@njit(cache=True, nogil=True)
def anneal_totals(totals, rank_of, num_ranks, swaps, rng):
    """Anneal the placement of one layer in place; ``rank_of`` [E] ends as the best seen. Returns its objective."""
    loads = np.zeros(num_ranks, np.int64)
    for e in range(totals.size):
        loads[rank_of[e]] += totals[e]
    mean = max(1.0, totals.sum() / num_ranks)
    current = smoothed_peak(totals, rank_of, num_ranks)
    best, best_rank_of = current, rank_of.copy()
    # Thresholds are drawn as integers, in 2**-30 of the objective.
    hot, cooling = HOT * num_ranks * (1 << 30), (COLD / HOT) ** (1.0 / max(1, swaps))
    for _ in range(swaps):
        hot *= cooling
        a, b = random_below(rng, totals.size), random_below(rng, totals.size)
        p, q, more = rank_of[a], rank_of[b], totals[b] - totals[a]
        if p == q or more == 0:
            continue
        delta = _power((loads[p] + more) / mean) + _power((loads[q] - more) / mean)
        delta -= _power(loads[p] / mean) + _power(loads[q] / mean)
        if delta > 0 and delta * (1 << 30) > random_threshold(rng, np.int64(hot)):
            continue
        loads[p] += more
        loads[q] -= more
        rank_of[a], rank_of[b] = q, p
        current += delta
        if current < best * (1.0 - 1e-12):
            best = current
            best_rank_of[:] = rank_of
    rank_of[:] = best_rank_of
    return best

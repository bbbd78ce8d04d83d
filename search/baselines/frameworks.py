"""Packers and a placement rule of the frameworks that train MoE models today, written from their descriptions.

In each packing every cell holds a sample, and all but slime's keep the cap. None of the packers looks at experts.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from costmodels import compiled
from search.evaluate import rank_loads
from search.kernels import random_below, random_threshold, seed_state
from search.packing.bins import Bins, Packing, cells_of_bins, fill_bins, first_fit_decreasing, karmarkar_karp
from search.placement.lpt import identity_placement, lpt_layer, lpt_placement, placement_of_ranks
from search.problem import Problem, no_packing

CV_DROP = 0.08
"""MindSpeed's default for ``--fine-grained-expert-placement-thre``."""
SWAPS = 20_000
"""Swaps proposed for each layer."""
SQUARINGS = 4
"""The objective is the sum over ranks of (load / mean) ** 16: four squarings."""
HOT, COLD = 0.05, 1e-5
"""First and last temperature, as shares of the objective of an even layer (P)."""


def modified_first_fit_decreasing(lengths: np.ndarray, max_tokens: int) -> Bins:
    """Pack by Johnson and Garey's modified first-fit decreasing (1985), within 71/60 of the least number of bins.

    Samples above a half of the cap open bins, longest first. From the least room to the most each takes the longest
    *medium* sample (above a third) that fits; back again, a bin without one takes the shortest *small* sample (above a
    sixth) with the longest that fits beside it. What still fits follows, longest first; the rest goes first fit.
    """
    rest = np.argsort(-lengths, kind="stable").tolist()
    bins: Bins = [[i] for i in rest if 2 * lengths[i] > max_tokens]
    room = [max_tokens - int(lengths[b[0]]) for b in bins]
    rest = rest[len(bins) :]

    def put(i: int, k: int) -> None:
        bins[k].append(i)
        room[k] -= int(lengths[i])
        rest.remove(i)

    for k in range(len(bins)):
        medium = next((i for i in rest if 3 * lengths[i] > max_tokens and lengths[i] <= room[k]), None)
        if medium is not None:
            put(medium, k)
    for k in range(len(bins) - 1, -1, -1):
        small = [i for i in rest if max_tokens < 6 * lengths[i] and 3 * lengths[i] <= max_tokens]
        if len(bins[k]) == 1 and len(small) > 1 and lengths[small[-1]] + lengths[small[-2]] <= room[k]:
            put(small[-1], k)
            put(next(i for i in small if lengths[i] <= room[k]), k)
    for k in range(len(bins)):
        while (i := next((i for i in rest if lengths[i] <= room[k]), None)) is not None:
            put(i, k)
    return bins + first_fit_decreasing(lengths, max_tokens, np.array(rest, np.int64))


def pack_mffd(problem: Problem) -> Packing:
    """NeMo-RL's default: modified first-fit decreasing, bin j to DP rank j % D.

    Bins are filled up to a multiple of D by taking one sample at a time out of the bin that holds most samples.
    """
    bins = modified_first_fit_decreasing(problem.lengths, problem.max_tokens)
    while len(bins) % (problem.num_slots * problem.topology.row_multiple):
        donor = max(range(len(bins)), key=lambda k: (len(bins[k]), -k))
        if len(bins[donor]) < 2:
            raise no_packing(problem)
        bins.append([bins[donor].pop()])
    return cells_of_bins(bins, problem)


def pack_verl(problem: Problem, weights: np.ndarray) -> Packing:
    """verl 0.9.1: Karmarkar-Karp over DP ranks with equal sample counts, then again inside each rank.

    Microbatches are added until all keep the cap; inside a rank they run from light to heavy and back (for pipelines).
    """
    ranks = [np.array(b, np.int64) for b in karmarkar_karp(weights, problem.num_slots, equal_size=True)]
    multiple = problem.topology.row_multiple
    most = max(-(-int(problem.lengths[rank].sum()) // problem.max_tokens) for rank in ranks)
    for rows in range(-(-most // multiple) * multiple, min(map(len, ranks)) + 1, multiple):
        bins_DR = [[rank[b].tolist() for b in karmarkar_karp(weights[rank], rows)] for rank in ranks]
        if all(b and problem.lengths[b].sum() <= problem.max_tokens for bins in bins_DR for b in bins):
            falling_DR = [sorted(bins, key=lambda b: (-int(weights[b].sum()), b[0])) for bins in bins_DR]
            return _cells_of_ranks([falling[::2][::-1] + falling[1::2] for falling in falling_DR], problem)
    raise no_packing(problem)


def pack_slime(problem: Problem, weights: np.ndarray) -> Packing:
    """slime with ``--balance-by-flops --balance-data``: Karmarkar-Karp into the fewest bins that could hold the tokens.

    A bin may exceed the cap (see :func:`beyond_cap`). Bins are split up to a multiple of D, dealt to DP ranks by
    Karmarkar-Karp on their weights in equal numbers, and run in the order of their index.
    """
    count = max(1, -(-int(problem.lengths.sum()) // problem.max_tokens))
    bins = [b for b in karmarkar_karp(weights, count) if b]
    bins = fill_bins(bins, problem.lengths, problem.num_slots * problem.topology.row_multiple)
    totals = np.array([int(weights[b].sum()) for b in bins])
    ranks = karmarkar_karp(totals, problem.num_slots, equal_size=True)
    return _cells_of_ranks([[bins[k] for k in rank] for rank in ranks], problem)


def pack_areal(problem: Problem) -> Packing:
    """AReaL: DP ranks first, then first-fit decreasing inside each rank.

    Samples go to ranks in equal numbers, longest first to the rank with fewest tokens; inside it, of the microbatches
    with room, to the one of fewest samples. All ranks repeat this with the most microbatches any needed, opened before.
    """
    padded = np.pad(problem.lengths, (0, -problem.num_samples % problem.num_slots))
    rank_of = lpt_layer(padded, problem.num_slots)[: problem.num_samples]
    ranks = [np.flatnonzero(rank_of == d) for d in range(problem.num_slots)]
    multiple, rows = problem.topology.row_multiple, 1
    while True:
        bins_DR = [
            first_fit_decreasing(problem.lengths, problem.max_tokens, rank, opened=rows, fewest=True) for rank in ranks
        ]
        most = -(-max(map(len, bins_DR)) // multiple) * multiple
        if most == rows and all(all(bins) for bins in bins_DR):
            return _cells_of_ranks(bins_DR, problem)
        if most > min(map(len, ranks)):
            raise no_packing(problem)
        rows = max(most, rows)


def _cells_of_ranks(bins_DR: list[Bins], problem: Problem) -> Packing:
    """Return the packing in which microbatch r of DP rank d is ``bins_DR[d][r]``."""
    return cells_of_bins([cell for row in zip(*bins_DR, strict=True) for cell in row], problem)


def mindspeed_placement(problem: Problem, cv_drop: float = CV_DROP) -> np.ndarray:
    """MindSpeed: leave a layer in place unless LPT lowers its ranks' variation by ``cv_drop`` (step totals), [L, E]."""
    stay_LE, move_LE = identity_placement(problem), lpt_placement(problem)
    drop_L = rank_variation(problem, stay_LE) - rank_variation(problem, move_LE)
    return np.where((drop_L >= cv_drop)[:, None], move_LE, stay_LE)


def rank_variation(problem: Problem, placement_LE: np.ndarray) -> np.ndarray:
    """Return the standard deviation of the ranks' step totals over their mean, [L]."""
    ranks = rank_loads(problem, np.zeros(problem.num_samples, np.int64), placement_LE, 1)[0]
    return ranks.std(axis=0) / ranks.mean(axis=0)


def relibra_placement(problem: Problem, *, seed: int = 0, swaps: int = SWAPS) -> np.ndarray:
    """Return ReLibra's placement by swap annealing on step totals (arXiv 2605.08639), [L, E], without its replicas.

    Two experts of a layer swap ranks; the objective is a smooth stand-in for the most loaded rank, so that levelling
    the others counts too. It is never above that of LPT, from which each layer starts.
    """
    totals_LE = problem.counts.sum(axis=0, dtype=np.int64)

    def place(layer: int) -> np.ndarray:
        rank_of = lpt_layer(totals_LE[layer], problem.num_ranks)
        anneal_totals(totals_LE[layer], rank_of, problem.num_ranks, swaps, seed_state(seed, layer))
        return rank_of

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        ranks = list(pool.map(place, range(problem.num_layers)))
    return placement_of_ranks(np.stack(ranks), problem.num_ranks)


@compiled(inline="always")
def _power(ratio):
    for _ in range(SQUARINGS):
        ratio *= ratio
    return ratio


@compiled
def anneal_totals(totals, rank_of, num_ranks, swaps, rng):
    """Anneal the placement of one layer in place; ``rank_of`` [E] ends as the best seen. Returns its objective."""
    loads = np.zeros(num_ranks, np.int64)
    for e in range(totals.size):
        loads[rank_of[e]] += totals[e]
    mean = max(1.0, totals.sum() / num_ranks)
    current = 0.0
    for p in range(num_ranks):
        current += _power(loads[p] / mean)
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


def largest_cell_tokens(problem: Problem, packing: Packing) -> int:
    """Return the tokens of the fullest cell of a packing: above ``max_tokens`` it could not be trained."""
    row_N, slot_N, num_rows = packing
    return int(problem.cell_tokens(row_N * problem.num_slots + slot_N, num_rows).max())


def beyond_cap(problem: Problem, tokens: int) -> Problem:
    """Return the problem with tables that reach cells of ``tokens``, continued along their last step (assumed)."""
    rows = tokens * problem.topology.slots_per_block * problem.spec.top_k
    token_nodes, row_nodes = (tokens >> problem.tables.tokens_shift) + 2, (rows >> problem.tables.rows_shift) + 2
    return replace(
        problem,
        cell_ns=_continued(problem.cell_ns, token_nodes),
        expert_ns=_continued(problem.expert_ns, row_nodes),
        exchange_ns=_continued(problem.exchange_ns, row_nodes),
    )


def _continued(table: np.ndarray, nodes: int) -> np.ndarray:
    step = table[..., -1:] - table[..., -2:-1]
    further = np.arange(1, max(0, nodes - table.shape[-1]) + 1)
    return np.ascontiguousarray(np.concatenate([table, table[..., -1:] + step * further], axis=-1))

"""Packers and a placement rule of the frameworks that train MoE models today, written from their descriptions.

In each packing every cell holds a sample, and all but slime's keep the cap. None of the packers looks at experts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from search.evaluate import rank_loads
from search.packing.bins import Bins, Packing, cells_of_bins, fill_bins, first_fit_decreasing, karmarkar_karp
from search.placement.lpt import identity_placement, lpt_layer, lpt_placement
from search.problem import Problem, no_packing

CV_DROP = 0.08
"""MindSpeed's default for ``--fine-grained-expert-placement-thre``."""


def modified_first_fit_decreasing(lengths: np.ndarray, max_tokens: int) -> Bins:
    """Pack by Johnson and Garey's modified first-fit decreasing (1985), within 71/60 of the least number of bins.

    Samples above a half of the cap open bins, longest first. Bins are then visited from the least room to the most:
    each takes the longest *medium* sample (above a third) that fits. Back from the most room to the least, a bin
    without a medium one takes the shortest *small* sample (above a sixth) with the longest small one that fits beside
    it. Whatever still fits follows, longest first; the rest is packed first-fit decreasing.
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

    The number of microbatches is the most that a rank needs by tokens, raised until every microbatch of every rank
    keeps the cap. Inside a rank, microbatches run from light to heavy and back (small ends, for pipelines).
    """
    ranks = [np.array(b, np.int64) for b in karmarkar_karp(weights, problem.num_slots, equal_size=True)]
    multiple = problem.topology.row_multiple
    most = max(-(-int(problem.lengths[rank].sum()) // problem.max_tokens) for rank in ranks)
    for rows in range(-(-most // multiple) * multiple, min(map(len, ranks)) + 1, multiple):
        bins_DR = [[rank[b].tolist() for b in karmarkar_karp(weights[rank], rows)] for rank in ranks]
        if all(b and problem.lengths[b].sum() <= problem.max_tokens for bins in bins_DR for b in bins):
            return _cells_of_ranks([_small_ends(bins, weights) for bins in bins_DR], problem)
    raise no_packing(problem)


def _small_ends(bins: Bins, weights: np.ndarray) -> Bins:
    falling = sorted(bins, key=lambda b: (-int(weights[b].sum()), b[0]))
    return falling[::2][::-1] + falling[1::2]


def pack_slime(problem: Problem, weights: np.ndarray) -> Packing:
    """slime with ``--balance-by-flops --balance-data``: Karmarkar-Karp into the fewest bins that could hold the tokens.

    The cap only gives the number of bins and a bin may exceed it (see :func:`beyond_cap`). Bins are
    split up to a multiple of D, dealt to DP ranks by Karmarkar-Karp on their weights in equal numbers, and run in the
    order of their index.
    """
    count = max(1, -(-int(problem.lengths.sum()) // problem.max_tokens))
    bins = [b for b in karmarkar_karp(weights, count) if b]
    bins = fill_bins(bins, problem.lengths, problem.num_slots * problem.topology.row_multiple)
    totals = np.array([int(weights[b].sum()) for b in bins])
    ranks = karmarkar_karp(totals, problem.num_slots, equal_size=True)
    return _cells_of_ranks([[bins[k] for k in rank] for rank in ranks], problem)


def pack_areal(problem: Problem) -> Packing:
    """AReaL: DP ranks first, then first-fit decreasing inside each rank.

    The controller deals samples to ranks in equal numbers, longest first to the rank with fewest tokens and a free
    place. Inside a rank a sample goes, of the microbatches with room, to the one that holds fewest samples. All ranks
    repeat this with the most microbatches any of them needed, opened beforehand.
    """
    padded = np.concatenate([problem.lengths, np.zeros(-problem.num_samples % problem.num_slots, np.int64)])
    rank_of = lpt_layer(padded, problem.num_slots)[: problem.num_samples]
    ranks = [np.flatnonzero(rank_of == d) for d in range(problem.num_slots)]
    multiple = problem.topology.row_multiple
    rows = 1
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
    """Leave a layer in place unless LPT lowers the coefficient of variation of its ranks by ``cv_drop``, [L, E].

    MindSpeed's rule, with the step's own totals for its moving average of past loads.
    """
    stay_LE, move_LE = identity_placement(problem), lpt_placement(problem)
    drop_L = rank_variation(problem, stay_LE) - rank_variation(problem, move_LE)
    return np.where((drop_L >= cv_drop)[:, None], move_LE, stay_LE)


def rank_variation(problem: Problem, placement_LE: np.ndarray) -> np.ndarray:
    """Return the standard deviation of the ranks' step totals over their mean, [L]."""
    ranks = rank_loads(problem, np.zeros(problem.num_samples, np.int64), placement_LE, 1)[0]
    return ranks.std(axis=0) / ranks.mean(axis=0)


def largest_cell_tokens(problem: Problem, packing: Packing) -> int:
    """Return the tokens of the fullest cell of a packing: above ``max_tokens`` it could not be trained."""
    row_N, slot_N, num_rows = packing
    return int(problem.cell_tokens(row_N * problem.num_slots + slot_N, num_rows).max())


def beyond_cap(problem: Problem, tokens: int) -> Problem:
    """Return the problem with tables that reach cells of ``tokens``, continued along their last step (assumed)."""
    rows = tokens * problem.topology.slots_per_block * problem.top_k
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

"""A proven lower bound on the step time of any plan of a batch, by the same tables the plan is priced with.

Over all U = R x B units (row, block), per layer (docs/algorithm.md, "The certificate", has the argument):

* experts and exchange: a non-decreasing cost f of the hottest rank, replaced by its greatest convex minorant g <= f; by
  Jensen ``sum_u f(peak_u) >= U g(sum_u peak_u / U)``, and ``sum_u peak_u`` is at least the total of any rank;
* attention: a unit waits for its slowest cell, at least the mean of its cells; where long samples force a unit whose
  other cells cannot be filled as high under the cap, the difference is lost in every packing (``_weights_bound``).
"""

from __future__ import annotations

import numpy as np

from search.problem import Problem, row_range


def convex_minorant(table: np.ndarray) -> np.ndarray:
    """Return the greatest convex function below a table at its nodes, [K] float64 (lower hull)."""
    hull: list[int] = []
    values = table.astype(np.float64)
    for k in range(len(values)):
        while len(hull) >= 2:
            a, b = hull[-2], hull[-1]
            if (values[b] - values[a]) * (k - a) < (values[k] - values[a]) * (b - a):
                break
            hull.pop()
        hull.append(k)
    return np.interp(np.arange(len(values)), hull, values[hull])


def lower_bound_ns(problem: Problem) -> int:
    """Return nanoseconds (over all layers and stages) below which no plan of the batch can go, in any number of rows.

    Integer look-ups round down by less than 1 ns each; the bound gives that back.
    """
    units = np.array(row_range(problem) or [row_range(problem).start]) * problem.num_blocks
    rounding = units * (2 * problem.num_layers + problem.cell_ns.shape[0])
    minorants = [convex_minorant(table) for table in problem.cell_ns]
    other = _experts_bound(problem, units) + units * problem.tables.row_fixed_ns - rounding
    means = other + np.array([_attention_bound(problem, minorants, int(u), exact=False) for u in units])
    lowest = np.inf
    for k in np.argsort(means, kind="stable"):  # the exact bound is above the mean's: the rest cannot be lower
        if means[k] >= lowest:
            break
        lowest = min(lowest, other[k] + _attention_bound(problem, minorants, int(units[k]), exact=True))
    return max(0, int(np.floor(lowest)) // problem.num_blocks)


def _experts_bound(problem: Problem, units: np.ndarray) -> np.ndarray:
    """Return the bound on experts and exchange for each number of units."""
    totals = problem.counts.sum(axis=0, dtype=np.int64)
    ordered = np.sort(totals, axis=1)
    companions = ordered[:, : problem.num_experts // problem.num_ranks - 1].sum(axis=1)
    peak = np.maximum(totals.sum(axis=1) / problem.num_ranks, ordered[:, -1] + companions)
    nodes = peak / units[:, None] / (1 << problem.tables.rows_shift)
    minorant = convex_minorant(problem.expert_ns + problem.exchange_ns)
    return units * np.interp(nodes, np.arange(len(minorant)), minorant).sum(axis=1)


def _attention_bound(problem: Problem, minorants: list[np.ndarray], units: int, *, exact: bool) -> float:
    """Return the bound on the sum over units and classes of the slowest cell, from the mean cell alone or ``exact``.

    The line that touches the dense part's convex minorant at the mean cell makes a cell cost a constant plus a weight
    per sample.
    """
    per_unit = problem.num_slots // problem.num_blocks
    step = 1 << problem.tables.tokens_shift
    node = min(int(problem.lengths.sum()) // (units * per_unit) // step, problem.cell_ns.shape[1] - 2)
    total = 0.0
    for c, minorant in enumerate(minorants):
        slope = (minorant[node + 1] - minorant[node]) / step
        total += units * (minorant[node] - slope * node * step)
        weights = problem.sequence_ns[:, c] + slope * problem.lengths
        mean = float(weights.sum()) / per_unit
        total += _weights_bound(weights, problem.lengths, problem.max_tokens, per_unit) if exact else mean
    return total


def _weights_bound(weights: np.ndarray, lengths: np.ndarray, max_tokens: int, per_unit: int) -> float:
    """Bound the sum over units, of ``per_unit`` cells, of the heaviest cell, by counting cells above a weight.

    With n(a) the cells of weight a or more, the sum is at least ``integral of ceil(n(a) / per_unit) da``, the integral
    of n is the total weight. n(a) is at least the samples that weigh a and exceed half the cap, and at most those that,
    as the longest of their cell, could be filled up to a, and at most k where the densest samples that k cells can hold
    weigh less than k + 1 times a. A unit that the first forces and the second cannot fill loses the difference.
    """
    alone = np.sort(weights[lengths > max_tokens // 2])
    reach = np.sort(_richest_cell(weights, lengths, max_tokens))
    filled = _filled_means(weights, lengths, max_tokens)
    # Every count below is constant between two neighbouring levels: its steps must all be among them.
    levels = np.unique(np.concatenate([[0.0], alone, reach, filled]))
    forced = len(alone) - np.searchsorted(alone, levels[1:], side="left")
    fillable = np.minimum(
        len(reach) - np.searchsorted(reach, levels[1:], side="left"),
        np.searchsorted(-filled, -levels[1:], side="right"),
    )
    lost = np.maximum(0.0, -(-forced // per_unit) - fillable / per_unit)
    return float(weights.sum() / per_unit + (np.diff(levels) * lost).sum())


def _richest_cell(weights: np.ndarray, lengths: np.ndarray, max_tokens: int) -> np.ndarray:
    """Return the most that a cell with each sample as its longest can weigh, [N]: the rest at the best rate allowed."""
    order = np.argsort(lengths, kind="stable")
    best_rate = np.maximum.accumulate((weights / lengths)[order])
    room = max_tokens - lengths
    allowed = np.searchsorted(lengths[order], np.minimum(room, lengths), side="right")
    rate = np.where(allowed > 0, best_rate[np.maximum(allowed - 1, 0)], 0.0)
    return weights + room * rate


def _filled_means(weights: np.ndarray, lengths: np.ndarray, max_tokens: int) -> np.ndarray:
    """Return the most that 1, 2, ... cells can all weigh, were samples divisible, densest first: never rising."""
    order = np.argsort(-weights / lengths, kind="stable")
    tokens = np.concatenate([[0], np.cumsum(lengths[order])])
    filled = np.concatenate([[0.0], np.cumsum(weights[order])])
    cells = np.arange(1, len(lengths) + 1)  # more than can be filled up: a plan may leave every cell half empty
    return np.interp(cells * max_tokens, tokens, filled) / cells

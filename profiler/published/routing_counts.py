"""Rows per expert behind the published MoE timings, which state only tokens and the name of a distribution.

The tables time EP rank 0 of a layer that sees all tokens. ``balanced`` is deterministic and enumerated here.
``power_law_a`` was drawn at random and the draws were not kept: expected counts come from drawing the same recipe many
times (the public collector of aiconfigurator: truncated power law per expert, scaled to ``T * top_k``, the hottest
group of experts swapped to rank 0). Shape suffixes: M draws, E experts, P EP ranks.
"""

from __future__ import annotations

import re
from functools import cache

import numpy as np

from profiler.cases.case import mean_loads
from profiler.errors import RoutePackError

DRAWS = 48
"""Draws per distribution: the mean load of rank 0 is then known to about 1 %, less than the tables' own noise."""
KEY_SEED = 20260812
"""Seed of the expected counts of random routings: a constant of the importer, so that every import agrees."""


def rank_zero_rows(tokens: int, experts: int, top_k: int, ep_size: int, distribution: str) -> tuple[int, ...]:
    """Return the row features (``EXPERT_ROWS``) of EP rank 0 for one line of a table."""
    counts = _global_counts(tokens, experts, top_k, distribution)
    drawn = counts.ndim == 2
    return mean_loads(hottest_rank_counts(counts, ep_size, tokens) if drawn else counts[: experts // ep_size])


@cache
def _global_counts(tokens: int, experts: int, top_k: int, distribution: str) -> np.ndarray:
    if distribution == "balanced":
        return balanced_counts(tokens, experts, top_k)
    exponent = re.fullmatch(r"power_law_(\d+(?:\.\d+)?)", distribution)
    if exponent is None or float(exponent[1]) == 1:
        raise RoutePackError(f"Unknown distribution {distribution!r} in moe_perf: expected balanced or power_law_<a>.")
    alpha = float(exponent[1])
    # One generator per routing: a row's features do not depend on which other rows the table holds.
    rng = np.random.default_rng([KEY_SEED, tokens, experts, top_k, round(alpha * 1000)])
    return power_law_counts(tokens, experts, top_k, alpha, rng)


def balanced_counts(num_tokens: int, num_experts: int, top_k: int) -> np.ndarray:
    """Return [E] rows per expert: token i takes experts ``(i + j * stride) mod E`` for j < top_k."""
    stride = -(-num_experts // top_k)
    tokens = np.arange(num_tokens, dtype=np.float64)
    first = tokens if num_tokens >= stride else tokens * stride / num_tokens
    chosen = first.astype(np.int64)[:, None] + stride * np.arange(top_k)
    return np.bincount(chosen.ravel() % num_experts, minlength=num_experts)


def power_law_counts(tokens: int, experts: int, top_k: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Return [M, E] int64 rows per expert, each row summing to ``tokens * top_k``, before the rank swap."""
    target = tokens * top_k
    low, high = (1.0, tokens * 0.8) if target > experts else (0.01, 2.0)
    power = 1.0 - alpha
    uniform = rng.random((DRAWS, experts))
    weight = ((high**power - low**power) * uniform + low**power) ** (1.0 / power)
    counts = np.rint(weight / weight.sum(axis=1, keepdims=True) * target).astype(np.int64)
    return _match_sum(counts, target)


def _match_sum(counts_ME: np.ndarray, target: int) -> np.ndarray:
    """Correct rounding as the collector does: add to the largest, take from the smallest, one each, in turn."""
    order = np.argsort(-counts_ME, axis=1, kind="stable")
    delta = target - counts_ME.sum(axis=1)
    num_experts = counts_ME.shape[1]
    draws = np.arange(len(counts_ME))
    for i in range(int(np.abs(delta).max())):
        more, less = draws[delta > i], draws[-delta > i]
        counts_ME[more, order[more, i % num_experts]] += 1
        smallest = order[less, -(i % num_experts) - 1]
        empty = counts_ME[less, smallest] == 0
        smallest[empty] = counts_ME[less[empty]].argmax(axis=1)
        counts_ME[less, smallest] -= 1
    return counts_ME


def hottest_rank_counts(counts_ME: np.ndarray, ep_size: int, num_tokens: int) -> np.ndarray:
    """Return [M, E / P] rows per local expert of EP rank 0 after the hottest rank was swapped there.

    An expert cannot take one token twice: what exceeds ``num_tokens`` goes to the lowest expert ids with room (ties of
    the router's top-k).
    """
    counts = counts_ME.copy()
    draws = np.arange(len(counts))
    groups_MPl = counts.reshape(len(counts), ep_size, -1)
    hottest = groups_MPl.sum(axis=2).argmax(axis=1)
    first = groups_MPl[:, 0].copy()
    groups_MPl[:, 0] = groups_MPl[draws, hottest]
    groups_MPl[draws, hottest] = np.where((hottest == 0)[:, None], groups_MPl[:, 0], first)
    surplus = np.maximum(counts - num_tokens, 0).sum(axis=1, keepdims=True)
    counts = np.minimum(counts, num_tokens)
    room = num_tokens - counts
    counts += np.clip(surplus - (room.cumsum(axis=1) - room), 0, room)
    return counts[:, : counts.shape[1] // ep_size]

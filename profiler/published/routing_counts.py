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
MOST_EXPONENT = 5.0
KEY_SEED = 20260812
"""Seed of the expected counts of random routings: a constant of the importer, so that every import agrees."""


def rank_zero_rows(tokens: int, experts: int, top_k: int, ep_size: int, distribution: str) -> tuple[int, ...]:
    """Return the row features (``EXPERT_ROWS``) of EP rank 0 for one line of a table."""
    if distribution == "balanced":
        return mean_loads(balanced_counts(tokens, experts, top_k)[: experts // ep_size])
    exponent = re.fullmatch(r"power_law_(\d+(?:\.\d+)?)", distribution)
    if exponent is None or not 0 < float(exponent[1]) <= MOST_EXPONENT or float(exponent[1]) == 1:
        raise RoutePackError(f"Unknown distribution {distribution!r} in moe_perf: expected balanced or power_law_<a>.")
    return mean_loads(
        hottest_rank_counts(power_law_counts(tokens, experts, top_k, float(exponent[1])), ep_size, tokens)
    )


@cache
def balanced_counts(num_tokens: int, num_experts: int, top_k: int) -> np.ndarray:
    """Return [E] rows per expert: token i takes experts ``(i + j * stride) mod E`` for j < top_k."""
    stride = -(-num_experts // top_k)
    tokens = np.arange(num_tokens, dtype=np.float64)
    first = tokens if num_tokens >= stride else tokens * stride / num_tokens
    chosen = first.astype(np.int64)[:, None] + stride * np.arange(top_k)
    return np.bincount(chosen.ravel() % num_experts, minlength=num_experts)


@cache
def power_law_counts(tokens: int, experts: int, top_k: int, alpha: float) -> np.ndarray:
    """Return [M, E] int64 rows per expert, each row summing to ``tokens * top_k``, before the rank swap."""
    # One generator per routing: a row's features do not depend on which other rows the table holds.
    rng = np.random.default_rng([KEY_SEED, tokens, experts, top_k, round(alpha * 1000)])
    target, power, draws = tokens * top_k, 1.0 - alpha, np.arange(DRAWS)
    low, high = (1.0, tokens * 0.8) if target > experts else (0.01, 2.0)
    weight = ((high**power - low**power) * rng.random((DRAWS, experts)) + low**power) ** (1.0 / power)
    counts_ME = np.rint(weight / weight.sum(axis=1, keepdims=True) * target).astype(np.int64)
    # Rounding is corrected as the collector does: add to the largest, take from the smallest, one each, in turn.
    order = np.argsort(-counts_ME, axis=1, kind="stable")
    delta = target - counts_ME.sum(axis=1)
    for i in range(int(np.abs(delta).max())):
        more, less = draws[delta > i], draws[-delta > i]
        counts_ME[more, order[more, i % experts]] += 1
        smallest = order[less, -(i % experts) - 1]
        empty = counts_ME[less, smallest] == 0
        smallest[empty] = counts_ME[less[empty]].argmax(axis=1)
        counts_ME[less, smallest] -= 1
    return counts_ME


def hottest_rank_counts(counts_ME: np.ndarray, ep_size: int, num_tokens: int) -> np.ndarray:
    """Return [M, E / P] rows per local expert of EP rank 0 after the hottest rank was swapped there.

    An expert cannot take one token twice: what exceeds ``num_tokens`` goes to the lowest expert ids with room (ties of
    the router's top-k).
    """
    draws = np.arange(len(counts_ME))
    groups_MPl = counts_ME.reshape(len(draws), ep_size, -1)
    hottest = groups_MPl.sum(axis=2).argmax(axis=1)
    order_MP = np.tile(np.arange(ep_size), (len(draws), 1))
    order_MP[draws, hottest], order_MP[:, 0] = 0, hottest
    counts = groups_MPl[draws[:, None], order_MP].reshape(counts_ME.shape)
    surplus = np.maximum(counts - num_tokens, 0).sum(axis=1, keepdims=True)
    counts = np.minimum(counts, num_tokens)
    room = num_tokens - counts
    counts += np.clip(surplus - (room.cumsum(axis=1) - room), 0, room)
    return counts[:, : counts.shape[1] // ep_size]

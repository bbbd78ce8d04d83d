"""Find rows that contradict others: larger work should not be faster.

Two tests for published tables:

* a *point* that takes longer than a larger one of the same curve by more than a limit;
* a *curve* (experts) that takes longer than the same work on fewer ranks, at most sizes.

Such rows are mostly systematic (a bad kernel choice of that software), so they are kept and marked, not dropped: a fit
may leave them out, a table may override with them. Rows measured here are tested against every case that asks more in
each feature, and timed again first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from profiler.cases.operations import OPERATIONS

POINT_LIMIT = 1.25
POINT_LIMIT_RANDOM = 1.6
"""Limit where the routing was drawn at random: those rows carry routing noise."""
CURVE_LIMIT = 1.15
SMALL_TOKENS = 512
SLACK_US = 20.0
"""Differences below this are scheduling, not work."""
DOUBT = "slower than a case that asks more in every feature"


def curve_ids(*columns: np.ndarray) -> np.ndarray:
    """Return one integer per row, equal where all columns are equal."""
    coded = [np.unique(column, return_inverse=True)[1] for column in columns]
    return np.unique(np.stack(coded, axis=1), axis=0, return_inverse=True)[1].reshape(-1)


def point_flags(curve: np.ndarray, size: np.ndarray, time: np.ndarray, limit: np.ndarray | float) -> np.ndarray:
    """Return a mask of rows slower than ``limit`` times the fastest larger row of their curve."""
    order = np.lexsort((size, curve))
    flagged = np.zeros(len(time), dtype=bool)
    limits = np.broadcast_to(limit, time.shape)
    for rows in np.split(order, np.flatnonzero(np.diff(curve[order])) + 1):
        least = np.minimum.accumulate(time[rows][::-1])[::-1]
        flagged[rows[:-1]] = time[rows[:-1]] > limits[rows[:-1]] * least[1:]
    return flagged


def shard_flags(curve: np.ndarray, shards: np.ndarray, tokens: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Return a mask of whole curves that are slower than a coarser sharding of the same work at most sizes.

    ``curve`` identifies rows that differ only in ``shards`` (ranks that share the work) and ``tokens``.
    """
    times: dict[tuple[int, int], dict[int, float]] = {}
    for key, shard, token, value in zip(curve.tolist(), shards.tolist(), tokens.tolist(), time.tolist(), strict=True):
        times.setdefault((key, shard), {})[token] = value
    slow: set[tuple[int, int]] = set()
    fastest: dict[int, dict[int, float]] = {}
    for key, shard in sorted(times):
        own, coarser = times[key, shard], fastest.setdefault(key, {})
        if _slower(own, coarser):
            slow.add((key, shard))
        # Against the fastest coarser sharding, not the next one: that may be slow itself.
        fastest[key] = {t: min(own.get(t, np.inf), coarser.get(t, np.inf)) for t in own.keys() | coarser.keys()}
    return np.array([pair in slow for pair in zip(curve.tolist(), shards.tolist(), strict=True)], dtype=bool)


def _slower(own: dict[int, float], coarser: dict[int, float]) -> bool:
    ratios = {token: own[token] / coarser[token] for token in own if token in coarser}
    small = [ratio for token, ratio in ratios.items() if token <= SMALL_TOKENS]
    return any(some and float(np.median(some)) > CURVE_LIMIT for some in (list(ratios.values()), small))


def doubtful_cases(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the ids of measured rows that are slower than a row of the same kind that asks more in every feature."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["status"] == "ok":
            groups.setdefault((row["op"], row["direction"]), []).append(row)
    doubts: set[str] = set()
    for (op, _), listed in groups.items():
        features = np.array([[row[name] for name in OPERATIONS[op].features] for row in listed])
        time = np.array([row["time_us"] for row in listed])
        asks_less = (features[:, None] <= features[None]).all(axis=2)
        slower = time[:, None] > POINT_LIMIT * time[None] + SLACK_US
        doubts |= {listed[i]["case_id"] for i in np.flatnonzero((asks_less & slower).any(axis=1))}
    return doubts


def faster(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the faster of two rows of one case; a row without a time loses."""
    if first["status"] != "ok" or (second["status"] == "ok" and second["time_us"] < first["time_us"]):
        return dict(second)
    return dict(first)

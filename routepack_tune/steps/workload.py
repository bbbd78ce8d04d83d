"""What a stream of step batches looks like, in a few numbers that a bundle can carry, and how far two streams differ.

Everything compared is the base-2 logarithm of a positive quantity, so that a distance is a ratio: tokens of a step,
quantiles of the lengths, the hottest expert's load over the mean one, and the effective number of experts (2 to the
entropy of the loads); the last two are means over layers. The distance between two streams is that of their means over
batches. It is a shift where it exceeds both a floor (below which tuned settings do not care) and three times what the
tuning batches' own spread lets one expect of as many recent batches. Which experts are hot is no shift: every step's
placement is planned anew.

Shape suffixes: L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler.errors import RoutePackError

if TYPE_CHECKING:
    from search import StepBatch

QUANTILES = tuple(q / 10 for q in range(11))
SPREADS = 3.0
FLOORS = {"tokens a step": 0.25, "lengths": 0.25, "hottest expert over mean": 0.20, "effective experts": 0.10}
"""Relative differences that are never a shift, of the numbers of a batch in :data:`KEYS`."""
KEYS = ("tokens", "length_quantiles", "hottest_over_mean", "effective_experts")
Stream = Sequence[Mapping[str, Any]]
"""The numbers of every batch."""


def workload_statistics(names: Sequence[str], batches: Iterable[StepBatch]) -> list[dict[str, Any]]:
    """Return the numbers of every batch of a stream, ready for JSON; every batch must carry routes."""
    rows = []
    for name, batch in zip(names, batches, strict=True):
        loads = batch.expert_counts.sum(axis=0, dtype=np.int64)
        if not loads.any():
            raise RoutePackError(f"{name}: no sample carries routes. Enable routing replay in the rollout.")
        lengths = [round(float(q), 1) for q in np.quantile(batch.lengths, QUANTILES)]
        numbers = {"tokens": int(batch.lengths.sum()), "length_quantiles": lengths, **_skew(loads)}
        rows.append({"name": name, "samples": batch.num_samples, **numbers})
    return rows


def compare_workloads(tuned: Stream, recent: Stream) -> dict[str, tuple[float, float, float]]:
    """Return how far recent batches are from tuning batches in every respect, in percent (see the module's text).

    The mean change with its sign; the mean of the absolute change, which is above it where, say, short samples shrink
    and long ones grow; and the limit above which that is a shift.
    """
    found = {}
    for (name, floor), key in zip(FLOORS.items(), KEYS, strict=True):
        before, after = (np.log2([np.atleast_1d(row[key]) for row in stream]) for stream in (tuned, recent))
        change, count, limit = after.mean(axis=0) - before.mean(axis=0), len(before), np.log2(1 + floor)
        if count > 1:
            # A batch is sqrt(1 + 1 / (k - 1)) spreads from the mean of the k - 1 others.
            left_out = np.abs(before - (before.sum(axis=0) - before) / (count - 1)).mean(axis=1)
            spread = np.sqrt(np.mean(left_out**2) / (1 + 1 / (count - 1)))
            limit = max(limit, SPREADS * spread * np.sqrt(1 / len(after) + 1 / count))
        change, distance, limit = (100 * (np.exp2([change.mean(), np.abs(change).mean(), limit]) - 1)).tolist()
        found[name] = change, distance, limit
    return found


def _skew(loads_LE: np.ndarray) -> dict[str, float]:
    """Return the hottest expert over the mean and the effective number of experts, geometric means over layers."""
    share_LE = loads_LE / loads_LE.sum(axis=1, keepdims=True)
    entropy_L = -(share_LE * np.log2(np.where(share_LE > 0, share_LE, 1.0))).sum(axis=1)
    hottest_L = np.log2(share_LE.max(axis=1) * share_LE.shape[1])
    means = {"hottest_over_mean": np.exp2(hottest_L.mean()), "effective_experts": np.exp2(entropy_L.mean())}
    return {name: round(float(mean), 4) for name, mean in means.items()}

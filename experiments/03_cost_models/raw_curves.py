"""Times read off the measured curves with as little model as possible: what plans are priced by, whoever made them.

* attention: the measured shape nearest in log of (heads, key-value heads, head widths) among those of the same window;
  for every measured number of sequences a log-log line through the measured lengths, and a log-log line through those
  numbers; beyond the most sequences measured, time grows with their number.
* experts: the curve of balanced routing of the nearest (hidden, inner width, local experts), log-log in routed rows;
  routing inside the timed region stays in.
* dense: the nearest (n, k), log-log in tokens. all-to-all: the nearest number of ranks, log-log in bytes.

A shape that was not measured itself is scaled by the ratio of arithmetic to the nearest one. Beyond a curve's ends its
last segment goes on. A floor is the least time of the curve. Backward is forward times the library's assumed ratio.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from costmodels import CostModel
from profiler import Measurements

NEAREST = {
    "attention": ("num_heads", "num_kv_heads", "qk_head_dim", "v_head_dim"),
    "experts": ("hidden_size", "inter_size", "local_experts"),
    "dense": ("n", "k"),
    "alltoall": ("ranks",),
}
SIZE = {"attention": "max_length", "experts": "rows", "dense": "tokens", "alltoall": "bytes"}


def log_log(x: np.ndarray, at: np.ndarray, time_us: np.ndarray) -> np.ndarray:
    """Return the broken line through (at, time) in logs, its end segments going on; ``at`` ascends."""
    if at.size == 1:
        return np.full(x.size, time_us[0]) * x / at[0]
    log_x, log_at, log_time = np.log(x), np.log(at), np.log(time_us)
    segment = np.clip(np.searchsorted(log_at, log_x) - 1, 0, at.size - 2)
    slope = (log_time[segment + 1] - log_time[segment]) / (log_at[segment + 1] - log_at[segment])
    return np.exp(log_time[segment] + slope * (log_x - log_at[segment]))


class RawCurves:
    """Stand where a cost model stands when tables are made; every time is read off measured curves."""

    def __init__(self, measured: Measurements, model: CostModel) -> None:
        self.models, self.params, self._model = model.models, model.params, model
        self._rows = {}
        for op in NEAREST:
            chosen = measured.select(op=op, direction="forward", status="ok", flag="")
            chosen = chosen.select(pattern="balanced") if op == "experts" else chosen
            self._rows[op] = {name: np.asarray(chosen.rows[name], dtype=np.float64)
                              for name in (*model.models[op, "forward"].operation.features, "time_us")}  # fmt: skip

    def predict_us(self, op: str, direction: str, features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return microseconds of one shape at many sizes, and no marks."""
        given = {name: np.atleast_1d(np.asarray(value, dtype=np.float64)) for name, value in features.items()}
        curve, scale = self._curve(op, given)
        size = given[SIZE[op]]
        if op == "attention":
            time_us = _by_sequences(size, given["num_sequences"], curve)
        else:
            at, mean_us = _merged(curve[SIZE[op]], curve["time_us"])
            time_us = log_log(size, at, mean_us)
        return time_us * scale * self._factor(op, direction, given), np.zeros(size.size, dtype=bool)

    def floor_us(self, op: str, direction: str, features: Mapping[str, np.ndarray]) -> float:
        """Return the least measured time of the shape's curve."""
        given = {name: np.atleast_1d(np.asarray(value, dtype=np.float64)) for name, value in features.items()}
        curve, _ = self._curve(op, given)
        shortest = {**features, **dict.fromkeys(("tokens", "pairs", "num_sequences", "max_length"), 1)}
        return float(curve["time_us"].min() * self._factor(op, direction, shortest))

    def _factor(self, op: str, direction: str, features: Mapping[str, Any]) -> Any:
        return 1.0 if direction == "forward" else self._model.backward_ratio(op, features)

    def _curve(self, op: str, given: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], float]:
        """Return the rows of the nearest measured shape, and arithmetic asked over arithmetic of that shape."""
        rows, names = self._rows[op], NEAREST[op]
        asked = np.array([given[name][0] for name in names])
        shapes = np.stack([rows[name] for name in names], axis=1)
        distance = np.abs(np.log(shapes / asked)).sum(axis=1)
        if op == "attention":
            distance = np.where(rows["window"] == given["window"][0], distance, np.inf)
        nearest = shapes[int(np.argmin(distance))]
        mine = (shapes == nearest).all(axis=1) & np.isfinite(distance)
        return {name: column[mine] for name, column in rows.items()}, _work(op, asked) / _work(op, nearest)

    def nearest(self, op: str, features: Mapping[str, np.ndarray]) -> str:
        """Return the measured shape that stands for the asked one, in words."""
        given = {name: np.atleast_1d(np.asarray(value, dtype=np.float64)) for name, value in features.items()}
        curve, scale = self._curve(op, given)
        shape = ", ".join(f"{name} {curve[name][0]:g}" for name in NEAREST[op])
        return f"{op} ({shape}) x {scale:.3g}"


def _work(op: str, shape: np.ndarray) -> float:
    """Return what arithmetic is proportional to, at equal sizes."""
    if op == "attention":
        return float(shape[0] * (shape[2] + shape[3]))
    return float(shape[0] * shape[1]) if op in ("experts", "dense") else 1.0


def _merged(at: np.ndarray, time_us: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return distinct sizes in order with the median of their times."""
    sizes = np.unique(at)
    return sizes, np.array([np.median(time_us[at == size]) for size in sizes])


def _by_sequences(length: np.ndarray, count: np.ndarray, curve: Mapping[str, np.ndarray]) -> np.ndarray:
    counts = np.unique(curve["num_sequences"])
    lines = []
    for measured in counts:
        mine = curve["num_sequences"] == measured
        lines.append(log_log(length, *_merged(curve["max_length"][mine], curve["time_us"][mine])))
    grid = np.stack(lines)
    place = np.clip(np.searchsorted(counts, count) - 1, 0, counts.size - 2)
    share = np.log(count / counts[place]) / np.log(counts[place + 1] / counts[place])
    column = np.arange(length.size)
    low, high = np.log(grid[place, column]), np.log(grid[place + 1, column])
    within = np.exp(low + np.minimum(share, 1.0) * (high - low))
    return within * np.maximum(count / counts[-1], 1.0)

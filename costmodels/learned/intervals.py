"""How far a prediction may lie from a measurement: split-conformal intervals from held-out residuals.

The half-width at a size is a quantile of |log(time / prediction)| over rows that were predicted without their size
group, by class of size. Outside the timed sizes residuals are not exchangeable with those inside: judge by
:data:`WIDENING` times the half-width there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.9
CLASSES = 6
LEAST_ROWS = 40
"""Held-out rows that a class of sizes has at least; half of them are enough for a single class."""
WIDENING = 2.0


@dataclass(frozen=True)
class Intervals:
    """Half-widths of the log of time that cover :data:`LEVEL` of the rows, by class of sizes."""

    edges: tuple[float, ...]
    """Sizes that divide the classes, ascending."""
    half_log: tuple[float, ...]
    """Per class."""

    def half_widths(self, size: np.ndarray) -> np.ndarray:
        """Return every row's half-width inside the timed sizes, as a log."""
        return np.asarray(self.half_log)[np.searchsorted(self.edges, size, side="right")]


def conformal_quantile(errors: np.ndarray, level: float = LEVEL) -> float:
    """Return the split-conformal quantile: the least error that covers ``level`` of one more row."""
    place = min(errors.size - 1, int(np.ceil((errors.size + 1) * level)) - 1)
    return float(np.sort(errors)[place])


def calibrate(size: np.ndarray, log_error: np.ndarray) -> Intervals | None:
    """Return intervals from absolute log errors of held-out rows; None where there are too few."""
    if size.size < LEAST_ROWS // 2:
        return None
    classes = max(1, min(CLASSES, size.size // LEAST_ROWS))
    edges = np.unique(np.quantile(size, np.arange(1, classes) / classes, method="nearest"))
    edges = edges[edges > size.min()]  # else nothing lies below the first
    place = np.searchsorted(edges, size, side="right")
    half = tuple(conformal_quantile(log_error[place == k]) for k in range(edges.size + 1))
    return Intervals(tuple(edges.tolist()), half)


def coverage(size: np.ndarray, log_error: np.ndarray, groups: Sequence[int] | np.ndarray) -> float | None:
    """Return the share of rows inside intervals that were calibrated without their group; None with too few rows."""
    hits: list[bool] = []
    for group in np.unique(groups):
        test = np.asarray(groups) == group
        if (found := calibrate(size[~test], log_error[~test])) is not None:
            hits += (log_error[test] <= found.half_widths(size[test])).tolist()
    return float(np.mean(hits)) if hits else None

"""How far a prediction may lie from a measurement: split-conformal intervals from held-out residuals.

The half-width at a size is a quantile of |log(time / prediction)| over rows that were predicted without their size
group, by class of size. Outside the timed ranges residuals are not exchangeable with those inside: the half-width is
doubled there. Shapes that were never timed have the quantile of held-out shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LEVEL = 0.9
CLASSES = 6
LEAST_ROWS = 40
"""A class of sizes with fewer held-out rows is joined to others."""
WIDENING = 2.0


@dataclass(frozen=True)
class Intervals:
    """Hold half-widths of the log of time that cover :data:`LEVEL` of the rows."""

    edges: tuple[float, ...]
    """Sizes that divide the classes, ascending."""
    half_log: tuple[float, ...]
    """Per class of sizes."""
    unseen_half_log: float | None
    """In shapes that were never timed; None where none could be held out."""

    def half_widths(self, size: np.ndarray, known: np.ndarray, outside: np.ndarray) -> np.ndarray:
        """Return every row's half-width as a share of its time: from time / (1 + h) to time * (1 + h)."""
        half = np.asarray(self.half_log)[np.searchsorted(self.edges, size, side="right")]
        half = np.where(known & outside, WIDENING * half, half)
        unseen = WIDENING * max(self.half_log) if self.unseen_half_log is None else self.unseen_half_log
        return np.asarray(np.expm1(np.where(known, half, unseen)))

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"edges": list(self.edges), "half_log": list(self.half_log), "unseen_half_log": self.unseen_half_log}

    @classmethod
    def from_json(cls, item: dict[str, Any]) -> Intervals:
        """Build what :meth:`to_json` wrote."""
        return cls(tuple(item["edges"]), tuple(item["half_log"]), item["unseen_half_log"])


def conformal_quantile(errors: np.ndarray, level: float = LEVEL) -> float:
    """Return the split-conformal quantile: the least error that covers ``level`` of one more row."""
    place = min(errors.size - 1, int(np.ceil((errors.size + 1) * level)) - 1)
    return float(np.sort(errors)[place])


def calibrate(size: np.ndarray, log_error: np.ndarray, unseen_error: np.ndarray | None) -> Intervals | None:
    """Return intervals from absolute log errors of held-out rows; None where there are too few."""
    if size.size < LEAST_ROWS // 2:
        return None
    classes = max(1, min(CLASSES, size.size // LEAST_ROWS))
    edges = np.unique(np.quantile(size, np.arange(1, classes) / classes, method="nearest"))
    place = np.searchsorted(edges, size, side="right")
    full = [k for k in range(edges.size + 1) if (place == k).any()]
    half = [conformal_quantile(log_error[place == k]) for k in full]
    # An empty class (all rows at its edge) has no lower edge of its own.
    edges = edges[[k - 1 for k in full[1:]]] if len(full) > 1 else edges[:0]
    unseen = None if unseen_error is None or unseen_error.size < LEAST_ROWS // 2 else conformal_quantile(unseen_error)
    return Intervals(tuple(edges.tolist()), tuple(half), unseen)


def coverage(size: np.ndarray, log_error: np.ndarray, groups: Sequence[int] | np.ndarray) -> float | None:
    """Return the share of rows inside intervals that were calibrated without their group; None with too few rows."""
    groups, hits, asked = np.asarray(groups), 0, 0
    for group in np.unique(groups):
        test = groups == group
        found = calibrate(size[~test], log_error[~test], None)
        if found is not None:
            half = np.asarray(found.half_log)[np.searchsorted(found.edges, size[test], side="right")]
            hits, asked = hits + int((log_error[test] <= half).sum()), asked + int(test.sum())
    return hits / asked if asked else None

"""The learned part: a residual on log(time / baseline), and what a prediction may rest on.

One :class:`OperationModel` prices one operation in one direction. Which members of the residual answer in which regime
(on a measured curve, between curves, beyond the timed sizes, in shapes never timed) was decided on held-out rows
(:mod:`costmodels.learned.residual`); where nothing beat the physics baseline, it answers alone. Every prediction says
whether it lies outside what was timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from costmodels.features import Columns, Operation, checked_columns, take
from costmodels.learned.curves import Curves
from costmodels.learned.intervals import Intervals
from costmodels.learned.ranges import Ranges, excess_octaves, known_families
from costmodels.learned.residual import Mix, Residual, known_log_ratio
from costmodels.learned.smooth import Kernel
from costmodels.learned.trees import Trees


class Predictor(Protocol):
    """What prices one operation in one direction: this GPU's own model, or one joined to a sibling's (``prior.py``)."""

    @property
    def own(self) -> OperationModel:
        """The model learned from this GPU's rows alone."""

    @property
    def kind(self) -> str:
        """What the residual rests on: ``lightgbm``, ``smooth``, ``prior``, or ``baseline`` for physics alone."""

    @property
    def shapes(self) -> Ranges:
        """Timed shapes, each with the range of every size feature."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why a residual or a prior was refused or taken."""

    @property
    def validation(self) -> dict[str, Any]:
        """Held-out errors by split, ready for JSON."""

    @property
    def intervals(self) -> Intervals | None:
        """None where too few rows could be held out."""

    def predict_us(self, features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return microseconds and, per row, whether it lies outside what was timed."""

    def knows(self, features: Mapping[str, np.ndarray | float]) -> Mapping[str, tuple[float, float]] | None:
        """Return the timed range of every size feature of a shape, None if the shape was never timed."""


@dataclass(frozen=True)
class OperationModel:
    """Baseline and learned residual of one operation in one direction."""

    operation: Operation
    direction: str
    parameters: Mapping[str, float]
    """Fitted parameters of the baseline."""
    shapes: Ranges
    """Timed shapes, each with the range of every size feature."""
    seen: Trees | None = None
    """Trees for shapes that were timed; None where they are not used."""
    unseen: Trees | None = None
    """Trees for shapes that were not timed; None where they are not used."""
    empty_us: float | None = None
    """Measured time of a call with nothing to do, where one was timed."""
    rows: int = 0
    flagged_rows: int = 0
    """Rows left out because they contradict their neighbours."""
    reasons: tuple[str, ...] = ()
    """Why a residual was refused, where it was."""
    validation: dict[str, Any] = field(default_factory=dict)
    smooth: Kernel | None = None
    """Smooth residual for shapes that were timed."""
    unseen_smooth: Kernel | None = None
    """The same for shapes that were not."""
    curves: Curves | None = None
    """Residual along measured curves."""
    mixes: Mapping[str, Mix] = field(default_factory=dict)
    """Members averaged in each regime."""
    intervals: Intervals | None = None
    """None where too few rows could be held out."""

    @property
    def own(self) -> OperationModel:
        """This model itself."""
        return self

    @property
    def kind(self) -> str:
        """``lightgbm``, ``smooth`` (kernel or curves) or ``baseline``, by what the residual rests on."""
        if self.seen is not None:
            return "lightgbm"
        return "baseline" if self.smooth is None and self.curves is None else "smooth"

    def predict_us(self, features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return microseconds and, per row, whether it lies outside what was timed."""
        columns = checked_columns(self.operation, features)
        time_us = np.asarray(self.operation.baseline(columns, self.parameters), dtype=np.float64)
        excess, outside = excess_octaves(self.operation, self.shapes, columns)
        known = known_families(self.operation, self.shapes, columns)
        return time_us * np.exp(self._log_ratio(columns, known, excess)), outside

    def floor_us(self, features: Mapping[str, np.ndarray]) -> float:
        """Return the time of a call with nothing to do, for one shape."""
        if self.empty_us is not None:
            return self.empty_us
        columns = {name: np.atleast_1d(np.asarray(value, dtype=np.float64)) for name, value in features.items()}
        return float(self.operation.floor(columns, self.parameters)[0])

    def knows(self, features: Mapping[str, np.ndarray | float]) -> Mapping[str, tuple[float, float]] | None:
        """Return the timed range of every size feature of a shape, None if the shape was never timed."""
        return self.shapes.get(tuple(int(features[name]) for name in self.operation.shape))

    def _log_ratio(self, columns: Columns, known: np.ndarray, excess: np.ndarray) -> np.ndarray:
        total = np.zeros(known.size)
        seen = Residual(trees=self.seen, smooth=self.smooth, curve=self.curves)
        unseen = Residual(trees=self.unseen, smooth=self.unseen_smooth)
        # A shape that was never timed lies on no curve, and beyond no size: what answers there is "between".
        unseen_mixes = {"between": self.mixes.get("unseen", ())}
        for rows, residual, mixes in ((known, seen, self.mixes), (~known, unseen, unseen_mixes)):
            if rows.any():
                part = take(columns, rows)
                members = residual.members(self.operation, part, self.operation.derive(part))
                total[rows] = known_log_ratio(members, mixes, excess[rows])
        return total

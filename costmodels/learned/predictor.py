"""The learned part: a residual on log(time / baseline), and what a prediction may rest on.

One :class:`OperationModel` prices one operation in one direction. Which members of the residual answer in which regime
(on a measured curve, between curves, beyond the timed sizes, in shapes never timed) was decided on held-out rows
(:mod:`costmodels.learned.residual`); where nothing beat the physics baseline, it answers alone. Every prediction says
whether it lies outside what was timed, and how far it may be off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from costmodels.features import Columns, Operation, checked_columns, size_of
from costmodels.learned.curves import Curves
from costmodels.learned.intervals import Intervals
from costmodels.learned.ranges import excess_octaves, known_families
from costmodels.learned.residual import Mix, Residual, known_log_ratio, mean_of
from costmodels.learned.smooth import Kernel
from costmodels.learned.trees import Trees

REGIMES = ("measured", "between", "larger", "beyond", "unseen")
PLAIN_MIXES: Mapping[str, Mix] = dict.fromkeys(REGIMES, ("trees",))
"""What answers where no choice was made."""


@dataclass(frozen=True)
class Overrides:
    """Hold timed points that contradict their neighbours: real for the software they were timed with, never smooth.

    They are no part of the fit; a caller that asks about exactly such a point may have the measured time instead.
    """

    features: np.ndarray
    """[points, raw features in the operation's order], distinct."""
    time_us: np.ndarray
    """[points]: median of the times of a point."""

    @classmethod
    def of(cls, operation: Operation, columns: Columns) -> Overrides | None:
        """Collect the points of rows with raw features and ``time_us``; None without any."""
        if not columns or not columns["time_us"].size:
            return None
        points = np.stack([columns[name] for name in operation.features], axis=1)
        distinct, inverse = np.unique(points, axis=0, return_inverse=True)
        inverse = np.asarray(inverse).reshape(-1)
        times = [float(np.median(columns["time_us"][inverse == place])) for place in range(len(distinct))]
        return cls(distinct, np.array(times))

    @cached_property
    def _places(self) -> dict[tuple[float, ...], float]:
        return dict(zip(map(tuple, self.features.tolist()), self.time_us.tolist(), strict=True))

    def find_us(self, operation: Operation, columns: Columns) -> np.ndarray:
        """Return the measured microseconds of every row that is such a point, NaN of the others."""
        rows = np.stack([columns[name] for name in operation.features], axis=1).tolist()
        return np.array([self._places.get(tuple(row), np.nan) for row in rows])


@dataclass(frozen=True)
class OperationModel:
    """Price one operation in one direction."""

    operation: Operation
    direction: str
    parameters: Mapping[str, float]
    """Fitted parameters of the baseline."""
    seen: Trees | None
    """Trees for shapes that were timed; None where they are not used."""
    unseen: Trees | None
    """Trees for shapes that were not timed; None where they are not used."""
    shapes: Mapping[tuple[int, ...], Mapping[str, tuple[float, float]]]
    """Timed shapes, each with the range of every size feature."""
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
    mixes: Mapping[str, Mix] = field(default_factory=lambda: dict(PLAIN_MIXES))
    """Members averaged in each regime."""
    intervals: Intervals | None = None
    """None where too few rows could be held out."""
    overrides: Overrides | None = None

    @property
    def kind(self) -> str:
        """``lightgbm`` or ``smooth`` by what the residual rests on, ``baseline`` where physics alone is used."""
        if self.seen is not None:
            return "lightgbm"
        return "baseline" if self.smooth is None and self.curves is None else "smooth"

    def predict_us(self, features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return microseconds and, per row, whether it lies outside what was timed."""
        columns = checked_columns(self.operation, features)
        time_us = np.asarray(self.operation.baseline(columns, self.parameters), dtype=np.float64)
        excess, outside = excess_octaves(self.operation, self.shapes, columns)
        return time_us * np.exp(self._log_ratio(columns, self._known_family(columns), excess)), outside

    def override_us(self, features: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the measured microseconds of points left out of the fit as inconsistent, NaN of all other rows."""
        columns = checked_columns(self.operation, features)
        rows = columns[self.operation.size[0]].size
        return np.full(rows, np.nan) if self.overrides is None else self.overrides.find_us(self.operation, columns)

    def half_width(self, features: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return every row's half-width h of the 90 % interval, which goes from time / (1 + h) to time * (1 + h).

        NaN where too few rows could be held out to know.
        """
        columns = checked_columns(self.operation, features)
        size = size_of(self.operation, columns)
        if self.intervals is None:
            return np.full(size.size, np.nan)
        return self.intervals.half_widths(size, self._known_family(columns), self._outside(columns))

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
        for seen, mask in ((True, known), (False, ~known)):
            if not mask.any():
                continue
            part = {name: column[mask] for name, column in columns.items()}
            derived, rows = self.operation.derive(part), int(mask.sum())
            if seen:
                wanted = {name for regime, mix in self.mixes.items() if regime != "unseen" for name in mix}
                residual = Residual(self.seen, self.smooth, self.curves)
                members = residual.members(self.operation, part, derived, wanted)
                total[mask] = known_log_ratio(members, self.mixes, excess[mask])
            else:
                mix = self.mixes.get("unseen", ())
                residual = Residual(self.unseen, self.unseen_smooth)
                total[mask] = mean_of(residual.members(self.operation, part, derived, set(mix)), mix, rows)
        return total

    def _known_family(self, columns: Columns) -> np.ndarray:
        return known_families(self.operation, self.shapes, columns)

    def _outside(self, columns: Columns) -> np.ndarray:
        return excess_octaves(self.operation, self.shapes, columns)[1]

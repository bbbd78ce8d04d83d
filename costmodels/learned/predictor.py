"""The model of one operation in one direction: physics, what is learned beyond it, and perhaps a sibling GPU's prior.

Which members of the residual answer in which regime (on a measured curve, between curves, beyond the timed sizes, in
shapes never timed) was decided on held-out rows (:mod:`costmodels.learned.residual`); where nothing beat the physics
baseline, it answers alone. With a prior, a second route is averaged in, in log space:

    time = baseline(parameters refitted here) x residual of the prior x exp(discrepancy learned here)

What a formula misses (kernel choices, tile effects) is mostly the same on two GPUs of one architecture; what differs
(bandwidth, clocks, power) is in the formula's parameters, which few points settle. The prior is asked as it is,
whatever it is made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from costmodels.features import (
    MOST,
    Columns,
    Operation,
    Ranges,
    checked_columns,
    excess_octaves,
    known_families,
    take,
    union,
)
from costmodels.learned.residual import Mix, Residual, known_log_ratio, mean_of
from costmodels.learned.validation import Intervals
from profiler import RoutePackError

LEAST_SIZE = 1e-9
PRIOR_RESIDUAL = "prior_log_residual"
"""Input of the discrepancy: log of the prior's time over the prior's baseline."""


@dataclass(frozen=True)
class Prior:
    """Hold what is taken from a sibling GPU for one operation in one direction."""

    source: OperationModel
    name: str
    """Device of the prior."""
    data_hash: str
    """Of the measurements that the prior was fitted to."""
    parameters: Mapping[str, float]
    """The baseline's parameters on this GPU, pulled to the prior's."""
    discrepancy: Residual
    """log(time here / (refitted baseline x prior's residual)) is the mean of its members, 0 without any."""
    seen_share: float = 1.0
    """Weight of the prior's route in shapes timed here; the rest is the own model's, averaged in log space."""
    unseen_share: float = 1.0
    """The same in shapes not timed here."""

    def __post_init__(self) -> None:
        check_parameters(self.source.operation, self.parameters)
        if not (0 <= self.seen_share <= 1 and 0 <= self.unseen_share <= 1):
            raise ValueError(f"expected shares from 0 to 1, got {self.seen_share} and {self.unseen_share}")

    def predict_us(self, columns: Columns) -> np.ndarray:
        """Return microseconds by the prior's route alone."""
        operation, residual = self.source.operation, self.source.log_residual(columns)
        inputs = {**operation.derive(columns), PRIOR_RESIDUAL: residual}
        members = self.discrepancy.members(operation, columns, inputs)
        log_us = np.log(operation.baseline(columns, self.parameters)) + residual
        return _finite(operation, np.exp(log_us + mean_of(members, members, residual.size)))


@dataclass(frozen=True)
class OperationModel:
    """Price one operation in one direction."""

    operation: Operation
    direction: str
    parameters: Mapping[str, float]
    """Fitted parameters of the baseline."""
    shapes: Ranges
    """Shapes timed on this GPU, each with the range of every size feature."""
    known: Residual = field(default_factory=Residual)
    """Members for shapes that were timed."""
    unseen: Residual = field(default_factory=Residual)
    """Members for shapes that were not."""
    mixes: Mapping[str, Mix] = field(default_factory=dict)
    """Members averaged in each regime."""
    prior: Prior | None = None
    empty_us: float | None = None
    """Measured time of a call with nothing to do, where one was timed."""
    rows: int = 0
    flagged_rows: int = 0
    """Rows left out because they contradict their neighbours."""
    reasons: tuple[str, ...] = ()
    """Why a residual or a prior was refused or taken."""
    validation: dict[str, Any] = field(default_factory=dict)
    """Held-out errors by split, ready for JSON."""
    intervals: Intervals | None = None
    """None where too few rows could be held out."""

    def __post_init__(self) -> None:
        operation = self.operation
        check_parameters(operation, self.parameters)
        if self.prior is not None and self.prior.source.operation is not operation:
            raise ValueError(f"the prior of {operation.name} is a model of {self.prior.source.operation.name}")
        if min(self.rows, self.flagged_rows) < 0 or not (self.empty_us is None or 0 < self.empty_us <= MOST):
            raise ValueError(f"expected numbers of rows >= 0 and a positive empty_us of {operation.name}")
        sizes = set(operation.features) - set(operation.shape)
        for shape, ranges in self.shapes.items():
            known = len(shape) == len(operation.shape) and all(0 <= number <= MOST for number in shape)
            least = {name: 0 if name in operation.zero_allowed else LEAST_SIZE for name in ranges}
            ordered = all(least[name] <= low <= high <= MOST for name, (low, high) in ranges.items())
            if not (known and ordered and ranges.keys() <= sizes):
                raise ValueError(f"timed sizes of {operation.name}, shape {shape!r:.60}, are no ranges: {ranges!r:.80}")

    @property
    def kind(self) -> str:
        """What it rests on: ``prior``, ``lightgbm``, ``smooth`` (kernel or curves), or ``baseline``: physics alone."""
        if self.prior is not None:
            return "prior"
        if self.known.trees is not None:
            return "lightgbm"
        return "baseline" if self.known == Residual() else "smooth"

    @cached_property
    def timed(self) -> Ranges:
        """Shapes timed here or on the prior's GPU, each with the range of every size feature."""
        return self.shapes if self.prior is None else union(self.shapes, self.prior.source.timed)

    def predict_us(self, features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return microseconds and, per row, whether it lies outside what was timed."""
        columns = checked_columns(self.operation, features)
        known = known_families(self.operation, self.shapes, columns)
        excess, outside = excess_octaves(self.operation, self.shapes, columns)
        log_ratio = np.zeros(known.size)
        # A shape that was never timed lies on no curve, and beyond no size: what answers there is "between".
        unseen_mixes = {"between": self.mixes.get("unseen", ())}
        for rows, residual, mixes in ((known, self.known, self.mixes), (~known, self.unseen, unseen_mixes)):
            if rows.any():
                part = take(columns, rows)
                members = residual.members(self.operation, part, self.operation.derive(part))
                log_ratio[rows] = known_log_ratio(members, mixes, excess[rows])
        own_us = _finite(self.operation, self.operation.baseline(columns, self.parameters) * np.exp(log_ratio))
        if self.prior is None:
            return own_us, outside
        share = np.where(known, self.prior.seen_share, self.prior.unseen_share)
        time_us = blend(own_us, self.prior.predict_us(columns), share)
        return time_us, excess_octaves(self.operation, self.timed, columns)[1]

    def log_residual(self, columns: Columns) -> np.ndarray:
        """Return the log of the time over the model's own baseline: what it learned beyond the formula."""
        return np.asarray(np.log(self.predict_us(columns)[0] / self.operation.baseline(columns, self.parameters)))

    def floor_us(self, features: Mapping[str, Any]) -> float:
        """Return the time of a call with nothing to do, for one shape."""
        if self.empty_us is not None:
            return self.empty_us
        columns = {name: np.atleast_1d(np.asarray(value, dtype=np.float64)) for name, value in features.items()}
        return float(self.operation.floor(columns, self.parameters)[0])


def blend(own_us: np.ndarray, prior_us: np.ndarray, share: np.ndarray | float) -> np.ndarray:
    """Return the mean of two predictions in log space, ``share`` of it the prior's."""
    return np.asarray(np.exp((1.0 - share) * np.log(own_us) + share * np.log(prior_us)))


def check_parameters(operation: Operation, parameters: Mapping[str, float]) -> None:
    """Raise ValueError unless these are the positive parameters of an operation's baseline."""
    positive = all(1 / MOST <= value <= MOST for value in parameters.values())
    if list(parameters) != list(operation.parameters) or not positive:
        raise ValueError(
            f"expected positive numbers for {list(operation.parameters)} of {operation.name}, got {parameters!r:.80}"
        )


def _finite(operation: Operation, time_us: np.ndarray) -> np.ndarray:
    """Return predicted times; RoutePackError where physics and what was learned leave everything that a time can be."""
    if (wrong := ~(np.isfinite(time_us) & (time_us > 0))).any():
        raise RoutePackError(
            f"The cost model predicts {time_us[wrong][0]} us for {operation.name}: its measurements or files are "
            "damaged. Run `routepack fit` again, on sound measurements."
        )
    return np.asarray(time_us)

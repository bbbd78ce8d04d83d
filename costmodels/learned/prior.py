"""Price a GPU with the cost model of a sibling: the prior's learned residual, this GPU's physics, and what is left.

    time = baseline(parameters fitted here) x residual of the prior x exp(discrepancy learned here)

What a formula misses (kernel choices, tile effects) is mostly the same on two GPUs of one architecture; what differs
(bandwidth, clocks, power) is in the formula's parameters, which few points settle. The prior is asked as it is,
whatever it is made of, and is saved whole beside the model that rests on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from costmodels.features import Columns, Operation, checked_columns
from costmodels.learned.intervals import Intervals
from costmodels.learned.predictor import OperationModel, Predictor
from costmodels.learned.ranges import Ranges, excess_octaves, joined, known_families
from costmodels.learned.residual import Residual, mean_of

PRIOR_RESIDUAL = "prior_log_residual"
"""Input of the discrepancy: log of the prior's time over the prior's baseline."""


@dataclass(frozen=True)
class Prior:
    """Hold what is taken from a sibling GPU for one operation in one direction."""

    source: Predictor
    name: str
    """Device of the prior."""
    data_hash: str
    """Of the measurements that the prior was fitted to."""
    parameters: Mapping[str, float]
    """The baseline's parameters on this GPU, pulled to the prior's."""
    discrepancy: Residual
    """log(time here / (refitted baseline x prior's residual)) is the mean of its members, 0 without any."""
    seen_share: float
    """Weight of the prior's route in shapes timed here; the rest is the own model's, averaged in log space."""
    unseen_share: float
    """The same in shapes not timed here."""

    def predict_us(self, operation: Operation, columns: Columns) -> np.ndarray:
        """Return microseconds by the prior's route alone."""
        residual = prior_residual(self.source, columns)
        log_us = np.log(operation.baseline(columns, self.parameters)) + residual
        inputs = {**operation.derive(columns), PRIOR_RESIDUAL: residual}
        members = self.discrepancy.members(operation, columns, inputs)
        return np.asarray(np.exp(log_us + mean_of(members, members, log_us.size)))


@dataclass(frozen=True)
class TransferredModel:
    """One operation priced by this GPU's own model and by a prior's route, in shares chosen on held-out rows."""

    own: OperationModel
    prior: Prior
    reasons: tuple[str, ...]
    validation: dict[str, Any]
    """Of the joint model."""
    intervals: Intervals | None
    """Calibrated on held-out rows of this GPU, the prior in use; the own model's where too few could be held out."""

    @property
    def kind(self) -> str:
        """``prior``: the residual of another GPU is in use."""
        return "prior"

    @cached_property
    def shapes(self) -> Ranges:
        """What was timed here or on the prior's GPU."""
        return joined(self.own.shapes, self.prior.source.shapes)

    def predict_us(self, features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return microseconds and, per row, whether it lies outside what was timed here and on the prior's GPU."""
        operation = self.own.operation
        columns = checked_columns(operation, features)
        known = known_families(operation, self.own.shapes, columns)
        share = np.where(known, self.prior.seen_share, self.prior.unseen_share)
        own_us, _ = self.own.predict_us(columns)
        prior_us = self.prior.predict_us(operation, columns)
        return blend(own_us, prior_us, share), excess_octaves(operation, self.shapes, columns)[1]

    def knows(self, features: Mapping[str, np.ndarray | float]) -> Mapping[str, tuple[float, float]] | None:
        """Return the timed range of every size feature of a shape, None if the shape was never timed."""
        return self.shapes.get(tuple(int(features[name]) for name in self.own.operation.shape))


def blend(own_us: np.ndarray, prior_us: np.ndarray, share: np.ndarray | float) -> np.ndarray:
    """Return the mean of two predictions in log space, ``share`` of it the prior's."""
    return np.asarray(np.exp((1.0 - share) * np.log(own_us) + share * np.log(prior_us)))


def prior_residual(source: Predictor, columns: Columns) -> np.ndarray:
    """Return the log of a model's time over its own baseline: what it learned beyond the formula."""
    time_us, _ = source.predict_us(columns)
    return np.asarray(np.log(time_us / source.own.operation.baseline(columns, source.own.parameters)))

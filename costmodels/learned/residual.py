"""Which learned residual answers where: trees, a smooth kernel and measured curves, averaged in log space.

==========  ==================================================  =========================================
regime      rows                                                what may answer
==========  ==================================================  =========================================
measured    on a measured curve, inside its sizes               whatever was best on unseen sizes
between     known shape, on no curve, inside the timed ranges   a smooth residual, unless trees are far better
larger      on a measured curve, above the timed sizes          whatever was best on the largest sizes
beyond      known shape, on no curve, above the timed sizes     a smooth residual, unless trees are far better
unseen      shapes that were never timed                        a smooth residual, unless trees are far better
==========  ==================================================  =========================================

Below the timed sizes the inner mixes go on. Off the measured curves steps of trees are not knowledge: a planner would
dodge waves that no device has. "Far better" is :data:`SMOOTH_PRICE`. Few rows are never left to trees alone. Across the
end of the timed sizes answers change gradually (:data:`RAMP_OCTAVES`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from costmodels.features import Columns, Operation
from costmodels.learned.curves import Curves, fit_curves
from costmodels.learned.smooth import Kernel, fit_kernel
from costmodels.learned.trees import Trees, grow_pair, grow_trees
from costmodels.params import FitParams

Mix = tuple[str, ...]
"""Names of members whose logs are averaged; none for physics alone."""
MIXES: tuple[Mix, ...] = (
    ("trees",), ("trees", "smooth"), ("trees", "curve"), ("trees", "smooth", "curve"), ("smooth",), ("smooth", "curve"),
)  # fmt: skip
SMOOTH: Mix = ("smooth",)
SMOOTH_PRICE = 1.4
"""A smooth residual is preferred up to this share of the best one's mean absolute log error on held-out rows."""
PAIR: Mix = ("trees", "smooth")
PAIR_PRICE = 1.05
"""With few rows held-out errors are too noisy to choose by: the mean of both is taken up to this share of the best."""
RAMP_OCTAVES = 0.5
"""Beyond the timed sizes the mix changes over from the inner to the outer one within this many octaves."""


@dataclass(frozen=True)
class Residual:
    """Hold the members for known shapes, or those for unseen ones (which have no curves)."""

    trees: Trees | None = None
    smooth: Kernel | None = None
    curves: Curves | None = None

    def members(
        self, operation: Operation, columns: Columns, derived: Columns, wanted: set[str]
    ) -> dict[str, np.ndarray]:
        """Return the log residual of each wanted member; NaN for rows on no curve."""
        found = {}
        if self.trees is not None and "trees" in wanted:
            found["trees"] = self.trees.log_ratio(derived)
        if self.smooth is not None and "smooth" in wanted:
            found["smooth"] = self.smooth.log_ratio(derived)
        if self.curves is not None and "curve" in wanted:
            found["curve"] = self.curves.log_ratio(operation, columns)
        return found


def fit_residual(
    operation: Operation, columns: Columns, target: np.ndarray, params: FitParams, unseen: bool, wanted: set[str]
) -> Residual:
    """Fit the wanted members to ``target``, the log of time over baseline; unseen shapes see dimensionless inputs."""
    derived = operation.derive(columns)
    names = operation.dimensionless if unseen else tuple(derived)
    small = target.size < params.small_rows
    trees = None
    if "trees" in wanted:
        # A few leaves more gain nothing from a second model.
        trees = grow_trees(derived, names, target, params) if small else grow_pair(derived, names, target, params)
    return Residual(
        trees=trees,
        smooth=fit_kernel(derived, names, target, params) if "smooth" in wanted else None,
        curves=fit_curves(operation, columns, target) if "curve" in wanted and not unseen else None,
    )


def mean_of(members: Mapping[str, np.ndarray], mix: Mix, rows: int) -> np.ndarray:
    """Return the mean of a mix's members, row by row over those that answer; 0 where none does."""
    total, count = np.zeros(rows), np.zeros(rows)
    for name in mix:
        if name in members:
            answers = np.isfinite(members[name])
            total += np.where(answers, members[name], 0.0)
            count += answers
    return total / np.maximum(count, 1.0)


def known_log_ratio(members: Mapping[str, np.ndarray], mixes: Mapping[str, Mix], excess: np.ndarray) -> np.ndarray:
    """Return the log residual in known shapes; ``excess``: octaves above the timed sizes."""
    rows = excess.size
    on_curve = np.isfinite(members["curve"]) if "curve" in members else np.zeros(rows, dtype=bool)
    inner = np.where(on_curve, *(mean_of(members, mixes.get(name, ()), rows) for name in ("measured", "between")))
    outer = np.where(on_curve, *(mean_of(members, mixes.get(name, ()), rows) for name in ("larger", "beyond")))
    share = np.clip(excess / RAMP_OCTAVES, 0.0, 1.0)
    return np.asarray((1.0 - share) * inner + share * outer)


def best_mix(members: Mapping[str, np.ndarray], true: np.ndarray, *, smooth: bool, small: bool) -> Mix:
    """Return the mix with the least mean absolute log error; the smooth one within its price where asked for.

    Few rows (``small``) are never left to trees alone, which follow noise; their default is the mean of trees and
    Gaussian process.
    """
    errors = {
        mix: float(np.abs(mean_of(members, mix, true.size) - true).mean())
        for mix in MIXES
        if set(mix) <= set(members) and not (small and mix == ("trees",)) and not (smooth and "curve" in mix)
    }
    best = min(errors, key=lambda mix: errors[mix])
    if small:
        return PAIR if errors.get(PAIR, np.inf) <= PAIR_PRICE * errors[best] else best
    return SMOOTH if smooth and errors.get(SMOOTH, np.inf) <= SMOOTH_PRICE * errors[best] else best

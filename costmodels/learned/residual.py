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

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from costmodels.features import MOST_LOG, Columns, Names, Operation
from costmodels.learned.curves import Curves, fit_curves
from costmodels.learned.smooth import Kernel, fit_kernel
from costmodels.learned.trees import ABSOLUTE, HUBER, Trees, grow_trees
from costmodels.params import FitParams

Mix = Names
"""Names of members whose logs are averaged; none for physics alone."""
TREES, SMOOTH, PAIR = ("trees",), ("smooth",), ("trees", "smooth")
MIXES: tuple[Mix, ...] = (TREES, PAIR, ("trees", "curve"), ("trees", "smooth", "curve"), SMOOTH, ("smooth", "curve"))
STEADY = ("between", "beyond", "unseen")
"""Regimes off the measured curves."""
SMOOTH_PRICE = 1.4
"""There a smooth residual is taken up to this share of the best one's mean absolute log error on held-out rows."""
PAIR_PRICE = 1.05
"""With few rows held-out errors are too noisy to choose by: the mean of both is taken up to this share of the best."""
RAMP_OCTAVES = 0.5
"""Beyond the timed sizes the mix changes over from the inner to the outer one within this many octaves."""


@dataclass(frozen=True)
class Residual:
    """Hold the members for known shapes, those for unseen ones (which have no curves), or those of a discrepancy."""

    scale: float | None = None
    """One log ratio for everything."""
    smooth: Kernel | None = None
    trees: Trees | None = None
    curve: Curves | None = None

    def __post_init__(self) -> None:
        if self.scale is not None and not abs(self.scale) <= MOST_LOG:
            raise ValueError(f"expected a scale, a log, within +-{MOST_LOG:g}, got {self.scale}")

    def members(self, operation: Operation, columns: Columns, derived: Columns) -> dict[str, np.ndarray]:
        """Return the log residual of each member that was fitted; NaN for rows on no curve."""
        found = {} if self.scale is None else {"scale": np.full(columns[operation.size[0]].size, self.scale)}
        learned = {"smooth": self.smooth, "trees": self.trees}
        found |= {name: member.log_ratio(derived) for name, member in learned.items() if member is not None}
        if self.curve is not None:
            found["curve"] = self.curve.log_ratio(operation, columns)
        return found


def fit_residual(
    operation: Operation, columns: Columns, target: np.ndarray, params: FitParams, unseen: bool, wanted: Collection[str]
) -> Residual:
    """Fit the wanted members to ``target``, the log of time over baseline; unseen shapes see dimensionless inputs."""
    derived = operation.derive(columns)
    names = operation.dimensionless if unseen else tuple(derived)
    return Residual(
        trees=grow_trees(derived, names, target, params, linear=True) if "trees" in wanted else None,
        smooth=fit_kernel(derived, names, target, params) if "smooth" in wanted else None,
        curve=fit_curves(operation, columns, target) if "curve" in wanted and not unseen else None,
    )


def fit_discrepancy(wanted: Collection[str], inputs: Columns, target: np.ndarray, params: FitParams) -> Residual:
    """Fit some of ``scale``, ``smooth`` and ``trees`` to ``target``, what a prior leaves of the log of time."""
    names, loss = tuple(inputs), ABSOLUTE
    if target.size >= params.small_rows:
        # Fewer, smaller, slower trees: what is left after the prior is mostly noise.
        loss, trees, leaves = HUBER, max(1, params.num_trees // 2), min(15, params.num_leaves)
        params = replace(params, num_trees=trees, num_leaves=leaves, learning_rate=params.learning_rate / 2)
    return Residual(
        scale=float(np.median(target)) if "scale" in wanted else None,
        smooth=fit_kernel(inputs, names, target, params) if "smooth" in wanted else None,
        trees=grow_trees(inputs, names, target, params, loss) if "trees" in wanted else None,
    )


def mean_of(members: Mapping[str, np.ndarray], mix: Collection[str], rows: int) -> np.ndarray:
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
    measured, between = mixes.get("measured", ()), mixes.get("between", ())
    inner, outer = (
        np.where(on_curve, mean_of(members, along, rows), mean_of(members, off, rows))
        for along, off in ((measured, between), (mixes.get("larger", measured), mixes.get("beyond", between)))
    )
    share = np.clip(excess / RAMP_OCTAVES, 0.0, 1.0)
    return np.asarray((1.0 - share) * inner + share * outer)


def best_mix(members: Mapping[str, np.ndarray], true: np.ndarray, *, steady: bool, small: bool) -> Mix:
    """Return the mix with the least mean absolute log error, or the preferred one within its price.

    ``steady``: off the measured curves, where the smooth residual is preferred. ``small``: few rows, which are never
    left to trees alone, for they follow noise; the mean of trees and Gaussian process is preferred.
    """
    if not members:
        return ()
    errors = {
        mix: float(np.abs(mean_of(members, mix, true.size) - true).mean())
        for mix in MIXES
        if set(mix) <= set(members) and not (small and mix == TREES) and not (steady and "curve" in mix)
    }
    best = min(errors, key=lambda mix: errors[mix])
    preferred, price = (PAIR, PAIR_PRICE) if small else (SMOOTH, SMOOTH_PRICE) if steady else (best, 1.0)
    return preferred if errors.get(preferred, np.inf) <= price * errors[best] else best

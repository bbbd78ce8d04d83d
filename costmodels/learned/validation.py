"""How wrong a model is on rows that it has not seen.

Rows are held out by group, never one by one: all rows of a size together (sizes nobody timed), all rows of a model's
shape together (shapes nobody timed), or the largest sizes (sizes beyond those timed). In each, rows of one shape and
size are never on both sides. Baseline and residuals are fitted anew without the held-out rows, and every contestant is
shown: the fitted baseline, LightGBM alone, interpolation along measured curves, trees, the smooth residual, the model.

Which members the model averages is chosen among six mixes by these same errors: with thousands of rows that choice
flatters the model by nothing that shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from costmodels.features import Columns, Operation, size_of
from costmodels.learned.baseline import fit_baseline
from costmodels.learned.ranges import excess_octaves, shape_ranges
from costmodels.learned.residual import Mix, best_mix, fit_residual, known_log_ratio, mean_of
from costmodels.learned.trees import grow_trees
from costmodels.params import FitParams

MIN_TRAINING_ROWS = 10
BINS_PER_OCTAVE = 4
GAIN_NEEDED = 0.98
"""A model is better than its baseline where its mean absolute log error is below this share of the baseline's."""
SIZES, SHAPES, LARGEST = "unseen sizes", "unseen shapes", "largest sizes"
LARGEST_GROUPS = 3
SMALLER_GROUPS = 3
"""The largest sizes are predicted from at least so many groups of smaller ones."""


@dataclass(frozen=True)
class HeldOut:
    """Hold predictions of rows that were not in the fit, microseconds; every row of the data, or the largest sizes."""

    split: str
    """``unseen sizes``, ``unseen shapes`` or ``largest sizes``."""
    true_us: np.ndarray
    baseline_us: np.ndarray
    model_us: np.ndarray
    alone_us: np.ndarray | None
    """LightGBM without a baseline; None where it was not asked for."""
    curve_us: np.ndarray | None = None
    """Interpolation of the baseline's residual along measured curves; NaN for rows on no curve."""
    members: dict[str, np.ndarray] = field(default_factory=dict)
    """Log residual of every member on every row."""
    excess: np.ndarray | None = None
    """Octaves by which rows lie above the sizes that were fitted."""
    mixes: dict[str, Mix] = field(default_factory=dict)
    """What this split chose."""

    def useful(self) -> bool:
        """Return whether the model beats its baseline and is not a constant correction of it."""
        ratio = np.log(self.model_us / self.baseline_us)
        model, baseline = (np.abs(np.log(p / self.true_us)).mean() for p in (self.model_us, self.baseline_us))
        return bool(np.ptp(ratio) > 1e-9 and model < GAIN_NEEDED * baseline)

    def report(self) -> dict[str, Any]:
        """Return the errors of all contestants, ready for JSON."""
        named = {"baseline": self.baseline_us, "lightgbm_alone": self.alone_us, "curve": self.curve_us}
        for name in ("trees", "smooth"):
            if name in self.members:
                named[name] = self.baseline_us * np.exp(self.members[name])
        named["model"] = self.model_us
        errors: dict[str, Any] = {}
        for name, predicted in named.items():
            answered = np.zeros(0, dtype=bool) if predicted is None else np.isfinite(predicted)
            if predicted is not None and answered.any():
                errors[name] = error_summary(predicted[answered], self.true_us[answered])
                if not answered.all():
                    errors[name]["rows"] = int(answered.sum())
        return {"rows": int(self.true_us.size), **errors}


def error_summary(predicted: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Return median, mean (MAPE), 95th percentile and worst of the absolute relative error, in percent."""
    error = 100.0 * np.abs(predicted / true - 1.0)
    return {
        "median_pct": round(float(np.median(error)), 3),
        "mape_pct": round(float(error.mean()), 3),
        "p95_pct": round(float(np.percentile(error, 95)), 3),
        "worst_pct": round(float(error.max()), 3),
    }


def size_groups(operation: Operation, columns: Columns) -> np.ndarray:
    """Return every row's size group: quarter octaves, so that nearly equal sizes are held out together."""
    return np.rint(BINS_PER_OCTAVE * np.log2(size_of(operation, columns))).astype(np.int64)


def family_groups(operation: Operation, columns: Columns) -> np.ndarray:
    """Return every row's shape group: one number for each model shape, whatever its parallel sizes."""
    keys = np.stack([columns[name] for name in operation.family], axis=1)
    return np.asarray(np.unique(keys, axis=0, return_inverse=True)[1]).reshape(-1)


def assign_folds(groups: np.ndarray, folds: int) -> np.ndarray:
    """Deal groups, in their order, over the folds; every row of a group gets the group's fold."""
    distinct, inverse = np.unique(groups, return_inverse=True)
    return (np.arange(distinct.size) % min(folds, max(1, distinct.size)))[inverse]


def held_out_folds(operation: Operation, columns: Columns, split: str, folds: int) -> np.ndarray | None:
    """Return the fold in which every row is predicted, -1 for rows that never are; None with too few groups."""
    if split == LARGEST:
        groups = size_groups(operation, columns)
        distinct = np.unique(groups)
        if distinct.size < LARGEST_GROUPS + SMALLER_GROUPS:
            return None
        fold = np.where(groups >= distinct[-LARGEST_GROUPS], 0, -1)
    else:
        group = family_groups if split == SHAPES else size_groups
        fold = assign_folds(group(operation, columns), folds)
        if np.unique(fold).size < 2:
            return None
    largest = max(int((fold == k).sum()) for k in range(int(fold.max()) + 1))
    return fold if fold.size - largest >= MIN_TRAINING_ROWS else None


def hold_out(
    operation: Operation,
    columns: Columns,
    time_us: np.ndarray,
    start: dict[str, float],
    split: str,
    params: FitParams,
    alone: bool = False,
) -> HeldOut | None:
    """Predict rows from other groups (for ``largest sizes`` those alone); None where the rows make too few groups."""
    fold = held_out_folds(operation, columns, split, params.folds)
    if fold is None:
        return None
    unseen = split == SHAPES
    wanted = {"trees", "smooth"} if unseen else {"trees", "smooth", "curve"}
    found: dict[str, np.ndarray] = {
        name: np.full(time_us.size, np.nan) for name in ("baseline", "excess", "outside", *wanted)
    }
    alone_us = np.full(time_us.size, np.nan)
    for k in range(int(fold.max()) + 1):
        train, test = fold != k, fold == k
        inner = {name: column[train] for name, column in columns.items()}
        asked = {name: column[test] for name, column in columns.items()}
        parameters = fit_baseline(operation, inner, time_us[train], params, start)
        found["baseline"][test] = operation.baseline(asked, parameters)
        found["excess"][test], found["outside"][test] = excess_octaves(operation, shape_ranges(operation, inner), asked)
        target = np.log(time_us[train] / operation.baseline(inner, parameters))
        residual = fit_residual(operation, inner, target, params, unseen, wanted)
        derived = operation.derive(asked)
        for name, values in residual.members(operation, asked, derived, wanted).items():
            found[name][test] = values
        if alone:
            trees = grow_trees(operation.derive(inner), tuple(derived), np.log(time_us[train]), params)
            alone_us[test] = np.exp(trees.log_ratio(derived))
    return _judged(split, found, time_us, alone_us if alone else None, fold >= 0, params)


def _judged(
    split: str, found: dict[str, np.ndarray], time_us: np.ndarray, alone_us: np.ndarray | None, kept: np.ndarray,
    params: FitParams,
) -> HeldOut:  # fmt: skip
    found = {name: values[kept] for name, values in found.items()}
    time_us, baseline_us, excess = time_us[kept], found.pop("baseline"), found.pop("excess")
    inner = found.pop("outside") == 0
    members = {name: values for name, values in found.items() if np.isfinite(values).any()}
    true, small = np.log(time_us / baseline_us), time_us.size < params.small_rows
    # Edge groups lie beyond what their fold was fitted to: they do not say what is best inside.
    judged = inner if split == SIZES and inner.any() else np.ones(true.size, dtype=bool)
    inside = {name: values[judged] for name, values in members.items()}
    best = best_mix(inside, true[judged], smooth=False, small=small)
    steady = best_mix(inside, true[judged], smooth=True, small=small)
    names = {SIZES: ("measured", "between"), LARGEST: ("larger", "beyond"), SHAPES: ("", "unseen")}[split]
    mixes = {name: mix for name, mix in zip(names, (best, steady), strict=True) if name}
    model = mean_of(members, steady if split == SHAPES else best, true.size)
    curve_us = baseline_us * np.exp(members["curve"]) if "curve" in members else None
    alone_us = None if alone_us is None else alone_us[kept]
    return HeldOut(
        split, time_us, baseline_us, baseline_us * np.exp(model), alone_us, curve_us, members, excess, mixes
    )  # fmt: skip


def with_mixes(held_out: HeldOut, mixes: dict[str, Mix]) -> HeldOut:
    """Return the same rows as the finished model would answer them: edges by what is best beyond the timed sizes."""
    assert held_out.excess is not None
    model = known_log_ratio(held_out.members, mixes, held_out.excess)
    return replace(held_out, model_us=held_out.baseline_us * np.exp(model))

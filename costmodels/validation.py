"""How wrong a model is on rows that it has not seen.

Rows are held out by group, never one by one: all rows of a size together (sizes nobody timed), or all rows of a model's
shape together (shapes nobody timed). In both, rows of one shape and size are never on both sides. Baseline and trees
are fitted anew without the held-out rows, and shown beside LightGBM alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodels.features import Columns, Operation, size_of
from costmodels.params import FitParams
from costmodels.predictor import grow_trees
from costmodels.roofline import fit_baseline

MIN_TRAINING_ROWS = 10
BINS_PER_OCTAVE = 4
GAIN_NEEDED = 0.98
"""A model is better than its baseline where its mean absolute log error is below this share of the baseline's."""


@dataclass(frozen=True)
class HeldOut:
    """Hold out-of-fold predictions of every row, microseconds."""

    split: str
    """``unseen sizes`` or ``unseen shapes``."""
    true_us: np.ndarray
    baseline_us: np.ndarray
    model_us: np.ndarray
    alone_us: np.ndarray | None
    """LightGBM without a baseline; None where it was not asked for."""

    def useful(self) -> bool:
        """Return whether the model beats its baseline and is not a constant correction of it."""
        ratio = np.log(self.model_us / self.baseline_us)
        model, baseline = (np.abs(np.log(p / self.true_us)).mean() for p in (self.model_us, self.baseline_us))
        return bool(np.ptp(ratio) > 1e-9 and model < GAIN_NEEDED * baseline)

    def report(self) -> dict[str, Any]:
        """Return the errors of all contestants, ready for JSON."""
        named = {"baseline": self.baseline_us, "lightgbm_alone": self.alone_us, "model": self.model_us}
        errors = {name: error_summary(p, self.true_us) for name, p in named.items() if p is not None}
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


def hold_out(
    operation: Operation,
    columns: Columns,
    time_us: np.ndarray,
    start: dict[str, float],
    split: str,
    params: FitParams,
    alone: bool = False,
) -> HeldOut | None:
    """Predict every row from the other groups; None where the rows make too few groups."""
    unseen = split == "unseen shapes"
    groups = family_groups(operation, columns) if unseen else size_groups(operation, columns)
    fold = assign_folds(groups, params.folds)
    if np.unique(fold).size < 2 or time_us.size - np.bincount(fold).max() < MIN_TRAINING_ROWS:
        return None
    derived = operation.derive(columns)
    names = operation.dimensionless if unseen else tuple(derived)
    baseline_us, model_us, alone_us = (np.empty_like(time_us) for _ in range(3))
    for k in range(int(fold.max()) + 1):
        train, test = fold != k, fold == k
        inner = {name: column[train] for name, column in columns.items()}
        parameters = fit_baseline(operation, inner, time_us[train], params, start)
        physics = np.asarray(operation.baseline(columns, parameters))
        seen = {name: column[train] for name, column in derived.items()}
        asked = {name: column[test] for name, column in derived.items()}
        trees = grow_trees(seen, names, np.log(time_us[train] / physics[train]), params, unseen)
        baseline_us[test] = physics[test]
        model_us[test] = physics[test] * np.exp(trees.log_ratio(asked))
        if alone:
            alone_us[test] = np.exp(grow_trees(seen, names, np.log(time_us[train]), params).log_ratio(asked))
    return HeldOut(split, time_us, baseline_us, model_us, alone_us if alone else None)

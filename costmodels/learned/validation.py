"""How wrong a model is on rows that it has not seen, and how far a prediction may lie from a measurement.

Rows are held out by group, never one by one: all rows of a size together (sizes nobody timed), all rows of a model's
shape together (shapes nobody timed), or the largest sizes (sizes beyond those timed). In each, rows of one shape and
size are never on both sides. Baseline and residuals are fitted anew without the held-out rows, and every contestant is
shown: the fitted baseline, LightGBM alone, interpolation along measured curves, trees, the smooth residual, the model.

Which members the model averages is chosen among six mixes by these same errors: with thousands of rows that choice
flatters the model by nothing that shows.

Intervals are split-conformal: the half-width at a size is a quantile of |log(time / prediction)| over rows that were
predicted without their size group, by class of size. Outside the timed sizes residuals are not exchangeable with those
inside: judge by :data:`WIDENING` times the half-width there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from costmodels.features import (
    MOST,
    MOST_LOG,
    Columns,
    Operation,
    Parameters,
    excess_octaves,
    shape_ranges,
    size_of,
    take,
)
from costmodels.learned.baseline import fit_baseline
from costmodels.learned.residual import STEADY, Mix, best_mix, fit_residual, known_log_ratio, mean_of
from costmodels.learned.trees import grow_trees
from costmodels.params import FitParams

MIN_TRAINING_ROWS = 10
BINS_PER_OCTAVE = 4
GAIN_NEEDED = 0.98
"""A model is better than its baseline where its mean absolute log error is below this share of the baseline's."""
SIZES, SHAPES, LARGEST = "unseen sizes", "unseen shapes", "largest sizes"
REGIMES = {SIZES: ("measured", "between"), SHAPES: ("unseen",), LARGEST: ("larger", "beyond")}
"""Regimes whose mix each split chooses; its own errors are those of the first."""
MEMBERS = ("trees", "smooth", "curve")
LARGEST_GROUPS = 3
SMALLER_GROUPS = 3
"""The largest sizes are predicted from at least so many groups of smaller ones."""
LEVEL = 0.9
CLASSES = 6
CLASS_ROWS = 40
"""Held-out rows that a class of sizes has at least; fewer make a single class."""
COVERABLE_ROWS, LEAST_INTERVAL_ROWS = 9, 5
"""Fewer errors than the first hold no quantile of :data:`LEVEL`: the largest, widened, stands for it; fewer than the
second tell nothing, and the interval is unknown (None)."""
WIDENING = 2.0


@dataclass(frozen=True)
class HeldOut:
    """Hold predictions of rows that were not in the fit, microseconds; every row of the data, or the largest sizes."""

    true_us: np.ndarray
    baseline_us: np.ndarray
    model_us: np.ndarray
    alone_us: np.ndarray | None = None
    """LightGBM without a baseline, of unseen sizes alone."""
    members: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Log residual of every member on every row; NaN for rows on no curve."""
    excess: np.ndarray | None = None
    """Octaves by which rows lie above the sizes that were fitted."""
    mixes: Mapping[str, Mix] = field(default_factory=dict)
    """What this split chose."""

    def useful(self) -> bool:
        """Return whether the model beats its baseline and is not a constant correction of it."""
        ratio = np.log(self.model_us / self.baseline_us)
        model, baseline = (log_error(us, self.true_us).mean() for us in (self.model_us, self.baseline_us))
        return bool(np.ptp(ratio) > 1e-9 and model < GAIN_NEEDED * baseline)

    def contestants(self) -> dict[str, np.ndarray]:
        """Return the predictions of every contestant, the model last; a row that one cannot answer is NaN."""
        found = {"baseline": self.baseline_us}
        if self.alone_us is not None:
            found["lightgbm_alone"] = self.alone_us
        shown = [name for name in ("curve", "trees", "smooth") if name in self.members]
        return found | {n: self.baseline_us * np.exp(self.members[n]) for n in shown} | {"model": self.model_us}

    def report(self) -> dict[str, Any]:
        """Return the errors of all contestants, ready for JSON."""
        report: dict[str, Any] = {"rows": int(self.true_us.size)}
        for name, predicted_us in self.contestants().items():
            answered = np.isfinite(predicted_us)
            report[name] = error_summary(predicted_us[answered], self.true_us[answered])
            if not answered.all():
                report[name]["rows"] = int(answered.sum())
        return report


Splits = dict[str, HeldOut | None]
"""Held-out predictions by split; None where the rows make too few groups."""


def log_error(predicted_us: np.ndarray, true_us: np.ndarray) -> np.ndarray:
    """Return the absolute error of every row's log."""
    return np.asarray(np.abs(np.log(predicted_us / true_us)))


def error_summary(predicted: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Return median, mean (MAPE), 95th percentile and worst of the absolute relative error, in percent."""
    error = 100.0 * np.abs(predicted / true - 1.0)
    found = {"median": np.median(error), "mape": error.mean(), "p95": np.percentile(error, 95), "worst": error.max()}
    return {f"{name}_pct": round(float(value), 3) for name, value in found.items()}


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


def held_out_folds(
    operation: Operation, columns: Columns, split: str, folds: int, least_rows: int = MIN_TRAINING_ROWS
) -> np.ndarray | None:
    """Return the fold in which every row is predicted, -1 for rows that never are; None with too few groups."""
    groups = family_groups(operation, columns) if split == SHAPES else size_groups(operation, columns)
    distinct = np.unique(groups)
    if distinct.size < (LARGEST_GROUPS + SMALLER_GROUPS if split == LARGEST else 2):
        return None
    fold = np.where(groups >= distinct[-LARGEST_GROUPS], 0, -1) if split == LARGEST else assign_folds(groups, folds)
    largest = max(int((fold == k).sum()) for k in range(int(fold.max()) + 1))
    return fold if fold.size - largest >= least_rows else None


def hold_out(
    operation: Operation,
    columns: Columns,
    time_us: np.ndarray,
    start: Parameters,
    split: str,
    params: FitParams,
    wanted: Collection[str] = MEMBERS,
    least_rows: int = MIN_TRAINING_ROWS,
) -> HeldOut | None:
    """Predict rows from other groups (for ``largest sizes`` those alone); None where the rows make too few groups."""
    fold = held_out_folds(operation, columns, split, params.folds, least_rows)
    if fold is None:
        return None
    found = {name: np.full(time_us.size, np.nan) for name in ("baseline", "excess", "outside", "alone", *MEMBERS)}
    for k in range(int(fold.max()) + 1):
        train, test = fold != k, fold == k
        inner, asked, inner_us = take(columns, train), take(columns, test), time_us[train]
        parameters = fit_baseline(operation, inner, inner_us, params, start)
        target = np.log(inner_us / operation.baseline(inner, parameters))
        residual = fit_residual(operation, inner, target, params, split == SHAPES, wanted)
        derived, excess = operation.derive(asked), excess_octaves(operation, shape_ranges(operation, inner), asked)
        answers = residual.members(operation, asked, derived)
        answers |= {"baseline": operation.baseline(asked, parameters), "excess": excess[0], "outside": excess[1]}
        if split == SIZES and wanted:
            trees = grow_trees(operation.derive(inner), tuple(derived), np.log(inner_us), params)
            answers["alone"] = np.exp(trees.log_ratio(derived))
        for name, values in answers.items():
            found[name][test] = values
    found, time_us = take(found, fold >= 0), time_us[fold >= 0]
    members = {name: found[name] for name in MEMBERS if np.isfinite(found[name]).any()}
    true, baseline_us = np.log(time_us / found["baseline"]), found["baseline"]
    # Edge groups lie beyond what their fold was fitted to: they do not say what is best inside.
    judged = found["outside"] == 0
    if split != SIZES or not judged.any():
        judged = np.ones(true.size, dtype=bool)
    inside, small = take(members, judged), time_us.size < params.small_rows
    mixes = {name: best_mix(inside, true[judged], steady=name in STEADY, small=small) for name in REGIMES[split]}
    model_us = baseline_us * np.exp(mean_of(members, mixes[REGIMES[split][0]], true.size))
    alone_us = found["alone"] if np.isfinite(found["alone"]).any() else None
    return HeldOut(time_us, baseline_us, model_us, alone_us, members, found["excess"], mixes)


def validate(
    operation: Operation, columns: Columns, time_us: np.ndarray, parameters: Parameters, params: FitParams
) -> tuple[Splits, dict[str, Mix], tuple[str, ...]]:
    """Return every split of the operation, what answers in each regime by their choice, and why some have none."""
    splits = [split for split in REGIMES if split != SHAPES or operation.shape]
    found = {split: hold_out(operation, columns, time_us, parameters, split, params) for split in splits}
    mixes: dict[str, Mix] = {}
    reasons = []
    for split, held_out in found.items():
        if split == LARGEST and not mixes.get("measured"):
            continue
        if why := _refusal(split, held_out, params):
            reasons.append(f"{split}: {why}")
        if held_out is not None:
            mixes |= dict.fromkeys(REGIMES[split], ()) if why else held_out.mixes
    if (sizes := found[SIZES]) is not None and sizes.excess is not None and mixes.get("measured"):
        # As the finished model would answer: edges by what is best beyond the timed sizes.
        log_ratio = known_log_ratio(sizes.members, mixes, sizes.excess)
        found[SIZES] = replace(sizes, model_us=sizes.baseline_us * np.exp(log_ratio))
    return found, mixes, tuple(reasons)


def _refusal(split: str, held_out: HeldOut | None, params: FitParams) -> str:
    """Return why physics answers alone; empty where a residual helps."""
    if held_out is None:
        inner = "; what is best inside is used beyond too" if split == LARGEST else ""
        return f"too few groups of rows to validate a residual{inner}"
    if (rows := held_out.true_us.size) < params.min_rows and split != LARGEST:
        return f"{rows} rows, a residual needs {params.min_rows}"
    return "" if held_out.useful() else "the residual was constant or no better than the baseline"


@dataclass(frozen=True)
class Intervals:
    """Half-widths of the log of time that cover :data:`LEVEL` of the rows, by class of sizes."""

    edges: tuple[float, ...]
    """Sizes that divide the classes, ascending."""
    half_log: tuple[float, ...]
    """Per class."""

    def __post_init__(self) -> None:
        widths = all(0 <= half <= MOST_LOG for half in self.half_log) and len(self.half_log) == len(self.edges) + 1
        if (
            not widths
            or any(not 0 < edge <= MOST for edge in self.edges)
            or list(self.edges) != sorted(set(self.edges))
        ):
            raise ValueError("expected edges of intervals that ascend, and one half-width of 0 or more for every class")

    def half_widths(self, size: np.ndarray) -> np.ndarray:
        """Return every row's half-width inside the timed sizes, as a log."""
        return np.asarray(self.half_log)[np.searchsorted(self.edges, size, side="right")]


def conformal_quantile(errors: np.ndarray) -> float:
    """Return the split-conformal quantile: the least error that covers :data:`LEVEL` of one more row.

    Of too few errors for that, :data:`WIDENING` times the largest.
    """
    if errors.size < COVERABLE_ROWS:
        return float(WIDENING * errors.max())
    return float(np.sort(errors)[int(np.ceil((errors.size + 1) * LEVEL)) - 1])


def calibrate(size: np.ndarray, errors: np.ndarray) -> Intervals | None:
    """Return intervals from absolute log errors of held-out rows; None where there are too few."""
    if size.size < LEAST_INTERVAL_ROWS:
        return None
    classes = max(1, min(CLASSES, size.size // CLASS_ROWS))
    edges = np.unique(np.quantile(size, np.arange(1, classes) / classes, method="nearest"))
    edges = edges[edges > size.min()]  # else nothing lies below the first
    place = np.searchsorted(edges, size, side="right")
    half = tuple(conformal_quantile(errors[place == k]) for k in range(edges.size + 1))
    return Intervals(tuple(edges.tolist()), half)


def coverage(size: np.ndarray, errors: np.ndarray, groups: np.ndarray) -> float | None:
    """Return the share of rows inside intervals that were calibrated without their group; None with too few rows."""
    hits: list[bool] = []
    for group in np.unique(groups):
        test = groups == group
        if (found := calibrate(size[~test], errors[~test])) is not None:
            hits += (errors[test] <= found.half_widths(size[test])).tolist()
    return float(np.mean(hits)) if hits else None


def intervals_of(operation: Operation, columns: Columns, found: Splits) -> tuple[Intervals | None, dict[str, Any]]:
    """Return calibrated half-widths and what share of held-out rows they cover, for the report."""
    if (sizes := found[SIZES]) is None:
        return None, {}
    size, groups = size_of(operation, columns), size_groups(operation, columns)
    errors = log_error(sizes.model_us, sizes.true_us)
    # Calibrated on sizes with smaller and larger ones on both sides: what "inside the timed range" means.
    inside = (groups > groups.min()) & (groups < groups.max())
    if inside.sum() < COVERABLE_ROWS:  # ends are predicted worse: with them it is wide rather than unknown
        inside = np.ones_like(inside)
    if (intervals := calibrate(size[inside], errors[inside])) is None:
        return None, {}
    covered = {"inside_pct": coverage(size[inside], errors[inside], groups[inside])}
    if (largest := found[LARGEST]) is not None:
        beyond = groups >= np.unique(groups)[-LARGEST_GROUPS]
        half = WIDENING * intervals.half_widths(size[beyond])
        covered["largest_sizes_pct"] = float((log_error(largest.model_us, largest.true_us) <= half).mean())
    return intervals, {"intervals": {name: round(100.0 * x, 1) for name, x in covered.items() if x is not None}}

"""Fit a transfer: choose the prior, refit the physics, learn the discrepancy, and keep it only where it helps.

Everything is decided by rows held out in groups (sizes nobody timed here, shapes nobody timed here), the same folds for
the model without a prior and with it. A prior that does not lower the held-out error is refused, and the model says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from costmodels.features import Columns, Operation, Parameter, size_of
from costmodels.learned.baseline import fit_baseline
from costmodels.learned.intervals import calibrate
from costmodels.learned.predictor import OperationModel, Predictor
from costmodels.learned.prior import (
    PRIOR_RESIDUAL,
    Prior,
    TransferredModel,
    blend,
    prior_residual,
)
from costmodels.learned.residual import fit_discrepancy
from costmodels.learned.validation import (
    GAIN_NEEDED,
    SHAPES,
    SIZES,
    HeldOut,
    assign_folds,
    error_summary,
    family_groups,
    hold_out,
    size_groups,
)
from costmodels.params import FitParams
from profiler import DeviceFingerprint

if TYPE_CHECKING:
    from costmodels.cost_model import CostModel

PRIOR_PULL = 0.1
"""Weight of the pull to the prior's parameters: five times that to the defaults, for they were measured."""
CLEARLY = 0.95
"""Share of the discrepancy's held-out error below which the refit alone is preferred to it."""
FEW_ROWS = 30
"""Below this the discrepancy is averaged with a plain scale, which shrinks it."""
LEAST_ROWS = 5
"""Fewer rows than this cannot tell whether a prior helps: it is used, refitted, and the model says so."""
SHARES = (0.0, 0.5, 1.0)
"""Weights of the prior's route that are tried against the own model's."""
LEAST_BLEND_ROWS = 100
"""Below this only all or nothing is tried: the held-out error of so few rows cannot tell more."""


@dataclass(frozen=True)
class _Rows:
    """Hold the rows of one operation timed on the new GPU, and what one prior says of them."""

    operation: Operation
    columns: Columns
    time_us: np.ndarray
    source: Predictor
    residual: np.ndarray
    inputs: Columns
    name: str
    data_hash: str

    @classmethod
    def of(
        cls, operation: Operation, columns: Columns, time_us: np.ndarray, prior: CostModel, source: Predictor
    ) -> _Rows:
        residual = prior_residual(source, columns)
        inputs = {**operation.derive(columns), PRIOR_RESIDUAL: residual}
        name, data_hash = prior.fingerprint.name, prior.data_hash
        return cls(operation, columns, time_us, source, residual, inputs, name, data_hash)

    def refit(self, keep: np.ndarray, params: FitParams) -> dict[str, float]:
        """Return the baseline's parameters for the kept rows, pulled to the source's at the speed of this device."""
        known = self.operation.parameters
        centred = {n: Parameter(v, known[n].unit, known[n].device_power) for n, v in self.source.own.parameters.items()}
        kept = {name: column[keep] for name, column in self.columns.items()}
        # baseline x residual = time is the same as baseline = time / residual.
        target = self.time_us[keep] / np.exp(self.residual[keep])
        pulled = replace(params, baseline_pull=PRIOR_PULL)
        return fit_baseline(replace(self.operation, parameters=centred), kept, target, pulled)

    def fit(self, keep: np.ndarray, parts: tuple[str, ...], params: FitParams) -> Prior:
        """Fit refit and discrepancy to the kept rows."""
        return self._fit(keep, self.refit(keep, params), parts, params)

    def _fit(self, keep: np.ndarray, parameters: dict[str, float], parts: tuple[str, ...], params: FitParams) -> Prior:
        base_us = self.operation.baseline(self.columns, parameters) * np.exp(self.residual)
        kept = {key: column[keep] for key, column in self.inputs.items()}
        target = np.log(self.time_us[keep] / base_us[keep])
        found = fit_discrepancy(parts, kept, target, _gentle(target.size, params))
        return Prior(self.source, self.name, self.data_hash, parameters, found, seen_share=1.0, unseen_share=1.0)

    def held_out(self, fold: np.ndarray, candidates: Sequence[tuple[str, ...]], params: FitParams) -> list[np.ndarray]:
        """Return, for each candidate of parts, microseconds of every row from the other folds."""
        found = [np.empty_like(self.time_us) for _ in candidates]
        for k in np.unique(fold):
            test = fold == k
            columns = {name: column[test] for name, column in self.columns.items()}
            parameters = self.refit(~test, params)
            for parts, predicted in zip(candidates, found, strict=True):
                prior = self._fit(~test, parameters, parts, params)
                predicted[test] = prior.predict_us(self.operation, columns)
        return found


def add_prior(
    own: OperationModel,
    held_out: HeldOut | None,
    rows: Columns,
    params: FitParams,
    fingerprint: DeviceFingerprint,
    priors: Sequence[CostModel],
) -> tuple[Predictor, HeldOut | None]:
    """Return the own model joined to the best prior, or the own model with the reason why no prior helps.

    ``rows`` holds raw features and ``time_us`` of this GPU; ``held_out`` is the own model's validation on unseen sizes.
    """
    operation, direction = own.operation, own.direction
    filled = np.ones(rows["time_us"].size, dtype=bool)
    for name in operation.features:
        if name not in operation.zero_allowed:
            filled &= rows[name] > 0
    columns = {name: rows[name][filled] for name in operation.features}
    time_us = rows["time_us"][filled]
    offered = [(prior, model) for prior in priors if (model := prior.models.get((operation.name, direction)))]
    if not offered:
        reason = f"no prior holds {operation.name} {direction}"
        return replace(own, reasons=(*own.reasons, reason)), held_out
    folds = _folds(operation, columns, params)
    data, why = _choose(operation, columns, time_us, offered, fingerprint, folds, params)
    everything = np.ones(time_us.size, dtype=bool)
    if folds.get(SIZES) is None:
        prior = data.fit(everything, (), params)
        reason = f"{why}; {time_us.size} rows cannot tell whether it helps"
        return TransferredModel(own, prior, (*own.reasons, reason), own.validation, own.intervals), held_out
    verdict = _judge(data, own, held_out, folds, params)
    if not any(verdict.shares.values()):
        reason = f"{why}: refused, {verdict.sentence}"
        return replace(own, reasons=(*own.reasons, reason)), held_out
    # Where no shape could be held out, what helps in unseen sizes is taken to help in unseen shapes.
    shares = (verdict.shares[SIZES], verdict.shares.get(SHAPES, float(verdict.shares[SIZES] > 0)))
    errors = np.abs(np.log(verdict.found[SIZES].model_us / time_us))
    prior = replace(data.fit(everything, verdict.parts, params), seen_share=shares[0], unseen_share=shares[1])
    validation = {**own.validation, **{split: _joined(own, split, verdict) for split in verdict.found}}
    reason = f"{why}: {verdict.sentence}; discrepancy by {' + '.join(verdict.parts) or 'the refit alone'}"
    intervals = calibrate(size_of(operation, columns), errors)
    return TransferredModel(own, prior, (*own.reasons, reason), validation, intervals), verdict.found[SIZES]


@dataclass(frozen=True)
class _Verdict:
    """Hold what the held-out rows say of a prior."""

    parts: tuple[str, ...]
    shares: dict[str, float]
    without: dict[str, np.ndarray]
    """Per split, held-out microseconds of the model without the prior."""
    found: dict[str, HeldOut]
    """Per split, ``model_us`` with the prior."""
    sentence: str


def _choose(
    operation: Operation, columns: Columns, time_us: np.ndarray, offered: list[tuple[CostModel, Predictor]],
    fingerprint: DeviceFingerprint, folds: dict[str, np.ndarray], params: FitParams,
) -> tuple[_Rows, str]:  # fmt: skip
    """Return the rows seen through the best prior, and a clause that says which and why."""
    arch = fingerprint.arch
    same = [pair for pair in offered if arch and pair[0].fingerprint.arch == arch]
    contest = same or offered
    seen = [_Rows.of(operation, columns, time_us, *pair) for pair in contest]
    best, errors = 0, []
    if len(contest) > 1:
        for data in seen:
            fold = folds.get(SIZES, np.arange(time_us.size) % 2)
            errors.append(_log_error(data.held_out(fold, [()], params)[0], time_us))
        best = int(np.argmin(errors))
    name, found = contest[best][0].fingerprint.name, contest[best][0].fingerprint.arch
    if same:
        why = f"prior {name} ({found}, the same architecture"
    else:
        why = f"prior {name} ({found or 'architecture unknown'}, another architecture than {arch or 'unknown'}"
    if errors:
        others = ", ".join(
            f"{pair[0].fingerprint.name} {100 * e:.1f} %" for pair, e in zip(contest, errors, strict=True)
        )
        why += f"; least held-out error of {others}"
    if same and len(same) < len(offered):
        passed = [pair[0].fingerprint.name for pair in offered if pair not in same]
        why += f"; {', '.join(passed)} passed over for its architecture"
    return seen[best], f"{why})"


def _folds(operation: Operation, columns: Columns, params: FitParams) -> dict[str, np.ndarray]:
    """Return the folds of each split that the rows allow."""
    found: dict[str, np.ndarray] = {}
    groups = {SIZES: size_groups(operation, columns)}
    if operation.shape:
        groups[SHAPES] = family_groups(operation, columns)
    for split, group in groups.items():
        fold = assign_folds(group, params.folds)
        counts = np.bincount(fold)
        if counts.size > 1 and fold.size - counts.max() >= LEAST_ROWS:
            found[split] = fold
    return found


def _candidates(rows: int, params: FitParams) -> list[tuple[str, ...]]:
    """Return the discrepancies that this many rows can carry, the refit alone first."""
    if rows < FEW_ROWS:
        return [(), ("scale", "smooth", "trees")]
    # A Gaussian process costs the cube of its rows; where they are many, trees know as much.
    return [(), ("smooth", "trees") if rows < params.small_rows else ("trees",)]


def _gentle(rows: int, params: FitParams) -> FitParams:
    """Return fewer, smaller, slower trees where rows are many: what is left after the prior is mostly noise."""
    if rows < params.small_rows:
        return params
    leaves, rate = min(15, params.num_leaves), params.learning_rate / 2
    return replace(params, num_trees=max(1, params.num_trees // 2), num_leaves=leaves, learning_rate=rate)


def _judge(
    data: _Rows, own: OperationModel, held_out: HeldOut | None, folds: dict[str, np.ndarray], params: FitParams
) -> _Verdict:
    """Choose the discrepancy and the shares by held-out error; a prior must gain what a residual must."""
    candidates = _candidates(data.time_us.size, params)
    with_prior = {split: data.held_out(fold, candidates, params) for split, fold in folds.items()}
    plain, learned = (sum(_log_error(found[i], data.time_us) for found in with_prior.values()) for i in (0, 1))
    # The discrepancy is shrunk by itself: only where it clearly hurts is it left out.
    best = 0 if plain < CLEARLY * learned else 1
    tried = SHARES if data.time_us.size >= LEAST_BLEND_ROWS else (SHARES[0], SHARES[-1])
    shares: dict[str, float] = {}
    without: dict[str, np.ndarray] = {}
    found: dict[str, HeldOut] = {}
    said = []
    for split, fold in folds.items():
        alone = _own_held_out(data, held_out if split == SIZES else None, split, fold, params)
        without[split] = alone.model_us if alone.useful() else alone.baseline_us
        blends = [blend(without[split], with_prior[split][best], share) for share in tried]
        errors = [_log_error(predicted, data.time_us) for predicted in blends]
        place = int(np.argmin(errors))
        if errors[place] >= GAIN_NEEDED * errors[0]:
            place = 0
        shares[split] = tried[place]
        found[split] = replace(alone, model_us=blends[place])
        used = f"with a share of {tried[place]:g}" if place else "with it"
        said.append(
            f"{split} {_percent(errors[0])} without it, {_percent(errors[place] if place else min(errors[1:]))} {used}"
        )
    return _Verdict(candidates[best], shares, without, found, ", ".join(said))


def _own_held_out(data: _Rows, held_out: HeldOut | None, split: str, fold: np.ndarray, params: FitParams) -> HeldOut:
    """Return held-out predictions of the model without a prior; of its baseline where rows are too few."""
    columns, time_us = data.columns, data.time_us
    if held_out is not None and np.array_equal(held_out.true_us, time_us):
        return held_out
    start = fit_baseline(data.operation, columns, time_us, params)
    held_out = hold_out(data.operation, columns, time_us, start, split, params)
    if held_out is not None:
        return held_out
    own_us = np.empty_like(time_us)
    for k in np.unique(fold):
        kept = {name: column[fold != k] for name, column in columns.items()}
        parameters = fit_baseline(data.operation, kept, time_us[fold != k], params, start)
        own_us[fold == k] = data.operation.baseline(columns, parameters)[fold == k]
    return HeldOut(split, time_us, own_us, own_us, None)


def _joined(own: OperationModel, split: str, verdict: _Verdict) -> dict[str, Any]:
    """Return a split's report with the joint model in the model's place, and the own model beside it."""
    found = verdict.found[split]
    report = dict(own.validation.get(split, {"rows": int(found.true_us.size)}))
    report["without_prior"] = error_summary(verdict.without[split], found.true_us)
    report["model"] = error_summary(found.model_us, found.true_us)
    return report


def _log_error(predicted_us: np.ndarray, true_us: np.ndarray) -> float:
    return float(np.abs(np.log(predicted_us / true_us)).mean())


def _percent(error: float) -> str:
    return f"{100 * error:.1f} %"

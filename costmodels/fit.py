"""Fit a cost model: measurements in, one model per operation and direction out, validated before it is believed.

With cost models of sibling GPUs, each operation is joined to the best of them: the prior is chosen, its physics
refitted, the discrepancy learned. All that is decided by rows held out in groups (sizes nobody timed here, shapes
nobody timed here), the same folds without a prior and with it. A prior that does not lower the held-out error is
refused, and the model says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from costmodels.cost_model import CostModel
from costmodels.features import Columns, Names, Operation, shape_ranges, size_of, take
from costmodels.freezing.freeze import freeze_tables, table_errors
from costmodels.learned.baseline import fit_baseline
from costmodels.learned.predictor import PRIOR_RESIDUAL, OperationModel, Prior, blend
from costmodels.learned.residual import fit_discrepancy, fit_residual
from costmodels.learned.validation import (
    GAIN_NEEDED,
    SHAPES,
    SIZES,
    HeldOut,
    Splits,
    calibrate,
    error_summary,
    held_out_folds,
    hold_out,
    intervals_of,
    log_error,
    validate,
)
from costmodels.operations import DIRECTIONS, OPERATIONS
from costmodels.params import FitParams
from profiler import (
    DeviceFingerprint,
    Measurements,
    ModelSpec,
    Observer,
    RoutePackError,
    Topology,
    compare_fingerprints,
)
from profiler.errors import explained
from profiler.files import arrays_hash, content_hash
from profiler.params import check_sizes

REQUIRED = ("attention", "experts")
"""Operations without which a step cannot be priced at all."""
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

Priors = Sequence[CostModel]


def fit_cost_model(
    measurements: Sequence[Measurements] | Measurements,
    spec: ModelSpec,
    topology: Topology,
    max_tokens: int,
    params: FitParams | None = None,
    observer: Observer | None = None,
    priors: Priors = (),
) -> CostModel:
    """Fit every operation that was measured, and freeze the tables of one model, topology and token cap.

    ``priors`` are cost models of sibling GPUs: each operation takes the best of them where it lowers held-out errors.

    Raises
    ------
    RoutePackError
        If the measurements are of different devices, attention or experts were not measured, or the sizes of the
        topology cannot divide the model.
    """
    with explained(of=ValueError):
        check_sizes(spec, topology)
    params, observer = params or FitParams(), observer or Observer()
    batches = [measurements] if isinstance(measurements, Measurements) else list(measurements)
    for batch in batches:
        batch.check()
    fingerprint, doubts = _device_of(batches), _doubts_of(batches)
    timed = {(name, d): _timed(batches, OPERATIONS[name], d) for name in OPERATIONS for d in DIRECTIONS}
    timed = {key: found for key, found in timed.items() if not found[1].all()}
    measured = {name for name, direction in timed if direction == "forward"}
    for name in REQUIRED:
        if name not in measured:
            raise RoutePackError(
                f"The measurements hold no usable forward time of {name} (they have "
                f"{', '.join(sorted(measured)) or 'nothing'}). Run `routepack profile` again, or import tables with it."
            )
    models, parity = {}, {}
    observer.start("fit", len(timed) + 1)
    for (name, direction), (rows, flagged) in timed.items():
        observer.now("fit", f"{name} {direction}")
        kept = take(rows, ~flagged)
        model, held_out = fit_operation(OPERATIONS[name], direction, kept, params, priors, fingerprint.arch)
        models[name, direction] = replace(model, flagged_rows=int(flagged.sum()))
        if held_out is not None:
            parity[f"{name}_{direction}"] = held_out
        observer.advance("fit")
    observer.now("fit", "tables")
    data_hash = _data_hash(batches)
    provenance = [{**(batch.meta.get("provenance") or {}), "dtype": batch.meta.get("dtype")} for batch in batches]
    of_data: dict[str, Any] = {"provenance": provenance, "parity": parity, "doubts": doubts}
    cost_model = CostModel(models, params, fingerprint, spec, topology, max_tokens, data_hash, **of_data)
    cost_model.tables = freeze_tables(cost_model, spec, topology, max_tokens)
    cost_model.table_errors = table_errors(cost_model, cost_model.tables)
    observer.advance("fit")
    observer.finish("fit")
    return cost_model


def _timed(batches: list[Measurements], operation: Operation, direction: str) -> tuple[Columns, np.ndarray]:
    """Return raw features and ``time_us`` of one operation and direction, and which rows are flagged."""
    chosen = [batch.select(op=operation.name, direction=direction, status="ok").rows for batch in batches]
    columns = {
        column: np.concatenate([np.asarray(rows[column], dtype=np.float64) for rows in chosen])
        for column in (*operation.features, "time_us")
    }
    return columns, np.concatenate([rows["flag"] != "" for rows in chosen])


def _device_of(batches: list[Measurements]) -> DeviceFingerprint:
    """Return the one device of all measurements."""
    if not batches:
        raise RoutePackError("No measurements were given. Run `routepack profile` first.")
    first = DeviceFingerprint.from_dict(batches[0].meta["fingerprint"])
    for batch in batches:
        match = compare_fingerprints(first, DeviceFingerprint.from_dict(batch.meta["fingerprint"]))
        if match.level == "different":
            raise RoutePackError(
                f"Measurements of different devices cannot be fitted together ({'; '.join(match.reasons)}). "
                "Fit them apart."
            )
    return first


def _doubts_of(batches: list[Measurements]) -> tuple[str, ...]:
    """Return why measurements are not to be trusted; each is a warning too."""
    doubts = []
    for batch in batches:
        if problems := (batch.meta.get("steadiness") or {}).get("problems"):
            doubts.append(
                f"These measurements are not steady: {'; '.join(problems)}. Profile again on a quiet machine before "
                "you trust what is learned from them."
            )
        doubts += batch.meta.get("doubts") or ()
    for doubt in doubts:
        warnings.warn(doubt, stacklevel=3)
    return tuple(doubts)


def _data_hash(batches: list[Measurements]) -> str:
    """Return the hash of what was fitted; text by its characters, for the width of a text column means nothing."""
    hashes = []
    for batch in batches:
        numbers = {name: column for name, column in batch.rows.items() if column.dtype.kind in "if"}
        texts = {name: batch.rows[name].tolist() for name in ("case_id", "status", "flag")}
        hashes.append([arrays_hash(**numbers), content_hash(texts)])
    return content_hash(hashes)


def fit_operation(
    operation: Operation, direction: str, rows: Columns, params: FitParams, priors: Priors = (), arch: str = ""
) -> tuple[OperationModel, HeldOut | None]:
    """Fit and validate one operation in one direction; ``rows`` holds its raw features and ``time_us``.

    The best of ``priors`` is joined where it lowers held-out errors; those of the architecture ``arch`` come first.
    """
    empty_us, rows = _split_empty(operation, rows)
    time_us = rows["time_us"]
    columns = {name: rows[name] for name in operation.features}
    parameters = fit_baseline(operation, columns, time_us, params)
    found, mixes, reasons = validate(operation, columns, time_us, parameters, params)
    intervals, covered = intervals_of(operation, columns, found)
    target = np.log(time_us / operation.baseline(columns, parameters))
    wanted = {name for regime, mix in mixes.items() if regime != "unseen" for name in mix}
    own = OperationModel(
        operation=operation,
        direction=direction,
        parameters=parameters,
        shapes=shape_ranges(operation, columns),
        known=fit_residual(operation, columns, target, params, False, wanted),
        unseen=fit_residual(operation, columns, target, params, True, mixes.get("unseen", ())),
        mixes=mixes,
        empty_us=empty_us,
        rows=int(time_us.size),
        reasons=reasons,
        validation={**{split: one.report() for split, one in found.items() if one is not None}, **covered},
        intervals=intervals,
    )
    return _join_prior(own, found, rows, params, priors, arch) if priors else (own, found[SIZES])


def _split_empty(operation: Operation, rows: Columns) -> tuple[float | None, Columns]:
    """Take out calls with nothing to do: they set the floor, and have no log."""
    positive = [rows[name] > 0 for name in operation.features if name not in operation.zero_allowed]
    filled = np.logical_and.reduce(positive)
    if filled.all():
        return None, rows
    if not filled.any():
        raise RoutePackError(f"Every measured row of {operation.name} is empty. Profile sizes above 0.")
    return float(np.median(rows["time_us"][~filled])), take(rows, filled)


@dataclass(frozen=True, eq=False)
class _Route:
    """Hold the rows timed on the new GPU as one prior sees them."""

    columns: Columns
    time_us: np.ndarray
    prior: CostModel
    source: OperationModel

    @cached_property
    def residual(self) -> np.ndarray:
        """What the prior learned beyond its formula, on every row."""
        return self.source.log_residual(self.columns)

    def fit(self, kept: np.ndarray | slice, candidates: Sequence[Names], params: FitParams) -> list[Prior]:
        """Refit the baseline to the kept rows, pulled to the prior's parameters, and every candidate's discrepancy."""
        operation, columns, residual = self.source.operation, take(self.columns, kept), self.residual[kept]
        centre = {n: replace(operation.parameters[n], default=value) for n, value in self.source.parameters.items()}
        # baseline x residual = time is the same as baseline = time / residual.
        bare_us, pulled = self.time_us[kept] / np.exp(residual), replace(params, baseline_pull=PRIOR_PULL)
        parameters = fit_baseline(replace(operation, parameters=centre), columns, bare_us, pulled)
        target = np.log(self.time_us[kept] / (operation.baseline(columns, parameters) * np.exp(residual)))
        inputs = {**operation.derive(columns), PRIOR_RESIDUAL: residual}
        name, data_hash = self.prior.fingerprint.name, self.prior.data_hash
        return [
            Prior(self.source, name, data_hash, parameters, fit_discrepancy(parts, inputs, target, params))
            for parts in candidates
        ]

    def held_out(self, fold: np.ndarray, candidates: Sequence[Names], params: FitParams) -> list[np.ndarray]:
        """Return, for each candidate, microseconds of every row from the other folds."""
        found = [np.empty_like(self.time_us) for _ in candidates]
        for k in np.unique(fold):
            test = fold == k
            for predicted_us, prior in zip(found, self.fit(~test, candidates, params), strict=True):
                predicted_us[test] = prior.predict_us(take(self.columns, test))
        return found


def _join_prior(
    own: OperationModel, found: Splits, rows: Columns, params: FitParams, priors: Priors, arch: str
) -> tuple[OperationModel, HeldOut | None]:
    """Return the own model, ``found`` its validation, joined to the best prior, or with the reason why none helps."""
    operation, key = own.operation, (own.operation.name, own.direction)
    columns, time_us = {name: rows[name] for name in operation.features}, rows["time_us"]
    offered = [_Route(columns, time_us, prior, prior.models[key]) for prior in priors if key in prior.models]
    if not offered:
        return replace(own, reasons=(*own.reasons, f"no prior holds {' '.join(key)}")), found[SIZES]
    folds = {
        split: fold
        for split in (SIZES, SHAPES)
        if split in found and (fold := held_out_folds(operation, columns, split, params.folds, LEAST_ROWS)) is not None
    }
    route, why = _choose(offered, arch, folds.get(SIZES, np.arange(time_us.size) % 2), params)
    if SIZES not in folds:
        (prior,) = route.fit(slice(None), [()], params)
        reason = f"{why}; {time_us.size} rows cannot tell whether it helps"
        return replace(own, prior=prior, reasons=(*own.reasons, reason)), found[SIZES]
    # A Gaussian process costs the cube of its rows; where they are many, trees know as much.
    parts = ("smooth", "trees") if time_us.size < params.small_rows else ("trees",)
    candidates = [(), ("scale", "smooth", "trees") if time_us.size < FEW_ROWS else parts]
    with_prior = {split: route.held_out(fold, candidates, params) for split, fold in folds.items()}
    plain, learned = (sum(log_error(us[i], time_us).mean() for us in with_prior.values()) for i in (0, 1))
    # The discrepancy is shrunk by itself: only where it clearly hurts is it left out.
    best = 0 if plain < CLEARLY * learned else 1
    shares, joint, said, validation = {}, {}, [], dict(own.validation)
    for split in folds:
        alone = found[split] or hold_out(
            operation, columns, time_us, own.parameters, split, params, wanted=(), least_rows=LEAST_ROWS
        )
        assert alone is not None
        shares[split], joint[split], errors, words = _weighed(alone, with_prior[split][best])
        validation[split] = {"rows": int(time_us.size), **validation.get(split, {}), **errors}
        said.append(f"{split} {words}")
    if not any(shares.values()):
        return replace(own, reasons=(*own.reasons, f"{why}: refused, {', '.join(said)}")), found[SIZES]
    (prior,) = route.fit(slice(None), [candidates[best]], params)
    # Where no shape could be held out, what helps in unseen sizes is taken to help in unseen shapes.
    unseen_share = shares.get(SHAPES, float(shares[SIZES] > 0))
    by = " + ".join(candidates[best]) or "the refit alone"
    model = replace(
        own,
        prior=replace(prior, seen_share=shares[SIZES], unseen_share=unseen_share),
        reasons=(*own.reasons, f"{why}: {', '.join(said)}; discrepancy by {by}"),
        validation=validation,
        intervals=calibrate(size_of(operation, columns), log_error(joint[SIZES].model_us, time_us)),
    )
    return model, joint[SIZES]


def _choose(offered: list[_Route], arch: str, fold: np.ndarray, params: FitParams) -> tuple[_Route, str]:
    """Return the best prior's route, and a clause that says which and why: of this architecture, else of any."""
    same = [route for route in offered if arch and route.prior.fingerprint.arch == arch]
    routes = same or offered
    errors = [log_error(one.held_out(fold, [()], params)[0], one.time_us).mean() for one in routes if len(routes) > 1]
    best = routes[int(np.argmin(errors)) if errors else 0]
    device = best.prior.fingerprint
    kin = "the same architecture" if same else f"another architecture than {arch or 'unknown'}"
    facts = [f"{device.arch or 'architecture unknown'}, {kin}"]
    if errors:
        named = zip(routes, errors, strict=True)
        of = ", ".join(f"{route.prior.fingerprint.name} {100 * error:.1f} %" for route, error in named)
        facts.append(f"least held-out error of {of}")
    if same and len(same) < len(offered):
        passed = [route.prior.fingerprint.name for route in offered if route not in same]
        facts.append(f"{', '.join(passed)} passed over for its architecture")
    return best, f"prior {device.name} ({'; '.join(facts)})"


def _weighed(alone: HeldOut, prior_us: np.ndarray) -> tuple[float, HeldOut, dict[str, Any], str]:
    """Return the prior's share with the least held-out error, what it predicts, its errors, and both in words."""
    without_us = alone.model_us if alone.useful() else alone.baseline_us
    tried = SHARES if prior_us.size >= LEAST_BLEND_ROWS else (SHARES[0], SHARES[-1])
    blends = [blend(without_us, prior_us, share) for share in tried]
    errors = [log_error(predicted_us, alone.true_us).mean() for predicted_us in blends]
    place = int(np.argmin(errors))
    if errors[place] < GAIN_NEEDED * errors[0]:
        used, error = f"with a share of {tried[place]:g}", errors[place]
    else:
        place, used, error = 0, "with it", min(errors[1:])
    shown = {"without_prior": without_us, "model": blends[place]}
    report = {name: error_summary(predicted_us, alone.true_us) for name, predicted_us in shown.items()}
    words = f"{100 * errors[0]:.1f} % without it, {100 * error:.1f} % {used}"
    return tried[place], replace(alone, model_us=blends[place]), report, words

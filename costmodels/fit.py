"""Fit a cost model: measurements in, one model per operation and direction out, validated before it is believed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from costmodels.cost_model import CostModel
from costmodels.features import Columns, Operation, size_of, take
from costmodels.fit_prior import join_prior
from costmodels.freezing.freeze import freeze_tables, table_errors
from costmodels.learned.baseline import fit_baseline
from costmodels.learned.intervals import LEVEL, WIDENING, Intervals, calibrate, coverage
from costmodels.learned.predictor import OperationModel
from costmodels.learned.ranges import shape_ranges
from costmodels.learned.residual import Mix, fit_residual
from costmodels.learned.validation import (
    LARGEST,
    LARGEST_GROUPS,
    REGIMES,
    SHAPES,
    SIZES,
    HeldOut,
    hold_out,
    log_error,
    size_groups,
    with_mixes,
)
from costmodels.operations.catalog import DIRECTIONS, OPERATIONS
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
from profiler.files import arrays_hash, content_hash

REQUIRED = ("attention", "experts")
"""Operations without which a step cannot be priced at all."""


def fit_cost_model(
    measurements: Sequence[Measurements] | Measurements,
    spec: ModelSpec,
    topology: Topology,
    max_tokens: int,
    params: FitParams | None = None,
    observer: Observer | None = None,
    priors: Sequence[CostModel] = (),
) -> CostModel:
    """Fit every operation that was measured, and freeze the tables of one model, topology and token cap.

    ``priors`` are cost models of sibling GPUs: each operation takes the best of them where it lowers held-out errors.

    Raises
    ------
    RoutePackError
        If the measurements are of different devices, or attention or experts were not measured.
    """
    params, observer = params or FitParams(), observer or Observer()
    batches = [measurements] if isinstance(measurements, Measurements) else list(measurements)
    fingerprint = _one_device(batches)
    _warn_of_unsteady(batches)
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
        kept = take(rows, ~flagged)
        model, held_out = fit_operation(OPERATIONS[name], direction, kept, params, priors, fingerprint.arch)
        models[name, direction] = replace(model, flagged_rows=int(flagged.sum()))
        if held_out is not None:
            parity[f"{name}_{direction}"] = held_out
        observer.advance("fit", f"{name} {direction}")
    cost_model = CostModel(
        models=models, params=params, fingerprint=fingerprint, spec=spec, topology=topology, max_tokens=max_tokens,
        data_hash=_data_hash(batches), provenance=[batch.meta.get("provenance") for batch in batches], parity=parity,
    )  # fmt: skip
    cost_model.tables = freeze_tables(cost_model, spec, topology, max_tokens)
    cost_model.table_errors = table_errors(cost_model, cost_model.tables, spec, topology, params.seed)
    observer.advance("fit", "tables")
    observer.finish("fit")
    return cost_model


def fit_operation(
    operation: Operation,
    direction: str,
    rows: Columns,
    params: FitParams,
    priors: Sequence[CostModel] = (),
    arch: str = "",
) -> tuple[OperationModel, HeldOut | None]:
    """Fit and validate one operation in one direction; ``rows`` holds its raw features and ``time_us``.

    The best of ``priors`` is joined where it lowers held-out errors; those of the architecture ``arch`` come first.
    """
    empty_us, rows = _split_empty(operation, rows)
    time_us = rows["time_us"]
    columns = {name: rows[name] for name in operation.features}
    parameters = fit_baseline(operation, columns, time_us, params)
    splits = [split for split in REGIMES if split != SHAPES or operation.shape]
    found = {split: hold_out(operation, columns, time_us, parameters, split, params) for split in splits}
    reasons: list[str] = []
    mixes = _mixes(found, params, reasons)
    if (sizes := found[SIZES]) is not None and "measured" in mixes:
        found[SIZES] = with_mixes(sizes, mixes)
    target = np.log(time_us / operation.baseline(columns, parameters))
    intervals, covered = _intervals(operation, columns, found)
    own = OperationModel(
        operation=operation,
        direction=direction,
        parameters=parameters,
        shapes=shape_ranges(operation, columns),
        known=fit_residual(operation, columns, target, params, False, _members(mixes, unseen=False)),
        unseen=fit_residual(operation, columns, target, params, True, _members(mixes, unseen=True)),
        mixes=mixes,
        empty_us=empty_us,
        rows=int(time_us.size),
        reasons=tuple(reasons),
        validation={**{split: one.report() for split, one in found.items() if one is not None}, **covered},
        intervals=intervals,
    )
    return join_prior(own, found, columns, time_us, params, priors, arch) if priors else (own, found[SIZES])


def _mixes(found: dict[str, HeldOut | None], params: FitParams, reasons: list[str]) -> dict[str, Mix]:
    """Return what answers in each regime, by each split's own choice; nothing where a split refuses it."""
    mixes: dict[str, Mix] = {}
    sizes = found[SIZES]
    if _accepted(sizes, SIZES, params, reasons):
        assert sizes is not None
        mixes |= sizes.mixes
        mixes |= {"larger": mixes["measured"], "beyond": mixes["between"]}
        largest = found[LARGEST]
        if largest is None:
            reasons.append(f"{LARGEST}: too few groups of sizes; what is best inside is used beyond too")
        elif largest.useful():
            mixes |= largest.mixes
        else:
            # The nearest residuals are no help farther out: physics alone from there on.
            reasons.append(f"{LARGEST}: no residual was better than the baseline")
            mixes |= {"larger": (), "beyond": ()}
    if SHAPES in found and _accepted(shapes := found[SHAPES], SHAPES, params, reasons):
        assert shapes is not None
        mixes |= shapes.mixes
    return mixes


def _members(mixes: dict[str, Mix], unseen: bool) -> set[str]:
    return {name for regime, mix in mixes.items() if (regime == "unseen") == unseen for name in mix}


def _intervals(
    operation: Operation, columns: Columns, found: dict[str, HeldOut | None]
) -> tuple[Intervals | None, dict[str, Any]]:
    """Return calibrated half-widths and what share of held-out rows they cover, for the report."""
    sizes, largest = found[SIZES], found[LARGEST]
    if sizes is None:
        return None, {}
    size, groups, error = (
        size_of(operation, columns),
        size_groups(operation, columns),
        log_error(sizes.model_us, sizes.true_us),
    )
    # Calibrated on sizes with smaller and larger ones on both sides: what "inside the timed range" means.
    inside = (groups > groups.min()) & (groups < groups.max())
    intervals = calibrate(size[inside], error[inside])
    if intervals is None:
        return None, {}
    inside_pct = coverage(size[inside], error[inside], groups[inside])
    report: dict[str, Any] = {"level_pct": 100.0 * LEVEL, "rows": int(inside.sum())}
    if inside_pct is not None:
        report["inside_pct"] = round(100.0 * inside_pct, 1)
    if largest is not None:
        beyond = groups >= np.unique(groups)[-LARGEST_GROUPS]
        half = WIDENING * intervals.half_widths(size[beyond])
        report["largest_sizes_pct"] = round(
            100.0 * float((log_error(largest.model_us, largest.true_us) <= half).mean()), 1
        )
    report["median_half_width_pct"] = round(100.0 * float(np.expm1(np.median(intervals.half_widths(size)))), 2)
    return intervals, {"intervals": report}


def _accepted(held_out: HeldOut | None, split: str, params: FitParams, reasons: list[str]) -> bool:
    if held_out is None:
        reasons.append(f"{split}: too few groups of rows to validate a residual")
    elif held_out.true_us.size < params.min_rows:
        reasons.append(f"{split}: {held_out.true_us.size} rows, a residual needs {params.min_rows}")
    elif not held_out.useful():
        reasons.append(f"{split}: the residual was constant or no better than the baseline")
    else:
        return True
    return False


def _timed(batches: list[Measurements], operation: Operation, direction: str) -> tuple[Columns, np.ndarray]:
    """Return raw features and ``time_us`` of one operation and direction, and which rows are flagged."""
    chosen = [batch.select(op=operation.name, direction=direction, status="ok").rows for batch in batches]
    columns = {
        column: np.concatenate([np.asarray(rows[column], dtype=np.float64) for rows in chosen])
        for column in (*operation.features, "time_us")
    }
    good = np.isfinite(columns["time_us"]) & (columns["time_us"] > 0)
    return take(columns, good), np.concatenate([rows["flag"] != "" for rows in chosen])[good]


def _split_empty(operation: Operation, rows: Columns) -> tuple[float | None, Columns]:
    """Take out calls with nothing to do: they set the floor, and have no log."""
    filled = np.ones(rows["time_us"].size, dtype=bool)
    for name in operation.features:
        if name not in operation.zero_allowed:
            filled &= rows[name] > 0
    if filled.all():
        return None, rows
    if not filled.any():
        raise RoutePackError(f"Every measured row of {operation.name} is empty. Profile sizes above 0.")
    return float(np.median(rows["time_us"][~filled])), {name: column[filled] for name, column in rows.items()}


def _warn_of_unsteady(batches: list[Measurements]) -> None:
    for batch in batches:
        if problems := (batch.meta.get("steadiness") or {}).get("problems"):
            warnings.warn(
                f"These measurements are not steady: {'; '.join(problems)}. Profile again on a quiet machine before "
                "you trust what is learned from them.",
                stacklevel=3,
            )


def _one_device(batches: list[Measurements]) -> DeviceFingerprint:
    if not batches:
        raise RoutePackError("No measurements were given. Run `routepack profile` first.")
    first, *others = (DeviceFingerprint.from_dict(batch.meta["fingerprint"]) for batch in batches)
    for other in others:
        match = compare_fingerprints(first, other)
        if match.level == "different":
            raise RoutePackError(
                f"Measurements of different devices cannot be fitted together ({'; '.join(match.reasons)}). "
                "Fit them apart."
            )
    return first


def _data_hash(batches: list[Measurements]) -> str:
    """Return the hash of what was fitted; text by its characters, for the width of a text column means nothing."""
    hashes = []
    for batch in batches:
        numbers = {name: column for name, column in batch.rows.items() if column.dtype.kind in "if"}
        texts = {name: batch.rows[name].tolist() for name in ("case_id", "status", "flag")}
        hashes.append([arrays_hash(**numbers), content_hash(texts)])
    return content_hash(hashes)

"""Fit a cost model: measurements in, one model per operation and direction out, validated before it is believed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from costmodels.cost_model import CostModel, tables_key
from costmodels.features import Columns, Operation
from costmodels.freeze import freeze_tables, table_errors
from costmodels.operations import DIRECTIONS, OPERATIONS
from costmodels.params import FitParams
from costmodels.predictor import OperationModel, grow_trees, shape_ranges
from costmodels.roofline import fit_baseline
from costmodels.validation import HeldOut, hold_out
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
) -> CostModel:
    """Fit every operation that was measured, and freeze the tables of one model, topology and token cap.

    Raises
    ------
    RoutePackError
        If the measurements are of different devices, or attention or experts were not measured.
    """
    params, observer = params or FitParams(), observer or Observer()
    batches = [measurements] if isinstance(measurements, Measurements) else list(measurements)
    fingerprint = _one_device(batches)
    present = [
        (OPERATIONS[name], direction, rows)
        for name in OPERATIONS
        for direction in DIRECTIONS
        if len(rows := _usable(batches, name, direction))
    ]
    measured = {operation.name for operation, direction, _ in present if direction == "forward"}
    for name in REQUIRED:
        if name not in measured:
            raise RoutePackError(
                f"The measurements hold no usable forward time of {name} (they have "
                f"{', '.join(sorted(measured)) or 'nothing'}). Run `routepack profile` again, or import tables with it."
            )
    models, parity = {}, {}
    observer.start("fit", len(present) + 1)
    for operation, direction, rows in present:
        model, held_out = fit_operation(operation, direction, rows, params)
        flagged = sum(_flagged(batch, operation.name, direction) for batch in batches)
        models[operation.name, direction] = replace(model, flagged_rows=flagged)
        if held_out is not None:
            parity[f"{operation.name}_{direction}"] = held_out
        observer.advance("fit", f"{operation.name} {direction}")
    cost_model = CostModel(
        models=models, params=params, fingerprint=fingerprint, spec=spec, topology=topology, max_tokens=max_tokens,
        data_hash=_data_hash(batches), provenance=[batch.meta.get("provenance") for batch in batches], parity=parity,
    )  # fmt: skip
    cost_model.tables = freeze_tables(cost_model, spec, topology, max_tokens, tables_key(spec, topology, max_tokens))
    cost_model.table_errors = table_errors(cost_model, cost_model.tables, spec, topology, params.seed)
    observer.advance("fit", "tables")
    observer.finish("fit")
    return cost_model


def fit_operation(
    operation: Operation, direction: str, rows: Columns, params: FitParams
) -> tuple[OperationModel, HeldOut | None]:
    """Fit and validate one operation in one direction; ``rows`` holds its raw features and ``time_us``."""
    empty_us, rows = _split_empty(operation, rows)
    time_us = rows["time_us"]
    columns = {name: rows[name] for name in operation.features}
    parameters = fit_baseline(operation, columns, time_us, params)
    derived = operation.derive(columns)
    target = np.log(time_us / operation.baseline(columns, parameters))
    sizes = hold_out(operation, columns, time_us, parameters, "unseen sizes", params, alone=True)
    shapes = hold_out(operation, columns, time_us, parameters, "unseen shapes", params) if operation.shape else None
    validation = {held_out.split: held_out.report() for held_out in (sizes, shapes) if held_out is not None}
    seen = unseen = None
    reasons: list[str] = []
    if _accepted(sizes, "unseen sizes", params, reasons):
        seen = grow_trees(derived, tuple(derived), target, params)
    if operation.shape and _accepted(shapes, "unseen shapes", params, reasons):
        unseen = grow_trees(derived, operation.dimensionless, target, params, unseen=True)
    model = OperationModel(
        operation=operation, direction=direction, parameters=parameters, seen=seen, unseen=unseen,
        shapes=shape_ranges(operation, columns), empty_us=empty_us, rows=int(time_us.size), reasons=tuple(reasons),
        validation=validation,
    )  # fmt: skip
    return model, sizes


def _accepted(held_out: HeldOut | None, split: str, params: FitParams, reasons: list[str]) -> bool:
    if held_out is None:
        reasons.append(f"{split}: too few groups of rows to validate trees")
    elif held_out.true_us.size < params.min_rows:
        reasons.append(f"{split}: {held_out.true_us.size} rows, trees need {params.min_rows}")
    elif not held_out.useful():
        reasons.append(f"{split}: trees were constant or no better than the baseline")
    else:
        return True
    return False


def _usable(batches: list[Measurements], name: str, direction: str) -> Columns:
    """Return raw features and ``time_us`` of the good rows of one operation and direction; empty without any."""
    operation = OPERATIONS[name]
    parts = [batch.select(op=name, direction=direction, status="ok", flag="").rows for batch in batches]
    columns = {
        column: np.concatenate([np.asarray(part[column], dtype=np.float64) for part in parts])
        for column in (*operation.features, "time_us")
    }
    good = np.isfinite(columns["time_us"]) & (columns["time_us"] > 0)
    return {column: values[good] for column, values in columns.items()} if good.any() else {}


def _flagged(batch: Measurements, name: str, direction: str) -> int:
    rows = batch.select(op=name, direction=direction, status="ok").rows
    return int((rows["flag"] != "").sum())


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

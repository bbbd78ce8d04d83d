"""Held-out errors of every contestant, by the library's own grouped validation.

Groups are held out whole: all rows of a size (five folds of sizes), all rows of a model's shape, or the three largest
sizes. Flags come with the import, before any split. What the library reports when it fits is read off; LightGBM alone
on raw and on log time is run here on the same folds, for the splits where the library does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gates
import numpy as np
from records import ErrorRecord

from costmodels import CostModel, FitParams
from costmodels.features import Columns, Operation
from costmodels.learned.baseline import fit_baseline
from costmodels.learned.trees import grow_trees
from costmodels.learned.validation import LARGEST, SHAPES, SIZES, HeldOut, error_summary, held_out_folds, hold_out
from costmodels.operations import OPERATIONS
from profiler import Measurements, import_published
from routepack_tune.reports.fit import contestant_label, contestants

GPUS = {"H200": "h200_sxm", "H100": "h100_sxm", "A100": "a100_sxm"}
MEGABYTE = 1e6

Mask = Callable[[Columns], np.ndarray]


def _all(columns: Columns) -> np.ndarray:
    return np.ones(next(iter(columns.values())).size, dtype=bool)


def _full_grouped_query(columns: Columns) -> np.ndarray:
    return (columns["window"] == 0) & (columns["qk_head_dim"] == columns["v_head_dim"])


@dataclass(frozen=True, slots=True)
class Part:
    """Name a task that is read off some rows of a validation of unseen sizes."""

    op: str
    task: str
    mask: Mask


TASKS = {
    ("experts", SIZES): gates.EXPERTS_SIZES,
    ("experts", SHAPES): gates.EXPERTS_SHAPES,
    ("experts", LARGEST): gates.EXPERTS_LARGEST,
    ("attention", SIZES): gates.ATTENTION_SIZES,
    ("attention", SHAPES): gates.ATTENTION_SHAPES,
    ("attention", LARGEST): gates.ATTENTION_LARGEST,
    ("dense", SIZES): gates.DENSE_SIZES,
    ("dense", LARGEST): gates.DENSE_LARGEST,
    ("alltoall", SIZES): gates.ALLTOALL_SIZES,
    ("alltoall", LARGEST): gates.ALLTOALL_LARGEST,
}
"""What each operation and split of the library's validation is called here."""
PARTS = (
    Part("attention", gates.ATTENTION_SIZES_FULL, _full_grouped_query),
    Part("alltoall", gates.ALLTOALL_LARGE, lambda c: c["bytes"] > 16 * MEGABYTE),
    Part("alltoall", gates.ALLTOALL_SMALL, lambda c: c["bytes"] < MEGABYTE),
)
LIGHTGBM_ALONE = (("experts", SIZES), ("experts", SHAPES), ("experts", LARGEST), ("attention", SIZES),
                  ("attention", SHAPES), ("attention", LARGEST))  # fmt: skip
RAW, LOG = "LightGBM on raw time", "LightGBM alone"


@functools.lru_cache(maxsize=3)
def measurements_of(gpu: str, shared: Path) -> Measurements | None:
    """Return a GPU's published times, None where its folder is absent."""
    folder = shared / "gpu-timings" / GPUS[gpu]
    return import_published(folder) if folder.is_dir() else None


def rows_of(measured: Measurements, op: str, *, flagged: bool) -> tuple[Columns, np.ndarray]:
    """Return raw features and times of the forward rows of an operation, with or without flagged ones."""
    chosen = measured.select(op=op, direction="forward", status="ok")
    rows = chosen.rows if flagged else chosen.select(flag="").rows
    operation = OPERATIONS[op]
    columns = {name: np.asarray(rows[name], dtype=np.float64) for name in operation.features}
    return columns, np.asarray(rows["time_us"], dtype=np.float64)


def quick_sample(measured: Measurements) -> Measurements:
    """Return every seventh row of the large tables, and all of the small one."""
    return measured.take((np.arange(len(measured)) % 7 == 0) | (measured.rows["op"] == "alltoall"))


def fitted_records(gpu: str, model: CostModel, measured: Measurements) -> Iterator[ErrorRecord]:
    """Yield what a cost model, just fitted, says of its own errors, and of parts of its unseen sizes."""
    for (op, split), task in TASKS.items():
        report = model.validation.get(f"{op}/forward", {}).get(split)
        if report is not None:
            yield from _records(gpu, task, report)
    for part in PARTS:
        held_out = model.parity.get(f"{part.op}_forward")
        columns, time_us = rows_of(measured, part.op, flagged=False)
        if held_out is not None and time_us.size:
            assert np.array_equal(time_us, held_out.true_us)
            yield from _of_rows(gpu, part.task, held_out, part.mask(columns))


def flagged_records(gpu: str, measured: Measurements, params: FitParams) -> Iterator[ErrorRecord]:
    """Yield the errors where rows that the flags mark take part on both sides."""
    operation = OPERATIONS["experts"]
    columns, time_us = rows_of(measured, "experts", flagged=True)
    start = fit_baseline(operation, columns, time_us, params)
    held_out = hold_out(operation, columns, time_us, start, SIZES, params)
    if held_out is not None:
        yield from _records(gpu, gates.EXPERTS_ALL, held_out.report())


def alone_records(gpu: str, op: str, split: str, measured: Measurements, params: FitParams) -> Iterator[ErrorRecord]:
    """Yield the errors of LightGBM without physics: on raw times, and on log times where the library has not done so.

    Shapes that were never timed give it the dimensionless inputs, as the library's own trees get.
    """
    operation = OPERATIONS[op]
    columns, time_us = rows_of(measured, op, flagged=False)
    fold = held_out_folds(operation, columns, split, params.folds) if time_us.size else None
    if fold is None:
        return
    kept = fold >= 0
    targets = {RAW: time_us, **({} if split == SIZES else {LOG: np.log(time_us)})}
    for name, target in targets.items():
        answer = _trees_alone(operation, columns, target, fold, split, params)
        predicted = answer if name == RAW else np.exp(answer)
        rows = int(kept.sum())
        yield ErrorRecord(gpu, TASKS[op, split], name, rows, **error_summary(predicted[kept], time_us[kept]))


def _trees_alone(
    operation: Operation, columns: Columns, target: np.ndarray, fold: np.ndarray, split: str, params: FitParams
) -> np.ndarray:
    derived, answer = operation.derive(columns), np.full(target.size, np.nan)
    names = operation.dimensionless if split == SHAPES else tuple(derived)
    for k in range(int(fold.max()) + 1):
        seen = {name: column[fold != k] for name, column in derived.items()}
        asked = {name: column[fold == k] for name, column in derived.items()}
        answer[fold == k] = grow_trees(seen, names, target[fold != k], params).log_ratio(asked)
    return answer


def _records(gpu: str, task: str, report: Mapping[str, Any]) -> Iterator[ErrorRecord]:
    for key, errors in report.items():
        if isinstance(errors, Mapping) and "median_pct" in errors:
            numbers = {name: errors[name] for name in ("median_pct", "mape_pct", "p95_pct", "worst_pct")}
            yield ErrorRecord(gpu, task, contestant_label(key), int(errors.get("rows", report["rows"])), **numbers)


def _of_rows(gpu: str, task: str, held_out: HeldOut, asked: np.ndarray) -> Iterator[ErrorRecord]:
    for name, predicted in contestants(held_out).items():
        answered = asked & np.isfinite(predicted)
        if answered.any():
            errors = error_summary(predicted[answered], held_out.true_us[answered])
            yield ErrorRecord(gpu, task, name, int(answered.sum()), **errors)

"""Measured times of training steps: one small file that a training job can write beside its log.

CSV with a header, or JSON with a list of objects, the same names in both: ``step`` (file name of the step batch without
``.npz``), ``step_time_s`` (forward and backward of all microbatches, without rollout, log-probabilities and optimizer),
and where known ``attention_s``, ``experts_s``, ``exchange_s``, ``rest_s`` (of the slowest EP block; they add up to the
step) and ``plan`` (the ``plan.json`` that ran, relative to this file). Empty fields are unknown.
"""

from __future__ import annotations

import csv
import difflib
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiler.errors import RoutePackError
from profiler.files import read_json

PARTS = ("attention_s", "experts_s", "exchange_s", "rest_s")
COLUMNS = ("step", "step_time_s", *PARTS, "plan")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Hold what was measured of one step; parts in the order of :data:`PARTS`, NaN where unknown."""

    step_time_s: float
    parts_s: tuple[float, ...]
    plan: Path | None


def read_step_times(path: Path | str) -> dict[str, StepTimes]:
    """Return the measured steps of a file by name.

    Raises
    ------
    RoutePackError
        If the file is missing or damaged, a column is missing or unknown, a step occurs twice, or a time is no
        number of seconds above 0; the message names the step.
    """
    path, found = Path(path), {}
    for number, row in enumerate(_rows(path), start=1):
        step, source = str(row.get("step") or ""), f"Step times {path}, row {number}"
        if not step:
            raise RoutePackError(f"{source} names no step. Give the step batch's file name without .npz.")
        if step in found:
            raise RoutePackError(f"{source}: step {step!r} occurs twice. Keep one row a step.")
        total = _seconds(row.get("step_time_s"), source, "step_time_s")
        if not total > 0:
            raise RoutePackError(f"{source}: step {step!r} has step_time_s {row.get('step_time_s')!r}, not above 0.")
        parts = tuple(_seconds(row.get(name), source, name) for name in PARTS)
        if sum(part for part in parts if not math.isnan(part)) > 1.01 * total:
            raise RoutePackError(f"{source}: the parts of step {step!r} add up to more than its {total:g} s.")
        found[step] = StepTimes(total, parts, path.parent / row["plan"] if row.get("plan") else None)
    if not found:
        raise RoutePackError(f"Step times {path} hold no step. Write one row a step: {', '.join(COLUMNS[:2])}.")
    return found


def _rows(path: Path) -> list[Mapping[str, Any]]:
    """Read the rows of either format and check their columns."""
    if path.suffix == ".json":
        rows = read_json(path, "Step times")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise RoutePackError(f"Step times {path}: expected a list of objects with {', '.join(COLUMNS)}.")
    else:
        try:
            rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig")), strict=True))
        except FileNotFoundError:
            raise RoutePackError(f"Step times not found: {path}.") from None
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise RoutePackError(f"Step times {path} cannot be read: {error}. Write them as CSV or .json.") from None
    for row in rows:
        unknown = [name for name in row if name not in COLUMNS]
        if unknown:
            near = difflib.get_close_matches(str(unknown[0]), COLUMNS, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise RoutePackError(
                f"Step times {path}: unknown column {unknown[0]!r}; known: {', '.join(COLUMNS)}.{hint}"
            )
        if "step" not in row or "step_time_s" not in row:
            raise RoutePackError(f"Step times {path}: columns step and step_time_s are needed, got {list(row)}.")
    return rows


def _seconds(value: Any, source: str, name: str) -> float:
    """Return a number of seconds; NaN where the field is empty."""
    if value is None or value == "":
        return math.nan
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise RoutePackError(f"{source}: {name} is {value!r}, expected a number of seconds.")
    return seconds

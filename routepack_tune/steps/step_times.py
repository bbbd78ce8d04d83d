"""Measured times of training steps: one small file that a training job can write beside its log.

CSV with a header, or JSON with a list of objects, the same names in both: ``step`` (file name of the step batch without
``.npz``), ``step_time_s`` (forward and backward of all microbatches, without rollout, log-probabilities and optimizer),
and where known ``attention_s``, ``experts_s``, ``exchange_s``, ``rest_s`` (of the slowest EP block; they add up to the
step) and ``plan`` (the ``plan.json`` that ran, relative to this file). Empty fields are unknown.
"""

from __future__ import annotations

import csv
import difflib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from profiler.errors import RoutePackError
from profiler.readers import read_json

PARTS = ("attention_s", "experts_s", "exchange_s", "rest_s")
COLUMNS = ("step", "step_time_s", *PARTS, "plan")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Hold what was measured of one step; parts in the order of :data:`PARTS`, NaN where unknown."""

    step_time_s: float
    parts_s: tuple[float, ...]
    plan: Path | None


def read_step_times(path: Path | str) -> dict[str, StepTimes]:
    """Return the measured steps of a file by name; what is wrong in it is an error that names row and step."""
    import pandas as pd  # type: ignore[import-untyped]

    path = Path(path)
    try:
        if path.suffix == ".json":
            listed = read_json(path, "Step times")
            if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
                raise ValueError("expected a list of objects")
            rows = pd.DataFrame(listed)
        else:
            rows = pd.DataFrame(csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines(), strict=True))
    except FileNotFoundError:
        raise RoutePackError(f"Step times not found: {path}.") from None
    except (OSError, ValueError, csv.Error) as error:
        raise RoutePackError(f"Step times {path} cannot be read: {error}. Write them as CSV or .json.") from None
    if rows.empty:
        raise RoutePackError(f"Step times {path} hold no step. Write one row a step: {', '.join(COLUMNS[:2])}.")
    unknown = [str(name) for name in rows if name not in COLUMNS]
    if unknown or not {"step", "step_time_s"} <= set(rows):
        near = difflib.get_close_matches(unknown[0], COLUMNS, 1) if unknown else []
        hint = f" Did you mean {near[0]}?" if near else ""
        raise RoutePackError(
            f"Step times {path}: columns step and step_time_s are needed, {', '.join(COLUMNS[2:])} are optional, "
            f"got {', '.join(map(str, rows))}.{hint}"
        )
    rows = rows.reindex(columns=COLUMNS).astype(object).replace({"": None, np.nan: None})
    given = rows[["step_time_s", *PARTS]]
    seconds = given.astype(str).apply(pd.to_numeric, errors="coerce").where(given.notna())
    total, parts = seconds["step_time_s"], seconds[list(PARTS)]
    wrong = {
        "names no step: give the step batch's file name without .npz": rows["step"].isna(),
        "occurs twice: keep one row a step": rows["step"].astype(str).duplicated(),
        "holds a time that is not above 0, or no number of seconds": (
            ~(total > 0) | (given.notna() & ~((seconds >= 0) & np.isfinite(seconds))).any(axis=1)
        ),
        "has parts that add up to more than the step": parts.sum(axis=1) > 1.01 * total,
    }
    for problem, bad in wrong.items():
        if bad.any():
            row = rows.loc[bad.idxmax()].dropna()
            raise RoutePackError(f"Step times {path}, row {bad.idxmax() + 1}: step {problem}. It holds {dict(row)}.")
    return {
        str(row.step): StepTimes(
            float(total[i]), tuple(parts.loc[i]), path.parent / str(row.plan) if row.plan else None
        )
        for i, row in enumerate(rows.itertuples())
    }

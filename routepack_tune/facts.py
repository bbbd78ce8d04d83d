"""What ``--json`` prints: the numbers and paths that a verb's text shows, under stable names (``docs/tuning.md``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from costmodels import CostModel
    from profiler import Measurements
    from routepack_tune.quickstart import QuickstartResult
    from search import Plan

LONG = ("signature", "history", "pareto")
"""Parts of a study's summary that only ``study.json`` holds."""


def measurements_facts(measurements: Measurements, out: Path, report: bool) -> dict[str, Any]:
    """Return how many rows of which operation there are, what rounds gained, and whether the device was steady."""
    from routepack_tune.reports.profile import REPORT_FILE

    status, ops = measurements.rows["status"], measurements.rows["op"]
    meta, device = measurements.meta, measurements.meta["fingerprint"]
    return {
        "measurements": out,
        "device": {name: device[name] for name in ("name", "arch", "origin")},
        "rows": {op: int((ops[status == "ok"] == op).sum()) for op in sorted(set(ops.tolist()))},
        "without_a_time": int(np.sum(status != "ok")),
        "backward": meta.get("backward"),
        "rounds": meta.get("rounds") or [],
        "limits": meta.get("limits") or [],
        "not_steady": (meta.get("steadiness") or {}).get("problems") or [],
        "report": out / REPORT_FILE if report else None,
    }


def cost_model_facts(model: CostModel, out: Path) -> dict[str, Any]:
    """Return the held-out errors of every operation, why models were chosen, and what is assumed."""
    from routepack_tune.reports.fit import REPORT_FILE, error_lines

    return {
        "costmodel": out,
        "held_out": list(error_lines(model.validation)),
        "reasons": {f"{op}/{direction}": list(one.reasons) for (op, direction), one in model.models.items()},
        "notes": list(model.tables.notes) if model.tables is not None else [],
        "report": out / REPORT_FILE,
    }


def study_facts(document: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Return a study's summary without what only its file holds."""
    from routepack_tune.study.folder import TUNING_REPORT_FILE

    told = {name: value for name, value in document["summary"].items() if name not in LONG}
    return {"study": out, "summary": told, "report": out / TUNING_REPORT_FILE}


def bundle_facts(bundle: Path, registered: str | None) -> dict[str, Any]:
    """Return where a bundle is, under which name it is registered, and what it holds by its own words."""
    from profiler.readers import read_json
    from routepack_tune.bundle import PLANNER_FILE

    known = read_json(bundle / PLANNER_FILE, "Bundle file")["provenance"]
    names = ("export", "export_reason", "trial", "held_out")
    uri = f"models:/{registered}@champion" if registered else None
    return {"bundle": bundle, "registered": uri, **{name: known.get(name) for name in names}}


def plan_facts(plan: Plan, out: Path) -> dict[str, Any]:
    """Return what a plan should take, against the default and the proven bound."""
    times = {"predicted": asdict(plan.predicted), "default": asdict(plan.default)}
    total_s = plan.predicted.step_time_s + plan.moves.seconds
    moves = {
        "priced": plan.provenance.get("previous_placement_id") is not None,
        "experts": len(plan.moves.experts),
        "bytes": plan.moves.bytes,
        "seconds": plan.moves.seconds,
    }
    return {
        "plan": out,
        **times,
        "step_and_moves_s": total_s,
        "speedup": plan.default.step_time_s / total_s,
        "lower_bound_s": plan.lower_bound_s,
        "gap": plan.gap,
        "rows": plan.num_rows,
        "moves": moves,
        "counters": plan.counters,
        "notes": list(plan.notes),
        "plan_hash": plan.plan_hash,
    }


def quickstart_facts(result: QuickstartResult) -> dict[str, Any]:
    """Return what the quickstart found; everything in it is synthetic."""
    outcomes = [{**asdict(one), "total_s": one.total_s} for one in result.outcomes]
    return {"synthetic": True, **asdict(result), "outcomes": outcomes}


def finite(value: Any) -> Any:
    """Return a value in which what JSON cannot hold, NaN and infinities, is None."""
    if isinstance(value, Mapping):
        return {str(key): finite(part) for key, part in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return finite(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

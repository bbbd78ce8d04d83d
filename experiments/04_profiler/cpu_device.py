"""This CPU as the device: a real sweep of a small model, and a set of other cases timed in the same way to judge it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from costmodels import FitParams
from costmodels.choose import KMeansChooser
from costmodels.fit import fit_operation
from costmodels.operations import DIRECTIONS, OPERATIONS
from profiler import Measurements, ModelSpec, ProfileParams, Topology, profile_device
from profiler.cases.design import even_round

NAMES = ("op", "direction", "points", "held_out_cases", "median_pct", "p90_pct", "spread_pct")
SPEC = ModelSpec.from_config({
    "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "intermediate_size": 1024,
}, "small")  # fmt: skip
TOPOLOGY, CAP = Topology(data_parallel_size=4, expert_model_parallel_size=4), 4096
POINTS, HELD_OUT_POINTS = 50, 90


def rows(out: Path | None) -> list[dict[str, Any]]:
    """Profile twice, 50 cases an operation by rounds and 90 by an even choice, and judge the first by the second."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = out or Path(temporary)
        # A target that is never met: all 50 points are taken.
        asked = ProfileParams(max_points=POINTS, target_error=1e-6, max_minutes=0)
        timed = profile_device(SPEC, TOPOLOGY, CAP, asked, folder / "timed", "cpu", chooser=KMeansChooser().next_round)
        others = ProfileParams(max_points=HELD_OUT_POINTS, max_minutes=0, seed=1)
        judge = profile_device(SPEC, TOPOLOGY, CAP, others, folder / "held-out", "cpu", chooser=even_round)
    return [
        _judged(op, direction, timed, judge)
        for op in ("attention", "experts", "router", "dense")
        for direction in DIRECTIONS
        if op in OPERATIONS
    ]


def _judged(op: str, direction: str, timed: Measurements, judge: Measurements) -> dict[str, Any]:
    own = timed.select(op=op, direction=direction, status="ok", flag="")
    other = judge.select(op=op, direction=direction, status="ok", flag="")
    fresh = ~np.isin(other.rows["case_id"], own.rows["case_id"])
    if op == "experts":
        fresh &= other.rows["rows"] > 0
    operation, asked = OPERATIONS[op], other.take(fresh).rows
    names = (*operation.features, "time_us")
    columns = {name: own.rows[name].astype(np.float64) for name in names}
    model, _ = fit_operation(operation, direction, columns, FitParams())
    predicted, _ = model.predict_us({name: asked[name].astype(np.float64) for name in operation.features})
    error = 100.0 * np.abs(predicted / asked["time_us"] - 1.0)
    spread = 100.0 * float(np.median(asked["spread_us"] / asked["time_us"]))
    return {
        "op": op, "direction": direction, "points": len(own), "held_out_cases": len(error),
        "median_pct": f"{np.median(error):.2f}", "p90_pct": f"{np.percentile(error, 90):.2f}",
        "spread_pct": f"{spread:.2f}",
    }  # fmt: skip

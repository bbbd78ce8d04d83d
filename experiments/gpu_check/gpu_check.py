"""Check the whole path on one device: profile, fit, parity with published H200 rows, plan of one synthetic batch.

Everything but the parity goes through the verbs. On ``cpu`` a small model stands in; nothing else differs.

Parity has two kinds of rows. *exact*: rows of the published attention and GEMM tables, timed here at the same sizes.
*fitted*: the sweep's own forward rows against the cost model that was fitted to the published rows, for an expert row
is published with routing in it and its split over the experts is not.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from costmodels import CostModel
from costmodels.operations import OPERATIONS
from profiler import Measurements, ProfileParams, fingerprint_device
from profiler.cases.case import OPERATIONS as TIMED
from profiler.cases.case import Case, Rates, case_bytes, case_seconds
from profiler.device.backend import TorchBackend
from profiler.files import write_json
from profiler.timer import time_case
from routepack_tune import api
from routepack_tune.bundle import untuned_planner
from routepack_tune.config import load_config
from routepack_tune.steps.generator import WorkloadParams, make_step_batch
from routepack_tune.steps.traces import save_step_batch

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "routepack_tune" / "example" / "timings" / "h200_sxm"
SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 128,
}  # fmt: skip
JOBS = {
    "cuda": ("Qwen3-30B-A3B", 8, 16384, "", WorkloadParams(num_prompts=24, rollouts=8, max_tokens=16384)),
    "cpu": ("small.json", 2, 256, "profile: {max_points: 8, repeats: 3}\n",
            WorkloadParams(num_prompts=4, rollouts=4, median_tokens=60, max_tokens=256)),
}  # fmt: skip
"""Model, data-parallel slots and EP ranks, token cap, settings of the profile, batch."""
EXACT_ROWS = 16
MOST_SECONDS = 0.25
"""Published rows that this device would take longer for are not timed."""

Line = tuple[str, str, int, float, float, float]


def write_job(out: Path, device: str) -> Path:
    """Write configuration and batch; return the configuration's path."""
    model, ranks, cap, settings, workload = JOBS[device]
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "small.json", SMALL)
    config = out / "routepack.yaml"
    config.write_text(
        f"model: {model}\ntopology: {{data_parallel_size: {ranks}, expert_model_parallel_size: {ranks}}}\n"
        f"max_tokens_per_microbatch: {cap}\n{settings}"
    )
    save_step_batch(out / "step.npz", make_step_batch(load_config(config).model, workload))
    return config


def published_cases(published: Measurements, rates: Rates) -> Iterator[tuple[Case, float]]:
    """Yield attention and GEMM rows that say exactly what ran and that this device affords, spread over sizes."""
    for op in ("attention", "dense"):
        rows = published.select(op=op, status="ok", flag="").rows
        listed = {name: rows[name].tolist() for name in TIMED[op].features}
        cases = []
        for time_us, *values in zip(rows["time_us"].tolist(), *listed.values(), strict=True):
            f = dict(zip(listed, values, strict=True))
            parts = (f["max_length"],) * f["num_sequences"] if op == "attention" else ()
            case = Case(op, "even", f, parts)
            fits = case_bytes(case, 2) < rates.memory_bytes and case_seconds(case, rates, 2) < MOST_SECONDS
            if fits and sum(parts) == f.get("tokens", 0) * bool(parts):
                cases.append((case, time_us))
        cases.sort(key=lambda one: one[1])
        places = np.linspace(0, len(cases) - 1, min(EXACT_ROWS, len(cases))).round().astype(int)
        yield from (cases[i] for i in sorted(set(places.tolist())))


def exact_parity(published: Measurements, rates: Rates, device: str) -> list[Line]:
    """Time published rows here and compare."""
    params = ProfileParams()
    backend, ratios = TorchBackend(device, params), dict[str, list[float]]()
    with backend.pinned():
        for case, published_us in published_cases(published, rates):
            row = time_case(case, backend, params, directions=("forward",))[0]
            if row["status"] == "ok":
                ratios.setdefault(case.op, []).append(row["time_us"] / published_us)
    return [line("exact", op, np.array(values)) for op, values in ratios.items()]


def fitted_parity(measured: Measurements, model: CostModel) -> list[Line]:
    """Compare the sweep's forward rows with what the model of the published rows says of them."""
    lines = []
    for op in ("attention", "dense", "experts"):
        rows = measured.select(op=op, direction="forward", status="ok", flag="").rows
        operation = OPERATIONS[op]
        usable = np.ones(rows["time_us"].size, dtype=bool)
        for name in operation.features:
            usable &= (rows[name] > 0) | (name in operation.zero_allowed)
        if usable.any():
            features = {name: rows[name][usable] for name in operation.features}
            lines.append(line("fitted", op, rows["time_us"][usable] / model.predict_us(op, "forward", features)[0]))
    return lines


def line(kind: str, op: str, ratios: np.ndarray) -> Line:
    """Return kind, operation, rows, and 10th percentile, median, 90th percentile of measured over published."""
    low, middle, high = (float(value) for value in np.percentile(ratios, (10, 50, 90)))
    return kind, op, ratios.size, low, middle, high


def main() -> None:
    """Run the check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=sorted(JOBS), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-minutes", type=float, default=4.0)
    asked = parser.parse_args()
    out, seconds, began = asked.out, dict[str, float](), time.perf_counter()

    def done(stage: str) -> None:
        seconds[stage] = round(time.perf_counter() - began - sum(seconds.values()), 1)
        print(f"{stage}: {seconds[stage]:.1f} s", flush=True)

    config = write_job(out, asked.device)
    measured = api.profile(
        config, out / "measurements", device=asked.device, max_minutes=asked.max_minutes, report=True
    )
    done("profile")
    api.fit(out / "measurements", config, out / "costmodel")
    done("fit")
    made = api.plan(out / "step.npz", out / "plan.json", untuned_planner(out / "costmodel", load_config(config)))
    done("plan")
    published = api.profile(
        write_job(out / "published", "cuda"), out / "published" / "measurements", published=PUBLISHED
    )
    model = api.fit(out / "published" / "measurements", out / "published" / "routepack.yaml", out / "published" / "fit")
    lines = exact_parity(published, Rates(**measured.meta["rates"]), asked.device) + fitted_parity(measured, model)
    done("parity")

    with (out / "parity.csv").open("w", newline="") as stream:
        heads = ("kind", "operation", "rows", "p10", "median", "p90")
        csv.writer(stream, lineterminator="\n").writerows([heads, *lines])
    device = fingerprint_device(asked.device)
    write_json(out / "gpu_check.json", {"seconds": seconds, "fingerprint": device.to_dict(),
                                        "steadiness": measured.meta["steadiness"], "parity": lines})  # fmt: skip
    print(f"\n{device.name}: measured here over published H200 (1: equal)")
    for kind, op, rows, low, middle, high in lines:
        print(f"  {kind:<7} {op:<10} {rows:>4} rows  p10 {low:9.3f}  median {middle:9.3f}  p90 {high:9.3f}")
    print(f"plan: predicted step {made.predicted.step_time_s:.4g} s, default {made.default.step_time_s:.4g} s")
    print(json.dumps(measured.meta["steadiness"]))


if __name__ == "__main__":
    main()

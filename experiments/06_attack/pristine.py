"""The tiny job whose files are attacked: every artifact of every verb, made once by the verbs themselves. Synthetic.

``job/``: ``model/config.json``, ``routepack.yaml``, ``steps/*.npz`` (counts and token-level routes), ``measurements/``,
``profile/cases.jsonl``, ``costmodel/``, ``study/``, ``bundle/``, ``plan.json``, ``times.csv``, ``published/``, and of
another model of the same shape in other sizes ``other/``.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np

MODEL = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 128,
    "mlp_only_layers": [0],
}
OTHER = {**MODEL, "hidden_size": 128, "num_experts": 16}
CONFIG = """\
model: model/config.json
topology: {data_parallel_size: 2, expert_model_parallel_size: 2}
max_tokens_per_microbatch: 256
planner:
  max_iterations: 300
  starts: 1
  alternations: 1
  placement_swaps: 50
  extra_rows: 1
fit: {num_trees: 5, folds: 2}
tune: {holdout_seeds: 1, hidden_planning_s: 1.0e+6}
"""
STEPS = 5


def write_job(folder: Path, model: dict = MODEL) -> None:
    """Write a job and everything that the verbs make of it into an empty folder."""
    from costmodels import fit_cost_model
    from profiler import Measurements
    from routepack_tune import deploy, load_planner, tune
    from routepack_tune.config import load_config
    from routepack_tune.steps.generator import WorkloadParams, make_step_batch
    from routepack_tune.steps.traces import save_step_batch
    from search import TUNABLE, Range

    os.environ.pop("MLFLOW_TRACKING_URI", None)
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(model, indent=2))
    (folder / "routepack.yaml").write_text(CONFIG)
    settings = load_config(folder / "routepack.yaml")
    few = Measurements.from_rows(*synthetic_rows(settings.model, 10, 2))  # a fit of so few takes a fraction of a second
    few.save(folder / "measurements")
    write_journal(folder / "profile", few, settings)
    measured = Measurements.from_rows(*synthetic_rows(settings.model, 24, 6))
    fit_cost_model([measured], *settings.job, settings.fit).save(folder / "costmodel")
    work = WorkloadParams(num_prompts=4, rollouts=3, median_tokens=60, sigma=0.6, max_tokens=250)
    batches = [make_step_batch(settings.model, work, step=step) for step in range(STEPS)]
    for step, batch in enumerate(batches):
        save_step_batch(folder / "steps" / f"step{step}.npz", batch)
    write_routes(folder / "routes.npz", settings.model)
    TUNABLE["max_iterations"], TUNABLE["placement_swaps"] = Range(100, 400, integer=True), Range(10, 60, integer=True)
    tune(folder / "steps", folder / "costmodel", folder / "routepack.yaml", folder / "study", trials=3)
    deploy(folder / "study", folder / "bundle")
    shutil.rmtree(folder / "study" / "artifacts", ignore_errors=True)
    for path in (folder / "study").glob("mlflow.db*"):
        path.unlink()
    planner = load_planner(folder / "bundle", warm_up=False)
    plan = planner.plan(batches[0])
    planner.plan(batches[1], previous=plan).save(folder / "plan.json")
    times = [(f"step{step}", planner.plan(batch).predicted.step_time_s) for step, batch in enumerate(batches)]
    with (folder / "times.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("step", "step_time_s"), *times])


def write_published(folder: Path) -> None:
    """Copy the bundled excerpt of published tables, thinned to every 40th row."""
    import pyarrow.parquet as pq

    import routepack_tune

    source = Path(routepack_tune.__file__).parent / "example" / "timings" / "h200_sxm"
    for path in sorted(source.rglob("*")):
        target = folder / path.relative_to(source)
        if path.suffix == ".parquet":
            target.parent.mkdir(parents=True, exist_ok=True)
            table = pq.read_table(path)
            pq.write_table(table.take(list(range(0, len(table), max(1, len(table) // 60)))), target)
        elif path.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)


def synthetic_rows(spec, count: int, shapes: int) -> tuple[list[dict], dict]:
    """Return ``count`` sizes of every operation of the job, and what goes with them: formulas, a percent of noise."""
    from profiler import fingerprint_device
    from profiler.cases.case import OPERATIONS, case_id

    rng, rows = np.random.default_rng(0), []
    sizes = [int(size) for size in np.unique(np.geomspace(1, 2048, count).astype(int))]
    heads = {"num_heads": 4, "num_kv_heads": 2, "qk_head_dim": 16, "v_head_dim": 16}
    for n in sizes:
        pairs = n * (n + 1) // 2
        dense = [(8, 64), (128, 64), (64, 64), (64, 128), (256, 64), (64, 256)]
        of = {
            "attention": [{"tokens": n, "pairs": pairs, "num_sequences": 1, "max_length": n, **heads, "window": 0}],
            "dense": [{"tokens": n, "n": a, "k": b} for a, b in dense[:shapes]],
            "router": [{"tokens": n, "hidden_size": spec.hidden_size, "num_experts": spec.num_experts, "top_k": 2}],
            "experts": [
                {
                    "rows": n,
                    "active_experts": min(4, n),
                    "padded_rows": -(-n // 128) * 128 + 384,
                    "max_rows": -(-n // 4),
                    "local_experts": 4,
                    "hidden_size": spec.hidden_size,
                    "inter_size": 32,
                    "router_tokens": 0,
                    "num_experts": spec.num_experts,
                }
            ],
            "alltoall": [{"bytes": n * 64, "inter_bytes": 0, "ranks": ranks} for ranks in (2, 4)],
            "transfer": [{"bytes": n * 1024, "inter_bytes": 0}],
        }
        for op, cases in of.items():
            for features in cases:
                work = 10 + 1e-3 * float(OPERATIONS[op].flops({**features})) + 1e-3 * features.get("bytes", 0)
                for way in ("forward", "backward") if not OPERATIONS[op].exchange else ("forward",):
                    time_us = work * (2.5 if way == "backward" else 1) * float(np.exp(0.01 * rng.standard_normal()))
                    rows.append(
                        {
                            **features,
                            "case_id": case_id(op, way, "float32", features),
                            "op": op,
                            "direction": way,
                            "status": "ok",
                            "time_us": time_us,
                            "spread_us": 0.1,
                            "repeats_us": [time_us] * 3,
                            "rank": 0,
                            "source": "measured",
                            "kernel": "synthetic",
                            "dtype": "float32",
                            "message": "",
                            "flag": "",
                            "pattern": "",
                        }
                    )
    meta = {
        "fingerprint": fingerprint_device("cpu").to_dict(),
        "model": None,
        "topology": None,
        "params": {},
        "provenance": {"note": "synthetic"},
        "backward": "measured",
        "dtype": "float32",
    }
    return rows, meta


def write_journal(folder: Path, measured, settings) -> None:
    """Write the journal of a profile that was killed after all of these rows."""
    header = {
        "model": settings.model.name,
        "spec_hash": settings.model.spec_hash,
        "dtype": "float32",
        "threads": 1,
        "fingerprints": [measured.meta["fingerprint"]],
        "rates": {},
        "links": {},
    }
    folder.mkdir(parents=True)
    rows = [{name: column[i] for name, column in measured.rows.items()} for i in range(len(measured))]
    plain = [{k: v.tolist() if hasattr(v, "tolist") else v for k, v in row.items()} for row in rows]
    lines = [{"header": header}, *({"rows": [row]} for row in plain[::2])]
    lines += [{"anchor": {"time_us": 10.0}}, {"session": {"minutes": 0.1}}, {"round": {"minutes": 0.1}}]
    (folder / "cases.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_routes(path: Path, spec) -> None:
    """Write a step batch of token-level routes with one unknown row a sample."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(4, 60, 12)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    shape = (offsets[-1], spec.num_moe_layers, spec.num_experts)
    ids = np.argsort(rng.random(shape), axis=2)[:, :, : spec.top_k].astype(np.int16)
    ids[offsets[1:] - 1] = -1
    prompts = np.arange(12) // 3
    np.savez_compressed(path, lengths=lengths, expert_ids=ids, offsets=offsets, prompt_ids=prompts)


def make(folder: Path) -> None:
    """Make the job and another of a different model beside it."""
    write_job(folder)
    write_job(folder / "other", OTHER)
    write_published(folder / "published")
    (folder / "facts.json").write_text(json.dumps({"model": MODEL, "config": asdict_config(folder)}, default=str))


def asdict_config(folder: Path) -> dict:
    """Return the job's configuration as plain data."""
    from routepack_tune.config import load_config

    return asdict(load_config(folder / "routepack.yaml"))

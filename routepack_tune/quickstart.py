"""The whole path on this machine with the bundled example: published H200 times, synthetic step batches.

Everything goes through the same verbs and files as real work; each stage's files stay in the folder to look at.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from profiler import Observer, RoutePackError
from profiler.files import write_bytes, write_json, write_text
from routepack_tune import api
from routepack_tune.bundle import load_planner
from routepack_tune.config import load_config
from routepack_tune.environment import version
from routepack_tune.reports.comparison import Outcome, compare_planners, loads_before_and_after
from routepack_tune.steps.generator import WorkloadParams, make_step_batch
from routepack_tune.steps.traces import load_step_batch, save_step_batch
from routepack_tune.study.folder import read_study

MARKER = "quickstart.json"
STAGES = ("steps", "measurements", "costmodel", "study", "bundle")
NUM_STEPS = 6
WORKLOAD = WorkloadParams(num_prompts=24, rollouts=8, median_tokens=2500.0, sigma=0.9, max_tokens=16384)


@dataclass(frozen=True, slots=True)
class QuickstartResult:
    """Hold what the quickstart found."""

    outcomes: list[Outcome]
    """Default, published baselines, tuned plan: means over the held-out batches."""
    seconds: dict[str, float]
    """Measured wall time of each stage."""
    report: Path


def quickstart(
    out: Path | str = "routepack-quickstart", trials: int = 8, seed: int = 0, observer: Observer | None = None
) -> QuickstartResult:
    """Profile (published), fit, tune, deploy, plan and report in ``out``; an earlier quickstart there is replaced."""
    out, observer = Path(out), observer or Observer()
    clock = _Clock(observer)
    _make_room(out)
    with clock.stage("steps"):
        config = _write_example(out, seed)
    with clock.stage("profile"), _example("timings/h200_sxm") as timings:
        api.profile(config, out / "measurements", published=timings, observer=observer)
    with clock.stage("fit"):
        api.fit(out / "measurements", config, out / "costmodel", observer=observer)
    with clock.stage("tune"):
        api.tune(out / "steps", out / "costmodel", config, out / "study", trials=trials, seed=seed, observer=observer)
    with clock.stage("deploy"):
        api.deploy(out / "study", out / "bundle")
    with clock.stage("plan"):
        planner = load_planner(out / "bundle")
        api.plan(out / "steps" / f"step{NUM_STEPS - 1:02d}.npz", out / "plan.json", planner, observer=observer)
    with clock.stage("compare"):
        outcomes = _compare(out)
    with clock.stage("report"):
        report = _report(out, config, outcomes)
    write_json(out / MARKER, {"schema_version": 1, "synthetic": True, "seconds": clock.seconds, "seed": seed,
                              "outcomes": [asdict(one) for one in outcomes]})  # fmt: skip
    return QuickstartResult(outcomes, clock.seconds, report)


class _Clock:
    """Time the stages and show them as one bar."""

    def __init__(self, observer: Observer) -> None:
        self.observer, self.seconds = observer, dict[str, float]()
        observer.start("quickstart", 8)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - begin, 2)
        self.observer.advance("quickstart", name)


def _make_room(out: Path) -> None:
    """Remove what an earlier quickstart left; refuse a folder of anything else."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / MARKER).is_file())):
        raise RoutePackError(f"{out} exists and is no quickstart folder. Choose another --out.")
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / MARKER, {"schema_version": 1, "synthetic": True})
    for name in STAGES:
        shutil.rmtree(out / name, ignore_errors=True)


def _write_example(out: Path, seed: int) -> Path:
    """Write the configuration and the synthetic step batches; return the configuration's path."""
    with _example("routepack.yaml") as source:
        write_bytes(out / "routepack.yaml", source.read_bytes())
    settings = load_config(out / "routepack.yaml")
    for step in range(NUM_STEPS):
        batch = make_step_batch(settings.model, WORKLOAD, seed=seed, step=step)
        save_step_batch(out / "steps" / f"step{step:02d}.npz", batch)
    return out / "routepack.yaml"


@contextmanager
def _example(name: str) -> Iterator[Path]:
    with resources.as_file(resources.files("routepack_tune") / "example" / name) as path:
        yield path


def _held_out(out: Path) -> list[Path]:
    document = read_study(out / "study")
    held = document["summary"]["names"]["holdout"]
    return [out / "steps" / step["file"] for step in document["steps"] if step["name"] in held]


def _compare(out: Path) -> list[Outcome]:
    planner = load_planner(out / "bundle")
    return compare_planners(planner, [load_step_batch(path, planner.spec) for path in _held_out(out)])


def _report(out: Path, config: Path, outcomes: list[Outcome]) -> Path:
    from routepack_tune.reports.quickstart import parities_of, quickstart_page
    from search import Plan

    planner = load_planner(out / "bundle")
    step = out / "steps" / f"step{NUM_STEPS - 1:02d}.npz"
    loads = loads_before_and_after(planner, load_step_batch(step, planner.spec), Plan.load(out / "plan.json"))
    document = read_study(out / "study")
    page = quickstart_page(
        subtitle=f"{planner.spec.name} on {planner.topology.data_parallel_size} data-parallel slots, expert "
        f"parallelism {planner.topology.expert_model_parallel_size}. Step batches are synthetic; step times are "
        "predicted.",
        outcomes=outcomes,
        loads=loads,
        history=document["summary"]["history"],
        parities=parities_of(out / "costmodel"),
        facts=_facts(document, config),
        notes=[
            "The step batches are synthetic: made from a seed by the project's generator, not recorded from a model.",
            "Times are predicted by models learned from published H200 measurements (aiconfigurator 0.7.0).",
            *planner.notes,
        ],
    )
    write_text(out / "report.html", page)
    return out / "report.html"


def _facts(document: dict[str, Any], config: Path) -> dict[str, str]:
    device, names = document["fingerprint"], document["summary"]["names"]
    return {
        "device priced": f"{device['name']} ({device['arch']}, {device['origin']})",
        "configuration": json.dumps({k: v for k, v in document["config"]["topology"].items() if v != 1}),
        "token cap of a microbatch": str(document["config"]["max_tokens_per_microbatch"]),
        "tuned on": ", ".join(names["tuned"]),
        "held out (shown above)": ", ".join(names["holdout"]),
        "best trial": str(document["summary"]["best"]["number"]),
        "tables": document["tables_hash"][:16],
        "version": f"routepack-tune {version()}",
        "settings file": config.name,
    }

"""The whole path on this machine with the bundled example: published H200 times, synthetic step batches.

Everything goes through the same verbs and files as real work; each stage's files stay in the folder to look at.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from profiler import Observer, RoutePackError
from profiler.files import write_bytes, write_json, write_text
from profiler.places import check_place, claimed
from routepack_tune import api
from routepack_tune.bundle import load_planner
from routepack_tune.config import load_config
from routepack_tune.reports.comparison import Outcome, compare_planners, loads_before_and_after
from routepack_tune.steps.generator import WorkloadParams, make_step_batch
from routepack_tune.steps.traces import load_step_batch, save_step_batch

EXAMPLE = Path(__file__).parent / "example"
MARKER = "quickstart.json"
STAGES = ("steps", "measurements", "costmodel", "study", "bundle")
NUM_STEPS, NUM_TRIALS = 6, 8
WORKLOAD = WorkloadParams(num_prompts=24, rollouts=8, median_tokens=2500.0, sigma=0.9, max_tokens=16384)


@dataclass(frozen=True, slots=True)
class QuickstartResult:
    """Hold what the quickstart found."""

    outcomes: list[Outcome]
    """Default plan, published baselines, ours: means over the held-out batches, planned one after another."""
    tuning: str
    """Whether tuning gained, and how much."""
    seconds: dict[str, float]
    """Measured wall time of each stage."""
    report: Path


def quickstart(out: Path | str, observer: Observer | None = None) -> QuickstartResult:
    """Profile (published), fit, tune, deploy, plan and report in ``out``; an earlier quickstart there is replaced."""
    check_place(out, folder=True)
    with claimed(out, "running the quickstart in"):
        return _run(Path(out), observer or Observer())


def _run(out: Path, bars: Observer) -> QuickstartResult:
    config, steps, seconds = out / "routepack.yaml", out / "steps", dict[str, float]()

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        begin = time.perf_counter()
        bars.now("quickstart", name)
        yield
        seconds[name] = round(time.perf_counter() - begin, 2)
        bars.advance("quickstart")

    from routepack_tune.reports.quickstart import quickstart_page

    bars.start("quickstart", 8)
    _make_room(out)
    with stage("steps"):
        write_bytes(config, (EXAMPLE / "routepack.yaml").read_bytes())
        spec = load_config(config).model
        for step in range(NUM_STEPS):
            save_step_batch(steps / f"step{step:02d}.npz", batch := make_step_batch(spec, WORKLOAD, step=step))
    with stage("profile"):
        api.profile(config, out / "measurements", published=EXAMPLE / "timings" / "h200_sxm", observer=bars)
    with stage("fit"):
        api.fit(out / "measurements", config, out / "costmodel", observer=bars)
    with stage("tune"):
        study = api.tune(steps, out / "costmodel", config, out / "study", trials=NUM_TRIALS, observer=bars)
    with stage("deploy"):
        api.deploy(out / "study", out / "bundle")
    with stage("plan"):
        planner = load_planner(out / "bundle", warm_up=False)
        previous, last = (steps / f"step{NUM_STEPS - back:02d}.npz" for back in (2, 1))
        api.plan(previous, out / "plan-before.json", planner, observer=bars)
        plan = api.plan(last, out / "plan.json", planner, out / "plan-before.json", observer=bars)
    with stage("compare"):
        last_tuned = len(study["summary"]["names"]["tuned"]) - 1
        files = [steps / step["file"] for step in study["steps"][last_tuned:]]
        before, *held_out = (load_step_batch(path, spec) for path in files)
        outcomes = compare_planners(planner, held_out, before)
    with stage("report"):
        loads = loads_before_and_after(planner, batch, plan)
        write_text(report := out / "report.html", quickstart_page(planner, study, outcomes, loads))
    made = {"seconds": seconds, "outcomes": [asdict(one) for one in outcomes]}
    write_json(out / MARKER, {"schema_version": 1, "synthetic": True, **made})
    summary, gained = study["summary"], study["summary"]["export"] == "best"
    tuning = f"Tuning {'gained' if gained else 'did not gain: the plan is of the default settings'}. "
    return QuickstartResult(outcomes, tuning + summary["export_reason"], seconds, report)


def _make_room(out: Path) -> None:
    """Remove what an earlier quickstart left; refuse a folder of anything else."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / MARKER).is_file())):
        raise RoutePackError(f"{out} exists and is no quickstart folder. Choose another --out.")
    write_json(out / MARKER, {"schema_version": 1, "synthetic": True})
    for name in STAGES:
        shutil.rmtree(out / name, ignore_errors=True)

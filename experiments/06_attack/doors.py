"""The doors: which file is changed how, and through which of the product's functions the result goes, up to a plan.

``mutate`` changes a fresh copy of the job and says how; ``walk`` runs the product and the judge. What it raises is the
outcome: RoutePackError (refused), ``Wrong`` (wrongly accepted), anything else (a traceback); nothing: accepted.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import arrays
import judge
import numpy as np
import operators as op
from hashes import rehash_bundle, rehash_costmodel, rehash_plan, rehash_study

PRISTINE = Path()
"""The unchanged job; a worker sets it."""


@dataclass(frozen=True)
class Door:
    """One way into the product."""

    weight: float
    """Share of all mutations."""
    needs: tuple[str, ...]
    """What is copied of the job, files and folders."""
    mutate: Callable[[op.Rng, Path], str]
    walk: Callable[[Path], None]


@cache
def planner() -> Any:
    """Return the unchanged bundle's planner."""
    from routepack_tune import load_planner

    return load_planner(PRISTINE / "bundle", warm_up=False)


@cache
def step(number: int = 2) -> Any:
    """Return an unchanged step batch."""
    from routepack_tune.steps.traces import load_step_batch

    return load_step_batch(PRISTINE / "steps" / f"step{number}.npz", planner().spec)


@cache
def cost_model() -> Any:
    """Return the unchanged cost model."""
    from costmodels import CostModel

    return CostModel.load(PRISTINE / "costmodel")


def budgeted(found: Any) -> Any:
    """Return a planner whose budgets, as far as they are a person's to choose, are small: they are not attacked."""
    given = {"placement_swaps": 100, "alternations": 2, "max_iterations": 300}
    small = {name: min(getattr(found.params, name), most) for name, most in given.items()}
    usual = {name: value for name, value in small.items() if getattr(found.params, name) <= 10**7}
    return replace(found, params=replace(found.params, **usual))


def plan_and_judge(found: Any, batch: Any, previous: Any = None) -> Any:
    """Plan a step with a loaded planner and judge the plan."""
    found = budgeted(found)
    made = found.plan(batch, previous=previous)
    judge.check_plan(made, batch, found.job, previous)
    json.dumps(made.to_dict(), allow_nan=False, default=lambda value: value.tolist())
    return made


def change_json(rng: op.Rng, path: Path, rehash: Callable[[Path], bool] | None = None) -> str:
    """Change a JSON file: its tree (half of the time with its hashes made right again), its text or its bytes."""
    text, kind = path.read_text(), rng.random()
    if kind < 0.72:
        tree = json.loads(text)
        said = "; ".join(op.change_tree(rng, tree) for _ in range(1 + (rng.random() < 0.15)))
        path.write_text(op.dumps_root(tree), errors="surrogatepass")
        if rehash is not None and rng.random() < 0.6 and rehash(path):
            said += " (hash right)"
    elif kind < 0.86:
        changed, said = op.change_text(rng, text)
        path.write_bytes(changed.encode("utf-8", "surrogatepass"))
        if rehash is not None and rng.random() < 0.5:
            rehash(path)
    else:
        changed_bytes, said = op.change_bytes(rng, text.encode())
        path.write_bytes(changed_bytes)
    return f"{path.name}: {said}"


def change_npz(rng: op.Rng, path: Path) -> str:
    """Change an archive's arrays or the archive itself."""
    data = path.read_bytes()
    if rng.random() < 0.6:
        found = judge.read_arrays(path)
        said = "; ".join(arrays.change_arrays(rng, found) for _ in range(1 + (rng.random() < 0.2)))
        path.write_bytes(arrays.npz(found, rng.random() < 0.8))
    else:
        changed, said = arrays.change_archive(rng, data)
        path.write_bytes(changed)
    return f"{path.name}: {said}"


def change_tables(rng: op.Rng, path: Path) -> str:
    """Change frozen tables: an array, the archive, or the header of plain values inside."""
    if rng.random() < 0.5:
        return change_npz(rng, path)
    found = judge.read_arrays(path)
    header = json.loads(found["header"].tobytes())
    said = op.change_tree(rng, header)
    text = op.dumps_root(header).encode("utf-8", "surrogatepass")
    found["header"] = np.frombuffer(text, np.uint8)
    path.write_bytes(arrays.npz(found))
    return f"{path.name} header: {said}"


# --- step batches, plans, bundles ---


def mutate_step(rng: op.Rng, case: Path) -> str:
    """Change a step batch of counts or of token-level routes, or give another model's."""
    path = case / "step.npz"
    if rng.random() < 0.04:
        shutil.copy(PRISTINE / "other" / op.one_of(rng, ("steps/step0.npz", "routes.npz")), path)
        return "the step of another model"
    shutil.copy(PRISTINE / op.one_of(rng, ("steps/step0.npz", "routes.npz")), path)
    return change_npz(rng, path)


def walk_step(case: Path) -> None:
    """Read the batch, compare it with the file, and plan it."""
    from routepack_tune.steps.traces import load_step_batch

    found = planner()
    batch = load_step_batch(case / "step.npz", found.spec, found.max_tokens)
    judge.check_batch(batch, found.spec)
    judge.check_same_batch(case / "step.npz", batch, found.spec)
    plan_and_judge(found, batch)


def mutate_plan(rng: op.Rng, case: Path) -> str:
    """Change the previous plan, or give another model's."""
    if rng.random() < 0.03:
        shutil.copy(PRISTINE / "other" / "plan.json", case / "plan.json")
        return "the plan of another model"
    return change_json(rng, case / "plan.json", rehash_plan)


def walk_plan(case: Path) -> None:
    """Read the plan and plan the next step from it."""
    from search import Plan

    previous = Plan.load(case / "plan.json")
    judge.check_plan_file(case / "plan.json")
    json.dumps(previous.to_dict(), allow_nan=False, default=lambda value: value.tolist())
    plan_and_judge(planner(), step(), previous)


def mutate_bundle(rng: op.Rng, case: Path) -> str:
    """Change ``planner.yaml`` or ``tables.npz``, or mix two bundles."""
    folder, kind = case / "bundle", rng.random()
    if kind < 0.05:
        name = op.one_of(rng, ("planner.yaml", "tables.npz"))
        shutil.copy(PRISTINE / "other" / "bundle" / name, folder / name)
        said = f"{name} of another bundle"
    elif kind < 0.6:
        return change_json(rng, folder / "planner.yaml", rehash_bundle)
    else:
        said = change_tables(rng, folder / "tables.npz")
    if rng.random() < 0.6 and rehash_bundle(folder / "planner.yaml"):
        said += " (hash right)"
    return said


def walk_bundle(case: Path) -> None:
    """Load the bundle and plan with it."""
    from routepack_tune import load_planner

    judge_planner(load_planner(case / "bundle", allow_mismatch=True, warm_up=False))


def judge_planner(found: Any) -> None:
    """Judge a planner's model, sizes, settings and tables, and a plan of it."""
    judge.holds(judge.whole(found.max_tokens, 1), f"max_tokens {found.max_tokens!r:.40}")
    judge.check_spec(found.spec)
    judge.check_topology(found.topology)
    judge.check_params(found.params)
    judge.check_tables(found.tables, found.spec, found.topology, found.max_tokens)
    plan_and_judge(found, step())


def mutate_tables(rng: op.Rng, case: Path) -> str:
    """Change the tables of a cost model, or give another model's."""
    folder = case / "costmodel"
    if rng.random() < 0.05:
        shutil.copy(PRISTINE / "other" / "costmodel" / "tables.npz", folder / "tables.npz")
        said = "tables of another cost model"
    else:
        said = change_tables(rng, folder / "tables.npz")
    if rng.random() < 0.5 and rehash_costmodel(folder):
        said += " (hash right)"
    return said


def walk_tables(case: Path) -> None:
    """Plan with the cost model's tables."""
    from routepack_tune.bundle import untuned_planner

    judge_planner(untuned_planner(case / "costmodel", config()))


@cache
def config() -> Any:
    """Return the unchanged configuration."""
    from routepack_tune.config import load_config

    return load_config(PRISTINE / "routepack.yaml")


# --- studies and the recheck ---


def mutate_study(rng: op.Rng, case: Path) -> str:
    """Change ``study.json`` or a file beside it, or mix two studies."""
    folder, kind = case / "study", rng.random()
    if kind < 0.6:
        return change_json(rng, folder / "study.json", rehash_study)
    if kind < 0.75:
        said = change_npz(rng, folder / "recheck.npz")
    elif kind < 0.9:
        said = change_tables(rng, folder / "tables.npz")
    elif kind < 0.95:
        said = change_json(rng, folder / "costmodel.json")
    else:
        name = op.one_of(rng, ("recheck.npz", "tables.npz", "costmodel.json", "study.json"))
        shutil.copy(PRISTINE / "other" / "study" / name, folder / name)
        said = f"{name} of another study"
    if rng.random() < 0.6 and rehash_study(folder / "study.json"):
        said += " (hash right)"
    return said


def walk_study(case: Path) -> None:
    """Deploy the study and plan with its bundle."""
    from routepack_tune import deploy, load_planner

    deploy(case / "study", case / "made")
    judge_planner(load_planner(case / "made", warm_up=False))


def mutate_journal(rng: op.Rng, case: Path) -> str:
    """Change the journal of a study's trials."""
    path = case / "study" / "study.journal"
    return change_lines(rng, path)


def change_lines(rng: op.Rng, path: Path) -> str:
    """Change a file of one JSON object a line."""
    lines, kind = path.read_text().splitlines(), rng.random()
    if kind < 0.6:
        at = int(rng.integers(len(lines)))
        tree = json.loads(lines[at])
        said = op.change_tree(rng, tree)
        lines[at] = op.dumps(tree.get("@root", tree), indent=False)
        path.write_text("\n".join(lines) + "\n", errors="surrogatepass")
        return f"{path.name} line {at + 1}: {said}"
    if kind < 0.8:
        text, said = op.change_text(rng, path.read_text())
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    else:
        data, said = op.change_bytes(rng, path.read_bytes())
        path.write_bytes(data)
    return f"{path.name}: {said}"


def walk_journal(case: Path) -> None:
    """Go on with the study for one trial."""
    from search import run_study
    from search.tuning.storage import choose_storage

    summary = run_study(task(), choose_storage(case / "study"), study_name(), 4, workers=1)
    params = {**task_params(), **summary["best"]["params"]}
    judge.holds(judge.number(summary["best"]["value"], 0), f"best value {summary['best']['value']!r:.40}")
    judge.check_params(type(planner().params)(**params))


@cache
def task() -> Any:
    """Return what the study tunes on."""
    from routepack_tune.study.verbs import _tune_task
    from search import TUNABLE, Range

    TUNABLE["max_iterations"], TUNABLE["placement_swaps"] = Range(100, 400, integer=True), Range(10, 60, integer=True)
    return _tune_task(PRISTINE / "steps", PRISTINE / "costmodel", config(), 0)[0]


@cache
def study_name() -> str:
    """Return the unchanged study's name."""
    return str(json.loads((PRISTINE / "study" / "study.json").read_text())["study_name"])


@cache
def task_params() -> dict[str, Any]:
    """Return the settings that the study starts from."""
    from dataclasses import asdict

    return asdict(task().base)


def mutate_recheck(rng: op.Rng, case: Path) -> str:
    """Change what ``check`` reads: batches, bundle, measured times, a plan that they name."""
    kind = rng.random()
    if kind < 0.25:
        return change_npz(rng, case / "steps" / f"step{int(rng.integers(2))}.npz")
    if kind < 0.5:
        return change_json(rng, case / "bundle" / "planner.yaml", rehash_bundle)
    path = case / "times.csv"
    if kind < 0.6:
        rows = [{"step": f"step{i}", "step_time_s": 0.1 + i} for i in range(5)]
        said = op.change_tree(rng, rows)
        path.write_text(op.dumps(rows), errors="surrogatepass")
        shutil.move(path, case / "times.json")
        return f"times.json: {said}"
    if kind < 0.75:
        text, said = op.change_text(rng, path.read_text())
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return f"times.csv: {said}"
    if kind < 0.85:
        data, said = op.change_bytes(rng, path.read_bytes())
        path.write_bytes(data)
        return f"times.csv: {said}"
    shutil.copy(PRISTINE / "plan.json", case / "plan.json")
    said = change_json(rng, case / "plan.json", rehash_plan)
    times = [line.split(",") for line in path.read_text().split()]
    path.write_text("\n".join([*(",".join(t) + (",plan" if i == 0 else ",") for i, t in enumerate(times))]))
    path.write_text(path.read_text().replace(f"step1,{times[2][1]},", f"step1,{times[2][1]},plan.json"))
    return f"times with {said}"


def walk_recheck(case: Path) -> None:
    """Check the bundle against batches and times."""
    from routepack_tune import check

    times = next(case.glob("times.*"))
    report = check(case / "bundle", case / "steps", times, out=case / "report.json")
    text = (case / "report.json").read_text()
    judge.holds("NaN" not in text and "Infinity" not in text, "a report with NaN")
    judge.holds(report.verdict in ("fits", "re-tune", "re-profile"), f"verdict {report.verdict!r:.40}")

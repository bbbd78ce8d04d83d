"""The verbs in order: each reads files, leaves one artifact, and this file is the dataflow.

    profile -> measurements -> fit -> costmodel -> tune -> study -> deploy -> bundle -> plan -> plan.json

Every artifact carries a schema version and the hashes of its parents, and is written whole or not at all.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.errors import RoutePackError
from profiler.files import content_hash, file_hash, read_json
from routepack_tune.bundle import Planner, check_replaceable, load_planner, typed_parts, write_bundle
from routepack_tune.config import Config, load_config, without_password
from routepack_tune.study import (
    COST_MODEL_FILE,
    RECHECK_FILE,
    TABLES_FILE,
    begin_study,
    check_study_files,
    default_storage,
    finish_study,
    locked_study,
    read_study,
    study_name,
)
from routepack_tune.traces import check_cap, list_step_files, load_step_batch

if TYPE_CHECKING:
    from costmodels import CostModel, StepTables
    from profiler import DeviceFingerprint, Measurements, Observer
    from search import Plan, StepBatch, StopCriterion, TuneTask

Paths = Path | str | Sequence[Path | str]


def version() -> str:
    """Return the installed version; ``0`` when run from a source tree that is not installed."""
    try:
        return importlib.metadata.version("routepack-tune")
    except importlib.metadata.PackageNotFoundError:
        return "0"


def profile(
    config: Path | str,
    out: Path | str,
    published: Path | str | None = None,
    device: str | None = None,
    observer: Observer | None = None,
) -> Measurements:
    """Time the model's operations on this device, or import published times; write ``out/measurements.parquet``.

    A killed run continues when it is called again with the same folder.
    """
    from profiler import import_published, profile_device

    settings, out = load_config(config), Path(out)
    if out.exists() and not out.is_dir():
        raise RoutePackError(f"{out} is a file, a folder is to be written there. Choose another --out.")
    if published is None:
        cap = settings.max_tokens_per_microbatch
        return profile_device(settings.model, settings.topology, cap, settings.profile, out, device, observer)
    if device is not None:
        raise RoutePackError(f"--published imports times, --device {device} takes them: give one of the two.")
    if (out / "cases.jsonl").exists():
        raise RoutePackError(
            f"{out} holds a profile of this machine; published times must not replace it. Choose another --out."
        )
    measurements = import_published(published)
    measurements.save(out)
    return measurements


def fit(
    measurements: Paths,
    config: Path | str,
    out: Path | str,
    observer: Observer | None = None,
    priors: Sequence[Path | str] = (),
) -> CostModel:
    """Fit the cost model of ``config`` from one or several measurements; write the folder ``out`` with its report.

    ``priors`` are folders of cost models of sibling GPUs: few measurements are joined to the best of them.

    The model is logged to MLflow and registered there as well; a store that is away is a warning.
    """
    from costmodels import CostModel, fit_cost_model
    from profiler import Measurements
    from routepack_tune.fit_report import write_fit_report
    from routepack_tune.fit_tracking import track_fit
    from routepack_tune.tracking import tracking_uri

    settings = load_config(config)
    check_replaceable(out, COST_MODEL_FILE)
    uri = tracking_uri(settings.tune.tracking_uri, out)
    folders = [measurements] if isinstance(measurements, (str, Path)) else list(measurements)
    batches = [Measurements.load(folder) for folder in folders]
    siblings = [CostModel.load(folder) for folder in priors]
    model = fit_cost_model(
        batches, settings.model, settings.topology, settings.max_tokens_per_microbatch, settings.fit, observer, siblings
    )
    model.save(out)
    track_fit(model, out, write_fit_report(model, batches, out), uri, settings.tune.experiment)
    return model


def tune(
    steps: Paths,
    costmodel: Path | str,
    config: Path | str,
    out: Path | str,
    trials: int = 20,
    storage: str | None = None,
    seed: int = 0,
    observer: Observer | None = None,
) -> dict[str, Any]:
    """Run or resume a study until it holds ``trials`` trials; return what ``out/study.json`` holds.

    Raises
    ------
    RoutePackError
        If an input is wrong (before anything is written), the folder holds another study, or no trial is feasible.
    """
    from routepack_tune.tracking import StudyTracker, tracking_uri
    from search import run_study

    if not trials >= 1:
        raise RoutePackError(f"Expected at least 1 trial, got {trials}.")
    settings, out, costmodel = load_config(config), Path(out), Path(costmodel)
    uri = tracking_uri(settings.tune.tracking_uri, out)
    header = _cost_model_header(costmodel)
    task, files = _tune_task(steps, costmodel, settings, seed)
    with locked_study(out):
        document = begin_study(out, task, costmodel, {
            "config": settings.effective,
            "steps": files,
            "storage": without_password(storage) if storage else "",
            "fingerprint": header["fingerprint"],
            "cost_model": {"sha256": file_hash(costmodel / COST_MODEL_FILE), "data_hash": header.get("data_hash")},
        })  # fmt: skip
        name = study_name(task)
        tracker = StudyTracker(out, uri, settings.tune.experiment, name, _study_facts(task))
        summary = run_study(
            task, storage or default_storage(out), name, trials, observer=observer, trial_observer=tracker
        )
        tracking = tracker.where(summary["best"]["number"])
        return finish_study(out, document, state="finished", trials=trials, tracking=tracking, summary=summary)


def deploy(study: Path | str, out: Path | str, register: str | None = None) -> Path:
    """Turn a study's best trial into a bundle, after planning a batch with it once more; register it if asked.

    Raises
    ------
    RoutePackError
        If the study has no feasible trial or its files changed; nothing is written then.
    """
    from routepack_tune.registry import register_bundle
    from routepack_tune.tracking import tracking_uri

    study, out = Path(study), Path(out)
    document = read_study(study)
    best = (document["summary"] or {}).get("best")
    if not best:
        raise RoutePackError(
            f"Study {study} has no feasible, finished trial: nothing to deploy. Run `routepack tune` to its end."
        )
    check_study_files(study, document)
    check_replaceable(out, "planner.yaml")
    planner = _planner_of_study(study, document, best)
    recheck = _recheck(planner, study)
    write_bundle(out, planner, _provenance(document, best, recheck))
    if register:
        tracking = document["tracking"]
        known = tracking.get("tracking_uri", "")
        uri = tracking_uri("" if "***" in known else known, study)
        register_bundle(out, register, uri, tracking.get("run_id", ""), tracking.get("experiment", "routepack-tune"))
    return out


def plan(
    step: Path | str,
    out: Path | str,
    bundle: Path | str | None = None,
    *,
    costmodel: Path | str | None = None,
    config: Path | str | None = None,
    previous: Path | str | None = None,
    max_runtime: float | None = None,
    max_iterations: int | None = None,
    seed: int = 0,
    allow_mismatch: bool = False,
    observer: Observer | None = None,
) -> Plan:
    """Plan one step batch with a bundle, or with a cost model and a configuration; write ``out``."""
    from search import Plan

    stop = _budget(max_runtime, max_iterations)
    if Path(out).is_dir():
        raise RoutePackError(f"{out} is a folder, the plan is one file. Give --out plan.json.")
    if config is not None:  # a sample above the cap is the news, not that the cost model knows another cap
        settings = load_config(config)
        check_cap(load_step_batch(step, settings.model), settings.max_tokens_per_microbatch, str(step))
    planner = _planner(bundle, costmodel, config, allow_mismatch)
    before = None
    if previous is not None:
        try:
            before = Plan.load(previous)
        except RoutePackError as error:
            raise RoutePackError(f"Previous plan {previous}: {error}") from None
    made = planner.plan(step, seed=seed, previous=before, stop=stop, observer=observer)
    made.save(out)
    return made


def _planner(
    bundle: Path | str | None, costmodel: Path | str | None, config: Path | str | None, allow_mismatch: bool
) -> Planner:
    if (bundle is None) == (costmodel is None or config is None) or (bundle is not None and (costmodel or config)):
        raise RoutePackError("Give either --bundle, or --costmodel together with --config.")
    if bundle is not None:
        return load_planner(bundle, allow_mismatch=allow_mismatch)
    assert costmodel is not None
    assert config is not None
    settings = load_config(config)
    header = _cost_model_header(Path(costmodel))
    return Planner(
        settings.model, settings.topology, settings.max_tokens_per_microbatch, settings.planner,
        _tables(costmodel, settings), _fingerprint(header["fingerprint"]),
    )  # fmt: skip


def _budget(max_runtime: float | None, max_iterations: int | None) -> StopCriterion | None:
    from search import MaxIterations, MaxRuntime

    if max_runtime is not None and max_iterations is not None:
        raise RoutePackError("Give --max-runtime or --max-iterations, not both.")
    try:
        if max_runtime is not None:
            return MaxRuntime(max_runtime)
        return None if max_iterations is None else MaxIterations(max_iterations)
    except ValueError as error:
        raise RoutePackError(str(error)) from None


def _tune_task(steps: Paths, costmodel: Path, settings: Config, seed: int) -> tuple[TuneTask, list[dict[str, str]]]:
    """Read every step batch and build the study's task; batches of another model are an error naming the file."""
    from search import TuneTask

    files = list_step_files(steps)
    batches: list[StepBatch] = []
    for path in files:
        try:
            batch = load_step_batch(path, settings.model)
        except RoutePackError as error:
            hint = f" To tune on part of a folder, give a quoted glob or files instead of {path.parent}."
            raise RoutePackError(f"{error}{hint if len(files) > 1 else ''}") from None
        check_cap(batch, settings.max_tokens_per_microbatch, str(path))
        batches.append(batch)
    names = [path.stem for path in files]
    if len(set(names)) < len(names):
        names = [f"{i:03d}-{name}" for i, name in enumerate(names)]
    task = TuneTask(
        names=tuple(names), batches=tuple(batches), tables=_tables(costmodel, settings), spec=settings.model,
        topology=settings.topology, max_tokens=settings.max_tokens_per_microbatch, base=settings.planner,
        params=settings.tune, seed=seed,
    )  # fmt: skip
    rows = zip(names, files, batches, strict=True)
    return task, [{"name": n, "file": p.name, "data_hash": b.data_hash} for n, p, b in rows]


def _tables(costmodel: Path | str, settings: Config) -> StepTables:
    from costmodels import tables_for

    return tables_for(costmodel, settings.model, settings.topology, settings.max_tokens_per_microbatch)


def _cost_model_header(costmodel: Path) -> dict[str, Any]:
    header = read_json(costmodel / COST_MODEL_FILE, "Cost model")
    if not isinstance(header, dict) or "fingerprint" not in header:
        raise RoutePackError(f"Cost model {costmodel} names no device. Run `routepack fit` again.")
    return header


def _fingerprint(value: dict[str, Any]) -> DeviceFingerprint:
    from profiler import DeviceFingerprint

    return DeviceFingerprint.from_dict(value)


def _study_facts(task: TuneTask) -> dict[str, Any]:
    """Return the parameters that the study's parent run shows."""
    sizes = {f.name: getattr(task.topology, f.name) for f in dataclasses.fields(task.topology)}
    return {
        "model": task.spec.name,
        **{name: size for name, size in sizes.items() if size != 1},
        "max_tokens_per_microbatch": task.max_tokens,
        "step_batches": len(task.batches),
        "held_out": task.num_holdout,
        "seed": task.seed,
        "tables_hash": task.tables.tables_hash,
        "batches_hash": content_hash(task.signature["batches"]),
    }


def _planner_of_study(study: Path, document: dict[str, Any], best: dict[str, Any]) -> Planner:
    from costmodels import StepTables

    settings = document["config"]
    spec, topology, params = typed_parts(settings["model"], settings["topology"], best["params"], f"Study {study}")
    cap, tables = settings["max_tokens_per_microbatch"], StepTables.load(study / TABLES_FILE)
    return Planner(spec, topology, cap, params, tables, _fingerprint(document["fingerprint"]))


def _recheck(planner: Planner, study: Path) -> Plan:
    """Plan the study's held-out batch once more with the winner's settings and check every hard constraint."""
    from search import check_plan

    batch = load_step_batch(study / RECHECK_FILE, planner.spec)
    try:
        plan = planner.plan(batch, seed=1)
        check_plan(plan, batch.lengths, planner.spec.num_experts)
        if not 0 < plan.predicted.step_time_s < float("inf"):
            raise RoutePackError(f"its predicted step time is {plan.predicted.step_time_s} s")
    except RoutePackError as error:
        raise RoutePackError(f"The best trial of {study} fails its re-check: {error} Tune again.") from None
    return plan


def _provenance(document: dict[str, Any], best: dict[str, Any], recheck: Plan) -> dict[str, Any]:
    holdout = document["summary"]["holdout"]
    return {
        "written_by": f"routepack-tune {version()}",
        "study": document["study_name"],
        "trial": best["number"],
        "objective": best["value"],
        "held_out_objective": holdout["best_value"],
        "held_out_step_time_s": _mean([score["step_time_s"] for score in holdout["best"]]),
        "held_out_default_s": _mean([score["default_s"] for score in holdout["best"]]),
        "mlflow": document["tracking"],
        "data_hashes": {step["name"]: step["data_hash"] for step in document["steps"]},
        "cost_model": document["cost_model"],
        "tables_hash": document["tables_hash"],
        "config_hash": content_hash(document["config"]),
        "recheck": {"plan_hash": recheck.plan_hash, "step_time_s": recheck.predicted.step_time_s,
                    "default_s": recheck.default.step_time_s},
    }  # fmt: skip


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None

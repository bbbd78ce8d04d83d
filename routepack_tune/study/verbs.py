"""The verbs ``tune`` and ``deploy``: a study of the planner's settings, and the bundle of its outcome."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.errors import RoutePackError, explained
from profiler.extras import extras_named
from profiler.files import content_hash, write_json, write_text
from profiler.places import check_place, claimed
from profiler.redact import redacted
from routepack_tune.bundle import PLANNER_FILE, check_replaceable, typed_parts, write_bundle
from routepack_tune.config import Config, load_config
from routepack_tune.environment import version
from routepack_tune.planner import Planner
from routepack_tune.steps.traces import list_step_files, load_step_batch
from routepack_tune.study.folder import (
    RECHECK_FILE,
    STUDY_FILE,
    TUNING_REPORT_FILE,
    begin_study,
    known_study,
    locked_study,
    read_study,
    set_aside,
    tables_file,
)

if TYPE_CHECKING:
    from profiler import Observer
    from search import Plan, TuneTask

Paths = Path | str | Sequence[Path | str]
_LOG = logging.getLogger("routepack_tune")


@extras_named()
def tune(
    steps: Paths,
    costmodel: Path | str,
    config: Path | str,
    out: Path | str,
    trials: int = 20,
    storage: str | None = None,
    seed: int = 0,
    observer: Observer | None = None,
    *,
    workers: int = 1,
    ray: bool = False,
    new_study: bool = False,
    warm_start: Sequence[Path | str] = (),
) -> dict[str, Any]:
    """Run or resume a study until it holds ``trials`` trials; return what ``out/study.json`` holds.

    Parameters
    ----------
    storage
        Optuna storage URL of a server, for several machines; None: a file in ``out``.
    workers, ray
        Processes of this machine; or tasks of the Ray cluster that this machine belongs to.
    new_study
        Begin afresh; the study in ``out`` moves to ``out/earlier``.
    warm_start
        Study folders or bundles of other clusters: their best settings are tried right after the defaults.

    Raises
    ------
    RoutePackError
        If an input is wrong (before anything is written), the folder holds another study, or no trial is feasible.
    """
    from costmodels.cost_model import read_header
    from routepack_tune.reports.tuning import tuning_page
    from routepack_tune.tracking.store import tracking_uri
    from routepack_tune.tracking.sync import StudySync
    from search import run_study
    from search.tuning.storage import choose_storage, open_study

    for name, number in (("trial", trials), ("worker", workers)):
        if not number >= 1:
            raise RoutePackError(f"Expected at least 1 {name}, got {number}.")
    check_place(out, folder=True)
    settings, out, costmodel = load_config(config), Path(out), Path(costmodel)
    uri = tracking_uri(settings.tune.tracking_uri, out)
    read_header(costmodel)  # refused before the batches are read
    task, files = _tune_task(steps, costmodel, settings, seed)
    task = dataclasses.replace(task, enqueue=tuple(best_setting(path, task) for path in warm_start))
    with locked_study(out):
        name = f"routepack-{content_hash(task.signature)[:12]}"  # the same inputs get the same one, in any storage
        where = storage or choose_storage(out)
        earlier = ""
        if new_study:
            name = open_study(task, where, name, new_study=True).study_name
            earlier = set_aside(out)
        shown = redacted(storage or "")
        document = known_study(out, task, costmodel) or begin_study(out, task, name, settings, files, costmodel, shown)
        sync, name = StudySync(out, uri, task, document), document["study_name"]
        if earlier:
            sync.end("KILLED", earlier)
        try:
            summary = run_study(task, where, name, trials, workers=workers, ray=ray, observer=observer, listener=sync)
            document |= {"state": "finished", "trials": trials, "summary": summary}
            write_json(out / STUDY_FILE, document)
            write_text(report := out / TUNING_REPORT_FILE, tuning_page(document))
        except BaseException as error:
            sync.end("FAILED" if isinstance(error, Exception) else "KILLED")
            raise
        document["tracking"] = sync.finish(summary, [report])
        write_json(out / STUDY_FILE, document)
        return document


@extras_named()
def deploy(study: Path | str, out: Path | str, register: str | None = None) -> Path:
    """Turn a study's outcome into a bundle, after planning a batch with it once more; register it if asked.

    The best trial is exported where it proved itself on the held-out batches, else the planner's defaults.

    Raises
    ------
    RoutePackError
        If the study has no feasible trial or its files changed; nothing is written then.
    """
    from routepack_tune.tracking.registry import check_registered_name, register_bundle

    study, out = Path(study), Path(out)
    if register is not None:
        check_registered_name(register)
    check_replaceable(out, PLANNER_FILE)
    document = read_study(study, whole=True)
    summary = document["summary"] or {}
    if not summary.get("best"):
        raise RoutePackError(
            f"Study {study} has no feasible, finished trial: nothing to deploy. Run `routepack tune` to its end."
        )
    uri = _registry_uri(study, document) if register else ""
    exported = exported_settings(document)
    planner, recheck = _planner_of_study(study, document, exported)
    with claimed(out, "deploying to"):
        write_bundle(out, planner, _provenance(document, exported, recheck))
        registered = register_bundle(out, register, uri, document) if register else ""
    what = "the default settings" if summary["export"] == "defaults" else f"trial {summary['best']['number']}"
    _LOG.info("The bundle holds %s. %s", what, summary["export_reason"])
    if registered:
        _LOG.info(registered)
    return out


def exported_settings(document: dict[str, Any]) -> dict[str, Any]:
    """Return ``params`` and ``max_tokens`` of what a study exports, with the ``number`` of the trial."""
    summary, config = document["summary"], document["config"]
    if summary["export"] == "defaults":
        given = summary["default"] or {"number": None, "params": config["planner"]}
    else:
        given = summary["best"]
    return {"max_tokens": config["max_tokens_per_microbatch"], **given}


def best_setting(path: Path | str, task: TuneTask) -> dict[str, Any]:
    """Return the best settings of another cluster's study or bundle as far as ``task`` may choose them.

    A value outside a range of ``task`` becomes the range's end; another cap counts only where it is allowed.
    """
    from routepack_tune.bundle_file import read_bundle

    path = Path(path)
    if (path / PLANNER_FILE).is_file():
        bundle, _ = read_bundle(path)
        params, cap = dataclasses.asdict(bundle.params), bundle.max_tokens_per_microbatch
    elif best := (read_study(path)["summary"] or {}).get("best"):
        params, cap = best["params"], best["max_tokens"]
    else:
        raise RoutePackError(f"{path} holds no tuned settings to start from. Give a finished study or a bundle.")
    setting = {name: min(max(params[name], knob.low), knob.high) for name, knob in task.space.items() if name in params}
    setting = {name: int(value) if task.space[name].integer else value for name, value in setting.items()}
    return setting | ({"max_tokens": cap} if len(task.caps) > 1 and cap in task.caps else {})


def _tune_task(steps: Paths, costmodel: Path, settings: Config, seed: int) -> tuple[TuneTask, list[Path]]:
    """Read every step batch and build the study's task; batches of another model are an error naming the file."""
    from costmodels import CostModel, freeze_tables, tables_for
    from search import TuneTask

    files = list_step_files(steps)
    hint = f" To tune on part of a folder, give a quoted glob or files instead of {files[0].parent}."
    with explained(after=hint if len(files) > 1 else ""):
        batches = [load_step_batch(path, settings.model, settings.max_tokens_per_microbatch) for path in files]
    names = [path.stem for path in files]
    if len(set(names)) < len(names):
        names = [f"{i:03d}-{name}" for i, name in enumerate(names)]
    further = [cap for cap in settings.tune.caps if cap != settings.max_tokens_per_microbatch]
    model = CostModel.load(costmodel) if further else None
    spec, topology, cap = settings.job
    task = TuneTask(
        names=tuple(names),
        batches=tuple(batches),
        tables=tables_for(costmodel, *settings.job),
        spec=spec,
        topology=topology,
        max_tokens=cap,
        base=settings.planner,
        params=settings.tune,
        seed=seed,
        tables_by_cap={other: freeze_tables(model, spec, topology, other) for other in further} if model else {},
    )
    return task, files


def _registry_uri(study: Path, document: dict[str, Any]) -> str:
    """Return the store that knows the study's run."""
    from routepack_tune.tracking.store import tracking_uri

    known = document["tracking"].get("tracking_uri", "")
    if "***" in known and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise RoutePackError(
            f"Study {study} is tracked at {known}; passwords are not stored. Set MLFLOW_TRACKING_URI to the whole URL."
        )
    return tracking_uri("" if "***" in known else known, study)


def _planner_of_study(study: Path, document: dict[str, Any], exported: dict[str, Any]) -> tuple[Planner, Plan]:
    """Return the planner with the exported settings and its plan of the study's last batch, checked once more."""
    from costmodels import StepTables
    from profiler import DeviceFingerprint
    from search import check_plan

    settings, cap = document["config"], exported["max_tokens"]
    spec, topology, params = typed_parts(settings["model"], settings["topology"], exported["params"], f"Study {study}")
    tables = StepTables.load(study / tables_file(cap, settings["max_tokens_per_microbatch"]))
    device, dtype = DeviceFingerprint.from_dict(document["fingerprint"]), document["cost_model"].get("dtype", "")
    planner = Planner(spec, topology, cap, params, tables, device, dtype)
    batch = load_step_batch(study / RECHECK_FILE, spec)
    with explained(f"What {study} exports fails its re-check: ", " Tune again."):
        plan = planner.plan(batch, seed=1)
        check_plan(plan, batch.lengths, spec.num_experts)
        if not 0 < plan.predicted.step_time_s < float("inf"):
            raise RoutePackError(f"its predicted step time is {plan.predicted.step_time_s} s")
    return planner, plan


def _provenance(document: dict[str, Any], exported: dict[str, Any], recheck: Plan) -> dict[str, Any]:
    summary = document["summary"]
    holdout, best = summary["holdout"], summary["export"] == "best"
    return {
        "written_by": f"routepack-tune {version()}",
        "study": document["study_name"],
        "export": summary["export"],
        "export_reason": summary["export_reason"],
        "trial": exported["number"],
        "objective": exported.get("value"),
        "held_out": {
            "default_settings": holdout["means"]["default_settings"],
            "exported": holdout["means"]["best" if best else "default_settings"],
            "gain": holdout["gain"] if best else None,
            "rests_on": holdout["rests_on"],
        },
        "mlflow": document["tracking"],
        "data_hashes": {step["name"]: step["data_hash"] for step in document["steps"]},
        "cost_model": document["cost_model"],
        "tables_hash": recheck.provenance["tables_hash"],
        "config_hash": content_hash(document["config"]),
        "default_params": document["config"]["planner"],
        "hidden_planning_s": document["config"]["tune"]["hidden_planning_s"],
        "workload": document["workload"],
        "environment": document["environment"],
        "recheck": {
            "plan_hash": recheck.plan_hash,
            "step_time_s": recheck.predicted.step_time_s,
            "default_s": recheck.default.step_time_s,
        },
    }

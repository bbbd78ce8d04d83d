"""The verbs in order: each reads files, leaves one artifact, and this file is the dataflow.

    profile -> measurements -> fit -> costmodel -> tune -> study -> deploy -> bundle -> plan -> plan.json

Every artifact carries a schema version and the hashes of its parents, and is written whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.errors import RoutePackError, explained
from profiler.extras import extras_named
from profiler.files import write_text
from profiler.places import check_place, claimed
from routepack_tune.bundle import COST_MODEL_FILE, check_replaceable
from routepack_tune.config import load_config
from routepack_tune.drift import check
from routepack_tune.planner import Planner
from routepack_tune.progress import is_first_rank
from routepack_tune.study.verbs import Paths, deploy, tune
from routepack_tune.tracking.registry import rollback

if TYPE_CHECKING:
    from costmodels import CostModel
    from profiler import Measurements, Observer
    from search import Plan, StopCriterion

__all__ = ["check", "deploy", "fit", "plan", "profile", "rollback", "tune"]


@extras_named()
def profile(
    config: Path | str,
    out: Path | str,
    published: Path | str | None = None,
    device: str | None = None,
    observer: Observer | None = None,
    prior: Sequence[Path | str] = (),
    steps: Sequence[Path | str] = (),
    target_error: float | None = None,
    max_minutes: float | None = None,
    report: bool = False,
    tables: str | None = None,
) -> Measurements:
    """Time the model's operations on this device, or import published times; write ``out/measurements.parquet``.

    Rounds of cases are timed until every operation's held-out error is below ``target_error`` percent, or
    ``max_minutes`` are used up (both stand in for the settings' own). ``prior`` are folders of cost models of sibling
    devices, with which fewer cases do; ``steps`` are step batches whose cells and loads are timed first of all.
    ``report`` draws pictures into ``out``. ``tables`` chooses the software whose published tables are imported.

    A killed run continues when it is called again with the same folder. Under torchrun every rank calls this, and rank
    0 alone shows progress and draws.
    """
    from costmodels import CostModel
    from costmodels.choose import KMeansChooser
    from profiler import fingerprint_device, import_published
    from routepack_tune.steps.seen import seen_of_steps

    check_place(out, folder=True)
    settings, out = load_config(config), Path(out)
    limits: dict[str, Any] = {"target_error": target_error, "max_minutes": max_minutes}
    if tables is not None and published is None:
        raise RoutePackError("--tables chooses among published tables: give --published with it.")
    if published is not None:
        for name, value in {"device": device, "prior": prior, "steps": steps, **limits}.items():
            if value:
                flag = name.replace("_", "-")
                raise RoutePackError(f"--published imports times, --{flag} is for taking them: give one of the two.")
        if (out / "cases.jsonl").exists():
            raise RoutePackError(
                f"{out} holds a profile of this machine; published times must not replace it. Choose another --out."
            )
        measurements = import_published(published, settings.profile.exchange, tables)
        measurements.save(out)
    else:
        from profiler import profile_device  # imports torch, which published times do without

        with explained(of=ValueError):
            params = replace(settings.profile, **{name: value for name, value in limits.items() if value is not None})
        seen = seen_of_steps(steps, settings)
        siblings = [CostModel.load(folder) for folder in prior]
        chooser = KMeansChooser(settings.fit, siblings, fingerprint_device(device).arch if siblings else "")
        measurements = profile_device(*settings.job, params, out, device, observer, chooser.next_round, seen)
    if report and is_first_rank():
        from routepack_tune.reports.profile import REPORT_FILE, profile_page

        write_text(out / REPORT_FILE, profile_page(measurements))
    return measurements


@extras_named()
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
    from routepack_tune.reports.fit import REPORT_FILE, fit_page, fit_pictures
    from routepack_tune.tracking.fit_tracking import track_fit
    from routepack_tune.tracking.store import tracking_uri

    check_replaceable(out, COST_MODEL_FILE)
    settings = load_config(config)
    uri = tracking_uri(settings.tune.tracking_uri, out)
    folders = [measurements] if isinstance(measurements, (str, Path)) else measurements
    with claimed(out, "fitting into"):
        batches = [Measurements.load(folder) for folder in folders]
        siblings = [CostModel.load(folder) for folder in priors]
        model = fit_cost_model(batches, *settings.job, settings.fit, observer, siblings)
        model.save(out)
        pictures = fit_pictures(model, batches)
        write_text(Path(out) / REPORT_FILE, fit_page(model, pictures))
        track_fit(model, out, pictures, uri, settings.tune.experiment)
    return model


@extras_named()
def plan(
    step: Path | str,
    out: Path | str,
    planner: Planner,
    previous: Path | str | None = None,
    *,
    seed: int = 0,
    stop: StopCriterion | None = None,
    observer: Observer | None = None,
) -> Plan:
    """Plan one step batch; write ``out``. ``previous`` is the last step's ``plan.json``; see :class:`Planner`."""
    from search import Plan

    check_place(out)
    with explained(f"Previous plan {previous}: "):
        before = None if previous is None else Plan.load(previous)
    made = planner.plan(step, seed, before, stop, observer)
    made.save(out)
    return made

"""The verbs in order: each reads files, leaves one artifact, and this file is the dataflow.

    profile -> measurements -> fit -> costmodel -> tune -> study -> deploy -> bundle -> plan -> plan.json

Every artifact carries a schema version and the hashes of its parents, and is written whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from profiler.errors import RoutePackError
from profiler.files import write_text
from routepack_tune.bundle import check_replaceable, load_planner
from routepack_tune.config import Config, load_config
from routepack_tune.costmodel_files import COST_MODEL_FILE, cost_model_header, fingerprint_of, tables_of
from routepack_tune.drift import check
from routepack_tune.planner import Planner
from routepack_tune.progress import is_first_rank
from routepack_tune.steps.traces import check_cap, load_step_batch
from routepack_tune.study.verbs import deploy, rollback, tune
from routepack_tune.version import version

if TYPE_CHECKING:
    from costmodels import CostModel
    from profiler import Measurements, Observer, ProfileParams
    from search import Plan, StepBatch, StopCriterion

Paths = Path | str | Sequence[Path | str]

__all__ = ["check", "deploy", "fit", "plan", "profile", "rollback", "tune", "version"]


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
) -> Measurements:
    """Time the model's operations on this device, or import published times; write ``out/measurements.parquet``.

    Rounds of cases are timed until every operation's held-out error is below ``target_error`` percent, or
    ``max_minutes`` are used up. ``prior`` are folders of cost models of sibling devices, with which fewer cases do;
    ``steps`` are step batches whose cells and loads are timed first of all. ``report`` draws pictures into ``out``.

    A killed run continues when it is called again with the same folder. Under torchrun every rank calls this, and rank
    0 alone shows progress and draws.
    """
    settings, out = load_config(config), Path(out)
    if out.exists() and not out.is_dir():
        raise RoutePackError(f"{out} is a file, a folder is to be written there. Choose another --out.")
    if published is None:
        params = _stated(settings.profile, target_error, max_minutes)
        measurements = _profile_here(replace(settings, profile=params), out, device, observer, prior, steps)
    else:
        given = {"--device": device, "--prior": prior, "--steps": steps, "--target-error": target_error,
                 "--max-minutes": max_minutes}  # fmt: skip
        asked = [flag for flag, value in given.items() if value]
        measurements = _import_published(published, out, asked, settings.profile.exchange)
    if report and is_first_rank():
        from routepack_tune.reports.profile import REPORT_FILE, profile_page

        write_text(out / REPORT_FILE, profile_page(measurements))
    return measurements


def _profile_here(
    settings: Config, out: Path, device: str | None, observer: Observer | None, prior: Sequence[Path | str],
    steps: Sequence[Path | str],
) -> Measurements:  # fmt: skip
    from costmodels import CostModel
    from costmodels.choose import KMeansChooser
    from profiler import fingerprint_device, profile_device
    from routepack_tune.steps.seen import seen_of_steps

    seen = seen_of_steps(steps, settings)
    siblings = [CostModel.load(folder) for folder in prior]
    chooser = KMeansChooser(settings.fit, siblings, fingerprint_device(device) if siblings else None)
    return profile_device(
        settings.model, settings.topology, settings.max_tokens_per_microbatch, settings.profile, out, device, observer,
        chooser.next_round, seen,
    )  # fmt: skip


def _import_published(published: Path | str, out: Path, given: list[str], exchange: str) -> Measurements:
    from profiler import import_published

    if given:
        raise RoutePackError(f"--published imports times, {given[0]} is for taking them: give one of the two.")
    if (out / "cases.jsonl").exists():
        raise RoutePackError(
            f"{out} holds a profile of this machine; published times must not replace it. Choose another --out."
        )
    measurements = import_published(published, exchange)
    measurements.save(out)
    return measurements


def _stated(params: ProfileParams, target_error: float | None, max_minutes: float | None) -> ProfileParams:
    """Return the settings with what was stated on the command line in their place."""
    try:
        return replace(
            params,
            target_error=params.target_error if target_error is None else target_error,
            max_minutes=params.max_minutes if max_minutes is None else max_minutes,
        )
    except ValueError as error:
        raise RoutePackError(str(error)) from None


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
    pictures = fit_pictures(model, batches)
    write_text(Path(out) / REPORT_FILE, fit_page(model, pictures))
    track_fit(model, out, pictures, uri, settings.tune.experiment)
    return model


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
    if (bundle is None) == (costmodel is None or config is None) or (bundle is not None and (costmodel or config)):
        raise RoutePackError("Give either --bundle, or --costmodel together with --config.")
    batch: StepBatch | Path | str = step
    if bundle is not None:
        planner = load_planner(bundle, allow_mismatch=allow_mismatch)
    else:
        assert costmodel is not None
        assert config is not None
        settings = load_config(config)
        # Before the tables: a sample above the cap is the news, not that the cost model knows another cap.
        batch = load_step_batch(step, settings.model)
        check_cap(batch, settings.max_tokens_per_microbatch, str(step))
        planner = untuned_planner(costmodel, settings)
    before = None
    if previous is not None:
        try:
            before = Plan.load(previous)
        except RoutePackError as error:
            raise RoutePackError(f"Previous plan {previous}: {error}") from None
    made = planner.plan(batch, seed=seed, previous=before, stop=stop, observer=observer)
    made.save(out)
    return made


def untuned_planner(costmodel: Path | str, settings: Config) -> Planner:
    """Return a planner with a cost model's times and the settings of ``routepack.yaml``.

    Raises
    ------
    RoutePackError
        If the cost model is missing, damaged, or for another model, topology or cap.
    """
    tables = tables_of(costmodel, settings)
    fingerprint = fingerprint_of(cost_model_header(Path(costmodel))["fingerprint"])
    cap = settings.max_tokens_per_microbatch
    return Planner(settings.model, settings.topology, cap, settings.planner, tables, fingerprint)


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

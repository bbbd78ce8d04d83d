"""Tell whether a bundle still fits: its times, its workload, its tuned settings and its device.

The verdict is ``fits``, ``re-tune`` (recent batches differ from those of the study, or the tuned settings lose to the
untuned ones on them) or ``re-profile`` (steps take longer or shorter than the cost model's interval allows, or the
device is another one; tuning again follows from it). What cannot be judged for want of data is said, never guessed.

Shape suffixes: S steps, B EP blocks, C components.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler.errors import RoutePackError
from profiler.files import file_hash, write_json
from routepack_tune.bundle import (
    PLANNER_FILE,
    bundle_folder,
    check_replaceable,
    compare_with_this_host,
    load_planner,
    write_bundle,
)
from routepack_tune.planner import Planner
from routepack_tune.reports.drift import (
    LEAST_COMPARED,
    LEAST_TIMED,
    Comparison,
    DriftReport,
    Prediction,
    median_interval,
    trend_interval,
)
from routepack_tune.steps.step_times import StepTimes, read_step_times
from routepack_tune.steps.traces import list_step_files, load_step_batch
from routepack_tune.steps.workload import (
    WORKLOAD_SCHEMA_VERSION,
    Shift,
    compare_workloads,
    hottest_overlap,
    workload_statistics,
)

if TYPE_CHECKING:
    from profiler import DeviceFingerprint, Observer
    from search import Plan, PlannerParams, StepBatch

MOST_COMPARED = 8
"""Latest batches that are planned with both settings."""
DEFAULT_HALF_WIDTH, LEAST_HALF_WIDTH = 0.10, 0.05
"""Allowed relative error of a step where the bundle states none, and at least."""


def check(
    bundle: Path | str,
    steps: Path | str | Sequence[Path | str],
    times: Path | str | None = None,
    refit: Path | str | None = None,
    out: Path | str | None = None,
    observer: Observer | None = None,
) -> DriftReport:
    """Compare a bundle with recent step batches and, where given, measured step times.

    Parameters
    ----------
    times
        Measured steps (:mod:`routepack_tune.steps.step_times`); steps without a plan are planned again with the bundle.
    refit
        Folder of a new bundle whose times are corrected by the measured steps. Where the evidence is too weak nothing
        is written and the report says why.
    out
        The report as a JSON file.

    Raises
    ------
    RoutePackError
        If an input is wrong; nothing is written then.
    """
    if refit is not None and times is None:
        raise RoutePackError("A refit needs measured step times: give --times.")
    folder = bundle_folder(bundle)
    if refit is not None:
        _check_refit_folder(folder, Path(refit))
    with warnings.catch_warnings():  # the report says what differs
        warnings.simplefilter("ignore", UserWarning)
        planner = load_planner(folder, allow_mismatch=True)
    files = list_step_files(steps)
    measured, notes = _measured(times, files)
    batches, prices, comparison = _plan_all(planner, files, measured, notes, observer)
    timed = [path.stem for path in files if path.stem in measured]
    blocks_SBC = np.stack([prices[name] for name in timed]) if timed else np.zeros((0, 1, 4))
    measured_S = np.array([measured[name].step_time_s for name in timed])
    prediction = _prediction(planner, blocks_SBC, measured_S, sum(measured[n].plan is not None for n in timed))
    shifts = _shifts(planner, [path.stem for path in files], batches, notes)
    device = _device_reason(planner.fingerprint, notes)
    verdict, reasons = _verdict(prediction, shifts, comparison, device, notes)
    report = DriftReport(verdict, reasons, len(files), prediction, shifts, comparison, tuple(notes))
    if refit is not None:
        parts_SC = np.array([measured[name].parts_s for name in timed]).reshape(len(timed), -1)
        hashes = {path.stem: batch.data_hash for path, batch in zip(files, batches, strict=True)}
        evidence = {name: hashes[name] for name in timed}
        report = _refitted(report, planner, folder, Path(refit), (blocks_SBC, measured_S, parts_SC), evidence, device)
    if out is not None:
        write_json(out, report.to_dict())
    return report


def stated_half_log(header: Mapping[str, Any]) -> dict[str, float]:
    """Return the cost model's 90 % half-widths (log of time) by component, from what ``costmodel.json`` holds."""
    component = {"attention": "attention", "dense": "attention", "experts": "experts", "alltoall": "exchange"}
    found: dict[str, float] = {}
    for entry in header.get("operations", {}).values():
        intervals, name = entry.get("intervals"), component.get(entry.get("operation"))
        if intervals and name:
            found[name] = max(found.get(name, 0.0), float(np.median(intervals["half_log"])))
    return found


def _check_refit_folder(folder: Path, refit: Path) -> None:
    old, new = folder.resolve(), refit.resolve()
    if old == new or old.is_relative_to(new) or new.is_relative_to(old):
        raise RoutePackError(f"{refit} is the bundle that is checked: it is never changed in place. Name a new folder.")
    check_replaceable(refit, PLANNER_FILE)


def _measured(times: Path | str | None, files: Sequence[Path]) -> tuple[dict[str, StepTimes], list[str]]:
    """Read the measured steps that have a batch; return them and what is to be said."""
    names = [path.stem for path in files]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RoutePackError(f"Two step batches are named {twice!r}: measured steps go by name. Rename one of them.")
    if times is None:
        return {}, ["no measured step times were given: the cost model was not checked (--times)"]
    found = read_step_times(times)
    known = {name: row for name, row in found.items() if name in names}
    if not known:
        raise RoutePackError(
            f"Step times {times} name no given step batch (first: {next(iter(found))!r}, batches: {names[0]!r} ...)."
        )
    notes = [f"{len(found) - len(known)} measured steps have no batch here"] if len(found) > len(known) else []
    if any(row.plan is None for row in known.values()):
        notes.append(
            "steps without a plan column were planned again (seed 0, no previous plan), as training may not have"
        )
    return known, notes


def _plan_all(
    planner: Planner, files: Sequence[Path], measured: Mapping[str, StepTimes], notes: list[str],
    observer: Observer | None,
) -> tuple[list[StepBatch], dict[str, np.ndarray], Comparison | None]:  # fmt: skip
    """Read every batch, plan the latest ones with both settings, and price the plans that ran."""
    from profiler import Observer
    from search import MaxIterations

    observer = observer or Observer()
    batches = [load_step_batch(path, planner.spec, planner.max_tokens) for path in files]
    given = {name: _given_plan(row.plan, planner, name) for name, row in measured.items() if row.plan is not None}
    untuned = _untuned(planner, notes)
    hidden_s = float(planner.provenance.get("hidden_planning_s", 0.0))
    compared = set(range(max(0, len(files) - MOST_COMPARED), len(files))) if untuned is not None else set()
    with contextlib.suppress(RoutePackError):  # compiles before anything is timed; so short a search may break a limit
        planner.plan(batches[0], stop=MaxIterations(1))
    plans: dict[str, Plan] = {}
    prices: dict[str, np.ndarray] = {}
    ratios: list[float] = []
    without: list[str] = []
    observer.start("batches", len(files))
    for i, (path, batch) in enumerate(zip(files, batches, strict=True)):
        name = path.stem
        if i in compared or (name in measured and name not in given):
            plans[name], tuned_s = _timed_plan(planner, batch, hidden_s)
            if i in compared and untuned is not None:
                try:
                    ratios.append(np.log(tuned_s / _timed_plan(untuned, batch, hidden_s)[1]))
                except RoutePackError as error:  # a limit, as of received rows, that only the tuned settings keep
                    without.append(f"{name}: {error}")
        if name in measured:
            prices[name] = _block_seconds(planner, batch, given.get(name) or plans[name], name)
        observer.advance("batches", name)
    observer.finish("batches")
    if without:
        notes.append(f"{len(without)} batches have no comparison, the untuned settings find no plan ({without[0]})")
    if ratios:
        notes.append("planning is counted as processor time of all threads; a study plans in one thread: the same sum")
    return batches, prices, _comparison(np.array(ratios)) if ratios else None


def _given_plan(path: Path, planner: Planner, name: str) -> Plan:
    from search import Plan

    try:
        plan = Plan.load(path)
    except RoutePackError as error:
        raise RoutePackError(f"Plan of step {name!r}, {path}: {error}") from None
    if plan.topology != planner.topology or plan.max_tokens != planner.max_tokens:
        raise RoutePackError(f"Plan of step {name!r}, {path}: is for another topology or token cap than the bundle.")
    return plan


def _untuned(planner: Planner, notes: list[str]) -> Planner | None:
    """Return the planner with the settings the study started from; None where those are the tuned ones."""
    from search import TUNABLE, PlannerParams

    stated = planner.provenance.get("default_params")
    if stated is None:
        defaults = PlannerParams()
        params: PlannerParams = replace(planner.params, **{name: getattr(defaults, name) for name in TUNABLE})
        notes.append("the bundle does not say which settings its study started from: compared with the planner's own")
    else:
        params = replace(planner.params, **stated)
    if params == planner.params:
        notes.append("the bundle holds the untuned settings: there is nothing to lose to")
        return None
    return replace(planner, params=params)


def _timed_plan(planner: Planner, batch: StepBatch, hidden_s: float) -> tuple[Plan, float]:
    """Return the plan, and its predicted step time with the planning time that is not hidden: as a study counts it,
    the processor time of all threads."""
    start = time.process_time()
    plan = planner.plan(batch)
    return plan, plan.predicted.step_time_s + max(0.0, time.process_time() - start - hidden_s)


def _block_seconds(planner: Planner, batch: StepBatch, plan: Plan, name: str) -> np.ndarray:
    """Return the predicted seconds of every component of every block, [B, C], by the bundle's tables."""
    from search import build_problem, check_plan, evaluate

    problem = build_problem(batch, *planner.job)
    stated = plan.provenance.get("batch_hash", batch.data_hash)
    try:
        if stated != batch.data_hash or plan.sample_ids != tuple(map(str, batch.sample_ids)):
            raise RoutePackError("it was made for other samples.")
        check_plan(plan, problem.lengths, problem.num_experts)
    except RoutePackError as error:
        raise RoutePackError(f"The plan given for step {name!r} does not fit its batch: {error}") from None
    priced = evaluate(problem, plan.row_N, plan.slot_N, plan.placement_LE, plan.num_rows)
    parts = [priced.attention_RB.sum(axis=0), priced.experts_RB.sum(axis=0), priced.exchange_RB.sum(axis=0)]
    parts.append(np.full(parts[0].shape, priced.fixed_ns * plan.num_rows))
    return np.stack(parts, axis=1) * (1e-9 / priced.stages)


def _comparison(log_ratios: np.ndarray) -> Comparison:
    """Return the mean gain with its bootstrap interval, batches drawn with replacement."""
    rng = np.random.default_rng(0)
    means = log_ratios[rng.integers(0, log_ratios.size, (2000, log_ratios.size))].mean(axis=1)
    high, low = np.quantile(means, (0.025, 0.975))
    gains = [100.0 * (1.0 - float(np.exp(x))) for x in (log_ratios.mean(), low, high)]
    return Comparison(int(log_ratios.size), *gains)


def _prediction(planner: Planner, blocks_SBC: np.ndarray, measured_S: np.ndarray, given: int) -> Prediction | None:
    if not measured_S.size:
        return None
    from costmodels.freezing.rescale import COMPONENTS

    totals_SB = blocks_SBC.sum(axis=2)
    log_error = np.log(measured_S / totals_SB.max(axis=1))
    slowest_SC = blocks_SBC[np.arange(measured_S.size), totals_SB.argmax(axis=1)]
    share_C = (slowest_SC / slowest_SC.sum(axis=1, keepdims=True)).mean(axis=0)
    half = (planner.provenance.get("cost_model") or {}).get("half_log") or {}
    stated = all(
        half.get(name) is not None or share < 0.02 for name, share in zip(COMPONENTS[:3], share_C, strict=False)
    )
    width = sum(half.get(name, 0.0) * share for name, share in zip(COMPONENTS, share_C, strict=True))
    allowed = max(LEAST_HALF_WIDTH, float(np.expm1(width))) if stated and half else DEFAULT_HALF_WIDTH
    median, low, high = (100.0 * float(np.expm1(x)) for x in median_interval(log_error))
    trend, trend_low, trend_high = (100.0 * float(np.expm1(x)) for x in trend_interval(log_error))
    return Prediction(
        steps=int(measured_S.size), given_plans=given, median_pct=median, low_pct=low, high_pct=high,
        trend_pct=trend, trend_low_pct=trend_low, trend_high_pct=trend_high, allowed_pct=100.0 * allowed,
        stated=bool(stated and half),
    )  # fmt: skip


def _shifts(
    planner: Planner, names: Sequence[str], batches: Sequence[StepBatch], notes: list[str]
) -> tuple[Shift, ...]:
    tuned = planner.provenance.get("workload")
    if not isinstance(tuned, Mapping) or tuned.get("schema_version") != WORKLOAD_SCHEMA_VERSION:
        notes.append("the bundle carries no statistics of its tuning batches (older version): workload not compared")
        return ()
    recent = workload_statistics(names, batches)
    if len(tuned["batches"]) < 2:
        notes.append("one tuning batch: its spread is unknown, limits of the workload are the least ones")
    notes.append(f"{100 * hottest_overlap(tuned, recent):.0f}% of the hottest experts are those of the tuning batches")
    return compare_workloads(tuned, recent)


def _device_reason(wanted: DeviceFingerprint, notes: list[str]) -> str:
    """Return what makes this device another one; empty where it fits or cannot be compared."""
    match = compare_with_this_host(wanted)
    if match is None:
        notes.append(f"no {wanted.kind} device here: the bundle's ({wanted.name}) was not compared")
        return ""
    text = f"device is {match.level} from the profiled one: {'; '.join(match.reasons)}"
    if match.level == "different":
        return text
    if match.level == "near":
        notes.append(text)
    return ""


def _verdict(
    prediction: Prediction | None, shifts: Sequence[Shift], comparison: Comparison | None, device: str,
    notes: list[str],
) -> tuple[str, tuple[str, ...]]:  # fmt: skip
    profile, tune = [device] if device else [], []
    if prediction is not None and prediction.outside is None:
        notes.append(f"{prediction.steps} measured steps are too few to judge the times by: at least {LEAST_TIMED}")
    elif prediction is not None and prediction.outside:
        profile.append(f"steps take {prediction.median_pct:+.1f}% of the predicted time, {prediction.allowed_pct:.1f}% "
                       "is allowed")  # fmt: skip
    tune += [f"{s.name} changed by {s.distance_pct:.0f}%, limit {s.limit_pct:.0f}%" for s in shifts if s.shifted]
    if comparison is not None and comparison.lost is None:
        notes.append(f"{comparison.batches} batches are too few to compare settings on: at least {LEAST_COMPARED}")
    elif comparison is not None and comparison.lost:
        tune.append(f"tuned settings lose {-comparison.gain_pct:.1f}% to untuned ones")
    return "re-profile" if profile else "re-tune" if tune else "fits", (*profile, *tune)


def _refitted(
    report: DriftReport, planner: Planner, folder: Path, refit: Path,
    steps: tuple[np.ndarray, np.ndarray, np.ndarray], evidence: Mapping[str, str], device: str,
) -> DriftReport:  # fmt: skip
    """Correct the times and write the new bundle, or say in the report why not."""
    from costmodels.freezing.rescale import fit_rescale, rescaled_tables

    if device:
        return replace(report, refit_refused=f"Refit refused: {device}. Profile this device.")
    try:
        found = fit_rescale(*steps)
    except RoutePackError as error:
        return replace(report, refit_refused=f"Refit refused: {error}")
    factors = ", ".join(f"{name} x {factor:.3f}" for name, factor in found.factors.items() if factor != 1.0)
    tables = rescaled_tables(
        planner.tables, found.factors, f"times corrected by {found.steps} measured training steps: {factors}"
    )
    made_from = {"bundle_sha256": file_hash(folder / PLANNER_FILE), "tables_hash": planner.tables.tables_hash}
    record = {"parent": made_from, "steps": dict(evidence), **asdict(found)}
    provenance = {**planner.provenance, "tables_hash": tables.tables_hash, "refit": record}
    write_bundle(refit, replace(planner, tables=tables), provenance)
    return replace(report, refit=found)

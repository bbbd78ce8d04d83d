"""Tell whether a bundle still fits: its times, its workload, its tuned settings and its device.

The verdict is ``fits``, ``re-tune`` (recent batches differ from those of the study, or the tuned settings lose to the
default ones on them) or ``re-profile`` (steps take longer or shorter than the cost model's interval allows, or the
device is another one; tuning again follows from it). What cannot be judged for want of data is said, never guessed.

Shape suffixes: S steps, B EP blocks, C components.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from profiler.errors import RoutePackError, explained
from profiler.extras import extras_named
from profiler.files import file_hash, write_json
from profiler.places import check_place
from routepack_tune.bundle import (
    PLANNER_FILE,
    bundle_folder,
    check_replaceable,
    device_match,
    load_planner,
    write_bundle,
)
from routepack_tune.planner import Planner
from routepack_tune.steps.step_times import StepTimes, read_step_times
from routepack_tune.steps.traces import list_step_files, load_step_batch
from routepack_tune.steps.workload import compare_workloads, workload_statistics

if TYPE_CHECKING:
    from costmodels.freezing.rescale import Rescale
    from profiler import Observer
    from search import Plan, StepBatch

MOST_COMPARED = 8
"""Latest batches that are planned with both settings."""
DEFAULT_HALF_WIDTH, LEAST_HALF_WIDTH = 0.10, 0.05
"""Allowed relative error of a step where the bundle states none, and at least."""
LEAST_TIMED, LEAST_COMPARED = 5, 4
"""Fewer measured steps give no verdict on the times, fewer batches none on workload and settings."""
LEAST_LOSS_PCT = 0.5
INTERVALS = ("median_pct", "low_pct", "high_pct", "trend_pct", "trend_low_pct", "trend_high_pct")
PROFILE, TUNE, FITS = "re-profile", "re-tune", "fits"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was compared, and what to do where it lies beyond its limit."""

    name: str
    advice: str
    """``re-profile`` (tuning again follows from it) or ``re-tune``."""
    beyond: bool
    text: str
    numbers: Mapping[str, Any]
    """Percent where a name ends with ``_pct``; ``low`` and ``high`` are ends of 95 % intervals."""


class _Costs(NamedTuple):
    """What a batch costs under some settings, seconds: step with moves, and planning."""

    step_s: float
    plan_s: float


@dataclass(frozen=True, slots=True)
class DriftReport:
    """Everything :func:`check` found."""

    findings: tuple[Finding, ...]
    batches: int
    notes: tuple[str, ...]
    refit: Rescale | None = None
    refit_refused: str = ""

    def document(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {"verdict": self.verdict, **asdict(self)}

    @property
    def verdict(self) -> str:
        """``fits``, or the first thing to be done."""
        advised = {one.advice for one in self.findings if one.beyond}
        return PROFILE if PROFILE in advised else TUNE if TUNE in advised else FITS


@extras_named()
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
        The report as a JSON file; where an input is wrong nothing is written.
    """
    for place, is_folder in ((out, False), (refit, True)):
        if place is not None:
            check_place(place, is_folder)
    folder = bundle_folder(bundle)[0]
    if refit is not None:
        refit, old = Path(refit).resolve(), folder.resolve()
        if times is None:
            raise RoutePackError("A refit needs measured step times: give --times.")
        if old.is_relative_to(refit) or refit.is_relative_to(old):
            raise RoutePackError(f"{refit} is the bundle that is checked: it is never changed. Name a new folder.")
        check_replaceable(refit, PLANNER_FILE)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # the report says what differs
        planner = load_planner(folder, allow_mismatch=True, warm_up=False)
    files, notes = list_step_files(steps), list[str]()
    measured = _measured(times, [path.stem for path in files], notes)
    batches = {path.stem: load_step_batch(path, planner.spec, planner.max_tokens) for path in files}
    prices, compared = _plan_all(planner, batches, measured, notes, observer)
    blocks_SBC = np.array(list(prices.values()))
    measured_S = np.array([measured[name].step_time_s for name in prices])
    device, said = device_match(planner.fingerprint)
    findings = [Finding("device", PROFILE, True, said, {})] if device == "different" else []
    notes += [said] if device in ("near", "unknown") else []
    if prices:
        findings.append(_times(planner, blocks_SBC, measured_S, notes))
    findings += _workload(planner, batches, notes)
    if compared:
        findings.append(_settings(compared, planner.provenance.get("hidden_planning_s"), notes))
    report = DriftReport(tuple(findings), len(files), tuple(notes))
    if refit is not None:
        from costmodels.freezing.rescale import fit_rescale

        try:
            if device == "different":
                raise RoutePackError(f"{said}. Profile this device.")
            parts_SC = np.array([measured[name].parts_s for name in prices])
            found = fit_rescale(blocks_SBC, measured_S, parts_SC)
            _write_refit(found, planner, folder, refit, {name: batches[name].data_hash for name in prices})
            report = replace(report, refit=found)
        except RoutePackError as error:
            report = replace(report, refit_refused=f"Refit refused: {error}")
    if out is not None:
        write_json(out, report.document())
    return report


def median_interval(values: np.ndarray) -> tuple[float, float, float]:
    """Return the median and its 95 % interval by order statistics; the range where values are few."""
    from scipy.stats import quantile_test

    median = float(np.median(values))
    found = quantile_test(values, q=median, p=0.5).confidence_interval(0.95)
    low, high = np.where(np.isfinite(found), found, (values.min(), values.max())).tolist()
    return median, low, high


def trend_interval(values: np.ndarray) -> tuple[float, float, float]:
    """Return the median of pairwise slopes and its 95 % interval (Sen 1968); zeros for a single value."""
    from scipy.stats import theilslopes

    if values.size < 2:
        return 0.0, 0.0, 0.0
    found = theilslopes(values, alpha=0.95)
    return float(found.slope), float(found.low_slope), float(found.high_slope)


def _measured(times: Path | str | None, names: Sequence[str], notes: list[str]) -> dict[str, StepTimes]:
    """Read the measured steps that have a batch, in the order of the batches."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RoutePackError(f"Two step batches are named {twice!r}: measured steps go by name. Rename one of them.")
    if times is None:
        notes.append("no measured step times were given: the cost model was not checked (--times)")
        return {}
    found = read_step_times(times)
    known = {name: found[name] for name in names if name in found}
    if not known:
        raise RoutePackError(
            f"Step times {times} name no given step batch (first: {next(iter(found))!r}, batches: {names[0]!r} ...)."
        )
    if len(found) > len(known):
        notes.append(f"{len(found) - len(known)} measured steps have no batch here")
    if any(row.plan is None for row in known.values()):
        notes.append(
            "steps without a plan column were planned again (seed 0, one after another), as training may not have"
        )
    return known


def _plan_all(
    planner: Planner,
    batches: Mapping[str, StepBatch],
    measured: Mapping[str, StepTimes],
    notes: list[str],
    observer: Observer | None,
) -> tuple[dict[str, np.ndarray], list[tuple[_Costs, _Costs]]]:
    """Price the plans that ran, and plan the latest batches with both settings, one after another as in training.

    Return the predicted block seconds of measured steps, [B, C] each, and what the batches planned with both cost under
    the bundle's settings and under the default ones.
    """
    from profiler import Observer
    from search import StopCriterion
    from search.tuning.objective import told_slack

    observer = observer or Observer()
    given = {
        name: _given_plan(row.plan, planner, batches[name], name)
        for name, row in measured.items()
        if row.plan is not None
    }
    untuned = _untuned(planner, notes)
    compared = list(batches)[-MOST_COMPARED:] if untuned is not None else []
    with contextlib.suppress(RoutePackError):  # compiles before anything is timed; so short a search may break a limit
        planner.plan(next(iter(batches.values())), stop=StopCriterion(max_iterations=1))
    prices: dict[str, np.ndarray] = {}
    pairs: list[tuple[_Costs, _Costs]] = []
    without: list[str] = []
    ours = others = None
    observer.start("batches", len(batches))
    for name, batch in batches.items():
        observer.now("batches", name)
        if name in compared or (name in measured and name not in given):
            ours, costs = _timed_plan(planner, batch, ours)
        if name in compared and untuned is not None:
            try:
                others, default_costs = _timed_plan(untuned, batch, others)
                pairs.append((costs, default_costs))
            except RoutePackError as error:  # a limit, as of received rows, that only the tuned settings keep
                without.append(f"{name}: {error}")
        if name in measured and (ran := given.get(name) or ours) is not None:
            prices[name] = _block_seconds(planner, batch, ran)
        observer.advance("batches")
    observer.finish("batches")
    if without:
        notes.append(f"{len(without)} batches have no comparison, the default settings find no plan ({without[0]})")
    if pairs:
        slack = told_slack(planner.provenance.get("hidden_planning_s"))
        notes.append(f"{slack}; it is processor time of all threads: a study plans in one, with the same sum")
    return prices, pairs


def _given_plan(path: Path, planner: Planner, batch: StepBatch, name: str) -> Plan:
    """Read the plan that ran; it must be of the bundle's job and of the batch's samples."""
    from search import Plan, check_plan
    from search.problem import padded_lengths

    with explained(f"Plan of step {name!r}, {path}, does not fit: "):
        plan = Plan.load(path)
        if plan.topology != planner.topology or plan.max_tokens != planner.max_tokens:
            raise RoutePackError("it is for another topology or token cap than the bundle.")
        if plan.model.spec_hash != planner.spec.spec_hash:
            raise RoutePackError(f"it is of the model {plan.model.name}, the bundle of {planner.spec.name}.")
        stated = plan.provenance.get("batch_hash", batch.data_hash)
        if stated != batch.data_hash or plan.sample_ids != tuple(map(str, batch.sample_ids)):
            raise RoutePackError("it was made for other samples.")
        check_plan(plan, padded_lengths(batch.lengths, planner.params.sequence_alignment), planner.spec.num_experts)
    return plan


def _untuned(planner: Planner, notes: list[str]) -> Planner | None:
    """Return the planner with the settings the study started from; None where those are the tuned ones."""
    params = replace(planner.params, **planner.provenance.get("default_params", {}))
    if params == planner.params:
        notes.append("the bundle holds the default settings: there is nothing to lose to")
        return None
    return replace(planner, params=params)


def _timed_plan(planner: Planner, batch: StepBatch, previous: Plan | None) -> tuple[Plan, _Costs]:
    """Return the plan and its costs; planning is the processor time of all threads."""
    start = time.process_time()
    plan = planner.plan(batch, previous=previous)
    return plan, _Costs(plan.predicted.step_time_s + plan.moves.seconds, time.process_time() - start)


def _block_seconds(planner: Planner, batch: StepBatch, plan: Plan) -> np.ndarray:
    """Return the predicted seconds of every component of every block, [B, C], by the bundle's tables."""
    from search import build_problem, evaluate

    priced = evaluate(build_problem(batch, *planner.job), plan.row_N, plan.slot_N, plan.placement_LE, plan.num_rows)
    parts = [priced.attention_RB.sum(axis=0), priced.experts_RB.sum(axis=0), priced.exchange_RB.sum(axis=0)]
    parts.append(np.full(parts[0].shape, priced.fixed_ns * plan.num_rows))
    return np.stack(parts, axis=1) * (1e-9 / priced.stages)


def _times(planner: Planner, blocks_SBC: np.ndarray, measured_S: np.ndarray, notes: list[str]) -> Finding:
    """Compare measured with predicted step times; beyond is an interval that lies wholly outside what is allowed."""
    from costmodels.freezing.rescale import COMPONENTS

    totals_SB = blocks_SBC.sum(axis=2)
    log_error = np.log(measured_S / totals_SB.max(axis=1))
    slowest_SC = blocks_SBC[np.arange(measured_S.size), totals_SB.argmax(axis=1)]
    shares = dict(zip(COMPONENTS, (slowest_SC / slowest_SC.sum(axis=1, keepdims=True)).mean(axis=0), strict=True))
    half = (planner.provenance.get("cost_model") or {}).get("half_log") or {}
    stated = bool(half) and all(name in half or shares[name] < 0.02 for name in COMPONENTS[:3])
    width = np.expm1(sum(half.get(name, 0.0) * share for name, share in shares.items()))
    allowed = 100 * (max(LEAST_HALF_WIDTH, float(width)) if stated else DEFAULT_HALF_WIDTH)
    ends = [*median_interval(log_error), *trend_interval(log_error)]
    numbers = dict(zip(INTERVALS, (100 * np.expm1(ends)).tolist(), strict=True))
    beyond = numbers["low_pct"] > allowed or numbers["high_pct"] < -allowed / (1 + allowed / 100)
    if measured_S.size < LEAST_TIMED:
        beyond = False
        notes.append(f"{measured_S.size} measured steps are too few to judge the times by: at least {LEAST_TIMED}")
    text = (
        "{median_pct:+.1f}% of the predicted time on {steps} measured steps (95% {low_pct:+.1f} to {high_pct:+.1f}; "
        "allowed {allowed_pct:.1f}%, {allowed_is}), trend {trend_pct:+.2f}% a step (95% {trend_low_pct:+.2f} to "
        "{trend_high_pct:+.2f})"
    )
    facts = {"steps": measured_S.size, "allowed_pct": allowed, "allowed_is": "stated" if stated else "assumed"}
    return Finding("step time", PROFILE, beyond, text.format(**numbers, **facts), numbers | facts)


def _workload(planner: Planner, batches: Mapping[str, StepBatch], notes: list[str]) -> Iterator[Finding]:
    """Compare recent batches with those of the study in every respect."""
    tuned = planner.provenance.get("workload")
    if tuned is None:
        notes.append("the bundle carries no statistics of its tuning batches: workload not compared")
        return
    recent = workload_statistics(list(batches), batches.values())
    if len(tuned) < 2:
        notes.append("one tuning batch: its spread is unknown, limits of the workload are the least ones")
    if len(batches) < LEAST_COMPARED:
        notes.append(
            f"{len(batches)} batches are too few to judge a shift of the workload by: at least {LEAST_COMPARED}"
        )
    for name, (change, distance, limit) in compare_workloads(tuned, recent).items():
        yield Finding(
            name,
            TUNE,
            distance > limit and len(batches) >= LEAST_COMPARED,
            f"{change:+.0f}% (distance {distance:.0f}%, limit {limit:.0f}%)",
            {"change_pct": change, "distance_pct": distance, "limit_pct": limit},
        )


def _settings(pairs: Sequence[tuple[_Costs, _Costs]], slack_s: float | None, notes: list[str]) -> Finding:
    """Return the mean gain of the bundle's over the default settings in what a study minimises, with its bootstrap
    interval, batches drawn with replacement; beyond is a loss that is sure."""
    from search.tuning.objective import exposed_planning_s

    def total_s(costs: _Costs, default: _Costs) -> float:
        return costs.step_s + exposed_planning_s(costs.plan_s, default.plan_s, slack_s)

    log_gains = np.log([total_s(ours, default) / total_s(default, default) for ours, default in pairs])
    means_s = np.array(pairs).mean(axis=0)  # [ours or default, step and moves or planning]
    rng, count = np.random.default_rng(0), log_gains.size
    means = log_gains[rng.integers(0, count, (2000, count))].mean(axis=1)
    gain, low, high = (-100 * np.expm1([log_gains.mean(), *np.quantile(means, (0.975, 0.025))])).tolist()
    (step_s, plan_s), (default_step_s, default_plan_s) = means_s.tolist()
    if count < LEAST_COMPARED:
        notes.append(f"{count} batches are too few to compare settings on: at least {LEAST_COMPARED}")
    return Finding(
        "settings",
        TUNE,
        count >= LEAST_COMPARED and high < 0 and gain < -LEAST_LOSS_PCT,
        f"gain {gain:+.2f}% over the default ones on {count} batches (95% {low:+.2f} to {high:+.2f}); step and moves "
        f"{default_step_s:.4g} -> {step_s:.4g} s, planning {default_plan_s:.2g} -> {plan_s:.2g} s",
        {"batches": count, "gain_pct": gain, "low_pct": low, "high_pct": high}
        | {"step_and_moves_s": step_s, "default_step_and_moves_s": default_step_s}
        | {"plan_s": plan_s, "default_plan_s": default_plan_s},
    )


def _write_refit(found: Rescale, planner: Planner, folder: Path, refit: Path, evidence: Mapping[str, str]) -> None:
    """Write a new bundle with corrected times, which says what it was made from."""
    from costmodels.freezing.rescale import rescaled_tables

    factors = ", ".join(f"{name} x {factor:.3f}" for name, factor in found.factors.items() if factor != 1.0)
    said = f"times corrected by {found.steps} measured training steps: {factors}"
    tables = rescaled_tables(planner.tables, found.factors, said)
    made_from = {"bundle_sha256": file_hash(folder / PLANNER_FILE), "tables_hash": planner.tables.tables_hash}
    record = {"parent": made_from, "steps": dict(evidence), **asdict(found)}
    provenance = {**planner.provenance, "tables_hash": tables.tables_hash, "refit": record}
    write_bundle(refit, replace(planner, tables=tables), provenance)

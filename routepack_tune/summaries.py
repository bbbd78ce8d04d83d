"""What the verbs print when they are done: a few lines for people; files hold the rest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from costmodels import CostModel
    from profiler import Measurements
    from routepack_tune.drift import DriftReport
    from routepack_tune.quickstart import QuickstartResult
    from search import Plan


NEXT = {
    "max_minutes": "Go on with more --max-minutes",
    "max_points": "Go on with more profile.max_points, or time on a quieter device",
}
"""What to do when a sweep stopped above its target."""


def measurements_summary(measurements: Measurements, out: Path) -> str:
    """Say how many rows of which operation there are, and where."""
    status, ops = measurements.rows["status"], measurements.rows["op"]
    counts = ", ".join(f"{op} {int((ops[status == 'ok'] == op).sum())}" for op in sorted(set(ops.tolist())))
    failed = int(np.sum(status != "ok"))
    device = measurements.meta["fingerprint"]
    lines = [
        f"Measurements: {out}",
        f"  {device['origin']} times of {device['name']} ({device['arch']}): {counts}"
        + (f"; {failed} without a time" if failed else ""),
    ]
    lines += _published_lines(measurements)
    if measurements.meta.get("backward") == "absent":
        lines.append("  forward times only: backward will be assumed, and marked so, until it is measured")
    for limit in measurements.meta.get("limits") or ():
        sizes = f"{limit['what']} up to {limit['designed']}, the job asks {limit['wanted']}"
        lines.append(f"  {limit['op']}: {sizes}: {limit['reason']}")
    return "\n".join([*lines, *(_rounds_lines(measurements.meta) or ["  next: routepack fit"])])


def _published_lines(measurements: Measurements) -> list[str]:
    """Say which software's tables were imported in which precision, and which rows were not or are doubted."""
    from profiler.published.plausible import skipped_words

    meta, flags = measurements.meta, measurements.rows["flag"]
    if not (tables := (meta.get("provenance") or {}).get("tables")):
        return []
    others = meta["provenance"].get("passed_over") or ()
    exchange = meta["fingerprint"]["software"].get("exchange")
    lines = [
        f"  {meta['dtype']} rows of {tables}"
        + (f", exchanges of {exchange}" if exchange else "")
        + (f"; also here: {', '.join(others)} (--tables)" if others else "")
    ]
    if skipped := list(skipped_words(meta)):
        lines.append(f"  other number types are left out: {'; '.join(skipped)}")
    if flagged := int((flags != "").sum()):
        lines.append(f"  {flagged} rows contradict their neighbours or the device's peak: flagged, no fit takes them")
    return lines


def _rounds_lines(meta: Mapping[str, Any]) -> list[str]:
    """Say what the rounds of a sweep gained, whether the device was steady, and what to do next."""
    rounds = meta.get("rounds") or ()
    if not rounds:
        return []
    last, minutes = rounds[-1], sum(one["minutes"] for one in rounds)
    cases, plural = sum(one["cases"] for one in rounds), "s" if len(rounds) > 1 else ""
    lines = [f"  {cases} cases in {len(rounds)} round{plural}, {minutes:.1f} min; stopped by {last['stopped_by']}"]
    for op in sorted(last["errors_pct"]):
        course = " -> ".join(f"{one['errors_pct'][op]:.1f}" for one in rounds if op in one["errors_pct"])
        lines.append(f"  {op}: held-out median error {course}%")
    above = {op: error for op, error in last["errors_pct"].items() if error > meta["params"]["target_error"]}
    if above and last["stopped_by"] in NEXT:
        target, way_out = meta["params"]["target_error"], NEXT[last["stopped_by"]]
        lines.append(f"  above the target of {target:g}%: {', '.join(sorted(above))}. {way_out}, with the same --out")
    problems = (meta.get("steadiness") or {}).get("problems") or ()
    if problems:
        lines.append(f"  NOT STEADY: {'; '.join(problems)}. Close other work and profile again into a new folder")
    else:
        lines.append("  next: routepack fit")
    return lines


def cost_model_summary(model: CostModel, out: Path) -> str:
    """Say how far predictions of unseen cases are off, and what is assumed."""
    from routepack_tune.reports.fit import REPORT_FILE, error_table, fit_verdict, own_reasons

    lines = [f"Cost model: {out}", f"  {' '.join(fit_verdict(model))}"]
    lines += [f"  {line}" for line in error_table(model.validation)]
    lines += [f"  {', '.join(where)}: {reason}" for reason, where in own_reasons(model).items()]
    lines += [f"  note: {note}" for note in (model.tables.notes if model.tables is not None else ())]
    return "\n".join([*lines, f"  pictures: {out / REPORT_FILE}"])


def study_summary(document: Mapping[str, Any], out: Path) -> str:
    """Say what the best trial gains on held-out batches."""
    from routepack_tune.reports.tuning import counted

    summary = document["summary"]
    best, exported = summary["best"], "the default settings"
    if summary["export"] == "best":
        exported = f"trial {best['number']}"
    lines = [
        f"Study: {out}",
        f"  exports {exported}. {summary['export_reason']}",
        f"  {counted(summary['trials'])}; best on the tuning batches is trial {best['number']}",
        f"  held out: {', '.join(summary['names']['holdout']) or 'nothing'}; {summary['planning']}",
        f"  report: {out / 'tuning-report.html'}",
    ]
    return "\n".join(lines)


def drift_summary(report: DriftReport, refit: Path | None) -> str:
    """Say whether a bundle still fits, on what evidence, and where the corrected one is."""
    beyond = ", ".join(one.name for one in report.findings if one.beyond)
    lines = [f"Verdict: {report.verdict}" + (f" ({beyond})" if beyond else "")]
    lines += [f"  {one.name}: {one.text}" for one in report.findings]
    if r := report.refit:
        for name, factor in r.factors.items():
            error = r.standard_errors[name]
            lines.append(f"  refit {name}: x {factor:.3f}" + (" (kept)" if error is None else f" +- {error:.3f}"))
        lines.append(
            f"  refit on {r.steps} steps, {len(r.set_aside)} set aside, ridge {r.ridge:g}: held-out error "
            f"{r.error_before_pct:.2f}% before, {r.error_after_pct:.2f}% after"
        )
    lines += [f"  note: {note}" for note in report.notes]
    if report.refit:
        lines.append(f"Bundle: {refit}\n  times corrected; check it before training loads it")
    return "\n".join(lines)


def bundle_summary(out: Path, registered: str | None) -> str:
    """Say where the bundle is and how training loads it."""
    lines = [f"Bundle: {out}", f"  in training: routepack_tune.load_planner({str(out)!r}).plan(batch)"]
    if registered:
        lines.append(f"  registered as models:/{registered}@champion")
    return "\n".join(lines)


def plan_summary(plan: Plan, out: Path) -> str:
    """Say what the plan should take, against the default and the proven bound."""
    predicted, default = plan.predicted, plan.default
    total_s = predicted.step_time_s + plan.moves.seconds
    moves = "moves not priced: no --previous, as in the first step of a job"
    if plan.provenance.get("previous_placement_id"):
        moves = (
            f"moving {len(plan.moves.experts)} experts before it {plan.moves.seconds:.4g} s, together {total_s:.4g} s"
        )
    lines = [
        f"Plan: {out}",
        f"  predicted step {predicted.step_time_s:.4g} s (attention {predicted.attention_s:.4g}, experts "
        f"{predicted.experts_s:.4g}, rest {predicted.rest_s:.4g}) in {plan.num_rows} rows",
        f"  {moves}",
        f"  default plan {default.step_time_s:.4g} s: {default.step_time_s / total_s:.3f}x; the step is within "
        f"{100 * plan.gap:.1f}% of the proven bound",
    ]
    counted = [f"{name.replace('_', ' ')} {count}" for name, count in plan.counters.items() if count]
    if counted:
        lines.append(f"  {', '.join(counted)}")
    lines += [f"  note: {note}" for note in plan.notes]
    return "\n".join([*lines, f"  plan hash {plan.plan_hash[:16]}"])


def print_quickstart(result: QuickstartResult) -> None:
    """Print the quickstart's last words: a table of default plan, published baselines and ours, and the time."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Column, Table

    title = "Held-out synthetic batches, one after another; seconds, predicted (planning: measured)"
    names = ("step", "moves", "speed", "moves free", "lost", "planning")
    columns = [Column(name, justify="right", no_wrap=True) for name in names]
    planner = Column("planner")
    table = Table(planner, *columns, title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    default, tuned = result.outcomes[0], result.outcomes[-1]
    for one in result.outcomes:
        speeds = f"{default.total_s / one.total_s:.2f}x", f"{default.total_s / one.free_s:.2f}x"
        times = f"{one.step_s:.3f}", f"{one.move_s:.3f}", *speeds, f"{one.lost_share:.1%}", f"{one.plan_s:.3f}"
        table.add_row(one.planner, *times, style="bold green" if one is tuned else "dim" if one is default else None)
    stages = ", ".join(f"{name} {seconds:.0f}" for name, seconds in result.seconds.items())
    console, took_s = Console(highlight=False), sum(result.seconds.values())
    console.print(table)
    console.print("speed: of step + moves against the default plan; lost: share of the step lost to imbalance")
    console.print(result.tuning, soft_wrap=True)
    console.print(f"Took {took_s:.0f} s ({stages}). Report: {result.report}", soft_wrap=True)
    origin = "Synthetic batches, published H200 times, assumed backward factors"
    console.print(f"{origin}: measure your own with `routepack profile`.", soft_wrap=True)

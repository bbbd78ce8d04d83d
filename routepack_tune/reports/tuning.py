"""The page of a study, ``tuning-report.html``: what tuning gained on batches it had not seen, and what is exported.

Self-contained like the other pages: inline SVG, no script, nothing loaded. Step times are predicted by the cost model;
planning times are measured on the tuning host.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from profiler.files import write_text
from routepack_tune.reports.figures import as_svg
from routepack_tune.reports.quickstart import page, section
from routepack_tune.reports.tuning_figures import BatchOutcome, holdout_outcomes, pictures, tuned_outcomes

STEP, PLAN = "predicted step times", "measured planning times"


def write_tuning_report(path: Path | str, document: Mapping[str, Any]) -> Path:
    """Write the page of what ``study.json`` holds, whole or not at all."""
    path = Path(path)
    write_text(path, render_tuning(document))
    return path


def render_tuning(document: Mapping[str, Any]) -> str:
    """Return the page."""
    summary, config = document["summary"], document["config"]
    drawn = {name: as_svg(ax.figure, f"tuning-{name}") for name, ax in pictures(summary).items()}
    both = f"{STEP}, {PLAN}"
    sections = [
        section("Gain on held-out batches", both, _holdout(summary, drawn)),
        section("Batches before and after", STEP, drawn.get("batches", "") + _batches(summary)),
        section("Course of the study", both, _counts(summary) + drawn.get("history", "")),
        section("Step time against planning time", both, drawn.get("pareto", "")),
        section("Which settings matter", "", drawn.get("importances", "")),
        section("Settings", "", _settings(summary)),
        section("Where it comes from", "", _facts(document)),
    ]
    sizes = {name: size for name, size in config["topology"].items() if size != 1}
    job = ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in sizes.items())
    subtitle = (
        f"{config['model']['name']}{' on ' if job else ''}{job}; cap {config['max_tokens_per_microbatch']} tokens"
    )
    return page("RoutePack-Tune: tuning report", subtitle, f"{_cards(summary)}\n{''.join(sections)}")


def _cards(summary: Mapping[str, Any]) -> str:
    holdout, trials, overhead = summary["holdout"], summary["trials"], summary.get("overhead") or {}
    exported = f"trial {summary['best']['number']}" if summary["export"] == "best" else "defaults"
    interval = "nothing held out"
    if holdout["gain_pct"] is not None and holdout["low_pct"] is not None:
        interval = f"held-out gain; 95% interval {holdout['low_pct']:.2f} to {holdout['high_pct']:.2f}%"
    elif holdout["gain_pct"] is not None:
        interval = "held-out gain, without an interval"
    gain = "-" if holdout["gain_pct"] is None else f"{holdout['gain_pct']:+.2f}%"
    cards = [
        ("good" if summary["export"] == "best" else "", exported, "is exported"),
        ("good" if summary["export"] == "best" else "", gain, interval),
        ("", str(sum(trials.get(state, 0) for state in ("complete", "pruned", "infeasible"))), "finished trials"),
    ]
    if overhead.get("total_s"):
        share = 100 * (1 - overhead["planning_s"] / overhead["total_s"])
        cards.append(("", f"{share:.1f}%", f"of {overhead['total_s']:.0f} s of trials not spent planning (measured)"))
    return '<div class="cards">' + "".join(
        f'<div class="card {kind}"><b>{html.escape(value)}</b><span class="soft">{html.escape(text)}</span></div>'
        for kind, value, text in cards
    ) + "</div>"  # fmt: skip


def _holdout(summary: Mapping[str, Any], drawn: Mapping[str, str]) -> str:
    names, seeds = summary["names"]["holdout"], summary["holdout"].get("seeds") or []
    words = f"<p>{html.escape(summary['export_reason'])}</p>"
    if names:
        words += (
            f'<p class="soft">Batches {html.escape(", ".join(names))} were in no trial; both settings planned each of '
            f"them with {len(seeds)} seed(s) that no trial used, in pairs.</p>"
        )
    return words + drawn.get("holdout", "")


def _counts(summary: Mapping[str, Any]) -> str:
    trials, best, default = summary["trials"], summary["best"], summary["default"]
    counted = ", ".join(f"{trials[state]} {word}" for state, word in
                        (("complete", "complete"), ("pruned", "stopped early"), ("infeasible", "infeasible"),
                         ("duplicate", "duplicates skipped"), ("failed", "failed")) if state in trials)  # fmt: skip
    text = f"{counted}. Best is trial {best['number']} with {best['value']:.4f}"
    beside = f"; the defaults have {default['value']:.4f}" if default else ""
    return f'<p class="soft">{text}{beside}.</p>'


def _batches(summary: Mapping[str, Any]) -> str:
    rows = [(one, "tuned on") for one in tuned_outcomes(summary)]
    rows += [(one, "held out") for one in holdout_outcomes(summary)]
    head = ("batch", "", "no planner, s", "defaults, s", "best trial, s", "gain", "planning, defaults", "best trial")
    return _table(head, [_batch_row(one, kind) for one, kind in rows]) if rows else ""


def _batch_row(one: BatchOutcome, kind: str) -> list[str]:
    return [one.name, kind, f"{one.no_planner_s:.4g}", f"{one.before_s:.4g}", f"{one.after_s:.4g}",
            f"{one.gain_pct:+.2f}%", f"{one.before_plan_s:.2g} s", f"{one.after_plan_s:.2g} s"]  # fmt: skip


def _settings(summary: Mapping[str, Any]) -> str:
    best, default = summary["best"], summary["default"] or {}
    before, after = _with_cap(default), _with_cap(best)
    rows = [[name, _short(before.get(name)), _short(value)] for name, value in after.items()
            if name in summary["importances"] or before.get(name) != value]  # fmt: skip
    return _table(("setting", "defaults", f"trial {best['number']}"), rows) if rows else ""


def _with_cap(told: Mapping[str, Any]) -> dict[str, Any]:
    cap = {"max_tokens_per_microbatch": told["max_tokens"]} if told.get("max_tokens") else {}
    return {**told.get("params", {}), **cap}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _facts(document: Mapping[str, Any]) -> str:
    device, tracking = document["fingerprint"], document.get("tracking") or {}
    facts = {
        "study": document["study_name"],
        "device priced": f"{device['name']} ({device['arch']}, {device['origin']})",
        "step batches": ", ".join(f"{step['name']} {step['data_hash'][:12]}" for step in document["steps"]),
        "frozen times": document["tables_hash"][:16],
        "cost model": str(document["cost_model"].get("sha256", ""))[:16],
        "seed": str(document["signature"].get("seed", "")),
        "MLflow run": tracking.get("run_id", ""),
        **{name: str(value) for name, value in (document.get("environment") or {}).get("versions", {}).items()},
    }
    rows = (f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in facts.items() if v)
    return f"<dl>{''.join(rows)}</dl>"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)

"""The page of a study, ``tuning-report.html``: what tuning gained on batches it had not seen, and what is exported.

Self-contained like the other pages: inline SVG, no script, nothing loaded. Step times are predicted by the cost model;
planning times are measured on the tuning host.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profiler.files import write_text
from routepack_tune.reports.figures import as_svg
from routepack_tune.reports.page import Block, Section, Table, Tile, Verdict, page
from routepack_tune.reports.tuning_figures import holdout_outcomes, pictures, tuned_outcomes

STEP, PLAN = "predicted step times", "measured planning times"
STATES = {
    "complete": "complete",
    "pruned": "stopped early",
    "infeasible": "infeasible",
    "duplicate": "duplicates skipped",
    "failed": "failed",
}


def write_tuning_report(path: Path | str, document: Mapping[str, Any]) -> Path:
    """Write the page of what ``study.json`` holds, whole or not at all."""
    write_text(Path(path), render_tuning(document))
    return Path(path)


def render_tuning(document: Mapping[str, Any]) -> str:
    """Return the page."""
    summary, config = document["summary"], document["config"]
    drawn = {name: as_svg(ax.figure, f"tuning-{name}") for name, ax in pictures(summary).items()}
    both = f"{STEP}, {PLAN}"
    sections: list[Section] = [
        ("Gain on held-out batches", both, [*_holdout(summary), drawn.get("holdout", "")]),
        ("Batches before and after", STEP, [drawn.get("batches", ""), _batches(summary)]),
        ("Course of the study", both, [_counts(summary), drawn.get("history", "")]),
        ("Step time against planning time", both, [drawn.get("pareto", "")]),
        ("Which settings matter", "", [drawn.get("importances", "")]),
        ("Settings", "", [_settings(summary)]),
        ("Where it comes from", "", [_facts(document)]),
    ]
    sizes = {name: size for name, size in config["topology"].items() if size != 1}
    job = ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in sizes.items())
    subtitle = (
        f"{config['model']['name']}{' on ' if job else ''}{job}; cap {config['max_tokens_per_microbatch']} tokens"
    )
    return page("RoutePack-Tune: tuning report", subtitle, sections, _tiles(summary))


def _tiles(summary: Mapping[str, Any]) -> list[Tile]:
    holdout, trials, overhead = summary["holdout"], summary["trials"], summary.get("overhead") or {}
    good = summary["export"] == "best"
    gain, interval = "-", "nothing held out"
    if holdout["gain_pct"] is not None:
        gain, interval = f"{holdout['gain_pct']:+.2f}%", "held-out gain, without an interval"
        if holdout["low_pct"] is not None:
            interval = f"held-out gain; 95% interval {holdout['low_pct']:.2f} to {holdout['high_pct']:.2f}%"
    finished = sum(trials.get(state, 0) for state in ("complete", "pruned", "infeasible"))
    tiles = [
        (f"trial {summary['best']['number']}" if good else "defaults", "is exported", good),
        (gain, interval, good),
        (str(finished), "finished trials", False),
    ]
    if overhead.get("total_s"):
        share = 100 * (1 - overhead["planning_s"] / overhead["total_s"])
        spent = f"of {overhead['total_s']:.0f} s of trials not spent planning (measured)"
        tiles.append((f"{share:.1f}%", spent, False))
    return tiles


def _holdout(summary: Mapping[str, Any]) -> list[Block]:
    names, seeds = summary["names"]["holdout"], summary["holdout"].get("seeds") or []
    words = (
        f"Batches {', '.join(names)} were in no trial; both settings planned each of them with {len(seeds)} seed(s) "
        "that no trial used, in pairs."
    )
    return [Verdict(summary["export_reason"]), words if names else ""]


def _counts(summary: Mapping[str, Any]) -> str:
    trials, best, default = summary["trials"], summary["best"], summary["default"]
    counted = ", ".join(f"{trials[state]} {word}" for state, word in STATES.items() if state in trials)
    beside = f"; the defaults have {default['value']:.4f}" if default else ""
    return f"{counted}. Best is trial {best['number']} with {best['value']:.4f}{beside}."


def _batches(summary: Mapping[str, Any]) -> Table:
    heads = ("batch", "", "no planner, s", "defaults, s", "best trial, s", "gain", "planning, defaults", "best trial")
    rows = []
    for kind, outcomes in (("tuned on", tuned_outcomes(summary)), ("held out", holdout_outcomes(summary))):
        for one in outcomes:
            steps = [f"{seconds:.4g}" for seconds in (one.no_planner_s, one.before_s, one.after_s)]
            plans = [f"{seconds:.2g} s" for seconds in (one.before_plan_s, one.after_plan_s)]
            rows.append([one.name, kind, *steps, f"{one.gain_pct:+.2f}%", *plans])
    return Table(heads, rows)


def _settings(summary: Mapping[str, Any]) -> Table:
    best = summary["best"]
    before, after = _with_cap(summary["default"] or {}), _with_cap(best)
    shown = [name for name, value in after.items() if name in summary["importances"] or before.get(name) != value]
    rows = [[name, _short(before.get(name)), _short(after[name])] for name in shown]
    return Table(("setting", "defaults", f"trial {best['number']}"), rows)


def _with_cap(told: Mapping[str, Any]) -> dict[str, Any]:
    cap = {"max_tokens_per_microbatch": told["max_tokens"]} if told.get("max_tokens") else {}
    return {**told.get("params", {}), **cap}


def _facts(document: Mapping[str, Any]) -> dict[str, Any]:
    device, tracking = document["fingerprint"], document.get("tracking") or {}
    return {
        "study": document["study_name"],
        "device priced": f"{device['name']} ({device['arch']}, {device['origin']})",
        "step batches": ", ".join(f"{step['name']} {step['data_hash'][:12]}" for step in document["steps"]),
        "frozen times": document["tables_hash"][:16],
        "cost model": str(document["cost_model"].get("sha256", ""))[:16],
        "seed": str(document["signature"].get("seed", "")),
        "MLflow run": tracking.get("run_id", ""),
        **{name: str(value) for name, value in (document.get("environment") or {}).get("versions", {}).items()},
    }


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)

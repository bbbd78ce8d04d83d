"""The page of a study, ``tuning-report.html``: what tuning gained on batches it had not seen, and what is exported.

All of it comes from ``study.json``, so that a page can be drawn again anywhere. Step times are predicted by the cost
model, planning times measured on the tuning host; costs are relative to the planner's default settings (1): less is
better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]

from routepack_tune.reports.figures import (
    ABOVE,
    AFTER,
    ATTENTION,
    BEFORE,
    EXPERTS,
    INK,
    as_svg,
    panels,
    plot_bars,
    save_png,
)
from routepack_tune.reports.page import Block, Section, Table, Tile, Verdict, page

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEP, PLAN = "predicted step times", "measured planning times"
STATES = {
    "complete": "complete",
    "pruned": "stopped early",
    "infeasible": "infeasible",
    "duplicate": "duplicates skipped",
    "failed": "failed",
}
SETTINGS = {
    "no_planner_s": ("no planner", "#cbd5e1"),
    "before_s": ("default settings", ATTENTION),
    "after_s": ("best trial", AFTER),
}


def tuning_page(document: Mapping[str, Any]) -> str:
    """Return the page of what ``study.json`` holds."""
    summary, config = document["summary"], document["config"]
    drawn = {name: as_svg(figure, f"tuning-{name}") for name, figure in pictures(summary).items()}
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
    job = ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in config["topology"].items() if size != 1)
    subtitle = (
        f"{config['model']['name']}{' on ' if job else ''}{job}; cap {config['max_tokens_per_microbatch']} tokens"
    )
    return page("RoutePack-Tune: tuning report", subtitle, sections, _tiles(summary))


def _tiles(summary: Mapping[str, Any]) -> list[Tile]:
    holdout, trials, overhead = summary["holdout"], summary["trials"], summary["overhead"]
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
        for one in outcomes.itertuples():
            steps = [f"{seconds:.4g}" for seconds in (one.no_planner_s, one.before_s, one.after_s)]
            plans = [f"{seconds:.2g} s" for seconds in (one.before_plan_s, one.after_plan_s)]
            rows.append([one.Index, kind, *steps, f"{one.gain_pct:+.2f}%", *plans])
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


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


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


def best_so_far(history: Sequence[Mapping[str, Any]]) -> pd.Series:
    """Return the best value up to each complete trial, by its number; only complete trials have a value that counts."""
    complete = {trial["number"]: trial["value"] for trial in history if trial["state"] == "complete"}
    return pd.Series(complete, dtype=np.float64).sort_index().cummin()


def holdout_outcomes(summary: Mapping[str, Any]) -> pd.DataFrame:
    """Return the held-out batches in order, winner against defaults (see :func:`_outcomes`)."""
    holdout = summary["holdout"]
    return _outcomes(holdout["best"], holdout["default_settings"])


def tuned_outcomes(summary: Mapping[str, Any]) -> pd.DataFrame:
    """Return the tuning batches in order of time, from the best trial's scores (see :func:`_outcomes`)."""
    scores = summary["best"].get("scores", ())
    before = [
        {**score, "step_time_s": score["reference_step_s"], "move_s": 0.0, "plan_s": score["reference_plan_s"]}
        for score in scores
    ]
    found = _outcomes(scores, before)
    return found.loc[[name for name in summary["names"]["tuned"] if name in found.index]]


def _outcomes(after: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return a row per batch: predicted steps without a planner, before and after tuning (moves of experts included),
    planning times, and the step time gained in percent; seconds, means over seeds."""
    columns = ("name", "default_s", "step_time_s", "move_s", "plan_s")
    mine, theirs = (
        pd.DataFrame(list(scores), columns=columns).groupby("name", sort=False).mean() for scores in (after, before)
    )
    found = pd.DataFrame(
        {
            "no_planner_s": mine["default_s"],
            "before_s": theirs["step_time_s"] + theirs["move_s"],
            "after_s": mine["step_time_s"] + mine["move_s"],
            "before_plan_s": theirs["plan_s"],
            "after_plan_s": mine["plan_s"],
        }
    )
    return found.reindex(mine.index).assign(gain_pct=100 * (1 - found["after_s"] / found["before_s"]))


def pictures(summary: Mapping[str, Any]) -> dict[str, Figure]:
    """Return every picture for which a study has data, by name."""
    found = {}
    if summary.get("history"):
        found["history"] = panels(7.2, 2.8, partial(plot_history, summary["history"]))
    if summary.get("importances"):
        ranked = sorted(summary["importances"].items(), key=lambda item: -item[1])
        shares = {name: 100 * share for name, share in ranked}
        draw = partial(plot_bars, shares, "share of the variation of the cost, %")
        found["importances"] = panels(7.2, 0.28 * len(shares) + 0.8, draw)
    if summary.get("pareto"):
        found["pareto"] = panels(7.2, 3.0, partial(plot_pareto, summary["pareto"]))
    held_out = holdout_outcomes(summary)
    if summary["holdout"]["gain_pct"] is not None:
        draw = partial(plot_holdout, held_out["gain_pct"], summary["holdout"])
        found["holdout"] = panels(7.2, 0.32 * (len(held_out) + 1) + 0.9, draw)
    outcomes = pd.concat([tuned_outcomes(summary), held_out])
    if len(outcomes):
        found["batches"] = panels(7.2, 2.6, partial(plot_batches, outcomes))
    return found


def save_pictures(summary: Mapping[str, Any], folder: Path) -> None:
    """Write every picture as a PNG on white."""
    for name, figure in pictures(summary).items():
        save_png(figure, folder / f"{name}.png")


def plot_history(history: Sequence[Mapping[str, Any]], ax: Axes) -> None:
    """Draw every trial and the best so far."""
    best = best_so_far(history)
    values = {trial["number"]: trial["value"] for trial in history}
    ax.axhline(1.0, color=INK, linewidth=0.8, linestyle=":", label="default settings")
    ax.plot(best.index, [values[number] for number in best.index], "o", color=BEFORE, label="trial")
    ax.step(best.index, best, where="post", color=AFTER, label="best so far", linewidth=2)
    top = max((values[number] for number in best.index), default=1.0)
    for state, marker, colour in (("pruned", "v", ATTENTION), ("infeasible", "x", EXPERTS)):
        if numbers := [trial["number"] for trial in history if trial["state"] == state]:
            ax.plot(numbers, [top] * len(numbers), marker, color=colour, label=STATES[state], markersize=5)
    ax.locator_params(axis="x", integer=True)
    ax.set(xlabel="trial", ylabel="cost / default settings")
    ax.legend(ncols=5, **ABOVE)


def plot_pareto(front: Sequence[Mapping[str, Any]], ax: Axes) -> None:
    """Draw the settings that no other beats in both step time and planning time."""
    points = sorted((one["plan_value"], one["step_value"], str(one["number"])) for one in front)
    plan, step, numbers = zip(*points, strict=True)
    ax.step(plan, step, "o-", where="post", color=AFTER, linewidth=1.5)
    for where, number in zip(zip(plan, step, strict=True), numbers, strict=True):
        ax.annotate(number, where, xytext=(4, 4), textcoords="offset points", fontsize=8)
    ax.plot([1.0], [1.0], "s", color=BEFORE, label="default settings", markersize=6)
    ax.set(xscale="log", xlabel="planning time / default settings", ylabel="step time / default settings")
    ax.legend()


def plot_holdout(gain_pct: pd.Series, holdout: Mapping[str, Any], ax: Axes) -> None:
    """Draw the gain of every held-out batch and the mean gain in cost with its interval."""
    names = ["all, cost", *gain_pct.index[::-1]]
    ax.axvline(0.0, color=INK, linewidth=0.8, linestyle=":")
    ax.plot(gain_pct[::-1], range(1, len(names)), "o", color=BEFORE, markersize=6)
    mean, low, high = holdout["gain_pct"], holdout["low_pct"], holdout["high_pct"]
    spread = [[max(0.0, mean - low)], [max(0.0, high - mean)]] if None not in (low, high) else None
    ax.errorbar([mean], [0], xerr=spread, fmt="D", color=AFTER, capsize=4, markersize=6, linewidth=2)
    ax.set_yticks(range(len(names)), names)
    ax.set(ylim=(-0.6, len(names) - 0.4), xlabel="gain over the default settings, %")


def plot_batches(outcomes: pd.DataFrame, ax: Axes) -> None:
    """Draw each batch without a planner, with default and with tuned settings."""
    x = np.arange(len(outcomes))
    for place, (field, (label, colour)) in enumerate(SETTINGS.items()):
        ax.bar(x + 0.27 * (place - 1), outcomes[field], 0.25, color=colour, label=label)
    ax.set_xticks(x, outcomes.index, rotation=30 if len(outcomes) > 6 else 0)
    ax.set_ylabel("predicted step, s")
    ax.legend(ncols=3, **ABOVE)

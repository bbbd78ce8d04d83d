"""The page of a study, ``tuning-report.html``: what tuning gained on batches it had not seen, and what is exported.

All of it comes from ``study.json``, so that a page can be drawn again anywhere. Step times and moves are predicted by
the cost model, planning times measured on the tuning host; the cost that trials minimise is relative to the planner's
default settings (1): less is better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]

from routepack_tune.reports.figures import ABOVE, AFTER, ATTENTION, BEFORE, EXPERTS, INK, as_svg, panels, plot_bars
from routepack_tune.reports.page import Section, Table, Tile, as_table, page, verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEP, PLAN = "predicted step times", "measured planning times"
TRIALS_A_SETTING = 10
"""Complete trials a setting below which importances are called rough."""
STATES = {
    "complete": "complete",
    "pruned": "stopped early",
    "infeasible": "infeasible",
    "duplicate": "duplicates skipped",
    "failed": "failed",
}
BATCHES = {
    "batch": "{name}",
    "": "{kind}",
    "default plan, s": "{default_plan_s:.4g}",
    "default settings: step + moves, s": "{before_s:.4g}",
    "best trial: step + moves, s": "{after_s:.4g}",
    "gain": "{gain_pct:+.2f}%",
    "default settings: planning": "{before_plan_s:.2g} s",
    "best trial: planning": "{after_plan_s:.2g} s",
}
BATCHES_TEXT = (
    "The default plan is first-fit decreasing with experts in place. In trials each batch follows the default "
    "settings' plan of the batch before; held-out batches follow one another, from the last tuned batch on."
)


def tuning_page(document: Mapping[str, Any]) -> str:
    """Return the page of what ``study.json`` holds."""
    summary, config = document["summary"], document["config"]
    drawn = {name: as_svg(figure, f"tuning-{name}") for name, figure in pictures(summary).items()}
    both, batches = f"{STEP}, {PLAN}", outcomes(summary).reset_index().to_dict("records")
    best, default = summary["best"], summary["default"]
    beside = f"; the default settings have {default['value']:.4f}" if default else ""
    course = f"{counted(summary['trials'])}. Best is trial {best['number']} with {best['value']:.4f}{beside}."
    if len(finalists := summary["finalists"]) > 1:
        course += (
            f" It was best again when trials {', '.join(map(str, finalists))} planned with seeds that are in no trial."
        )
    if (spent := summary["overhead"]).get("total_s"):
        course += f" Of {spent['total_s']:.0f} s in trials {spent['planning_s']:.0f} s were planning (measured)."
    gained = verdict(summary["export_reason"])
    names, seeds = ", ".join(summary["names"]["holdout"]), summary["holdout"].get("seeds") or []
    held_out = (
        f"Batches {names} were in no trial; both settings planned each of them with {len(seeds)} seed(s) that no trial "
        "used, in pairs."
    )
    sections: list[Section] = [
        (
            "Gain on held-out batches",
            both,
            [gained, held_out if names else "", f"In this study {summary['planning']}."],
        ),
        ("Batches before and after", both, [BATCHES_TEXT, Table(BATCHES, batches)]),
        ("Course of the study", both, [course, drawn.get("history", "")]),
        ("Step time against planning time", both, [drawn.get("pareto", "")]),
        ("Which settings matter", "", [drawn.get("importances", "")]),
        ("Settings", "", [as_table(_settings(summary))]),
        ("What to keep in mind", "", [document.get("notes") or ()]),
        ("Where it comes from", "", [_facts(document)]),
    ]
    job = ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in config["topology"].items() if size != 1)
    subtitle = (
        f"{config['model']['name']}{' on ' if job else ''}{job}; cap {config['max_tokens_per_microbatch']} tokens"
    )
    return page("RoutePack-Tune: tuning report", subtitle, sections, _tiles(summary))


def _tiles(summary: Mapping[str, Any]) -> list[Tile]:
    """Return what is exported, then the three costs on held-out batches under the default settings and under it."""
    holdout, good = summary["holdout"], summary["export"] == "best"
    exported = f"trial {summary['best']['number']}" if good else "default settings"
    before, after = holdout["means"]["default_settings"], holdout["means"]["best" if good else "default_settings"]
    tiles: list[Tile] = [(exported, "exported", good)]
    if not before:
        return [*tiles, ("-", "nothing held out", False)]
    interval = "the default settings' own"
    if good:
        interval = "gain {gain_pct:+.2f}%, 95% interval {low_pct:+.2f} to {high_pct:+.2f}%"
        interval = interval.format(**holdout["gain"])
    named = {
        "step_time_s": f"step time (predicted); with moves: {interval}",
        "move_s": "moving experts before a step (predicted)",
        "plan_s": "planning a step (measured processor time)",
    }
    for name, text in named.items():
        numbers = [f"{costs[name]:.4g}" for costs in ((before, after) if good else (before,))]
        tiles.append((f"{' → '.join(numbers)} s", text, good and name == "step_time_s"))
    return tiles


def counted(trials: Mapping[str, int]) -> str:
    """Say how many trials ended how."""
    return ", ".join(f"{trials[state]} {word}" for state, word in STATES.items() if trials.get(state))


def _settings(summary: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the settings that matter or changed, before and after."""
    before, after = (
        {**told.get("params", {}), "max_tokens_per_microbatch": told.get("max_tokens") or None}
        for told in (summary["default"] or {}, summary["best"])
    )
    return [
        {
            "setting": name,
            "default settings": _short(before.get(name)),
            f"trial {summary['best']['number']}": _short(value),
        }
        for name, value in after.items()
        if name in summary["importances"] or before.get(name) != value
    ]


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


def outcomes(summary: Mapping[str, Any]) -> pd.DataFrame:
    """Return a row per batch, those tuned on first, in order of time, then those held out (``kind``).

    Columns are predicted steps of the default plan, before and after tuning (moves of experts included), planning times
    before and after, all in seconds as means over seeds, and the step time gained in percent.
    """
    scores, holdout, names = summary["best"].get("scores", ()), summary["holdout"], summary["names"]
    default = [
        {**score, "step_time_s": score["reference_step_s"], "move_s": 0.0, "plan_s": score["reference_plan_s"]}
        for score in scores
    ]
    columns = ("name", "default_s", "step_time_s", "move_s", "plan_s")
    after, before = (
        pd.DataFrame(rows, columns=columns).set_index("name").astype(np.float64).groupby(level="name").mean()
        for rows in ([*scores, *holdout["best"]], [*default, *holdout["default_settings"]])
    )
    found = pd.DataFrame({"default_plan_s": after["default_s"]})
    found["before_s"] = before["step_time_s"] + before["move_s"]
    found["after_s"] = after["step_time_s"] + after["move_s"]
    found["before_plan_s"], found["after_plan_s"] = before["plan_s"], after["plan_s"]
    found["gain_pct"] = 100 * (1 - found["after_s"] / found["before_s"])
    found["kind"] = np.where(found.index.isin(names["holdout"]), "held out", "tuned on")
    return found.loc[[name for name in (*names["tuned"], *names["holdout"]) if name in found.index]]


def pictures(summary: Mapping[str, Any]) -> dict[str, Figure]:
    """Return every picture for which a study has data, by name."""
    found = {}
    if history := summary.get("history"):
        found["history"] = panels(7.2, 2.8, partial(plot_history, history))
    if shares := summary.get("importances"):
        ranked = {name: 100 * shares[name] for name in sorted(shares, key=shares.__getitem__, reverse=True)}
        draw = partial(plot_bars, ranked, f"share of the variation of the cost, %{_roughness(summary)}")
        found["importances"] = panels(7.2, 0.28 * len(shares) + 0.8, draw)
    if front := summary.get("pareto"):
        found["pareto"] = panels(7.2, 3.0, partial(plot_pareto, front))
    return found


def _roughness(summary: Mapping[str, Any]) -> str:
    """Say that importances are rough where few trials tell many settings apart."""
    trials, settings = summary["trials"].get("complete", 0), len(summary["importances"])
    return f" (rough: {trials} complete trials, {settings} settings)" if trials < TRIALS_A_SETTING * settings else ""


def plot_history(history: Sequence[Mapping[str, Any]], ax: Axes) -> None:
    """Draw every trial and the best so far; those stopped early at the mean of the batches they saw.

    What has no place on the scale of the complete trials stands at its upper edge: infeasible ones, which have no cost,
    and those stopped early beyond it.
    """
    best = best_so_far(history)
    values = [trial["value"] for trial in sorted(history, key=lambda trial: trial["number"]) if trial["number"] in best]
    low, high = min([*values, 1.0]), max([*values, 1.0])
    top = high + 0.15 * max(high - low, 0.01)
    ax.axhline(1.0, color=INK, linewidth=0.8, linestyle=":", label="default settings")
    ax.plot(best.index, values, "o", color=BEFORE, label="complete")
    ax.step(best.index, best, where="post", color=AFTER, label="best so far", linewidth=2)
    for state, marker, colour in (("pruned", "v", ATTENTION), ("infeasible", "x", EXPERTS)):
        placed = {
            trial["number"]: top if trial["value"] is None else min(trial["value"], top)
            for trial in history
            if trial["state"] == state
        }
        if placed:
            style: dict[str, Any] = {"markersize": 5, "clip_on": False}
            ax.plot(list(placed), list(placed.values()), marker, color=colour, label=STATES[state], **style)
    ax.set_ylim(top=top)
    ax.locator_params(axis="x", integer=True)
    ax.set(xlabel="trial", ylabel="cost / default settings")
    ax.legend(ncols=6, **ABOVE)


def plot_pareto(front: Sequence[Mapping[str, Any]], ax: Axes) -> None:
    """Draw the settings that no other beats in both step time and planning time."""
    points = sorted((one["plan_value"], one["step_value"], str(one["number"])) for one in front)
    plan, step, _ = zip(*points, strict=True)
    ax.step(plan, step, "o-", where="post", color=AFTER, linewidth=1.5)
    for x, y, number in points:
        ax.annotate(number, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8)
    ax.plot([1.0], [1.0], "s", color=BEFORE, label="default settings", markersize=6)
    ax.set(xscale="log", xlabel="planning time / default settings", ylabel="step time / default settings")
    ax.legend()

"""Pictures of a study: data first (tested), then drawing on given axes.

All come from a study's summary alone, so that a page can be drawn again anywhere. Values are costs relative to the
planner's default settings (1); less is better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_tune.reports.figures import AFTER, ATTENTION, BEFORE, EXPERTS, INK, new_axes, save_png, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class Course:
    """How a study went, trial by trial."""

    number_T: np.ndarray
    value_T: np.ndarray
    """Values of complete trials."""
    best_T: np.ndarray
    """The best value up to each of them."""
    stopped: tuple[int, ...]
    """Numbers of trials that were stopped early."""
    infeasible: tuple[int, ...]


def course(history: Sequence[Mapping[str, Any]]) -> Course:
    """Return the course of a study from its summary's ``history``; only complete trials have a value that counts."""
    ordered = sorted(history, key=lambda trial: trial["number"])
    complete = [trial for trial in ordered if trial["state"] == "complete"]
    value_T = np.array([trial["value"] for trial in complete], dtype=np.float64)
    return Course(
        number_T=np.array([trial["number"] for trial in complete], dtype=np.int64),
        value_T=value_T,
        best_T=np.minimum.accumulate(value_T) if value_T.size else value_T,
        stopped=tuple(trial["number"] for trial in ordered if trial["state"] == "pruned"),
        infeasible=tuple(trial["number"] for trial in ordered if trial["state"] == "infeasible"),
    )


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """One batch before and after tuning; predicted seconds, means over seeds."""

    name: str
    no_planner_s: float
    """First-fit decreasing, experts in place."""
    before_s: float
    """The planner's default settings, moves of experts included."""
    after_s: float
    """The best trial's settings, moves of experts included."""
    before_plan_s: float
    after_plan_s: float

    @property
    def gain_pct(self) -> float:
        """Step time that the best trial saves against the default settings."""
        return 100 * (1 - self.after_s / self.before_s)


def holdout_outcomes(summary: Mapping[str, Any]) -> list[BatchOutcome]:
    """Return the held-out batches in order, winner against defaults."""
    holdout = summary["holdout"]
    return _outcomes(holdout["best"], holdout["default_settings"])


def tuned_outcomes(summary: Mapping[str, Any]) -> list[BatchOutcome]:
    """Return the tuning batches in order of time, from the best trial's scores."""
    scores = [dict(score) for score in summary["best"].get("scores", ())]
    before = [
        {**s, "step_time_s": s["reference_step_s"], "move_s": 0.0, "plan_s": s["reference_plan_s"]}
        for s in scores
        if "reference_step_s" in s
    ]
    found = {one.name: one for one in _outcomes(scores, before)} if len(before) == len(scores) else {}
    return [found[name] for name in summary["names"]["tuned"] if name in found]


def _outcomes(after: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> list[BatchOutcome]:
    outcomes = []
    for name in dict.fromkeys(score["name"] for score in after):
        mine = [score for score in after if score["name"] == name]
        theirs = [score for score in before if score["name"] == name]
        outcomes.append(BatchOutcome(
            name, _mean(mine, "default_s"), _mean(theirs, "step_time_s") + _mean(theirs, "move_s"),
            _mean(mine, "step_time_s") + _mean(mine, "move_s"), _mean(theirs, "plan_s"), _mean(mine, "plan_s"),
        ))  # fmt: skip
    return outcomes


def _mean(scores: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(np.mean([score.get(key, 0.0) for score in scores]))


def plot_course(data: Course, ax: Axes | None = None) -> Axes:
    """Draw every trial and the best so far."""
    ax = new_axes(7.2, 2.8) if ax is None else styled(ax)
    ax.axhline(1.0, color=INK, linewidth=0.8, linestyle=":", label="default settings")
    ax.plot(data.number_T, data.value_T, "o", color=BEFORE, label="trial", markersize=4)
    ax.step(data.number_T, data.best_T, where="post", color=AFTER, label="best so far", linewidth=2)
    top = float(data.value_T.max()) if data.value_T.size else 1.0
    for numbers, marker, colour, label in ((data.stopped, "v", ATTENTION, "stopped early"),
                                           (data.infeasible, "x", EXPERTS, "infeasible")):  # fmt: skip
        if numbers:
            ax.plot(numbers, [top] * len(numbers), marker, color=colour, label=label, markersize=5, linestyle="")
    ax.locator_params(axis="x", integer=True)
    ax.set_xlabel("trial")
    ax.set_ylabel("cost / default settings")
    ax.legend(frameon=False, fontsize=8, labelcolor=INK, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return ax


def plot_importances(importances: Mapping[str, float], ax: Axes | None = None) -> Axes:
    """Draw each knob's share of what varies the cost, the largest on top."""
    ranked = sorted(importances.items(), key=lambda item: item[1])
    ax = new_axes(7.2, 0.28 * len(ranked) + 0.8) if ax is None else styled(ax)
    ax.barh([name for name, _ in ranked], [100 * share for _, share in ranked], color=ATTENTION, height=0.62)
    ax.set_xlabel("share of the variation of the cost, %")
    return ax


def plot_pareto(front: Sequence[Mapping[str, Any]], ax: Axes | None = None) -> Axes:
    """Draw the settings that no other beats in both step time and planning time."""
    ax = new_axes(7.2, 3.0) if ax is None else styled(ax)
    ordered = sorted(front, key=lambda one: (one["plan_value"], one["step_value"]))
    plan, step = [one["plan_value"] for one in ordered], [one["step_value"] for one in ordered]
    ax.step(plan, step, where="post", color=AFTER, linewidth=1.5)
    ax.plot(plan, step, "o", color=AFTER, markersize=5)
    for one in ordered:
        where = (one["plan_value"], one["step_value"])
        ax.annotate(str(one["number"]), where, xytext=(4, 4), textcoords="offset points", fontsize=8, color=INK)
    ax.plot([1.0], [1.0], "s", color=BEFORE, label="default settings")
    ax.set_xscale("log")
    ax.set_xlabel("planning time / default settings")
    ax.set_ylabel("step time / default settings")
    ax.legend(frameon=False, fontsize=9, labelcolor=INK)
    return ax


def plot_holdout(summary: Mapping[str, Any], ax: Axes | None = None) -> Axes:
    """Draw the gain of every held-out batch and the mean gain in cost with its interval."""
    outcomes, holdout = holdout_outcomes(summary), summary["holdout"]
    ax = new_axes(7.2, 0.32 * (len(outcomes) + 1) + 0.9) if ax is None else styled(ax)
    names = ["all, cost", *(one.name for one in reversed(outcomes))]
    ax.axvline(0.0, color=INK, linewidth=0.8, linestyle=":")
    ax.plot([one.gain_pct for one in reversed(outcomes)], range(1, len(names)), "o", color=BEFORE, markersize=6)
    mean, low, high = holdout["gain_pct"], holdout["low_pct"], holdout["high_pct"]
    spread = [[max(0.0, mean - low)], [max(0.0, high - mean)]] if None not in (low, high) else None
    ax.errorbar([mean], [0], xerr=spread, fmt="D", color=AFTER, capsize=4, markersize=6, linewidth=2)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(-0.6, len(names) - 0.4)
    ax.set_xlabel("gain over the default settings, %")
    return ax


def plot_batches(outcomes: Sequence[BatchOutcome], ax: Axes | None = None) -> Axes:
    """Draw each batch without a planner, with default and with tuned settings."""
    ax = new_axes(7.2, 2.6) if ax is None else styled(ax)
    x = np.arange(len(outcomes))
    bars = (("no_planner_s", "no planner", "#cbd5e1"), ("before_s", "default settings", ATTENTION),
            ("after_s", "best trial", AFTER))  # fmt: skip
    for k, (field, label, colour) in enumerate(bars):
        ax.bar(x + 0.27 * (k - 1), [getattr(one, field) for one in outcomes], 0.25, color=colour, label=label)
    ax.set_xticks(x, [one.name for one in outcomes], rotation=30 if len(outcomes) > 6 else 0)
    ax.set_ylabel("predicted step, s")
    ax.legend(frameon=False, fontsize=8, labelcolor=INK, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return ax


def pictures(summary: Mapping[str, Any]) -> dict[str, Axes]:
    """Return every picture for which a study has data, by name."""
    found = {}
    if summary.get("history"):
        found["history"] = plot_course(course(summary["history"]))
    if summary.get("importances"):
        found["importances"] = plot_importances(summary["importances"])
    if summary.get("pareto"):
        found["pareto"] = plot_pareto(summary["pareto"])
    if (summary.get("holdout") or {}).get("gain_pct") is not None:
        found["holdout"] = plot_holdout(summary)
    outcomes = [*tuned_outcomes(summary), *holdout_outcomes(summary)]
    if outcomes:
        found["batches"] = plot_batches(outcomes)
    return found


def save_pictures(summary: Mapping[str, Any], folder: Path) -> None:
    """Write every picture as a PNG on white."""
    for name, ax in pictures(summary).items():
        save_png(ax.figure, folder / f"{name}.png")

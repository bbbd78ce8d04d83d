"""The quickstart's page: what the tuned plan gains, why, and how far to trust it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from costmodels.tables import read_npz
from profiler.files import write_text
from routepack_tune.reports.comparison import Outcome, RankLoad
from routepack_tune.reports.figures import (
    Parity,
    as_svg,
    draw_parities,
    new_figure,
    parity,
    plot_hottest,
    plot_rank_load,
    plot_time_split,
    styled,
)
from routepack_tune.reports.page import Block, Section, Table, Tile, page
from routepack_tune.reports.tuning_figures import Course, plot_course


@dataclass(frozen=True, slots=True)
class Report:
    """What the page shows."""

    title: str
    subtitle: str
    outcomes: Sequence[Outcome]
    """Default first, tuned last."""
    before: RankLoad
    after: RankLoad
    course: Course
    parities: Sequence[Parity]
    facts: Mapping[str, str]
    """Where everything comes from: model, topology, device, data, versions."""
    notes: Sequence[str] = ()
    """What a reader must know: assumed, extrapolated, synthetic."""
    marks: Mapping[str, str] = field(default_factory=dict)
    """What ``times``, ``load``, ``tuning`` and ``parity`` rest on: synthetic, predicted, published, measured."""


def write_report(path: Path | str, report: Report) -> Path:
    """Write the page, whole or not at all."""
    write_text(Path(path), render(report))
    return Path(path)


def render(report: Report) -> str:
    """Return the page."""
    marks = report.marks
    sections: list[Section] = [
        ("Predicted step time", marks.get("times", "predicted"), _times(report.outcomes)),
        ("Load of the expert-parallel ranks", marks.get("load", "predicted"), _loads(report.before, report.after)),
        ("Tuning", marks.get("tuning", "predicted"), _tuning(report.course)),
        ("How well the times are known", marks.get("parity", ""), _parities(report.parities)),
        ("What to keep in mind", "", [report.notes]),
        ("Where it comes from", "", [report.facts]),
    ]
    return page(report.title, report.subtitle, sections, _tiles(report.outcomes))


def parities_of(costmodel: Path | str) -> list[Parity]:
    """Return the held-out times that ``routepack fit`` kept, one entry per operation and direction."""
    arrays = read_npz(Path(costmodel) / "parity.npz", "Held-out times")
    names = sorted(name.removesuffix("_true_us") for name in arrays if name.endswith("_true_us"))
    return [parity(name.replace("_", " "), arrays[f"{name}_true_us"], arrays[f"{name}_predicted_us"]) for name in names]


def _tiles(outcomes: Sequence[Outcome]) -> list[Tile]:
    default, tuned = outcomes[0], outcomes[-1]
    best_s = min((one.step_s for one in outcomes[:-1]), default=default.step_s)
    lost = f"{100 * default.lost_share:.1f}% → {100 * tuned.lost_share:.1f}%"
    return [
        (f"{default.step_s / tuned.step_s:.2f}x", "predicted speed over the default plan", True),
        (f"{best_s / tuned.step_s:.2f}x", "over the best published baseline", True),
        (lost, "of the step lost to imbalance", False),
        (f"{tuned.plan_s:.2f} s", "to plan a step (measured here)", False),
    ]


def _times(outcomes: Sequence[Outcome]) -> list[Block]:
    heads = "planner", "step, s", "attention, s", "experts, s", "rest, s", "lost to imbalance", "rows", "plan time"
    rows = []
    for one in outcomes:
        seconds = [f"{value:.3f}" for value in (one.step_s, one.attention_s, one.experts_s, one.rest_s)]
        plan = f"{one.plan_s:.2f} s" if one.plan_s >= 0.1 else f"{1000 * one.plan_s:.0f} ms"
        rows.append([one.planner, *seconds, f"{100 * one.lost_share:.1f}%", one.rows, plan])
    table = Table(heads, rows, frozenset({len(rows) - 1}))
    return [as_svg(plot_time_split(outcomes).figure, "times"), table]


def _loads(before: RankLoad, after: RankLoad) -> list[Block]:
    limit = max(1.05, float(before.relative_LP.max()), float(after.relative_LP.max()))
    figure = new_figure(7.2, 3.2)
    left, right = figure.subplots(1, 2)
    plot_rank_load(before, "default plan", limit, styled(left))
    plot_rank_load(after, "tuned plan", limit, styled(right))
    return [
        f"The hottest rank of a row and layer carries {before.hottest.mean():.2f} times the mean before and "
        f"{after.hottest.mean():.2f} times after: every other rank waits for it.",
        as_svg(figure, "loads"),
        as_svg(plot_hottest(before, after).figure, "hottest"),
    ]


def _tuning(course: Course) -> list[Block]:
    if not course.number_T.size:
        return []
    words = (
        f"{course.number_T.size} feasible trial(s); the objective is step time plus exposed planning time over the "
        f"default plan's. Best: {course.best_T[-1]:.4f}."
    )
    return [words, as_svg(plot_course(course).figure, "history")]


def _parities(parities: Sequence[Parity]) -> list[Block]:
    if not parities:
        return []
    words = "Times of cases that the model had not seen (held-out folds) against its predictions."
    return [words, as_svg(draw_parities(parities), "parity")]

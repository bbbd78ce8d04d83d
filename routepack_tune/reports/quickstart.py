"""One self-contained HTML page: what the tuned plan gains, why, and how far to trust it.

Nothing is loaded from outside: pictures are inline SVG, the style is in the page, there is no script. Every number says
whether it is measured, published, predicted, assumed or synthetic.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from costmodels.tables import read_npz
from profiler.files import write_text
from routepack_tune.reports.comparison import Outcome, RankLoad
from routepack_tune.reports.figures import (
    History,
    Parity,
    as_svg,
    new_figure,
    parity,
    plot_history,
    plot_hottest,
    plot_parity,
    plot_rank_load,
    plot_time_split,
    styled,
)

STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --soft: #5f6c7b; --page: #f6f7f9; --card: #ffffff; --line: #e3e8ee;
  --good: #0b8a61; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaef; --soft: #9aa7b5; --page: #14181d; --card: #1c2229;
  --line: #2d3640; --good: #3ddba4; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, sans-serif; }
main { max-width: 900px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 17px; margin: 0 0 10px; }
p { margin: 6px 0; } .soft { color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 20px 22px;
  margin-top: 18px; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin-top: 18px; }
.card { flex: 1 1 190px; background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 14px 18px; }
.card b { display: block; font-size: 25px; font-weight: 650; } .card.good b { color: var(--good); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 7px 8px; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); font-size: 13px; }
th:first-child, td:first-child { text-align: left; }
tr.tuned td { font-weight: 650; color: var(--good); }
.scroll { overflow-x: auto; } svg { width: 100%; height: auto; color: var(--soft); }
svg text { font-family: inherit; }
.mark { display: inline-block; border: 1px solid var(--line); border-radius: 99px; padding: 0 9px; font-size: 12px;
  color: var(--soft); margin-left: 6px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; margin: 0; } dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; } li { margin: 3px 0; }
"""


@dataclass(frozen=True, slots=True)
class Report:
    """Hold what the page shows."""

    title: str
    subtitle: str
    outcomes: Sequence[Outcome]
    """Default first, tuned last."""
    before: RankLoad
    after: RankLoad
    history: History
    parities: Sequence[Parity]
    facts: Mapping[str, str]
    """Where everything comes from: model, topology, device, data, versions."""
    notes: Sequence[str] = ()
    """What a reader must know: assumed, extrapolated, synthetic."""
    marks: Mapping[str, str] = field(default_factory=dict)
    """What ``times``, ``load``, ``tuning`` and ``parity`` rest on: synthetic, predicted, published, measured."""


def write_report(path: Path | str, report: Report) -> Path:
    """Write the page, whole or not at all."""
    path = Path(path)
    write_text(path, render(report))
    return path


def render(report: Report) -> str:
    """Return the page."""
    sections = [
        section("Predicted step time", report.marks.get("times", "predicted"), _times(report)),
        section("Load of the expert-parallel ranks", report.marks.get("load", "predicted"), _loads(report)),
        section("Tuning", report.marks.get("tuning", "predicted"), _tuning(report.history)),
        section("How well the times are known", report.marks.get("parity", ""), _parities(report.parities)),
        section("What to keep in mind", "", _list(report.notes)),
        section("Where it comes from", "", _facts(report.facts)),
    ]
    return page(report.title, report.subtitle, f"{_cards(report.outcomes)}\n{''.join(sections)}")


def page(title: str, subtitle: str, body: str) -> str:
    """Return a whole page in the project's style that loads nothing."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{html.escape(title)}</h1>\n<p class="soft">{html.escape(subtitle)}</p>\n'
        f"{body}</main>\n</body>\n</html>\n"
    )


def parities_of(costmodel: Path | str) -> list[Parity]:
    """Return the held-out times that ``routepack fit`` kept, one entry per operation and direction."""
    arrays = read_npz(Path(costmodel) / "parity.npz", "Held-out times")
    names = sorted(name.removesuffix("_true_us") for name in arrays if name.endswith("_true_us"))
    return [parity(name.replace("_", " "), arrays[f"{name}_true_us"], arrays[f"{name}_predicted_us"]) for name in names]


def headline(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the page's four numbers: speed-ups of the last outcome over the first and the best other, shares lost."""
    default, tuned = outcomes[0], outcomes[-1]
    best = min((one.step_s for one in outcomes[:-1]), default=default.step_s)
    return {
        "over_default": default.step_s / tuned.step_s,
        "over_best_baseline": best / tuned.step_s,
        "default_lost": default.lost_share,
        "tuned_lost": tuned.lost_share,
    }


def _cards(outcomes: Sequence[Outcome]) -> str:
    numbers = headline(outcomes)
    cards = (
        ("good", f"{numbers['over_default']:.2f}x", "predicted speed over the default plan"),
        ("good", f"{numbers['over_best_baseline']:.2f}x", "over the best published baseline"),
        (
            "",
            f"{100 * numbers['default_lost']:.1f}% → {100 * numbers['tuned_lost']:.1f}%",
            "of the step lost to imbalance",
        ),
        ("", f"{outcomes[-1].plan_s:.2f} s", "to plan a step (measured here)"),
    )
    shown = (
        f'<div class="card {kind}"><b>{value}</b><span class="soft">{text}</span></div>' for kind, value, text in cards
    )
    return f'<div class="cards">{"".join(shown)}</div>'


def section(title: str, mark: str, body: str) -> str:
    """Return one card of the page with a badge that says what it rests on; nothing where there is nothing to show."""
    badge = f'<span class="mark">{html.escape(mark)}</span>' if mark else ""
    return f"<section>\n<h2>{html.escape(title)}{badge}</h2>\n{body}\n</section>\n" if body else ""


def _times(report: Report) -> str:
    figure = plot_time_split(report.outcomes).figure
    rows = "".join(
        f"<tr{' class=tuned' if one is report.outcomes[-1] else ''}><td>{html.escape(one.planner)}</td>"
        f"<td>{one.step_s:.3f}</td><td>{one.attention_s:.3f}</td><td>{one.experts_s:.3f}</td><td>{one.rest_s:.3f}</td>"
        f"<td>{100 * one.lost_share:.1f}%</td><td>{one.rows}</td><td>{_seconds(one.plan_s)}</td></tr>"
        for one in report.outcomes
    )
    head = "".join(
        f"<th>{name}</th>"
        for name in (
            "planner",
            "step, s",
            "attention, s",
            "experts, s",
            "rest, s",
            "lost to imbalance",
            "rows",
            "plan time",
        )
    )
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    return as_svg(figure, "times") + table


def _loads(report: Report) -> str:
    limit = max(1.05, float(report.before.relative_LP.max()), float(report.after.relative_LP.max()))
    figure = new_figure(7.2, 3.2)
    left, right = figure.subplots(1, 2)
    plot_rank_load(report.before, "default plan", limit, styled(left))
    plot_rank_load(report.after, "tuned plan", limit, styled(right))
    words = (
        f'<p class="soft">The hottest rank of a row and layer carries {report.before.hottest.mean():.2f} times the '
        f"mean before and {report.after.hottest.mean():.2f} times after: every other rank waits for it.</p>"
    )
    return words + as_svg(figure, "loads") + as_svg(plot_hottest(report.before, report.after).figure, "hottest")


def _tuning(history: History) -> str:
    if not history.numbers.size:
        return ""
    words = (
        f'<p class="soft">{history.numbers.size} feasible trial(s); the objective is step time plus exposed planning '
        f"time over the default plan's. Best: {history.best[-1]:.4f}.</p>"
    )
    return words + as_svg(plot_history(history).figure, "history")


def _parities(parities: Sequence[Parity]) -> str:
    if not parities:
        return ""
    columns = min(4, len(parities))
    lines = -(-len(parities) // columns)
    figure = new_figure(2.6 * columns, 2.7 * lines)
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for ax, points in zip(axes, parities, strict=False):
        plot_parity(points, styled(ax))
    for ax in axes[len(parities) :]:
        ax.set_visible(False)
    words = '<p class="soft">Times of cases that the model had not seen (held-out folds) against its predictions.</p>'
    return words + as_svg(figure, "parity")


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _facts(facts: Mapping[str, str]) -> str:
    if not facts:
        return ""
    return "<dl>" + "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in facts.items()
    ) + "</dl>"  # fmt: skip


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.0f} ms"

"""The quickstart's page: what our plan gains, and why; how the study and the fit went is on their own pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_tune.environment import version
from routepack_tune.reports.comparison import Outcome, RankLoad
from routepack_tune.reports.figures import ABOVE, AFTER, ATTENTION, EXPERTS, MOVES, REST, as_svg, folded, panels
from routepack_tune.reports.page import Block, Section, Table, Tile, in_words, page, verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from routepack_tune.planner import Planner

PARTS = {
    "attention_s": ("attention and dense", ATTENTION),
    "experts_s": ("experts", EXPERTS),
    "rest_s": ("dispatch, combine, fixed", REST),
    "move_s": ("moving experts", MOVES),
}
COLUMNS = {
    "planner": "{planner}",
    "step + moves, s": "{total_s:.3f}",
    "step, s": "{step_s:.3f}",
    "attention, s": "{attention_s:.3f}",
    "experts, s": "{experts_s:.3f}",
    "rest, s": "{rest_s:.3f}",
    "moves, s": "{move_s:.3f}",
    "step, moves free, s": "{free_s:.3f}",
    "lost to imbalance": "{lost_share:.1%}",
    "rows": "{rows}",
    "plan, s": "{plan_s:.3f}",
}
EXPLAINED = (
    "A name says how samples are packed into rows, then where experts are: identity leaves them in place, LPT (longest "
    "processing time first) places each expert, hottest first, on the least loaded rank. Rows are rounds of "
    "microbatches; lost to imbalance is the share of the step in which ranks wait for slower ones. Batches follow one "
    "another as in a job: moves are of experts that change their rank before a step. With moves free, each step is "
    "planned as if no step had been before it."
)


ON_WHITE = "#333f4a"
"""Colour of words on the middle of the scale, which is white on dark pages too."""
PALE = 0.2
"""Share of the colour scale below which a picture of loads looks empty: words say what it shows."""


def quickstart_page(
    planner: Planner, study: Mapping[str, Any], outcomes: Sequence[Outcome], loads: tuple[RankLoad, RankLoad]
) -> str:
    """Return the page; ``outcomes`` begin with the default plan and end with ours, ``loads`` are of these two."""
    device, names, topology = study["fingerprint"], study["summary"]["names"], planner.topology
    notes = [
        "The step batches are synthetic: made from a seed by the project's generator, not recorded from a model.",
        "Times are predicted by models learned from published H200 measurements (aiconfigurator 0.7.0).",
        *planner.notes,
    ]
    facts = {
        "device priced": f"{device['name']} ({device['arch']}, {device['origin']})",
        "topology": in_words(study["config"]["topology"]),
        "token cap of a microbatch": str(planner.max_tokens),
        "tuned on": ", ".join(names["tuned"]),
        "held out (shown above)": ", ".join(names["holdout"]),
        "best trial": str(study["summary"]["best"]["number"]),
        "how tuning went": "study/tuning-report.html",
        "how well the times are known": "costmodel/costmodel-report.html",
        "tables": study["tables_hash"][:16],
        "version": f"routepack-tune {version()}",
        "settings file": "routepack.yaml",
    }
    times = as_svg(panels(7.2, 0.62 * len(outcomes) + 1.2, partial(plot_time_split, outcomes)), "times")
    rows = [{**asdict(one), "total_s": one.total_s} for one in outcomes]
    table = Table(COLUMNS, rows, tuned=[len(outcomes) - 1])
    summary, ours = study["summary"], outcomes[-1].planner
    gained = "Tuning gained." if summary["export"] == "best" else "Tuning did not gain: these are the default settings."
    sections: list[Section] = [
        (
            "Predicted step time",
            "synthetic batches, predicted times",
            [verdict(f"{gained} {summary['export_reason']}"), times, table, EXPLAINED],
        ),
        ("Load of the expert-parallel ranks", "synthetic batches", _loads(*loads, ours)),
        ("What to keep in mind", "", [notes]),
        ("Where it comes from", "", [facts]),
    ]
    subtitle = (
        f"{planner.spec.name} on {topology.data_parallel_size} data-parallel slots, expert parallelism "
        f"{topology.expert_model_parallel_size}. Step batches are synthetic; step times are predicted."
    )
    return page("RoutePack-Tune: quickstart", subtitle, sections, _tiles(outcomes))


def _tiles(outcomes: Sequence[Outcome]) -> list[Tile]:
    default, tuned = outcomes[0], outcomes[-1]
    best_s = min((one.total_s for one in outcomes[:-1]), default=default.total_s)
    lost = f"{100 * default.lost_share:.1f}% → {100 * tuned.lost_share:.1f}%"
    return [
        (
            f"{default.total_s / tuned.total_s:.2f}x",
            f"predicted speed over the default plan, moves of experts included; {default.total_s / tuned.free_s:.2f}x "
            "with moves free",
            True,
        ),
        (f"{best_s / tuned.total_s:.2f}x", "over the best published baseline, moves included", True),
        (lost, "of the step lost to imbalance", False),
        (f"{tuned.plan_s:.2f} s", "to plan a step (measured here)", False),
    ]


def _loads(before: RankLoad, after: RankLoad, ours: str) -> list[Block]:
    limit = max(1.05, float(before.relative_LP.max()), float(after.relative_LP.max()))
    named = {"default plan": before, ours: after}
    draws = [partial(plot_rank_load, load, name, limit) for name, load in named.items()]
    return [
        f"The hottest rank of a row and layer carries {before.hottest.mean():.2f} times the mean before and "
        f"{after.hottest.mean():.2f} times after: every other rank waits for it.",
        as_svg(panels(7.2, 3.2, *draws), "loads"),
    ]


def plot_time_split(outcomes: Sequence[Outcome], ax: Axes) -> None:
    """Draw predicted step times, split into attention, experts and the rest; the last one is set off as ours."""
    left, y = np.zeros(len(outcomes)), np.arange(len(outcomes))[::-1]
    ax.axhspan(y[-1] - 0.45, y[-1] + 0.45, color=AFTER, alpha=0.15, linewidth=0)
    for part, (label, colour) in PARTS.items():
        width = np.array([getattr(one, part) for one in outcomes])
        ax.barh(y, width, left=left, height=0.62, color=colour, label=label)
        left += width
    beside: dict[str, Any] = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
    for where, total in zip(y, left, strict=True):
        weight = "bold" if where == y[-1] else "normal"
        ax.annotate(f"{total:.3g} s", (total, where), fontsize=9, fontweight=weight, **beside)
    ax.set_yticks(y, [folded(one.planner) for one in outcomes])
    ax.get_yticklabels()[-1].set(color=AFTER, fontweight="bold")
    ax.set(
        xlim=(0, left.max() * 1.14), ylim=(-0.5, len(outcomes) - 0.5), xlabel="predicted step time and moves, seconds"
    )
    ax.legend(ncols=3, **ABOVE)


def plot_rank_load(load: RankLoad, title: str, limit: float, ax: Axes) -> None:
    """Draw the relative load of every EP rank in every layer."""
    shades: dict[str, Any] = {"cmap": "RdBu_r", "vmin": 2 - limit, "vmax": limit}
    image = ax.imshow(load.relative_LP, aspect="auto", interpolation="nearest", **shades)
    ax.set(xlabel="EP rank", ylabel="MoE layer", title=title)
    off = float(np.abs(load.relative_LP - 1).max(initial=0.0))
    if off <= PALE * (limit - 1):
        middle: dict[str, Any] = {"ha": "center", "va": "center", "color": ON_WHITE, "transform": ax.transAxes}
        ax.text(0.5, 0.5, f"all within {max(1, math.ceil(100 * off - 1e-9))} % of the mean", **middle)
    ax.figure.colorbar(image, ax=ax, fraction=0.05, pad=0.03).outline.set_visible(False)

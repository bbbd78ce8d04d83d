"""The quickstart's page: what the tuned plan gains, why, and how far to trust it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from costmodels.tables import read_npz
from routepack_tune.reports.comparison import Outcome, RankLoad
from routepack_tune.reports.figures import (
    ABOVE,
    AFTER,
    ATTENTION,
    BEFORE,
    EXPERTS,
    REST,
    as_svg,
    parity_figure,
    picture,
)
from routepack_tune.reports.page import Block, Section, Table, Tile, page
from routepack_tune.reports.tuning import best_so_far, plot_history

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = {
    "attention_s": ("attention and dense", ATTENTION),
    "experts_s": ("experts", EXPERTS),
    "rest_s": ("dispatch, combine, fixed", REST),
}
SHORT_NAMES = {"first-fit decreasing": "FFD", "Karmarkar-Karp": "KK", "RoutePack-Tune (tuned plan)": "RoutePack-Tune"}
Parities = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""True and predicted held-out times, microseconds, by operation and direction."""


def quickstart_page(
    subtitle: str,
    outcomes: Sequence[Outcome],
    loads: tuple[RankLoad, RankLoad],
    history: Sequence[Mapping[str, Any]],
    parities: Parities,
    facts: Mapping[str, str],
    notes: Sequence[str],
) -> str:
    """Return the page.

    Parameters
    ----------
    outcomes
        Default first, tuned last.
    loads
        Load of the EP ranks under the default and the tuned plan.
    history
        The study's trials.
    facts
        Where everything comes from: model, topology, device, data, versions.
    notes
        What a reader must know: assumed, extrapolated, synthetic.
    """
    sections: list[Section] = [
        ("Predicted step time", "synthetic batches, predicted times", _times(outcomes)),
        ("Load of the expert-parallel ranks", "synthetic batches", _loads(*loads)),
        ("Tuning", "synthetic batches, predicted and measured times", _tuning(history)),
        ("How well the times are known", "published times", _parities(parities)),
        ("What to keep in mind", "", [notes]),
        ("Where it comes from", "", [facts]),
    ]
    return page("RoutePack-Tune: quickstart", subtitle, sections, _tiles(outcomes))


def parities_of(costmodel: Path | str) -> Parities:
    """Return the held-out times that ``routepack fit`` kept."""
    arrays = read_npz(Path(costmodel) / "parity.npz", "Held-out times")
    names = sorted(name.removesuffix("_true_us") for name in arrays if name.endswith("_true_us"))
    return {name.replace("_", " "): (arrays[f"{name}_true_us"], arrays[f"{name}_predicted_us"]) for name in names}


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
    drawn = picture("times", 7.2, 0.62 * len(outcomes) + 1.2, partial(plot_time_split, outcomes))
    return [drawn, Table(heads, rows, frozenset({len(rows) - 1}))]


def _loads(before: RankLoad, after: RankLoad) -> list[Block]:
    limit = max(1.05, float(before.relative_LP.max()), float(after.relative_LP.max()))
    named = {"default plan": before, "tuned plan": after}
    return [
        f"The hottest rank of a row and layer carries {before.hottest.mean():.2f} times the mean before and "
        f"{after.hottest.mean():.2f} times after: every other rank waits for it.",
        picture("loads", 7.2, 3.2, *(partial(plot_rank_load, load, name, limit) for name, load in named.items())),
        picture("hottest", 7.2, 2.8, partial(plot_hottest, before, after)),
    ]


def _tuning(history: Sequence[Mapping[str, Any]]) -> list[Block]:
    best = best_so_far(history)
    if not len(best):
        return []
    words = (
        f"{len(best)} feasible trial(s); the objective is step time plus exposed planning time over the default "
        f"plan's. Best: {best.iloc[-1]:.4f}."
    )
    return [words, picture("history", 7.2, 2.8, partial(plot_history, history))]


def _parities(parities: Parities) -> list[Block]:
    if not parities:
        return []
    words = "Times of cases that the model had not seen (held-out folds) against its predictions."
    return [words, as_svg(parity_figure(parities), "parity")]


def plot_time_split(outcomes: Sequence[Outcome], ax: Axes) -> None:
    """Draw predicted step times, split into attention, experts and the rest."""
    left, y = np.zeros(len(outcomes)), np.arange(len(outcomes))[::-1]
    for part, (label, colour) in PARTS.items():
        width = np.array([getattr(one, part) for one in outcomes])
        ax.barh(y, width, left=left, height=0.62, color=colour, label=label)
        left += width
    for where, total in zip(y, left, strict=True):
        ax.text(total, where, f" {total:.3g} s", va="center", fontsize=9)
    ax.set_yticks(y, [short_name(one.planner) for one in outcomes])
    ax.set(xlim=(0, left.max() * 1.14), xlabel="predicted step time, seconds")
    ax.legend(ncols=3, **ABOVE)


def short_name(planner: str) -> str:
    """Return a planner's name as it fits under a bar."""
    for long, short in SHORT_NAMES.items():
        planner = planner.replace(long, short)
    return planner


def plot_rank_load(load: RankLoad, title: str, limit: float, ax: Axes) -> None:
    """Draw the relative load of every EP rank in every layer."""
    shades: dict[str, Any] = {"cmap": "RdBu_r", "vmin": 2 - limit, "vmax": limit}
    image = ax.imshow(load.relative_LP, aspect="auto", interpolation="nearest", **shades)
    ax.set(xlabel="EP rank", ylabel="MoE layer", title=title)
    ax.figure.colorbar(image, ax=ax, fraction=0.05, pad=0.03).outline.set_visible(False)


def plot_hottest(before: RankLoad, after: RankLoad, ax: Axes) -> None:
    """Draw how far the hottest EP rank is above the mean, over all rows and layers."""
    edges = np.linspace(1.0, max(before.hottest.max(), after.hottest.max(), 1.01), 50).tolist()
    for load, label, colour in ((before, "default plan", BEFORE), (after, "tuned plan", AFTER)):
        ax.hist(load.hottest, bins=edges, color=colour, alpha=0.75, label=f"{label} (mean {load.hottest.mean():.2f})")
    ax.set(xlabel="hottest EP rank over the mean, per row and layer (1 is even)", ylabel="rows x layers")
    ax.legend()

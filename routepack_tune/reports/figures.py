"""Pictures of the report: data first (tested), then drawing on given axes.

Colours are fixed per meaning: attention blue, experts orange, the rest grey; before grey, after green.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from routepack_tune.reports.comparison import Outcome, RankLoad

INK = "#4f5b66"
"""Drawn colour of text and axes; in an inline SVG it becomes the page's own text colour."""
ATTENTION, EXPERTS, REST, BEFORE, AFTER = "#3b82f6", "#f59e0b", "#94a3b8", "#94a3b8", "#10b981"
SHORT_NAMES = {"first-fit decreasing": "FFD", "Karmarkar-Karp": "KK", "RoutePack-Tune (tuned plan)": "RoutePack-Tune"}


@dataclass(frozen=True, slots=True)
class Parity:
    """Held-out times of one operation against their predictions."""

    name: str
    true_us: np.ndarray
    predicted_us: np.ndarray
    median_error: float
    """Median of ``|predicted / true - 1|``."""


def parity(name: str, true_us: np.ndarray, predicted_us: np.ndarray, most: int = 1500) -> Parity:
    """Return at most ``most`` points, evenly taken in order of the true time, with the median error of all."""
    keep = np.isfinite(true_us) & np.isfinite(predicted_us) & (true_us > 0)
    true_us, predicted_us = true_us[keep], predicted_us[keep]
    error = float(np.median(np.abs(predicted_us / true_us - 1))) if true_us.size else float("nan")
    order = np.argsort(true_us, kind="stable")
    if order.size > most:
        order = order[np.linspace(0, order.size - 1, most).astype(np.int64)]
    return Parity(name, true_us[order], predicted_us[order], error)


def short_name(planner: str) -> str:
    """Return a planner's name as it fits under a bar."""
    for long, short in SHORT_NAMES.items():
        planner = planner.replace(long, short)
    return planner


def plot_time_split(outcomes: Sequence[Outcome], ax: Axes | None = None) -> Axes:
    """Draw predicted step times, split into attention, experts and the rest."""
    ax = new_axes(7.2, 0.62 * len(outcomes) + 1.2) if ax is None else styled(ax)
    left = np.zeros(len(outcomes))
    y = np.arange(len(outcomes))[::-1]
    for field, label, colour in (("attention_s", "attention and dense", ATTENTION), ("experts_s", "experts", EXPERTS),
                                 ("rest_s", "dispatch, combine, fixed", REST)):  # fmt: skip
        width = np.array([getattr(one, field) for one in outcomes])
        ax.barh(y, width, left=left, height=0.62, color=colour, label=label)
        left += width
    for where, total in zip(y, left, strict=True):
        ax.text(total, where, f" {total:.3g} s", va="center", color=INK, fontsize=9)
    ax.set_yticks(y, [short_name(one.planner) for one in outcomes])
    ax.set_xlim(0, left.max() * 1.14)
    ax.set_xlabel("predicted step time, seconds")
    ax.legend(loc="upper center", bbox_to_anchor=(0.42, 1.16), ncols=3, frameon=False, fontsize=9, labelcolor=INK)
    return ax


def plot_rank_load(load: RankLoad, title: str, limit: float, ax: Axes | None = None) -> Axes:
    """Draw the relative load of every EP rank in every layer."""
    ax = new_axes(3.6, 3.6) if ax is None else styled(ax)
    shades: dict[str, Any] = {"cmap": "RdBu_r", "vmin": 2 - limit, "vmax": limit}
    image = ax.imshow(load.relative_LP, aspect="auto", interpolation="nearest", **shades)
    ax.set_xlabel("EP rank")
    ax.set_ylabel("MoE layer")
    ax.set_title(title, fontsize=10, color=INK)
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.05, pad=0.03)
    bar.ax.tick_params(colors=INK, labelsize=8)
    bar.outline.set_visible(False)
    return ax


def plot_hottest(before: RankLoad, after: RankLoad, ax: Axes | None = None) -> Axes:
    """Draw how far the hottest EP rank is above the mean, over all rows and layers."""
    ax = new_axes(7.2, 2.8) if ax is None else styled(ax)
    edges = np.linspace(1.0, max(before.hottest.max(), after.hottest.max(), 1.01), 50).tolist()
    for load, label, colour in ((before, "default plan", BEFORE), (after, "tuned plan", AFTER)):
        ax.hist(load.hottest, bins=edges, color=colour, alpha=0.75, label=f"{label} (mean {load.hottest.mean():.2f})")
    ax.set_xlabel("hottest EP rank over the mean, per row and layer (1 is even)")
    ax.set_ylabel("rows x layers")
    ax.legend(frameon=False, fontsize=9, labelcolor=INK)
    return ax


def plot_parity(points: Parity, ax: Axes, colour: str = ATTENTION) -> Axes:
    """Draw predicted against true times of held-out cases on logarithmic axes."""
    styled(ax).loglog(points.true_us, points.predicted_us, ".", color=colour, markersize=3, alpha=0.5, rasterized=True)
    ends = [points.true_us.min(), points.true_us.max()] if points.true_us.size else [1.0, 10.0]
    ax.plot(ends, ends, color=INK, linewidth=1)
    ax.set_xlabel("held-out time, µs")
    ax.set_ylabel("predicted, µs")
    ax.set_title(f"{points.name}\nmedian error {100 * points.median_error:.1f}%", fontsize=9, color=INK)
    return ax


def draw_parities(parities: Sequence[Parity], colours: Sequence[str] = ()) -> Figure:
    """Draw a panel for each; panels with colours are contestants on the same rows, side by side on one axis."""
    columns = len(parities) if colours else min(4, len(parities))
    lines = -(-len(parities) // columns)
    figure = new_figure(2.6 * columns, 2.7 * lines)
    axes = figure.subplots(lines, columns, squeeze=False, sharey=bool(colours)).ravel()
    for place, points in enumerate(parities):
        plot_parity(points, axes[place], *colours[place : place + 1])
        if colours and place:
            axes[place].set_ylabel("")
    for ax in axes[len(parities) :]:
        ax.set_visible(False)
    return figure


def new_figure(width: float, height: float) -> Figure:
    """Return a transparent figure without touching matplotlib's global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0)
    return figure


def new_axes(width: float, height: float) -> Axes:
    """Return the single axes of a new figure, in the report's style."""
    return styled(new_figure(width, height).add_subplot())


def styled(ax: Axes) -> Axes:
    """Strip an axes to what is read: no box, quiet ticks."""
    ax.patch.set_alpha(0)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(INK)
    ax.tick_params(colors=INK, labelsize=9)
    ax.xaxis.label.set_color(INK)
    ax.yaxis.label.set_color(INK)
    ax.xaxis.label.set_fontsize(9)
    ax.yaxis.label.set_fontsize(9)
    return ax


def as_svg(figure: Any, salt: str) -> Markup:
    """Return an inline SVG whose text takes the page's colour; ``salt`` keeps ids of several pictures apart."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None}, dpi=160)
    text = buffer.getvalue()
    # matplotlib escapes its texts.
    return Markup(text[text.index("<svg") :].replace(INK, "currentColor"))


def save_png(figure: Any, path: Path) -> None:
    """Write a PNG on white, for places that show no SVG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=150, facecolor="white")

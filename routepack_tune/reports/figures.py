"""Drawing for every page: the style, figures of panels, pictures that several pages show, and SVG or PNG of them.

Colours are fixed per meaning: attention blue, experts orange, the rest grey; before grey, after green; doubt red.
Every plot takes its data and the axes to draw on.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#4f5b66"
"""Drawn colour of text and axes; in an inline SVG it becomes the page's own text colour."""
ATTENTION, EXPERTS, REST, BEFORE, AFTER, DOUBTFUL = "#3b82f6", "#f59e0b", "#94a3b8", "#94a3b8", "#10b981", "#ef4444"
STYLE: Any = {
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "text.color", "legend.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.labelsize", "axes.titlesize", "xtick.labelsize", "ytick.labelsize"), 9),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor"), "none"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "legend.fontsize": 8,
    "lines.markersize": 4,
    "figure.constrained_layout.use": True,
}
"""Settings of matplotlib: no box, quiet ticks, nothing behind the picture."""
ABOVE: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}
"""Place of a legend over its axes."""
MOST_POINTS = 1500


def panels(width: float, height: float, *draws: Callable[[Axes], None], columns: int = 0, **how: Any) -> Figure:
    """Return a figure with a panel for every function of axes, side by side or in rows of ``columns``."""
    import matplotlib
    from matplotlib.figure import Figure

    columns = columns or len(draws)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        axes = figure.subplots(-(-len(draws) // columns), columns, squeeze=False, **how).ravel()
        for draw, ax in zip(draws, axes, strict=False):
            draw(ax)
        for ax in axes[len(draws) :]:
            ax.set_visible(False)
    return figure


def plot_bars(values: Mapping[str, float], label: str, ax: Axes) -> None:
    """Draw named numbers as horizontal bars, the first on top."""
    names = list(values)[::-1]
    ax.barh(names, [values[name] for name in names], color=AFTER, height=0.6)
    ax.tick_params(axis="y", labelsize=8)
    ax.set_xlabel(label)


def plot_parity(name: str, true_us: np.ndarray, predicted_us: np.ndarray, colour: str, ax: Axes) -> None:
    """Draw predicted against true times of held-out cases; of many points, some, evenly taken in order of true time."""
    known = np.isfinite(true_us) & np.isfinite(predicted_us) & (true_us > 0)
    order = np.flatnonzero(known)[np.argsort(true_us[known], kind="stable")]
    true_us, predicted_us = true_us[order], predicted_us[order]
    error = 100 * np.median(np.abs(predicted_us / true_us - 1)) if order.size else np.nan
    shown = np.linspace(0, order.size - 1, min(order.size, MOST_POINTS)).astype(np.int64)
    ax.loglog(true_us[shown], predicted_us[shown], ".", color=colour, markersize=3, alpha=0.5, rasterized=True)
    ends = true_us[[0, -1]] if order.size else [1.0, 10.0]
    ax.plot(ends, ends, color=INK, linewidth=1)
    ax.set(xlabel="held-out time, µs", ylabel="predicted, µs", title=f"{name}\nmedian error {error:.1f}%")


def parity_figure(pairs: Mapping[str, tuple[np.ndarray, np.ndarray]], colours: Sequence[str] = ()) -> Figure:
    """Draw true and predicted times by name; panels with colours are contestants on the same rows, on one axis."""
    columns = len(pairs) if colours else min(4, len(pairs))
    draws = [
        partial(plot_parity, name, *times, colours[place] if colours else ATTENTION)
        for place, (name, times) in enumerate(pairs.items())
    ]
    lines = -(-len(pairs) // columns)
    figure = panels(2.6 * columns, 2.7 * lines, *draws, columns=columns, sharey=bool(colours))
    if colours:
        for ax in figure.axes:
            ax.label_outer()
    return figure


def as_svg(figure: Figure, salt: str) -> Markup:
    """Return an inline SVG whose text takes the page's colour; ``salt`` keeps ids of several pictures apart."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None}, dpi=160)
    text = buffer.getvalue()
    # matplotlib escapes its texts.
    return Markup(text[text.index("<svg") :].replace(INK, "currentColor"))


def picture(salt: str, width: float, height: float, *draws: Callable[[Axes], None]) -> Markup:
    """Return panels side by side as an inline SVG."""
    return as_svg(panels(width, height, *draws), salt)


def save_png(figure: Figure, path: Path) -> None:
    """Write a PNG on white, for places that show no SVG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=150, facecolor="white")

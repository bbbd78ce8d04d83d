"""Drawing for every page: the style, figures of panels, what several pages draw, and SVG or PNG of them.

Colours are fixed per meaning: attention blue, experts orange, the rest grey; before grey, after green; doubt red.
Every plot takes its data and the axes to draw on.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#4f5b66"
"""Drawn colour of text and axes; in an inline SVG it becomes the page's own text colour."""
MOVES = "#8b5cf6"
ATTENTION, EXPERTS, REST, BEFORE, AFTER, DOUBTFUL = "#3b82f6", "#f59e0b", "#94a3b8", "#94a3b8", "#10b981", "#ef4444"
STYLE: Any = {
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "text.color", "legend.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.labelsize", "axes.titlesize", "xtick.labelsize", "ytick.labelsize"), 9),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor"), "none"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "legend.fontsize": 8,
    "lines.markersize": 4,
    "axes.formatter.min_exponent": 4,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
}
"""Settings of matplotlib: no box, quiet ticks, short numbers on logarithmic axes, nothing behind the picture."""
ABOVE: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}
"""Place of a legend over its axes."""


def panels(width: float, height: float, *draws: Callable[[Axes], None], **how: Any) -> Figure:
    """Return a figure with a panel for every function of axes, side by side."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        for draw, ax in zip(draws, figure.subplots(1, len(draws), squeeze=False, **how)[0], strict=True):
            draw(ax)
    return figure


def folded(name: str, width: int = 30) -> str:
    """Return a name in lines that fit beside a bar; one without blanks is broken where it must be."""
    return "\n".join(textwrap.wrap(name, width)) or name


def plot_bars(values: Mapping[str, float], label: str, ax: Axes) -> None:
    """Draw named numbers as horizontal bars, the first on top."""
    names = list(values)[::-1]
    ax.barh(range(len(names)), [values[name] for name in names], color=AFTER, height=0.6)
    ax.set_yticks(range(len(names)), [folded(name) for name in names])
    ax.tick_params(axis="y", labelsize=8)
    ax.set_xlabel(label)


def as_svg(figure: Figure, salt: str) -> Markup:
    """Return an inline SVG whose text takes the page's colour; ``salt`` keeps ids of several pictures apart."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None}, dpi=160)
    text = buffer.getvalue()
    # matplotlib escapes its texts.
    return Markup(text[text.index("<svg") :].replace(INK, "currentColor"))


def save_png(figure: Figure, path: Path) -> None:
    """Write a PNG on white, for places that show no SVG."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, format="png", dpi=150, facecolor="white")

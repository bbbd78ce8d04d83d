"""Pictures of a fitted cost model: data first (tested), then drawing on given axes.

Every contestant keeps its colour: the model green, the fitted baseline grey, LightGBM alone orange, interpolation of
measured curves blue. All errors are of rows that the contestant had not seen.

Shape suffixes: N held-out rows, B size bins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_tune.reports.figures import AFTER, ATTENTION, BEFORE, EXPERTS, INK, new_axes, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from costmodels.learned.predictor import Predictor
    from costmodels.learned.validation import HeldOut

LABELS = {
    "baseline": "fitted baseline",
    "alone": "LightGBM alone",
    "lightgbm_alone": "LightGBM alone",
    "curve": "curve interpolation",
    "trees": "residual trees",
    "smooth": "smooth residual",
}
COLOURS = {"model": AFTER, "fitted baseline": BEFORE, "LightGBM alone": EXPERTS, "curve interpolation": ATTENTION}
OTHER_COLOURS = ("#a855f7", "#ef4444", "#14b8a6")
FEWEST_IN_BIN = 5
MOST_SHAPES = 12
MOST_INPUTS = 12


@dataclass(frozen=True)
class HeldOutRows:
    """What every contestant said about rows that it had not seen."""

    name: str
    """``experts forward`` and the like."""
    true_us: np.ndarray
    """[N] measured times."""
    predicted_us: Mapping[str, np.ndarray]
    """Per contestant, [N]; the model last. A row that a contestant cannot answer is NaN."""
    size_N: np.ndarray | None = None
    """The size by which rows were held out; None where rows are not known any more."""
    size_label: str = ""
    shape_N: np.ndarray | None = None
    """[N] text: the model's shape behind every row."""


def contestant_label(key: str) -> str:
    """Return a contestant's name for people."""
    return LABELS.get(key, key.replace("_", " "))


def contestants(held_out: HeldOut) -> dict[str, np.ndarray]:
    """Return the predictions of every contestant that a validation holds, by name, the model last."""
    found = {}
    for field in dataclasses.fields(held_out):
        value = getattr(held_out, field.name)
        if field.name.endswith("_us") and field.name != "true_us" and isinstance(value, np.ndarray):
            found[contestant_label(field.name.removesuffix("_us"))] = value
    if "model" in found:
        found["model"] = found.pop("model")
    return found


def absolute_errors(predicted_us: np.ndarray, true_us: np.ndarray) -> np.ndarray:
    """Return ``|predicted / true - 1|`` in percent, NaN where there is no prediction."""
    return 100.0 * np.abs(predicted_us / true_us - 1.0)


def errors_by_size(rows: HeldOutRows) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the centres of octaves of size, [B], and every contestant's median error in percent there, [B].

    Octaves with fewer than ``FEWEST_IN_BIN`` answered rows are NaN.
    """
    if rows.size_N is None:
        return np.empty(0), {}
    octave = np.rint(np.log2(rows.size_N)).astype(np.int64)
    bins = np.unique(octave)
    curves = {}
    for name, predicted in rows.predicted_us.items():
        error = absolute_errors(predicted, rows.true_us)
        curves[name] = np.array([_median(error[octave == one]) for one in bins])
    return np.exp2(bins.astype(np.float64)), curves


def _median(values: np.ndarray) -> float:
    values = values[np.isfinite(values)]
    return float(np.median(values)) if values.size >= FEWEST_IN_BIN else float("nan")


def errors_by_shape(rows: HeldOutRows, most: int = MOST_SHAPES) -> list[tuple[str, int, dict[str, float]]]:
    """Return the shapes on which the model is worst: name, rows, and every contestant's mean error in percent."""
    if rows.shape_N is None:
        return []
    errors = {name: absolute_errors(predicted, rows.true_us) for name, predicted in rows.predicted_us.items()}
    found = []
    for shape in dict.fromkeys(rows.shape_N.tolist()):
        mine = rows.shape_N == shape
        answered = {name: error[mine][np.isfinite(error[mine])] for name, error in errors.items()}
        means = {name: float(one.mean()) if one.size else float("nan") for name, one in answered.items()}
        found.append((str(shape), int(mine.sum()), means))
    return sorted(found, key=lambda one: -one[2].get("model", 0.0))[:most]


def gains(model: Predictor) -> dict[str, float]:
    """Return every tree input's share of the gain of all splits, in percent, the largest first; empty without trees.

    Read from LightGBM's text format, where every tree lists its splits' inputs and gains; of trees with linear leaves
    beside constant ones, the constant ones speak.
    """
    trees = model.own.seen or model.own.unseen
    text = trees.text if trees is not None else ""
    total: dict[str, float] = {}
    names: list[str] = []
    split: list[str] = []
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key == "feature_names":
            names = value.split()
            total = dict.fromkeys(names, 0.0)
        elif key == "split_feature":
            split = value.split()
        elif key == "split_gain":
            for place, gain in zip(split, value.split(), strict=True):
                total[names[int(place)]] += float(gain)
    whole = sum(total.values())
    ordered = sorted(total.items(), key=lambda item: -item[1])
    return {name: 100.0 * gain / whole for name, gain in ordered} if whole > 0 else {}


def coverages(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return what share of held-out rows lies inside their interval, percent, by where; ``entry`` is one operation's
    validation."""
    intervals = entry.get("intervals") or {}
    named = {"inside the timed sizes": "inside_pct", "at the largest sizes": "largest_sizes_pct"}
    return {where: float(intervals[key]) for where, key in named.items() if key in intervals}


def colour_of(name: str, place: int = 0) -> str:
    """Return a contestant's colour."""
    return COLOURS.get(name, OTHER_COLOURS[place % len(OTHER_COLOURS)])


def draw_errors(rows: HeldOutRows, importance: Mapping[str, float]) -> Figure:
    """Draw errors by size and by shape, residuals, and what the trees look at."""
    figure = new_figure(10.4, 6.0)
    (by_size, by_shape), (residuals, inputs) = figure.subplots(2, 2)
    plot_errors_by_size(rows, styled(by_size))
    plot_errors_by_shape(rows, styled(by_shape))
    plot_residuals(rows, styled(residuals))
    plot_gains(importance, styled(inputs))
    return figure


def plot_errors_by_size(rows: HeldOutRows, ax: Axes) -> Axes:
    """Draw every contestant's median error against size."""
    sizes, curves = errors_by_size(rows)
    for place, (name, errors) in enumerate(curves.items()):
        ax.semilogx(sizes, errors, "o-", color=colour_of(name, place), markersize=3, linewidth=1.4, label=name)
    ax.set_ylim(bottom=0)
    ax.set_xlabel(rows.size_label or "size")
    ax.set_ylabel("median error, %")
    if curves:
        ax.legend(frameon=False, fontsize=8, labelcolor=INK)
    return ax


def plot_errors_by_shape(rows: HeldOutRows, ax: Axes) -> Axes:
    """Draw mean errors of the shapes that the model knows worst."""
    worst = errors_by_shape(rows)[::-1]
    y = np.arange(len(worst))
    for place, name in enumerate(rows.predicted_us):
        ax.plot([one[2][name] for one in worst], y, "o", color=colour_of(name, place), markersize=4)
    ax.set_yticks(y, [one[0] for one in worst], fontsize=7)
    ax.set_xlim(left=0)
    ax.set_xlabel("mean error by shape, % (worst shapes)")
    return ax


def plot_residuals(rows: HeldOutRows, ax: Axes) -> Axes:
    """Draw how predictions of every contestant spread around the truth."""
    edges = np.linspace(-40.0, 40.0, 81)
    for place, (name, predicted) in enumerate(rows.predicted_us.items()):
        error = 100.0 * (predicted / rows.true_us - 1.0)
        error = np.clip(error[np.isfinite(error)], edges[0], edges[-1])
        ax.hist(error, bins=edges.tolist(), histtype="step", linewidth=1.4, color=colour_of(name, place))
    ax.axvline(0.0, color=INK, linewidth=0.8)
    ax.set_xlabel("predicted over measured - 1, % (ends hold what is beyond)")
    ax.set_ylabel("held-out rows")
    return ax


def plot_gains(importance: Mapping[str, float], ax: Axes) -> Axes:
    """Draw the inputs from which the trees gain most."""
    shown = list(importance.items())[:MOST_INPUTS][::-1]
    ax.barh([name for name, _ in shown], [share for _, share in shown], color=AFTER, height=0.6)
    ax.tick_params(axis="y", labelsize=7)
    ax.set_xlabel("share of the trees' gain, %" if shown else "no trees in this model")
    return ax


def plot_coverages(found: Mapping[str, float], ax: Axes | None = None) -> Axes:
    """Draw how many held-out rows lie inside their 90 % interval."""
    ax = new_axes(7.2, 0.3 * len(found) + 1.0) if ax is None else ax
    names: Sequence[str] = list(found)[::-1]
    ax.barh(names, [found[name] for name in names], color=AFTER, height=0.6)
    ax.axvline(90.0, color=INK, linewidth=1)
    ax.set_xlim(0, 100)
    ax.tick_params(axis="y", labelsize=8)
    ax.set_xlabel("rows inside their interval, % (line: promised)")
    return ax

"""Pictures: step time against planning time for every regime, and what drift and growth cost.

Colours are fixed per meaning: ours green, RoutePack orange, one-shot rules grey (hollow: experts in place).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from methods import OURS
from records import CheckRecord, PlanRecord

from routepack_tune.reports.figures import AFTER, EXPERTS, INK, REST, STYLE, save_png


@dataclass(frozen=True, slots=True)
class Curve:
    """Hold a method's medians over the batches of a regime, one point per budget."""

    method: str
    search: bool
    """Whether it is given a time."""
    plan_s: tuple[float, ...]
    above_ideal: tuple[float, ...]
    """Step time over the forced-balanced ideal."""


def curves(records: Sequence[PlanRecord], regime: str) -> list[Curve]:
    """Return every method that keeps the cap, best last point first; only batches that all its budgets were run on."""
    of_method: dict[str, dict[float, dict[int, PlanRecord]]] = {}
    for record in records:
        if record.regime == regime:
            of_method.setdefault(record.method, {}).setdefault(record.budget_s, {})[record.instance] = record
    found = []
    for method, budgets in of_method.items():
        common = set.intersection(*(set(by_instance) for by_instance in budgets.values()))
        points = [[by_instance[k] for k in sorted(common)] for _, by_instance in sorted(budgets.items())]
        if not common or any(record.over_cap_percent > 0 for record in points[-1]):
            continue
        found.append(Curve(
            method, max(budgets) > 0, tuple(median(r.plan_s for r in point) for point in points),
            tuple(median(100 / r.percent for r in point) for point in points),
        ))  # fmt: skip
    return sorted(found, key=lambda curve: curve.above_ideal[-1])


def plot_curves(found: Sequence[Curve], title: str, ax: Any) -> None:
    """Draw what the step time exceeds the ideal by against planning time, both on logarithmic axes; name the best
    rule."""
    rules = [curve for curve in found if not curve.search]
    for curve in found:
        excess = [100 * (ratio - 1) for ratio in curve.above_ideal]
        if curve in rules:
            hollow = {"markerfacecolor": "white"} if curve.method.endswith("identity") else {}
            ax.plot(curve.plan_s, excess, "o", color=REST, markersize=4, **hollow)
        else:
            colour = AFTER if curve.method == OURS else EXPERTS if curve.method.startswith("RoutePack") else INK
            ax.plot(curve.plan_s, excess, "o-", color=colour, label=curve.method, markersize=4, zorder=3)
    if rules:
        place = (rules[0].plan_s[0], 100 * (rules[0].above_ideal[0] - 1))
        ax.annotate(rules[0].method, place, (0, -12), textcoords="offset points", fontsize=7, color=INK)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    ax.set_title(title, fontsize=10, color=INK)
    ax.set_xlabel("planning time, s (measured)")
    ax.set_ylabel("step time above ideal, % (predicted)")


@matplotlib.rc_context(STYLE)
def draw_curves(records: Sequence[PlanRecord], regimes: Sequence[str], path: Path) -> None:
    """Write the picture of step time against planning time, one panel a regime."""
    columns = min(4, len(regimes))
    rows = math.ceil(len(regimes) / columns)
    figure = Figure(figsize=(4.2 * columns, 3.4 * rows))
    for k, regime in enumerate(regimes):
        plot_curves(curves(records, regime), regime, figure.add_subplot(rows, columns, k + 1))
    handles: dict[str, Any] = {}
    for ax in figure.axes:
        handles |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    save_png(figure, path)


def series(checks: Sequence[CheckRecord], check: str, quantity: str) -> tuple[list[float], list[float]]:
    """Return the variants of a growth check as numbers, and a quantity's value at each, ascending."""
    found = sorted((float(c.variant), c.value) for c in checks if c.check == check and c.quantity == quantity)
    return [x for x, _ in found], [y for _, y in found]


def drift_steps(checks: Sequence[CheckRecord], policy: str, quantity: str) -> list[float]:
    """Return the median over batches of a quantity of a policy, by drifting step."""
    values: dict[int, list[float]] = {}
    for c in checks:
        if c.check == "drift" and c.quantity.startswith(f"{policy}: {quantity}, step "):
            values.setdefault(int(c.quantity.rsplit(" ", 1)[1]), []).append(c.value)
    return [median(values[step]) for step in sorted(values)]


@matplotlib.rc_context(STYLE)
def draw_checks(checks: Sequence[CheckRecord], path: Path) -> None:
    """Write the picture of movement over drifting steps and of growth in samples and layers."""
    figure = Figure(figsize=(15, 3.4))
    left, middle, right = (figure.add_subplot(1, 3, k) for k in (1, 2, 3))
    for policy, colour in (("sticky", AFTER), ("stickiness 0", EXPERTS), ("from scratch", REST)):
        moved = drift_steps(checks, policy, "moved share")
        left.plot(range(1, len(moved) + 1), [100 * share for share in moved], "o-", color=colour, label=policy)
    left.locator_params(axis="x", integer=True)
    left.set_ylim(bottom=0)
    left.set_xlabel("drifting step")
    left.set_ylabel("experts relocated, %")
    left.legend(frameon=False, fontsize=8, labelcolor=INK)
    for ax, what in ((middle, "samples"), (right, "layers")):
        memory = ax.twinx()
        memory.spines["right"].set_visible(True)
        lines = []
        drawn = (
            (ax, "cpu_s", "o-", "CPU seconds (measured)"),
            (memory, "planning_gib", "s--", "batch and plan, GiB (measured)"),
        )
        for side, quantity, style, label in drawn:
            size, value = series(checks, f"growth in {what}", quantity)
            lines += side.plot(size, value, style, color=AFTER if side is ax else EXPERTS, label=label)
            side.set_ylim(bottom=0)
            side.set_ylabel(label)
        ax.set_xlim(left=0)
        ax.set_xlabel(what)
        ax.legend(handles=lines, frameon=False, fontsize=8, labelcolor=INK)
    save_png(figure, path)

"""Pictures of a profile: data first (tested), then drawing on given axes.

Measured rows are blue, the physics line grey, doubtful rows red. The physics line is the baseline of ``costmodels``
fitted to these very rows: what a roofline explains of them.

Shape suffixes: R rows of one operation and direction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler.cases.case import BACKWARD_WORK
from profiler.cases.operations import DIRECTIONS
from profiler.cases.operations import OPERATIONS as TIMED
from routepack_tune.reports.figures import AFTER, ATTENTION, BEFORE, EXPERTS, INK, new_axes, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from profiler import Measurements

DOUBTFUL = "#ef4444"
SCATTER_LIMIT = 3.0
"""A row farther from the physics line than this many times the scatter of all rows about it is doubtful."""
LEAST_SCATTER = 0.02
FEWEST_FOR_PHYSICS = 8
MOST_LINES = 6
EXCHANGES = ("alltoall", "transfer")
"""Operations that move bytes and compute nothing."""
FLOPS_PER_CLOCK = {"sm_80": 2048, "sm_90": 4096, "sm_100": 8192}
"""Dense 16-bit operations of one multiprocessor in one clock, by architecture (NVIDIA's white papers)."""


@dataclass(frozen=True)
class OperationRows:
    """The good rows of one operation and direction, and what physics says of each."""

    op: str
    direction: str
    size_label: str
    size_R: np.ndarray
    """Tokens, rows or bytes."""
    time_us: np.ndarray
    physics_us: np.ndarray
    """NaN where too few rows were timed to fit it, or a row has nothing to do."""
    doubtful_R: np.ndarray
    """bool: marked by the consistency flags, or far from the physics line."""
    flagged: int
    tflops_R: np.ndarray
    """Arithmetic over time; NaN where an operation only moves bytes."""
    gbps_R: np.ndarray
    """Least bytes that have to move (weights, inputs, outputs), over time."""
    group_R: np.ndarray
    """int: rows of one shape and pattern, whose sizes form one curve."""

    @property
    def name(self) -> str:
        """Operation and direction in words."""
        return f"{self.op.replace('_', ' ')} {self.direction}"


def operation_rows(measurements: Measurements) -> list[OperationRows]:
    """Return every operation and direction that has a good row, in the order of the operations."""
    found = []
    for op in TIMED:
        for direction in DIRECTIONS:
            rows = measurements.select(op=op, direction=direction, status="ok").rows
            if rows["time_us"].size:
                found.append(_operation(op, direction, rows))
    return found


def _operation(op: str, direction: str, rows: Mapping[str, np.ndarray]) -> OperationRows:
    from costmodels.operations.catalog import OPERATIONS

    time_us = rows["time_us"]
    sizes = ("tokens",) if "tokens" in TIMED[op].features else OPERATIONS[op].size
    # Experts timed here route nothing: their size is that of their rows.
    size = next((name for name in sizes if rows[name].any()), sizes[-1])
    physics_us, flagged = _physics(op, rows), rows["flag"] != ""
    seconds = time_us * 1e-6
    flops, moved = _work(op, direction, rows)
    family = [rows[name] for name in OPERATIONS[op].family if name in rows]
    return OperationRows(
        op, direction, size.replace("_", " "), rows[size], time_us, physics_us,
        flagged | far_from(time_us, physics_us), int(flagged.sum()),
        flops / seconds / 1e12 if op not in EXCHANGES else np.full(time_us.size, np.nan),
        moved / seconds / 1e9, _groups([rows["pattern"], *family]),
    )  # fmt: skip


def _physics(op: str, rows: Mapping[str, np.ndarray]) -> np.ndarray:
    from costmodels.learned.baseline import fit_baseline
    from costmodels.operations.catalog import OPERATIONS
    from costmodels.params import FitParams

    operation = OPERATIONS[op]
    columns = {name: rows[name].astype(np.float64) for name in operation.features}
    usable = rows["time_us"] > 0
    for name, column in columns.items():
        usable &= (column > 0) | (name in operation.zero_allowed)
    physics = np.full(usable.size, np.nan)
    fitted = usable & (rows["flag"] == "")
    if fitted.sum() >= FEWEST_FOR_PHYSICS:
        some = {name: column[fitted] for name, column in columns.items()}
        found = fit_baseline(operation, some, rows["time_us"][fitted], FitParams())
        physics[usable] = operation.baseline({name: column[usable] for name, column in columns.items()}, found)
    return physics


def far_from(time_us: np.ndarray, physics_us: np.ndarray) -> np.ndarray:
    """Return a mask of rows that lie farther from the line than three times the rows' scatter about it."""
    known = np.isfinite(physics_us) & (physics_us > 0)
    far = np.zeros(time_us.size, dtype=bool)
    if known.any():
        ratio = np.log(time_us[known] / physics_us[known])
        low, middle, high = np.percentile(ratio, (25, 50, 75))
        far[known] = np.abs(ratio - middle) > SCATTER_LIMIT * max(high - low, LEAST_SCATTER)
    return far


def _work(op: str, direction: str, rows: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the operations and the least bytes of every row."""
    if op in EXCHANGES:
        return np.zeros(rows["time_us"].size), rows["bytes"].astype(np.float64)
    back = direction == "backward"
    flops = TIMED[op].flops(rows) * (BACKWARD_WORK if back and "attention" in op else 1 + back)
    width = np.array([4 if name == "float32" else 1 if "8" in name else 2 for name in rows["dtype"].tolist()])
    return flops, TIMED[op].elements(rows) * width * (1.0 + back)


def _groups(columns: Sequence[np.ndarray]) -> np.ndarray:
    coded = [np.unique(column, return_inverse=True)[1] for column in columns]
    return np.unique(np.stack(coded, axis=1), axis=0, return_inverse=True)[1].reshape(-1)


def peak_tflops(fingerprint: Mapping[str, Any], dtype: str) -> float:
    """Return the arithmetic peak of 16-bit types from units, clock and architecture; 0 where one is unknown."""
    if dtype not in ("bfloat16", "float16"):
        return 0.0
    per_clock = FLOPS_PER_CLOCK.get(fingerprint.get("arch", ""), 0)
    return float(per_clock * fingerprint.get("units", 0) * fingerprint.get("clock_max_mhz", 0)) / 1e6


def anchor_course(readings: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the anchor's times over their median, in order, and the clocks over their highest (NaN where untold)."""
    cases = [reading["case_id"] for reading in readings]
    times = np.array([reading["time_us"] for reading in readings], dtype=np.float64)
    relative = np.array(
        [t / np.median(times[[c == case for c in cases]]) for t, case in zip(times, cases, strict=True)]
    )
    said = [reading.get("readings") for reading in readings]
    clocks = np.array(
        [one.get("clock_mhz", np.nan) if isinstance(one, Mapping) else np.nan for one in said], dtype=float
    )
    return relative, clocks / np.nanmax(clocks) if np.isfinite(clocks).any() else clocks


def plot_times(rows: OperationRows, ax: Axes | None = None) -> Axes:
    """Draw time against size on logarithmic axes, with the physics line of the commonest shapes."""
    ax = new_axes(4.6, 3.2) if ax is None else styled(ax)
    shown = rows.size_R > 0
    good, bad = shown & ~rows.doubtful_R, shown & rows.doubtful_R
    for group, _ in Counter(rows.group_R[shown].tolist()).most_common(MOST_LINES):
        mine = np.flatnonzero(shown & (rows.group_R == group) & np.isfinite(rows.physics_us))
        mine = mine[np.lexsort((rows.physics_us[mine], rows.size_R[mine]))]
        ax.plot(rows.size_R[mine], rows.physics_us[mine], "-", color=BEFORE, linewidth=1)
    ax.plot(rows.size_R[good], rows.time_us[good], ".", color=ATTENTION, markersize=4, rasterized=good.sum() > 500)
    ax.plot(rows.size_R[bad], rows.time_us[bad], "x", color=DOUBTFUL, markersize=5, rasterized=bad.sum() > 500)
    if shown.any():
        _logarithmic(ax)
    ax.set_xlabel(rows.size_label)
    ax.set_ylabel("time, µs")
    return ax


def _logarithmic(ax: Axes) -> None:
    """Make both axes logarithmic; numbers between powers of ten are shown only where there are few powers."""
    from matplotlib.ticker import NullFormatter

    ax.set_xscale("log")
    ax.set_yscale("log")
    for axis, (low, high) in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
        if high >= 20 * low:
            axis.set_minor_formatter(NullFormatter())


def plot_throughput(rows: OperationRows, peak: float, ax: Axes | None = None) -> Axes:
    """Draw TFLOP/s (GB/s where nothing is computed) against time, with the peak where it is known."""
    ax = new_axes(4.6, 3.2) if ax is None else styled(ax)
    moves = rows.op in EXCHANGES
    rate = rows.gbps_R if moves else rows.tflops_R
    shown = rate > 0
    ax.plot(rows.time_us[shown], rate[shown], ".", color=EXPERTS, markersize=4, rasterized=shown.sum() > 500)
    best = float(rate[shown].max()) if shown.any() else 0.0
    line, label = (peak, "peak") if peak > 0 and not moves else (best, "best seen")
    if shown.any():
        ax.axhline(line, color=INK, linewidth=0.8)
        ax.annotate(f"{label} {line:.3g}", (0.02, line), xycoords=("axes fraction", "data"), fontsize=8, color=INK,
                    va="bottom")  # fmt: skip
        _logarithmic(ax)
    ax.set_xlabel("time, µs")
    ax.set_ylabel("GB/s" if moves else "TFLOP/s")
    return ax


def plot_course(readings: Sequence[Mapping[str, Any]], limit: float, ax: Axes | None = None) -> Axes:
    """Draw how the anchor's time, and the clock, went through the sweep."""
    ax = new_axes(7.2, 2.6) if ax is None else styled(ax)
    times, clocks = anchor_course(readings)
    order = np.arange(1, times.size + 1)
    ax.axhspan(1 - limit, 1 + limit, color=AFTER, alpha=0.12, linewidth=0)
    ax.plot(
        order, times, "o-", color=ATTENTION, markersize=4, linewidth=1.2, label="time of the anchor over its median"
    )
    if np.isfinite(clocks).any():
        ax.plot(order, clocks, "-", color=EXPERTS, linewidth=1.2, label="clock over its highest")
    ax.set_ylim(bottom=0)
    ax.locator_params(axis="x", integer=True)
    ax.set_xlabel("looks at the anchor, through the sweep")
    ax.legend(frameon=False, fontsize=8, labelcolor=INK)
    return ax

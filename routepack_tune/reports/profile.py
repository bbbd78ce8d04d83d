"""What ``routepack profile --report`` leaves: one self-contained HTML page that tells a good profile from a bad one.

The page lies beside the measurements as ``profile-report.html``. Every number is measured here or published, as the
rows say. Measured rows are blue, doubtful ones red; the grey physics line is the baseline of ``costmodels`` fitted to
these very rows: what a roofline explains of them.

Shape suffixes: R rows of one operation and direction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler.cases.case import BACKWARD_WORK
from profiler.cases.operations import DIRECTIONS
from profiler.cases.operations import OPERATIONS as TIMED
from routepack_tune.reports.figures import AFTER, ATTENTION, BEFORE, DOUBTFUL, EXPERTS, INK, picture
from routepack_tune.reports.page import Block, Section, Table, Verdict, page

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from profiler import Measurements

REPORT_FILE = "profile-report.html"
SHARES = {
    "busy_share": "of the time inside warm-up, cache flushes and timed runs",
    "drift": "largest departure of the anchor from its median",
    "ends": "anchor at the end of the sweep against its start",
    "order_effect": "last repeats of a case against its first",
    "foreign_cpu_share": "of the CPU used by other processes",
    "clock_fall": "lowest clock under the highest",
}
SCATTER_LIMIT = 3.0
"""A row farther from the physics line than this many times the scatter of all rows about it is doubtful."""
LEAST_SCATTER = 0.02
FEWEST_FOR_PHYSICS = 8
MOST_LINES = 6
FLOPS_PER_CLOCK = {"sm_80": 2048, "sm_90": 4096, "sm_100": 8192}
"""Dense 16-bit operations of one multiprocessor in one clock, by architecture (NVIDIA's white papers)."""
NEVER_TIMED = {"flash-attn-3": "FlashAttention 3", "deep-ep": "DeepEP", "deep-gemm": "DeepGEMM"}
"""Installed packages that may train but whose kernels are never timed."""
FIRST_GROUPED = 90
"""Compute capability, x 10, from which torch's ``grouped_mm`` is one kernel."""


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
    gbps_R: np.ndarray
    """Least bytes that have to move (weights, inputs, outputs), over time."""
    rate_R: np.ndarray
    """TFLOP/s; GB/s where nothing is computed."""
    group_R: np.ndarray
    """int: rows of one shape and pattern, whose sizes form one curve."""

    @property
    def name(self) -> str:
        """Operation and direction in words."""
        return f"{self.op.replace('_', ' ')} {self.direction}"

    @property
    def unit(self) -> str:
        """Unit of the rate."""
        return "GB/s" if TIMED[self.op].exchange else "TFLOP/s"


def operation_rows(measurements: Measurements) -> Iterator[OperationRows]:
    """Yield every operation and direction that has a good row, in the order of the operations."""
    for op in TIMED:
        for direction in DIRECTIONS:
            rows = measurements.select(op=op, direction=direction, status="ok").rows
            if rows["time_us"].size:
                yield _rows_of(op, direction, rows)


def _rows_of(op: str, direction: str, rows: Mapping[str, np.ndarray]) -> OperationRows:
    import pandas as pd  # type: ignore[import-untyped]

    from costmodels.operations import OPERATIONS

    time_us, flagged = rows["time_us"], rows["flag"] != ""
    sizes = ("tokens",) if "tokens" in TIMED[op].features else OPERATIONS[op].size
    # Experts timed here route nothing: their size is that of their rows.
    size = next((name for name in sizes if rows[name].any()), sizes[-1])
    physics_us = _physics(op, rows)
    flops, moved = _work(op, direction, rows)
    gbps = moved / time_us / 1e3
    curves = pd.DataFrame({name: rows[name] for name in ("pattern", *OPERATIONS[op].family) if name in rows})
    return OperationRows(
        op,
        direction,
        size.replace("_", " "),
        rows[size],
        time_us,
        physics_us,
        doubtful_R=flagged | far_from(time_us, physics_us),
        flagged=int(flagged.sum()),
        gbps_R=gbps,
        rate_R=gbps if TIMED[op].exchange else flops / time_us / 1e6,
        group_R=curves.groupby(list(curves)).ngroup().to_numpy(),
    )


def _physics(op: str, rows: Mapping[str, np.ndarray]) -> np.ndarray:
    from costmodels.learned.baseline import fit_baseline
    from costmodels.operations import OPERATIONS
    from costmodels.params import FitParams

    operation, time_us = OPERATIONS[op], rows["time_us"]
    needed = ("time_us", *(name for name in operation.features if name not in operation.zero_allowed))
    usable = np.logical_and.reduce([rows[name] > 0 for name in needed])
    fitted = usable & (rows["flag"] == "")
    physics = np.full(usable.size, np.nan)
    if fitted.sum() >= FEWEST_FOR_PHYSICS:
        columns = {name: rows[name].astype(np.float64) for name in operation.features}
        some = {name: column[fitted] for name, column in columns.items()}
        found = fit_baseline(operation, some, time_us[fitted], FitParams())
        physics[usable] = operation.baseline({name: column[usable] for name, column in columns.items()}, found)
    return physics


def _work(op: str, direction: str, rows: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the floating-point operations and the least bytes of every row."""
    asked, back = TIMED[op], direction == "backward"
    flops = asked.flops(rows) * (BACKWARD_WORK if back and "attention" in op else 1 + back)
    width = np.array([4 if name == "float32" else 1 if "8" in name else 2 for name in rows["dtype"].tolist()])
    moved = rows["bytes"] if asked.exchange else asked.elements(rows) * width * (1 + back)
    return flops, moved


def far_from(time_us: np.ndarray, physics_us: np.ndarray) -> np.ndarray:
    """Return a mask of rows that lie farther from the line than three times the rows' scatter about it."""
    if not np.isfinite(physics_us).any():
        return np.zeros(time_us.size, dtype=bool)
    ratio = np.log(time_us / physics_us)
    low, middle, high = np.nanpercentile(ratio, (25, 50, 75))
    return np.abs(ratio - middle) > SCATTER_LIMIT * max(high - low, LEAST_SCATTER)


def peak_tflops(fingerprint: Mapping[str, Any], dtype: str) -> float:
    """Return the arithmetic peak of 16-bit types from units, clock and architecture; 0 where one is unknown."""
    if dtype not in ("bfloat16", "float16"):
        return 0.0
    per_clock = FLOPS_PER_CLOCK.get(fingerprint.get("arch", ""), 0)
    return float(per_clock * fingerprint.get("units", 0) * fingerprint.get("clock_max_mhz", 0)) / 1e6


def anchor_course(readings: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the anchor's times over their median, in order, and the clocks over their highest (NaN where untold)."""
    cases = np.array([reading["case_id"] for reading in readings])
    times = np.array([reading["time_us"] for reading in readings], dtype=np.float64)
    relative = np.array([time / np.median(times[cases == case]) for time, case in zip(times, cases, strict=True)])
    clocks = np.array([reading["readings"].get("clock_mhz", np.nan) for reading in readings], dtype=np.float64)
    return relative, clocks / np.nanmax(clocks) if np.isfinite(clocks).any() else clocks


def plot_times(rows: OperationRows, ax: Axes) -> None:
    """Draw time against size on logarithmic axes, with the physics line of the commonest shapes."""
    shown = rows.size_R > 0
    for group, _ in Counter(rows.group_R[shown].tolist()).most_common(MOST_LINES):
        mine = np.flatnonzero(shown & (rows.group_R == group) & np.isfinite(rows.physics_us))
        mine = mine[np.lexsort((rows.physics_us[mine], rows.size_R[mine]))]
        ax.plot(rows.size_R[mine], rows.physics_us[mine], "-", color=BEFORE, linewidth=1)
    for some, marker, colour in ((~rows.doubtful_R, ".", ATTENTION), (rows.doubtful_R, "x", DOUBTFUL)):
        some = shown & some
        ax.plot(rows.size_R[some], rows.time_us[some], marker, color=colour, rasterized=some.sum() > 500)
    _logarithmic(ax, shown)
    ax.set(xlabel=rows.size_label, ylabel="time, µs")


def plot_throughput(rows: OperationRows, peak: float, ax: Axes) -> None:
    """Draw TFLOP/s (GB/s where nothing is computed) against time, with the peak where it is known."""
    shown = rows.rate_R > 0
    ax.plot(rows.time_us[shown], rows.rate_R[shown], ".", color=EXPERTS, rasterized=shown.sum() > 500)
    best = rows.rate_R[shown].max(initial=0.0)
    line, label = (peak, "peak") if peak > 0 and rows.unit == "TFLOP/s" else (best, "best seen")
    if shown.any():
        ax.axhline(line, color=INK, linewidth=0.8)
        ax.text(0.02, line, f"{label} {line:.3g}", transform=ax.get_yaxis_transform(), fontsize=8, va="bottom")
    _logarithmic(ax, shown)
    ax.set(xlabel="time, µs", ylabel=rows.unit)


def _logarithmic(ax: Axes, shown: np.ndarray) -> None:
    """Make both axes logarithmic; numbers between powers of ten are shown only where there are few powers."""
    from matplotlib.ticker import NullFormatter

    if not shown.any():
        return
    ax.set(xscale="log", yscale="log")
    for axis, (low, high) in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
        if high >= 20 * low:
            axis.set_minor_formatter(NullFormatter())


def plot_course(readings: Sequence[Mapping[str, Any]], limit: float, ax: Axes) -> None:
    """Draw how the anchor's time, and the clock, went through the sweep."""
    times, clocks = anchor_course(readings)
    order = np.arange(1, times.size + 1)
    ax.axhspan(1 - limit, 1 + limit, color=AFTER, alpha=0.12, linewidth=0)
    ax.plot(order, times, "o-", color=ATTENTION, linewidth=1.2, label="time of the anchor over its median")
    if np.isfinite(clocks).any():
        ax.plot(order, clocks, "-", color=EXPERTS, linewidth=1.2, label="clock over its highest")
    ax.set_ylim(bottom=0)
    ax.locator_params(axis="x", integer=True)
    ax.set_xlabel("looks at the anchor, through the sweep")
    ax.legend()


def profile_page(measurements: Measurements) -> str:
    """Return the page."""
    meta, rows = measurements.meta, measurements.rows
    sources = sorted(set(rows["source"].tolist()))
    mark = f"{' and '.join(sources)} times" if sources else ""
    dtype = str(meta.get("dtype") or Counter(rows["dtype"].tolist()).most_common(1)[0][0])
    device = meta["fingerprint"]
    operations = list(operation_rows(measurements))
    peak = peak_tflops(device, dtype)
    sections: list[Section] = [
        ("Was the device steady", mark, _steadiness(meta)),
        ("Operations", mark, _overview(operations, peak)),
        *((one.name, mark, _operation(one, peak)) for one in operations),
        ("Rounds", "measured", [_rounds(meta.get("rounds") or ())]),
        ("Ranks", "measured", _ranks(meta.get("ranks") or ())),
        ("Left out: what lies beyond is extrapolated", "", [_limits(meta.get("limits") or ())]),
        ("What did not run", "", [Table(("operation", "status", "message", "rows"), failures(measurements))]),
        ("Where it comes from", "", [_facts(measurements)]),
    ]
    units = f", {device['units']} units" if device["units"] else ""
    model = (meta.get("model") or {}).get("name")
    subtitle = f"{device['name']} ({device['arch']}{units}), {model or 'no single model'}, {len(measurements)} rows"
    return page("Profile", subtitle, sections)


def failures(measurements: Measurements) -> list[tuple[str, str, str, int]]:
    """Return what has no time: operation and direction, status, message, rows."""
    rows = measurements.take(measurements.rows["status"] != "ok").rows
    named = zip(*(rows[name].tolist() for name in ("op", "direction", "status", "message")), strict=True)
    counted = Counter((f"{op} {direction}", status, message) for op, direction, status, message in named)
    return [(*key, count) for key, count in sorted(counted.items())]


def _steadiness(meta: Mapping[str, Any]) -> list[Block]:
    found = meta.get("steadiness")
    if not found:
        published = meta["fingerprint"].get("origin") == "published"
        return [] if published else [Verdict("Nobody watched: profile again.")]
    readings = (meta.get("anchor") or {}).get("readings") or ()
    limit = float((meta.get("params") or {}).get("max_drift", 0.25))
    shares = {text: f"{100 * found[name]:.1f}%" for name, text in SHARES.items() if found.get(name) is not None}
    held = [f"{reason} at {looks} look{'s' * (looks != 1)}" for reason, looks in (found.get("held_by") or {}).items()]
    yes = Verdict("Nothing that was watched left its limits.", "Yes.")
    no = Verdict("Do not fit these times; close other work and profile again into a new folder.", "No.")
    return [
        yes if found["steady"] else no,
        () if found["steady"] else found["problems"],
        shares | {"clocks held down by": ", ".join(held)},
        picture("course", 7.2, 2.6, partial(plot_course, readings, limit)) if readings else "",
    ]


def _overview(operations: Sequence[OperationRows], peak: float) -> list[Block]:
    lines = []
    for rows in operations:
        best = np.nanmax(rows.rate_R)
        share = f"{100 * best / peak:.0f}%" if peak and rows.unit == "TFLOP/s" else "-"
        off = np.abs(np.log(rows.time_us / rows.physics_us))
        from_line = f"{100 * np.nanmedian(off):.1f}%" if np.isfinite(off).any() else "-"
        doubtful, rate = int(rows.doubtful_R.sum()), f"{best:.3g} {rows.unit}"
        lines.append((rows.name, rows.time_us.size, doubtful, rows.flagged, from_line, rate, share))
    words = (
        f"The arithmetic peak is {peak:.0f} TFLOP/s: multiprocessors x highest clock x operations per clock."
        if peak
        else "The device's peak is not known: throughput is shown against the best that was seen here."
    )
    heads = ("operation", "rows", "doubtful", "of them flagged", "from the physics line", "best", "of the peak")
    return [words, Table(heads, lines)]


def _operation(rows: OperationRows, peak: float) -> list[Block]:
    said = ["Grey: the physics line, for the commonest shapes."]
    if rows.doubtful_R.any():
        said.append(
            f"Red crosses: {int(rows.doubtful_R.sum())} doubtful rows, slower than a larger case ({rows.flagged}) or "
            "farther from the line than three times the rows' scatter about it."
        )
    idle = rows.time_us[rows.size_R == 0]
    if idle.size:
        said.append(f"With nothing to do it takes {np.median(idle):.1f} µs.")
    if (rows.gbps_R > 0).any():
        said.append(f"Best {np.nanmax(rows.gbps_R):.3g} GB/s of weights, inputs and outputs.")
    draws = partial(plot_times, rows), partial(plot_throughput, rows, peak)
    return [" ".join(said), picture(rows.name.replace(" ", "-"), 9.6, 3.3, *draws)]


def _rounds(rounds: Sequence[Mapping[str, Any]]) -> Table:
    ops = sorted({op for one in rounds for op in one["errors_pct"]})
    lines = []
    for number, one in enumerate(rounds, 1):
        errors = [f"{one['errors_pct'][op]:.1f}" if op in one["errors_pct"] else "-" for op in ops]
        lines.append((number, one["cases"], f"{one['minutes']:.2f}", *errors, one["stopped_by"].replace("_", " ")))
    heads = [f"{op.replace('_', ' ')}, held-out error %" for op in ops]
    return Table(("round", "cases", "minutes", *heads, "stopped by"), lines)


def _ranks(ranks: Sequence[Mapping[str, Any]]) -> list[Block]:
    if len(ranks) < 2:
        return []
    slow = max(ranks, key=lambda one: one["speed"])
    words = f"Slowest: rank {slow['rank']} on {slow['host']}, {100 * (slow['speed'] - 1):.1f}% above the median time."
    lines = [(one["rank"], one["host"], one["device"], f"{one['speed']:.3f}") for one in ranks]
    return [words, Table(("rank", "host", "device", "time over the median"), lines)]


def _limits(limits: Sequence[Mapping[str, Any]]) -> Table:
    names = ("op", "what", "wanted", "designed", "reason")
    lines = [[one.get(name, "") for name in names] for one in limits]
    return Table(("operation", "what", "wanted", "timed up to", "reason"), lines)


def _facts(measurements: Measurements) -> dict[str, Any]:
    meta = measurements.meta
    device = meta["fingerprint"]
    return {
        "device": f"{device['name']}, {device['memory_gib']} GiB, {device.get('l2_mib', 0) or 'unknown'} MiB L2",
        "links": ", ".join(filter(None, (device["interconnect"], device.get("pcie", ""), device.get("network", "")))),
        "ranks per node": str(device["ranks_per_node"]),
        "software": ", ".join(f"{name} {value}" for name, value in sorted(device["software"].items())),
        "timed, but may train otherwise": _differences(measurements),
        "number type": str(meta.get("dtype", "")),
        "threads": str(meta.get("threads", "")),
        "token cap": str(meta.get("max_tokens", "")),
        "backward": str(meta.get("backward", "")),
    }


def _differences(measurements: Measurements) -> str:
    """Say what is installed but never timed, and where torch's own kernel is slower than what trains."""
    device, rows, said = measurements.meta["fingerprint"], measurements.rows, []
    if absent := [name for package, name in NEVER_TIMED.items() if package in device["software"]]:
        said.append(f"{', '.join(absent)}: installed here, but no kernel of theirs is timed")
    capability = device["arch"].removeprefix("sm_")
    loops = capability.isdigit() and int(capability) < FIRST_GROUPED
    kernels = rows["kernel"][rows["op"] == "experts"].tolist()
    if loops and any(kernel.startswith("torch: ") for kernel in kernels):
        said.append("experts: torch's grouped_mm on this card is a loop over experts with a synchronisation")
    return "; ".join(said)

"""What ``routepack profile --report`` leaves: one self-contained HTML page that tells a good profile from a bad one.

The page lies beside the measurements as ``profile-report.html``. Every number is measured here or published, as the
rows say. Measured rows are blue, doubtful ones red; the grey physics line is the baseline of ``costmodels`` fitted to
these very rows: what a roofline explains of them. Thousands of rows are drawn as bands of quantiles and as densities.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]

from costmodels.features import take
from costmodels.freezing.notes import priced_of
from costmodels.learned.baseline import fit_baseline
from costmodels.operations import OPERATIONS
from costmodels.params import FitParams
from profiler.cases.case import BACKWARD_WORK, DIRECTIONS, moved_elements
from profiler.cases.case import OPERATIONS as TIMED
from profiler.published.plausible import device_peaks, skipped_words
from routepack_tune.reports.figures import ABOVE, AFTER, ATTENTION, BEFORE, DOUBTFUL, EXPERTS, INK, as_svg, panels
from routepack_tune.reports.page import Block, Section, Table, as_table, page, verdict

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
MOST_POINTS, MOST_CROSSES = 500, 150
"""More rows than this are drawn as bands and densities; of doubtful ones so many are shown, evenly taken."""
FEWEST_FOR_PHYSICS = 8
MOST_LINES = 6
FLOPS_PER_CLOCK = {"sm_80": 2048, "sm_90": 4096, "sm_100": 8192}
"""Dense 16-bit operations of one multiprocessor in one clock, by architecture (NVIDIA's white papers)."""
LIMITS = {"operation": "{op}, {what}", "wanted": "{wanted}", "timed up to": "{designed}", "reason": "{reason}"}
FAILURES = {"operation": "{op} {direction}", "status": "{status}", "message": "{message}", "rows": "{rows}"}
NEVER_TIMED = {"flash-attn-3": "FlashAttention 3", "deep-ep": "DeepEP", "deep-gemm": "DeepGEMM"}
"""Installed packages that may train but whose kernels are never timed."""
FIRST_GROUPED = 90
"""Compute capability, x 10, from which torch's ``grouped_mm`` is one kernel."""


@dataclass(frozen=True)
class OperationRows:
    """The good rows of one operation and direction, and what physics says of each."""

    name: str
    """Operation and direction in words."""
    size_label: str
    unit: str
    """Unit of the rate: TFLOP/s, or GB/s where nothing is computed."""
    rows: pd.DataFrame
    """``size`` (tokens, rows or bytes), ``time_us``, ``physics_us`` (NaN where too few rows were timed to fit it, or a
    row has nothing to do), ``flagged`` (by the consistency flags), ``doubtful`` (flagged, or far from that line),
    ``gbps`` (least bytes that have to move, over time), ``rate`` and ``curve`` (rows of one shape and pattern)."""


def operation_rows(measurements: Measurements) -> Iterator[OperationRows]:
    """Yield every operation and direction that has a good row, in the order of the operations."""
    for op, direction in product(TIMED, DIRECTIONS):
        rows = measurements.select(op=op, direction=direction, status="ok").rows
        if rows["time_us"].size:
            yield _rows_of(op, direction, rows)


def _rows_of(op: str, direction: str, rows: Mapping[str, np.ndarray]) -> OperationRows:
    asked, back = TIMED[op], direction == "backward"
    sizes = ("tokens",) if "tokens" in asked.features else OPERATIONS[op].size
    # Experts timed here route nothing: their size is that of their rows.
    size = next((name for name in sizes if rows[name].any()), sizes[-1])
    flops = asked.flops(rows) * (BACKWARD_WORK if back and "attention" in op else 1 + back)
    width = np.array([4 if name == "float32" else 1 if "8" in name else 2 for name in rows["dtype"].tolist()])
    # An exchange of n ranks keeps an n-th of its bytes at home.
    leaves = rows["bytes"] * (1 - 1 / np.maximum(rows["ranks"], 1)) if op == "alltoall" else rows["bytes"]
    moved = leaves if asked.exchange else moved_elements(op, rows) * width * (1 + back)
    shapes = pd.DataFrame({name: rows[name] for name in ("pattern", *OPERATIONS[op].family) if name in rows})
    found = pd.DataFrame({"size": rows[size], "time_us": rows["time_us"], "physics_us": _physics(op, rows)})
    found["flagged"] = rows["flag"] != ""
    found["doubtful"] = found["flagged"] | far_from(rows["time_us"], found["physics_us"].to_numpy())
    found["gbps"] = moved / rows["time_us"] / 1e3
    found["rate"] = found["gbps"] if asked.exchange else flops / rows["time_us"] / 1e6
    found["curve"] = shapes.groupby(list(shapes)).ngroup()
    unit = "GB/s" if asked.exchange else "TFLOP/s"
    return OperationRows(f"{op} {direction}".replace("_", " "), size.replace("_", " "), unit, found)


def _physics(op: str, rows: Mapping[str, np.ndarray]) -> np.ndarray:
    operation, time_us = OPERATIONS[op], rows["time_us"]
    columns = {name: rows[name].astype(np.float64) for name in operation.features}
    usable = np.logical_and.reduce([columns[name] > 0 for name in columns if name not in operation.zero_allowed])
    usable &= time_us > 0
    fitted, physics = usable & (rows["flag"] == ""), np.full(usable.size, np.nan)
    if fitted.sum() >= FEWEST_FOR_PHYSICS:
        found = fit_baseline(operation, take(columns, fitted), time_us[fitted], FitParams())
        physics[usable] = operation.baseline(take(columns, usable), found)
    return physics


def far_from(time_us: np.ndarray, physics_us: np.ndarray) -> np.ndarray:
    """Return a mask of rows that lie farther from the line than three times the rows' scatter about it."""
    if not np.isfinite(physics_us).any():
        return np.zeros(time_us.size, dtype=bool)
    ratio = np.log(time_us / physics_us)
    low, middle, high = np.nanpercentile(ratio, (25, 50, 75))
    return np.abs(ratio - middle) > SCATTER_LIMIT * max(high - low, LEAST_SCATTER)


def peak_tflops(fingerprint: Mapping[str, Any], dtype: str, system: Mapping[str, Any] | None = None) -> float:
    """Return the arithmetic peak of 16-bit types as a system file states it, else from units, clock and architecture.

    0 where nothing tells it.
    """
    if dtype not in ("bfloat16", "float16"):
        return 0.0
    if stated := device_peaks(system or {})[0]:
        return stated / 1e12
    per_clock = FLOPS_PER_CLOCK.get(fingerprint.get("arch", ""), 0)
    return float(per_clock * fingerprint.get("units", 0) * fingerprint.get("clock_max_mhz", 0)) / 1e6


def rate_words(rate: float) -> str:
    """Return a rate with three digits, never as a power of ten."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def anchor_course(readings: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the anchor's ``time`` over its median and its ``clock`` over the highest (NaN where untold), by look."""
    columns = ["case_id", "time_us", "readings.clock_mhz"]
    looks = pd.json_normalize(list(readings)).reindex(columns=columns)
    time = looks["time_us"] / looks.groupby("case_id")["time_us"].transform("median")
    clock = looks["readings.clock_mhz"] / looks["readings.clock_mhz"].max()
    return pd.DataFrame({"time": time, "clock": clock}).set_index(looks.index + 1)


def quantiles_by_size(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the 10th, 50th and 90th percentile of time, and the median of physics, by octave of size."""
    size = np.exp2(np.rint(np.log2(rows["size"])))
    found = (
        rows.groupby(size)["time_us"].quantile([0.1, 0.5, 0.9]).unstack().set_axis(["low", "middle", "high"], axis=1)
    )
    return found.assign(physics=rows.groupby(size)["physics_us"].median())


def physics_lines(rows: pd.DataFrame) -> Iterator[pd.Series]:
    """Yield the physics line of each of the commonest shapes: its median by size, so that it never runs back."""
    for curve, _ in Counter(rows["curve"]).most_common(MOST_LINES):
        line = rows[rows["curve"] == curve].dropna(subset="physics_us")
        yield line.groupby("size")["physics_us"].median()


def plot_times(of: OperationRows, ax: Axes) -> None:
    """Draw time against size on logarithmic axes: points and physics of the commonest shapes, or bands of many rows."""
    rows = of.rows.query("size > 0")
    good, doubtful = rows[~rows["doubtful"]], rows[rows["doubtful"]]
    if len(rows) > MOST_POINTS:
        band = quantiles_by_size(good)
        ax.fill_between(band.index, band["low"], band["high"], color=ATTENTION, alpha=0.2, linewidth=0)
        ax.plot(band["middle"], "o-", color=ATTENTION, label="median, and where eight in ten lie")
        lines = [band["physics"].dropna()]
        doubtful = doubtful.iloc[np.linspace(0, len(doubtful) - 1, min(len(doubtful), MOST_CROSSES)).astype(int)]
    else:
        ax.plot(good["size"], good["time_us"], ".", color=ATTENTION, label="rows")
        lines = list(physics_lines(rows))
    for line in lines:
        ax.plot(line, "-", color=BEFORE, linewidth=1, label="physics" if line is lines[0] else None)
    if len(doubtful):
        ax.plot(doubtful["size"], doubtful["time_us"], "x", color=DOUBTFUL, markersize=3, label="doubtful")
    ax.set(xscale="log", yscale="log", xlabel=of.size_label, ylabel="time, µs")
    ax.legend(**ABOVE, ncols=3)


def plot_throughput(of: OperationRows, peak: float, ax: Axes) -> None:
    """Draw TFLOP/s (GB/s where nothing is computed) against time, with the peak where it is known."""
    rows = of.rows.query("rate > 0 and not doubtful")
    line, label = (peak, "peak") if peak > 0 and of.unit == "TFLOP/s" else (rows["rate"].max(), "best seen")
    if len(rows) > MOST_POINTS:
        how: dict[str, Any] = {"xscale": "log", "yscale": "log", "bins": "log", "gridsize": 45, "mincnt": 1}
        ax.hexbin(rows["time_us"], rows["rate"], cmap="Oranges", linewidths=0, rasterized=True, **how)
    else:
        ax.loglog(rows["time_us"], rows["rate"], ".", color=EXPERTS)
    ax.axhline(line, color=INK, linewidth=0.8)
    ax.text(0.02, line, f"{label} {rate_words(line)}", transform=ax.get_yaxis_transform(), fontsize=8, va="bottom")
    ax.set(xlabel="time, µs", ylabel=of.unit)


def plot_course(readings: Sequence[Mapping[str, Any]], limit: float, ax: Axes) -> None:
    """Draw how the anchor's time, and the clock, went through the sweep."""
    course = anchor_course(readings)
    ax.axhspan(1 - limit, 1 + limit, color=AFTER, alpha=0.12, linewidth=0)
    ax.plot(course["time"], "o-", color=ATTENTION, linewidth=1.2, label="time of the anchor over its median")
    if course["clock"].notna().any():
        ax.plot(course["clock"], "-", color=EXPERTS, linewidth=1.2, label="clock over its highest")
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
    peak = peak_tflops(device, dtype, meta.get("system"))
    watched = "Are these times to be trusted" if device.get("origin") == "published" else "Was the device steady"
    sections: list[Section] = [
        (watched, mark, _steadiness(measurements, operations)),
        ("Operations", mark, _overview(operations, peak)),
        *((one.name, mark, _operation(one, peak)) for one in operations),
        ("Rounds", "measured", [_rounds(meta.get("rounds") or ())]),
        ("Ranks", "measured", _ranks(meta.get("ranks") or ())),
        ("Left out: what lies beyond is extrapolated", "", [Table(LIMITS, meta.get("limits") or ())]),
        ("What did not run", "", [Table(FAILURES, failures(measurements))]),
        ("Where it comes from", "", [_facts(measurements)]),
    ]
    units = f", {device['units']} units" if device["units"] else ""
    model = meta["model"]["name"] or "a model without a name" if meta.get("model") else "no single model"
    subtitle = f"{device['name']} ({device['arch']}{units}), {model}, {len(measurements)} rows"
    return page("Profile", subtitle, sections)


def failures(measurements: Measurements) -> list[dict[str, Any]]:
    """Return what has no time: operation and direction, status, message, and the number of rows."""
    rows = measurements.take(measurements.rows["status"] != "ok").rows
    names = ["op", "direction", "status", "message"]
    return pd.DataFrame(rows, columns=names).value_counts(sort=False).reset_index(name="rows").to_dict("records")


def _steadiness(measurements: Measurements, operations: Sequence[OperationRows]) -> list[Block]:
    meta = measurements.meta
    found, timed = meta.get("steadiness"), priced_of({(op, way) for op, way in zip(*_ways(measurements), strict=True)})
    if not found and meta["fingerprint"].get("origin") == "published":
        return [*_published(meta, operations), timed]
    if not found:
        return [verdict("Nobody watched: profile again.", "Not known."), timed]
    readings = (meta.get("anchor") or {}).get("readings") or ()
    limit = float((meta.get("params") or {}).get("max_drift", 0.25))
    shares = {text: f"{100 * found[name]:.1f}%" for name, text in SHARES.items() if found.get(name) is not None}
    held = [f"{reason} at {looks} look{'s' * (looks != 1)}" for reason, looks in (found.get("held_by") or {}).items()]
    yes = verdict("Nothing that was watched left its limits.", "Yes.")
    no = verdict("Do not fit these times; close other work and profile again into a new folder.", "No.")
    return [
        yes if found["steady"] else no,
        () if found["steady"] else found["problems"],
        timed,
        shares | {"clocks held down by": ", ".join(held)},
        as_svg(panels(7.2, 2.6, partial(plot_course, readings, limit)), "course") if readings else "",
    ]


def _ways(measurements: Measurements) -> tuple[list[str], list[str]]:
    rows = measurements.select(status="ok").rows
    return rows["op"].tolist(), rows["direction"].tolist()


def _published(meta: Mapping[str, Any], operations: Sequence[OperationRows]) -> list[Block]:
    """Say whether anything in imported tables is impossible, and how far another software would be."""
    flagged, rows = sum(of.rows["flagged"].sum() for of in operations), sum(len(of.rows) for of in operations)
    doubts = list(meta.get("doubts") or ())
    yes = f"nothing in these tables is impossible on this device; {flagged} of {rows} rows contradict it or their "
    yes += "neighbours and are left out of fits."
    no = verdict("Choose other tables, or measure.", "No.")
    others = (
        "Nobody here measured them. The same GPU with another library differs by 13 to 33% in experts and 3 to 15% in "
        "attention (median of public tables): a profile of your own software is better."
    )
    return [no if doubts else verdict(yes, "As far as can be told, yes:"), doubts, others]


def _overview(operations: Sequence[OperationRows], peak: float) -> list[Block]:
    lines = []
    for of in operations:
        off = np.log(of.rows["time_us"] / of.rows["physics_us"]).abs().median()
        best = of.rows["rate"][~of.rows["doubtful"]].max()
        lines.append(
            {
                "operation": of.name,
                "rows": len(of.rows),
                "doubtful": of.rows["doubtful"].sum(),
                "of them flagged": of.rows["flagged"].sum(),
                "from the physics line": "-" if np.isnan(off) else f"{off:.1%}",
                "best": f"{rate_words(best)} {of.unit}" if best > 0 else "-",
                "of the peak": f"{best / peak:.0%}" if peak and best > 0 and of.unit == "TFLOP/s" else "-",
            }
        )
    words = (
        f"The arithmetic peak is {peak:.0f} TFLOP/s, as the tables' system file states it, else multiprocessors x "
        "highest clock x operations per clock. Best: among rows without a doubt."
        if peak
        else "The device's peak is not known: throughput is shown against the best that was seen here."
    )
    return [words, as_table(lines)]


def _operation(of: OperationRows, peak: float) -> list[Block]:
    rows, said = of.rows, []
    if doubtful := rows["doubtful"].sum():
        said.append(
            f"Red crosses: {doubtful} doubtful rows, slower than a larger case ({rows['flagged'].sum()}) or farther "
            "from the line than three times the rows' scatter about it."
        )
    if (idle := rows["time_us"][rows["size"] == 0]).size:
        said.append(f"With nothing to do it takes {idle.median():.1f} µs.")
    if not (rows["size"] > 0).any():
        return [" ".join(said)]
    what = "that leave a rank" if of.unit == "GB/s" else "of weights, inputs and outputs"
    said.append(f"Best {rate_words(rows['gbps'][~rows['doubtful']].max())} GB/s {what}.")
    drawn = panels(9.6, 3.3, partial(plot_times, of), partial(plot_throughput, of, peak))
    words = ["Grey: the physics line, of all rows or the commonest shapes.", *said]
    return [" ".join(words), as_svg(drawn, of.name.replace(" ", "-"))]


def _rounds(rounds: Sequence[Mapping[str, Any]]) -> Table:
    ops = sorted({op for one in rounds for op in one["errors_pct"]})
    lines = []
    for number, one in enumerate(rounds, 1):
        line = {"round": number, "cases": one["cases"], "minutes": f"{one['minutes']:.2f}"}
        for op in ops:
            error = f"{one['errors_pct'][op]:.1f}" if op in one["errors_pct"] else "-"
            line[f"{op.replace('_', ' ')}, held-out error %"] = error
        lines.append(line | {"stopped by": one["stopped_by"].replace("_", " ")})
    return as_table(lines)


def _ranks(ranks: Sequence[Mapping[str, Any]]) -> list[Block]:
    if len(ranks) < 2:
        return []
    slow = max(ranks, key=lambda one: one["speed"])
    words = f"Slowest: rank {slow['rank']} on {slow['host']}, {100 * (slow['speed'] - 1):.1f}% above the median time."
    heads = {"rank": "{rank}", "host": "{host}", "device": "{device}", "time over the median": "{speed:.3f}"}
    return [words, Table(heads, ranks)]


def _facts(measurements: Measurements) -> dict[str, Any]:
    meta = measurements.meta
    device = meta["fingerprint"]
    l2 = device.get("l2_mib", 0)
    return {
        "device": f"{device['name']}, {device['memory_gib']} GiB" + (f", {l2} MiB L2" if l2 else ""),
        "links": ", ".join(filter(None, (device["interconnect"], device.get("pcie", ""), device.get("network", "")))),
        "ranks per node": str(device["ranks_per_node"]),
        "software": ", ".join(f"{name} {value}" for name, value in sorted(device["software"].items())),
        "timed, but may train otherwise": _differences(measurements),
        "number type": str(meta.get("dtype", "")),
        "left out for their number type": "; ".join(skipped_words(meta)),
        "tables not chosen": ", ".join((meta.get("provenance") or {}).get("passed_over") or ()),
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

"""What ``routepack profile --report`` leaves: one self-contained HTML page that tells a good profile from a bad one.

The page lies beside the measurements as ``profile-report.html``. Every number is measured here or published, as the
rows say; the physics line is fitted to the rows it is drawn through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler.files import write_text
from routepack_tune.reports.figures import as_svg, new_figure
from routepack_tune.reports.page import Block, Section, Table, Verdict, page
from routepack_tune.reports.profile_figures import (
    EXCHANGES,
    OperationRows,
    operation_rows,
    peak_tflops,
    plot_course,
    plot_throughput,
    plot_times,
)

if TYPE_CHECKING:
    from profiler import Measurements

REPORT_FILE = "profile-report.html"
SHARES = (
    ("busy_share", "of the time inside warm-up, cache flushes and timed runs"),
    ("drift", "largest departure of the anchor from its median"),
    ("ends", "anchor at the end of the sweep against its start"),
    ("order_effect", "last repeats of a case against its first"),
    ("foreign_cpu_share", "of the CPU used by other processes"),
    ("clock_fall", "lowest clock under the highest"),
)


def write_profile_report(measurements: Measurements, out: Path | str) -> Path:
    """Write the page into the folder of the measurements; return its path."""
    path = Path(out) / REPORT_FILE
    write_text(path, render_profile(measurements))
    return path


def render_profile(measurements: Measurements) -> str:
    """Return the page."""
    meta, rows = measurements.meta, measurements.rows
    sources = sorted(set(rows["source"].tolist()))
    mark = f"{' and '.join(sources)} times" if sources else ""
    dtype = str(meta.get("dtype") or Counter(rows["dtype"].tolist()).most_common(1)[0][0])
    device = meta["fingerprint"]
    operations = operation_rows(measurements)
    failed = Table(("operation", "status", "message", "rows"), failures(measurements))
    peak = peak_tflops(device, dtype)
    sections: list[Section] = [
        ("Was the device steady", mark, _steadiness(meta)),
        ("Operations", mark, _overview(operations, peak)),
        *((one.name, mark, _operation(one, peak)) for one in operations),
        ("Rounds", "measured", [_rounds(meta.get("rounds") or ())]),
        ("Ranks", "measured", _ranks(meta.get("ranks") or ())),
        ("Left out: what lies beyond is extrapolated", "", [_limits(meta.get("limits") or ())]),
        ("What did not run", "", [failed]),
        ("Where it comes from", "", [_facts(meta)]),
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
    shares = {text: f"{100 * found[name]:.1f}%" for name, text in SHARES if found.get(name) is not None}
    held = [f"{reason} at {looks} look{'s' * (looks != 1)}" for reason, looks in (found.get("held_by") or {}).items()]
    yes = Verdict("Nothing that was watched left its limits.", "Yes.")
    no = Verdict("Do not fit these times; close other work and profile again into a new folder.", "No.")
    return [
        yes if found["steady"] else no,
        () if found["steady"] else found["problems"],
        shares | {"clocks held down by": ", ".join(held)},
        as_svg(plot_course(readings, limit).figure, "course") if readings else "",
    ]


def _overview(operations: Sequence[OperationRows], peak: float) -> list[Block]:
    lines = []
    for rows in operations:
        best = np.nanmax(rows.gbps_R if rows.op in EXCHANGES else rows.tflops_R)
        rate = f"{best:.3g} {'GB/s' if rows.op in EXCHANGES else 'TFLOP/s'}"
        share = f"{100 * best / peak:.0f}%" if peak and rows.op not in EXCHANGES else "-"
        off = np.abs(np.log(rows.time_us / rows.physics_us))
        from_line = f"{100 * float(np.nanmedian(off)):.1f}%" if np.isfinite(off).any() else "-"
        lines.append((rows.name, rows.time_us.size, int(rows.doubtful_R.sum()), rows.flagged, from_line, rate, share))
    words = (
        f"The arithmetic peak is {peak:.0f} TFLOP/s: multiprocessors x highest clock x operations per clock."
        if peak
        else "The device's peak is not known: throughput is shown against the best that was seen here."
    )
    heads = ("operation", "rows", "doubtful", "of them flagged", "from the physics line", "best", "of the peak")
    return [words, Table(heads, lines)]


def _operation(rows: OperationRows, peak: float) -> list[Block]:
    figure = new_figure(9.6, 3.3)
    left, right = figure.subplots(1, 2)
    plot_times(rows, left)
    plot_throughput(rows, peak, right)
    said = ["Grey: the physics line, for the commonest shapes."]
    if rows.doubtful_R.any():
        said.append(
            f"Red crosses: {int(rows.doubtful_R.sum())} doubtful rows, slower than a larger case ({rows.flagged}) or "
            "farther from the line than three times the rows' scatter about it."
        )
    idle = rows.time_us[rows.size_R == 0]
    if idle.size:
        said.append(f"With nothing to do it takes {float(np.median(idle)):.1f} µs.")
    if (rows.gbps_R > 0).any():
        said.append(f"Best {float(np.nanmax(rows.gbps_R)):.3g} GB/s of weights, inputs and outputs.")
    return [" ".join(said), as_svg(figure, rows.name.replace(" ", "-"))]


def _rounds(rounds: Sequence[Mapping[str, Any]]) -> Table:
    ops = sorted({op for one in rounds for op in one.get("errors_pct", {})})
    lines = []
    for number, one in enumerate(rounds, 1):
        errors = [f"{one['errors_pct'][op]:.1f}" if op in one["errors_pct"] else "-" for op in ops]
        stopped = str(one.get("stopped_by", "")).replace("_", " ")
        lines.append((number, one["cases"], f"{one['minutes']:.2f}", *errors, stopped))
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


def _facts(meta: Mapping[str, Any]) -> dict[str, Any]:
    device = meta["fingerprint"]
    return {
        "device": f"{device['name']}, {device['memory_gib']} GiB, {device.get('l2_mib', 0) or 'unknown'} MiB L2",
        "links": ", ".join(filter(None, (device["interconnect"], device.get("pcie", ""), device.get("network", "")))),
        "ranks per node": str(device["ranks_per_node"]),
        "software": ", ".join(f"{name} {value}" for name, value in sorted(device["software"].items())),
        "number type": str(meta.get("dtype", "")),
        "threads": str(meta.get("threads", "")),
        "token cap": str(meta.get("max_tokens", "")),
        "backward": str(meta.get("backward", "")),
    }

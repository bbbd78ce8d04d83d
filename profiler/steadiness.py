"""Was the device steady? What a profile says about its own trustworthiness.

One fixed case, the anchor, is timed again through the sweep: its spread is the drift. Every run of a sweep also notes
how its time went: inside timed work or not, who else used the CPU, and what the device said of its clocks.

Legend: a *session* is one run of the command, a resumed sweep has several; a *problem* is one plain sentence; a *job*
is this process, or all workers that one launcher started on this node: none is foreign to another.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from profiler.cases.case import Case
from profiler.device.backend import TorchBackend
from profiler.device.fingerprint import own_cores, read_text
from profiler.journal import Journal
from profiler.params import ProfileParams
from profiler.timer import time_case

WARM_UP_S = {"cpu": 0.1, "cuda": 1.0}
"""Work before the first case: right after idling, clocks still rise."""
MAX_FOREIGN = {"cpu": 0.10, "cuda": 0.50}
"""Share of the CPU that others may use; a GPU only needs the host to launch."""
MAX_ORDER_EFFECT = 0.10
"""Later repeats of a case may be this much slower than its first ones, in the median over cases."""
FEWEST_REPEATS = 6
SHORTEST_US = 100.0
"""Shorter runs scatter too much to tell their order."""
FEWEST_FOR_ENDS = 4
"""Anchor readings from which the beginning and the end of a sweep are compared."""
BUSY_FIELDS = (0, 1, 2, 5, 6, 7)
"""user, nice, system, irq, softirq and what a hypervisor took, of a line of ``/proc/stat``."""
FAULTS = {
    0x008: "a hardware slowdown",
    0x020: "its temperature (software)",
    0x040: "its temperature (hardware)",
    0x080: "the power brake",
}
"""Bits of ``slowed_by`` that no setting asked for: cooling or power supply fail the card."""
SLOWDOWNS = {0x004: "the power cap", **FAULTS}
"""Those that cost time; idle, application clocks and display clocks are no faults."""


def time_anchor(anchor: Case, backend: TorchBackend, params: ProfileParams, journal: Journal) -> None:
    """Time the anchor once more, forward, and note it with what the device said right after."""
    forward = time_case(anchor, backend, params, directions=("forward",))[0]
    if forward["status"] == "ok":
        looked = {name: forward[name] for name in ("case_id", "time_us")}
        journal.add(anchor=looked | {"readings": backend.readings()})


@contextmanager
def watched(backend: TorchBackend, journal: Journal) -> Iterator[None]:
    """Note how one run of a sweep went: one ``session`` line of the journal, written also when it was interrupted."""
    held, busy_s = len(journal.rows) + len(journal.anchors), backend.busy_s
    began, before = time.perf_counter(), cpu_use()
    while time.perf_counter() - began < WARM_UP_S[backend.kind]:
        backend.flush()
        backend.wait()  # Not timed: what covers a launch is measured on a warm card.
    try:
        yield
    finally:
        # A refused folder stays as it was, and a run that found everything done says nothing about the device.
        if len(journal.rows) + len(journal.anchors) != held:
            wall_s, after = time.perf_counter() - began, cpu_use()
            session = {"kind": backend.kind, "wall_s": wall_s, "busy_s": backend.busy_s - busy_s}
            told = {"foreign_cpu_share": foreign_share(before, after, wall_s)}
            journal.add(session=session | told | {"throttled": after.throttled - before.throttled})


def steadiness(journal: Journal, params: ProfileParams) -> dict[str, Any]:
    """Return the verdict over all sessions of a sweep and the numbers behind it, None where nobody could tell.

    Clocks that fall and a power cap are how a card works under GEMMs, in training too: facts, no problems.
    """
    anchors, sessions, readings = journal.anchors, journal.sessions, [one["readings"] for one in journal.anchors]
    times: dict[str, list[float]] = {}
    for one in anchors:
        times.setdefault(one["case_id"], []).append(one["time_us"])
    course = [one["time_us"] / median(times[one["case_id"]]) for one in anchors]
    clocks = [one["clock_mhz"] for one in readings if one.get("clock_mhz", 0) > 0]
    held = Counter(why for bit, why in SLOWDOWNS.items() for one in readings if int(one.get("slowed_by", 0)) & bit)
    wall_s = sum(one["wall_s"] for one in sessions)
    kind = sessions[-1]["kind"] if sessions else "cpu"
    told = [one for one in sessions if one["foreign_cpu_share"] is not None]
    foreign_s = sum(one["wall_s"] * one["foreign_cpu_share"] for one in told)
    found: dict[str, Any] = {
        "drift": max((abs(time - 1) for time in course), default=0.0),
        "ends": _rise(course, 10) if len(course) >= FEWEST_FOR_ENDS else None,
        "order_effect": order_effect([row["repeats_us"] for row in journal.rows.values() if "repeats_us" in row]),
        "clock_fall": 1 - min(clocks) / max(clocks) if len(clocks) > 1 else None,
        "held_by": dict(held),
        "wall_s": wall_s,
        "busy_share": sum(one["busy_s"] for one in sessions) / wall_s if sessions else None,
        "foreign_cpu_share": foreign_s / sum(one["wall_s"] for one in told) if told else None,
    }
    ends, most, max_foreign = found["ends"] or 0.0, params.max_drift, MAX_FOREIGN[kind]
    checks = (
        (found["drift"], most, f"one case left its median by {{:.0%}} through the sweep (limit {most:.0%})"),
        (ends, most / 2, "the same case was {:.0%} slower at the end of the sweep than at the start"),
        (-ends, most / 2, "the same case was {:.0%} faster at the end of the sweep than at the start"),
        (found["order_effect"], MAX_ORDER_EFFECT, "the last repeats of a case were {:.0%} slower than its first ones"),
        (found["foreign_cpu_share"], max_foreign, "other processes used {:.0%} of the CPU that this one may use"),
        (sum(one["throttled"] for one in sessions), 0, "the container's CPU limit stopped this process {} times"),
    )
    problems = [sentence.format(value) for value, limit, sentence in checks if (value or 0.0) > limit]
    looks = [f"{why} at {held[why]} of {len(anchors)} looks" for why in FAULTS.values() if why in held]
    problems += [f"clocks were held down by {faults}" for faults in looks]
    return found | {"steady": not problems, "problems": problems}


def order_effect(repeats: Sequence[Sequence[float]]) -> float | None:
    """Return by which share a case's last third of repeats is slower than its first, median over long enough cases."""
    rises = [_rise(times, 3) for times in repeats if len(times) >= FEWEST_REPEATS and median(times) >= SHORTEST_US]
    return median(rises) if rises else None


def _rise(times: Sequence[float], parts: int) -> float:
    """Return by which share the last of so many parts lies above the first."""
    count = max(1, len(times) // parts)
    return median(times[-count:]) / median(times[:count]) - 1


class CpuUse(NamedTuple):
    """Hold running totals in seconds of CPU; a difference of two is what happened between them."""

    cores: int
    """Those that this process may run on."""
    machine_s: float | None
    """All processes on these cores, and what a hypervisor took of them; None where the kernel does not tell."""
    job_s: float
    throttled: int
    """How often a container's quota stopped its processes."""


def cpu_use(proc: Path = Path("/proc")) -> CpuUse:
    """Return the totals of now."""
    usable, per_second = own_cores(), os.sysconf("SC_CLK_TCK")
    lines = re.findall(r"^cpu(\d+) (.+)$", read_text(proc / "stat"), re.MULTILINE)
    fields = [[*map(int, line.split()), 0, 0, 0, 0] for core, line in lines if int(core) in usable]
    ticks = sum(core[i] for core in fields for i in BUSY_FIELDS)
    others = 0  # Ticks of the other processes that this one's launcher started.
    for path in proc.glob("[0-9]*/stat") if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1 else ():
        # A process may end while we look; its name, in brackets, may hold anything.
        told = read_text(path).rpartition(")")[2].split()
        if told and int(told[1]) == os.getppid() and path.parent.name != str(os.getpid()):
            others += int(told[11]) + int(told[12])
    stops = re.search(r"^nr_throttled (\d+)$", read_text("/sys/fs/cgroup/cpu.stat"), re.MULTILINE)
    job_s, machine_s = sum(os.times()[:4]) + others / per_second, ticks / per_second if fields else None
    return CpuUse(len(usable), machine_s, job_s, int(stops[1]) if stops else 0)


def foreign_share(before: CpuUse, after: CpuUse, wall_s: float) -> float | None:
    """Return the share of the usable cores' time that others used, a hypervisor included; None if unknown."""
    if before.machine_s is None or after.machine_s is None:
        return None
    others = (after.machine_s - before.machine_s) - (after.job_s - before.job_s)
    return min(1.0, max(0.0, others / (wall_s * after.cores)))

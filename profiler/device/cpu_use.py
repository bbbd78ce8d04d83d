"""Who used the CPU: this job, or others. Read from the kernel's counters; empty where there are none.

Legend: ``cores`` are the ones this process may run on; a job is this process, or all workers that one launcher started
on this node (they measure together, so none is foreign to another).
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
BUSY_FIELDS = (0, 1, 2, 5, 6)
"""user, nice, system, irq, softirq of a line of ``/proc/stat``; field 7 is what a hypervisor took."""
STOLEN_FIELD = 7


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Hold running totals in seconds of CPU; a difference of two is what happened between them."""

    cores: int
    machine_s: float | None
    """All processes on the cores that this one may use; None where the kernel does not tell."""
    stolen_s: float
    job_s: float
    throttled: int
    """How often a container's quota stopped its processes."""


def cpu_use(proc: Path = PROC) -> CpuUse:
    """Return the totals of now."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    ticks = _machine_ticks(proc / "stat", usable)
    per_second = os.sysconf("SC_CLK_TCK")
    return CpuUse(
        cores=len(usable),
        machine_s=None if ticks is None else ticks[0] / per_second,
        stolen_s=0.0 if ticks is None else ticks[1] / per_second,
        job_s=_job_s(proc, per_second),
        throttled=_throttled(),
    )


def foreign_share(before: CpuUse, after: CpuUse, wall_s: float) -> float | None:
    """Return the share of the usable cores' time that others used, a hypervisor included; None if unknown."""
    if before.machine_s is None or after.machine_s is None or not wall_s > 0:
        return None
    others = (after.machine_s - before.machine_s) - (after.job_s - before.job_s) + (after.stolen_s - before.stolen_s)
    return min(1.0, max(0.0, others / (wall_s * after.cores)))


def _machine_ticks(path: Path, usable: set[int]) -> tuple[int, int] | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        busy = stolen = 0
        found = False
        for core, line in re.findall(r"^cpu(\d+) (.+)$", path.read_text(), re.MULTILINE):
            if int(core) in usable:
                fields = [int(text) for text in line.split()]
                busy, found = busy + sum(fields[i] for i in BUSY_FIELDS), True
                stolen += fields[STOLEN_FIELD] if len(fields) > STOLEN_FIELD else 0
        return (busy, stolen) if found else None
    return None


def _job_s(proc: Path, per_second: int) -> float:
    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        parent, me = os.getppid(), os.getpid()
        for path in proc.glob("[0-9]*/stat"):
            # A process may end while we look; its name, in brackets, may hold anything.
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[1]) == parent and path.parent.name != str(me):
                    total += (int(fields[11]) + int(fields[12])) / per_second
    return total


def _throttled() -> int:
    with contextlib.suppress(OSError):
        found = re.search(r"^nr_throttled (\d+)$", Path("/sys/fs/cgroup/cpu.stat").read_text(), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0

"""What a device says of itself while it works: its clocks, and who used the CPU, as plain numbers.

NVML answers for NVIDIA GPUs through its Python binding (the ``nvidia`` extra); a CPU tells its clock where the kernel
does. A reading that is not offered is absent, never 0.

Legend: ``clock_mhz`` (streaming multiprocessors, or the mean of the cores), ``slowed_by`` (NVML's bit mask of the
reasons why clocks are held down). A *job* is this process, or all workers that one launcher started on this node: they
measure together, so none is foreign to another.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from profiler.device.fingerprint import own_cores, read_text

BUSY_FIELDS = (0, 1, 2, 5, 6, 7)
"""user, nice, system, irq, softirq and what a hypervisor took, of a line of ``/proc/stat``."""


def read_gpu(uuid: str) -> dict[str, float]:
    """Return the readings of the NVIDIA GPU with this UUID; empty where NVML or its Python binding is missing."""
    try:
        import pynvml as nvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return {}
    found = {}
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        asked = {"clock_mhz": ("ClockInfo", nvml.NVML_CLOCK_SM), "slowed_by": ("CurrentClocksThrottleReasons",)}
        for name, (function, *arguments) in asked.items():
            # One reading that this card or a tenant may not have hides no other; a name that a binding dropped neither.
            with contextlib.suppress(nvml.NVMLError, AttributeError):
                found[name] = float(getattr(nvml, f"nvmlDeviceGet{function}")(handle, *arguments))
    return found


def read_cpu() -> dict[str, float]:
    """Return the mean clock of the cores, where the kernel tells it."""
    clocks = re.findall(r"^cpu MHz\s*:\s*([\d.]+)$", read_text("/proc/cpuinfo"), re.MULTILINE)
    return {"clock_mhz": sum(map(float, clocks)) / len(clocks)} if clocks else {}


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
    stops = re.search(r"^nr_throttled (\d+)$", read_text("/sys/fs/cgroup/cpu.stat"), re.MULTILINE)
    return CpuUse(
        len(usable),
        ticks / per_second if fields else None,
        sum(os.times()[:4]) + _other_workers_ticks(proc) / per_second,
        int(stops[1]) if stops else 0,
    )


def _other_workers_ticks(proc: Path) -> int:
    """Return the CPU time of the other processes that this one's launcher started."""
    total = 0
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        for path in proc.glob("[0-9]*/stat"):
            # A process may end while we look; its name, in brackets, may hold anything.
            fields = read_text(path).rpartition(")")[2].split()
            if fields and int(fields[1]) == os.getppid() and path.parent.name != str(os.getpid()):
                total += int(fields[11]) + int(fields[12])
    return total


def foreign_share(before: CpuUse, after: CpuUse, wall_s: float) -> float | None:
    """Return the share of the usable cores' time that others used, a hypervisor included; None if unknown."""
    if before.machine_s is None or after.machine_s is None or not wall_s > 0:
        return None
    others = (after.machine_s - before.machine_s) - (after.job_s - before.job_s)
    return min(1.0, max(0.0, others / (wall_s * after.cores)))

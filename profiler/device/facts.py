"""Facts of a machine that its driver and kernel tell: links, network cards, CPU limits, installed kernel packages.

Every fact is empty or 0 where nobody tells it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

KERNEL_PACKAGES = ("flash-attn", "flash-attn-3", "transformer-engine", "deep-ep", "deep-gemm")
"""Distributions whose kernels may run instead of torch's own: their versions are part of what was timed."""


def read_text(path: Path | str) -> str:
    """Return what a file of the kernel says, empty where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _nvidia_smi(*arguments: str) -> str:
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def driver_facts(uuid: str) -> dict[str, str]:
    """Return ``driver``, ``pcie`` (generation and width at their best) and ``clock_max_mhz`` of one NVIDIA GPU."""
    names = "driver_version,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm"
    line = _nvidia_smi("-i", uuid, f"--query-gpu={names}", "--format=csv,noheader,nounits").partition("\n")[0]
    cells = [cell.strip() for cell in line.split(",")]
    driver, generation, width, clock = cells if len(cells) == 4 else ("", "", "", "")
    pcie = f"gen {generation} x{width}" if generation.isdigit() and width.isdigit() else ""
    return {"driver": driver, "pcie": pcie, "clock_max_mhz": clock if clock.isdigit() else "0"}


def nvlink_total(uuid: str) -> str:
    """Return the sum of a GPU's NVLink rates in words."""
    rates = re.findall(r"Link \d+: ([\d.]+) GB/s", _nvidia_smi("nvlink", "--status", "-i", uuid))
    return f"NVLink {sum(map(float, rates)):.0f} GB/s" if rates else ""


def network_cards(system: Path = Path("/sys")) -> str:
    """Return the rates of the active ports, ``8 x 400 Gb/s InfiniBand``; of Ethernet cards where no port has RDMA."""
    found = Counter(_rdma_ports(system)) or Counter(_ethernet_ports(system))
    ordered = sorted(found.items(), key=lambda item: (-item[0][0], item[0][1]))
    return ", ".join(f"{count} x {rate:g} Gb/s {layer}" for (rate, layer), count in ordered)


def _rdma_ports(system: Path) -> Iterator[tuple[float, str]]:
    for port in system.glob("class/infiniband/*/ports/*"):
        rate = re.match(r"([\d.]+) Gb/sec", read_text(port / "rate"))
        if rate and "ACTIVE" in read_text(port / "state"):
            yield float(rate[1]), read_text(port / "link_layer") or "InfiniBand"


def _ethernet_ports(system: Path) -> Iterator[tuple[float, str]]:
    for card in system.glob("class/net/*"):
        speed = read_text(card / "speed")
        # Bridges and virtual pairs have no device behind them; a port without a cable says -1.
        if (card / "device").exists() and speed.isdigit() and int(speed) > 0:
            yield int(speed) / 1e3, "Ethernet"


def own_cores() -> set[int]:
    """Return the cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def cpu_limit() -> float:
    """Return the cores that a container's quota allows, 0 without one."""
    quota, _, period = read_text("/sys/fs/cgroup/cpu.max").partition(" ")
    if not quota:
        quota, period = (read_text(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    with contextlib.suppress(ValueError, ZeroDivisionError):
        return max(0.0, int(quota) / int(period))
    return 0.0


def usable_cores() -> int:
    """Return the cores this process may use: its affinity, and the quota of its container."""
    cores, limit = len(own_cores()), cpu_limit()
    return max(1, min(cores, int(limit))) if limit else cores


def kernel_packages() -> dict[str, str]:
    """Return the versions of the installed packages that bring their own kernels."""
    found = {}
    for name in KERNEL_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found

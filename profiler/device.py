"""What a device is, as facts that decide times, and how far two devices agree.

The marketing name is information only: a card is known by vendor, architecture, units, memory, interconnect and
ranks per node, so that another wording of the same name never hides a profile, and the same wording never vouches
for different silicon.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from profiler.errors import RoutePackError

GIB = 2**30
MEMORY_TOLERANCE = 0.10
"""Two devices of one kind may report memory this far apart (reserved pages, ECC) and still be near."""


@dataclass(frozen=True)
class DeviceFingerprint:
    """Hold the facts of a device that decide its times."""

    kind: str
    """``cpu`` or ``cuda``."""
    vendor: str
    arch: str
    """``sm_90`` and the like, or the machine type of a CPU."""
    name: str
    """What the driver calls it: information only."""
    units: int
    """Streaming multiprocessors, or cores this process may use; 0 if unknown."""
    memory_gib: int
    interconnect: str
    """How ranks of one node reach one another; empty if unknown."""
    ranks_per_node: int
    software: dict[str, str] = field(default_factory=dict)
    origin: str = "measured"
    """``measured`` here, or ``published`` by somebody else."""

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> DeviceFingerprint:
        """Read what :meth:`to_dict` wrote.

        Raises
        ------
        RoutePackError
            If a field is missing or unknown.
        """
        try:
            return cls(**value)
        except TypeError as error:
            raise RoutePackError(
                f"Device fingerprint {value!r} is damaged: {error}. Run `routepack profile` again."
            ) from None


@dataclass(frozen=True, slots=True)
class Match:
    """Say how far a found device agrees with the wanted one."""

    level: str
    """``exact`` (use), ``near`` (use with a warning) or ``different`` (refuse unless forced)."""
    reasons: tuple[str, ...]
    """What differs, one clause each; empty when exact."""


def compare_fingerprints(wanted: DeviceFingerprint, found: DeviceFingerprint) -> Match:
    """Compare two devices; hardware decides, a name alone never does."""
    far: list[str] = []
    close: list[str] = []
    for name in ("kind", "vendor", "arch"):
        _note(far, name, getattr(wanted, name), getattr(found, name))
    if 0 in (wanted.units, found.units):
        _note(close, "units", wanted.units or "unknown", found.units or "unknown")
    else:
        _note(far, "units", wanted.units, found.units)
    larger = max(wanted.memory_gib, found.memory_gib)
    within = abs(wanted.memory_gib - found.memory_gib) <= MEMORY_TOLERANCE * larger
    _note(close if within else far, "memory", f"{wanted.memory_gib} GiB", f"{found.memory_gib} GiB")
    for name in ("interconnect", "ranks_per_node", "name"):
        _note(close, name, getattr(wanted, name) or "unknown", getattr(found, name) or "unknown")
    for key in sorted(wanted.software.keys() | found.software.keys()):
        _note(close, key, wanted.software.get(key, "absent"), found.software.get(key, "absent"))
    level = "different" if far else "near" if close else "exact"
    return Match(level, tuple(far + close))


def _note(reasons: list[str], what: str, wanted: object, found: object) -> None:
    if wanted != found:
        reasons.append(f"{what} is {found}, expected {wanted}")


def fingerprint_device(device: str | None = None) -> DeviceFingerprint:
    """Return the facts of ``cpu`` or ``cuda`` on this machine; None takes CUDA where torch can see a device.

    Raises
    ------
    RoutePackError
        If CUDA is asked for and torch is missing or sees no device.
    """
    if device not in (None, "cpu", "cuda"):
        raise RoutePackError(f"Unknown device {device!r}: expected cpu or cuda.")
    if device == "cuda" and not _cuda_visible():
        raise RoutePackError(
            "Device cuda was asked for, but torch sees no CUDA device here. Run on a GPU node with a CUDA build of "
            "torch, or use --device cpu."
        )
    if device == "cuda" or (device is None and _driver_present() and _cuda_visible()):
        return _fingerprint_cuda()
    return _fingerprint_cpu()


def _driver_present() -> bool:
    # torch takes seconds to import: without a driver there is nothing to ask it. Only Linux has these files.
    if platform.system() != "Linux":
        return True
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/proc/driver/nvidia"))


def _cuda_visible() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def _fingerprint_cuda() -> DeviceFingerprint:
    import torch

    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    amd = torch.version.hip is not None
    software = {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.hip if amd else torch.version.cuda),
        "driver": query_nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader"),
    }
    return DeviceFingerprint(
        kind="cuda",
        vendor="amd" if amd else "nvidia",
        arch=facts.gcnArchName.split(":")[0] if amd else f"sm_{facts.major}{facts.minor}",
        name=facts.name,
        units=facts.multi_processor_count,
        memory_gib=round(facts.total_memory / GIB),
        interconnect=_nvlink(),
        ranks_per_node=torch.cuda.device_count(),
        software=software,
    )


def query_nvidia_smi(*arguments: str) -> str:
    """Return the first line that nvidia-smi answers, empty where it is absent or fails."""
    return (_nvidia_smi(*arguments).splitlines() or [""])[0].strip()


def _nvidia_smi(*arguments: str) -> str:
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _nvlink() -> str:
    rates = re.findall(r"Link \d+: ([\d.]+) GB/s", _nvidia_smi("nvlink", "--status", "-i", "0"))
    return f"NVLink {sum(map(float, rates)):.0f} GB/s" if rates else ""


def _fingerprint_cpu() -> DeviceFingerprint:
    import importlib.metadata

    software = {"system": platform.system()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        software["torch"] = importlib.metadata.version("torch")
    vendor, name = _cpu_names()
    return DeviceFingerprint(
        kind="cpu",
        vendor=vendor,
        arch=platform.machine(),
        name=name,
        units=usable_cores(),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB),
        interconnect="",
        ranks_per_node=1,
        software=software,
    )


def usable_cores() -> int:
    """Return the cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_names() -> tuple[str, str]:
    """Return vendor and model name, from the kernel where it tells, else what Python knows."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    facts = dict(re.findall(r"^(vendor_id|model name)\s*:\s*(.+)$", text, re.MULTILINE))
    fallback = platform.processor() or platform.machine()
    return facts.get("vendor_id", fallback), facts.get("model name", fallback)

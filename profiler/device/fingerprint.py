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
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from profiler.device.facts import driver_facts, kernel_packages, network_cards, nvlink_total, usable_cores
from profiler.errors import RoutePackError

GIB = 2**30
TOLERANCE = 0.10
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
    l2_mib: int = 0
    """Last cache before the memory (GPUs); 0 if unknown."""
    pcie: str = ""
    """``gen 5 x16``, the best that card and slot do; empty if unknown."""
    network: str = ""
    """Active ports of the node, ``8 x 400 Gb/s InfiniBand``; empty if unknown."""
    clock_max_mhz: int = 0
    """Highest clock of the multiprocessors; 0 if unknown."""

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
    for name in ("memory_gib", "l2_mib"):
        _note_size(far, close, name, getattr(wanted, name), getattr(found, name))
    for name in ("interconnect", "ranks_per_node", "name"):
        _note(close, name, getattr(wanted, name) or "unknown", getattr(found, name) or "unknown")
    for name in ("pcie", "network", "clock_max_mhz"):
        # Facts that older files and published tables do not know: what one side cannot tell is no difference.
        if getattr(wanted, name) and getattr(found, name):
            _note(close, name, getattr(wanted, name), getattr(found, name))
    for key in sorted(wanted.software.keys() | found.software.keys()):
        _note(close, key, wanted.software.get(key, "absent"), found.software.get(key, "absent"))
    level = "different" if far else "near" if close else "exact"
    return Match(level, tuple(far + close))


def _note(reasons: list[str], what: str, wanted: object, found: object) -> None:
    if wanted != found:
        reasons.append(f"{what} is {found}, expected {wanted}")


def _note_size(far: list[str], close: list[str], what: str, wanted: int, found: int) -> None:
    """Note sizes that differ: by little, or where one side does not know its own, they are near."""
    name, unit = what.rsplit("_", 1)
    text = {"gib": "GiB", "mib": "MiB"}[unit]
    if 0 in (wanted, found):
        # An L2 cache is unknown to every older file: not worth a word.
        if what == "memory_gib":
            _note(close, name, f"{wanted} {text}" if wanted else "unknown", f"{found} {text}" if found else "unknown")
        return
    within = abs(wanted - found) <= TOLERANCE * max(wanted, found)
    _note(close if within else far, name, f"{wanted} {text}", f"{found} {text}")


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
    uuid = f"GPU-{facts.uuid}"
    driver = driver_facts(uuid)
    software = {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.hip if amd else torch.version.cuda),
        "driver": driver["driver"],
    }
    return DeviceFingerprint(
        kind="cuda",
        vendor="amd" if amd else "nvidia",
        arch=facts.gcnArchName.split(":")[0] if amd else f"sm_{facts.major}{facts.minor}",
        name=facts.name,
        units=facts.multi_processor_count,
        memory_gib=round(facts.total_memory / GIB),
        interconnect=nvlink_total(uuid),
        ranks_per_node=torch.cuda.device_count(),
        software=software | kernel_packages(),
        l2_mib=round(facts.L2_cache_size / 2**20),
        pcie=driver["pcie"],
        network=network_cards(),
        clock_max_mhz=int(driver["clock_max_mhz"]),
    )


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
        network=network_cards(),
    )


def _cpu_names() -> tuple[str, str]:
    """Return vendor and model name, from the kernel where it tells, else what Python knows."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    facts = dict(re.findall(r"^(vendor_id|model name)\s*:\s*(.+)$", text, re.MULTILINE))
    fallback = platform.machine()  # platform.processor would start a process
    return facts.get("vendor_id", fallback), facts.get("model name", fallback)

"""What a device is, as facts that decide times, and how far two devices agree.

The marketing name is information only: a card is known by vendor, architecture, units, memory, interconnect and
ranks per node, so that another wording of the same name never hides a profile, and the same wording never vouches
for different silicon.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from profiler.device.facts import driver_facts, kernel_packages, network_cards, nvlink_total, read_text, usable_cores
from profiler.errors import RoutePackError

GIB = 2**30
TOLERANCE = 0.10
"""Two devices of one kind may report memory this far apart (reserved pages, ECC) and still be near."""
FAR, NEAR, NONE = "different", "near", "exact"
RULES = {
    "kind": (FAR, FAR),
    "vendor": (FAR, FAR),
    "arch": (FAR, FAR),
    "units": (FAR, NEAR),
    "memory_gib": (FAR, NEAR),
    "l2_mib": (FAR, NONE),
    "interconnect": (NEAR, NEAR),
    "ranks_per_node": (NEAR, NEAR),
    "name": (NEAR, NEAR),
    "pcie": (NEAR, NONE),
    "network": (NEAR, NONE),
    "clock_max_mhz": (NEAR, NONE),
}
"""By fact: what another value means, and what it means where one side does not know its own."""
SIZES = {"memory_gib": "GiB", "l2_mib": "MiB"}
"""Facts of which another value within the tolerance is near."""


@dataclass(frozen=True)
class DeviceFingerprint:
    """Hold the facts of a device that decide its times; unknown ones are 0 or empty."""

    kind: str
    """``cpu`` or ``cuda``."""
    vendor: str
    arch: str
    """``sm_90`` and the like, or the machine type of a CPU."""
    name: str
    """What the driver calls it: information only."""
    units: int
    """Streaming multiprocessors, or cores this process may use."""
    memory_gib: int
    interconnect: str
    """How ranks of one node reach one another."""
    ranks_per_node: int
    software: dict[str, str] = field(default_factory=dict)
    origin: str = "measured"
    """``measured`` here, or ``published`` by somebody else."""
    l2_mib: int = 0
    """Last cache before the memory (GPUs)."""
    pcie: str = ""
    """``gen 5 x16``, the best that card and slot do."""
    network: str = ""
    """Active ports of the node, ``8 x 400 Gb/s InfiniBand``."""
    clock_max_mhz: int = 0
    """Highest clock of the multiprocessors."""

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> DeviceFingerprint:
        """Read what :meth:`to_dict` wrote; raise RoutePackError if a field is missing or unknown."""
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
    reasons: dict[str, list[str]] = {FAR: [], NEAR: [], NONE: []}
    for name, (differs, unknown) in RULES.items():
        ours, theirs = getattr(wanted, name), getattr(found, name)
        known = bool(ours and theirs)
        if known and name in SIZES and abs(ours - theirs) <= TOLERANCE * max(ours, theirs):
            differs = NEAR
        if ours != theirs:
            reasons[differs if known else unknown].append(_difference(name, ours, theirs))
    for key in sorted(wanted.software.keys() | found.software.keys()):
        before, now = (one.software.get(key, "absent") for one in (wanted, found))
        if before != now:
            reasons[NEAR].append(_difference(key, before, now))
    return Match(next((level for level in (FAR, NEAR) if reasons[level]), NONE), (*reasons[FAR], *reasons[NEAR]))


def _difference(name: str, wanted: object, found: object) -> str:
    unit = f" {SIZES[name]}" if name in SIZES else ""
    expected, seen = (f"{value}{unit}" if value else "unknown" for value in (wanted, found))
    return f"{name.rpartition('_')[0] if unit else name} is {seen}, expected {expected}"


def fingerprint_device(device: str | None = None) -> DeviceFingerprint:
    """Return the facts of ``cpu`` or ``cuda`` on this machine; None takes CUDA where torch can see a device.

    RoutePackError if CUDA is asked for and torch sees no device.
    """
    if device not in (None, "cpu", "cuda"):
        raise RoutePackError(f"Unknown device {device!r}: expected cpu or cuda.")
    # torch takes seconds to import: without a driver there is nothing to ask it. Only Linux has these files.
    drivers = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/proc/driver/nvidia")
    asked = device == "cuda" or platform.system() != "Linux" or any(Path(path).exists() for path in drivers)
    if device != "cpu" and asked and _cuda_visible():
        return _fingerprint_cuda()
    if device == "cuda":
        raise RoutePackError(
            "Device cuda was asked for, but torch sees no CUDA device here. Run on a GPU node with a CUDA build of "
            "torch, or use --device cpu."
        )
    return _fingerprint_cpu()


def _cuda_visible() -> bool:
    import torch

    return torch.cuda.is_available()


def _fingerprint_cuda() -> DeviceFingerprint:
    import torch

    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    amd = torch.version.hip is not None
    uuid = f"GPU-{facts.uuid}"
    driver = driver_facts(uuid)
    runtime = str(torch.version.hip if amd else torch.version.cuda)
    software = {"torch": str(torch.__version__), "cuda": runtime, "driver": driver["driver"]}
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
    software = {"system": platform.system()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        software["torch"] = importlib.metadata.version("torch")
    machine = platform.machine()
    told = dict(re.findall(r"^(vendor_id|model name)\s*:\s*(.+)$", read_text("/proc/cpuinfo"), re.MULTILINE))
    return DeviceFingerprint(
        kind="cpu",
        vendor=told.get("vendor_id", machine),
        arch=machine,
        name=told.get("model name", machine),
        units=usable_cores(),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB),
        interconnect="",
        ranks_per_node=1,
        software=software,
        network=network_cards(),
    )

"""What a device is, as facts that decide times, and how far two devices agree.

The marketing name is information only: another wording of it never hides a profile, and the same wording never vouches
for different silicon. A fact is empty or 0 where nobody tells it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from profiler.errors import RoutePackError
from profiler.params import check_settings

GIB = 2**30
TOLERANCE = 0.10
"""Two devices of one kind may report memory this far apart (reserved pages, ECC) and still be near."""
FAR, NEAR, NONE = "different", "near", "exact"
KERNEL_PACKAGES = ("flash-attn", "flash-attn-3", "transformer-engine", "deep-ep", "deep-gemm")
"""Distributions whose kernels may run instead of torch's own: their versions are part of what was timed."""


def _fact(differs: str, unknown: str = "", unit: str = "", **default: Any) -> Any:
    """Declare a fact: what another value means, what if one side does not know its own; in a unit, close is near."""
    return field(metadata={"differs": differs, "unknown": unknown or differs, "unit": unit}, **default)


@dataclass(frozen=True)
class DeviceFingerprint:
    """Hold the facts of a device that decide its times."""

    kind: str = _fact(FAR)
    """``cpu`` or ``cuda``."""
    vendor: str = _fact(FAR)
    arch: str = _fact(FAR)
    """``sm_90`` and the like, or the machine type of a CPU."""
    name: str = _fact(NEAR)
    """What the driver calls it: information only."""
    units: int = _fact(FAR, NEAR)
    """Streaming multiprocessors, or cores this process may use."""
    memory_gib: int = _fact(FAR, NEAR, "GiB")
    interconnect: str = _fact(NEAR)
    """How ranks of one node reach one another."""
    ranks_per_node: int = _fact(NEAR)
    software: dict[str, str] = field(default_factory=dict)
    origin: str = "measured"
    """``measured`` here, or ``published`` by somebody else."""
    l2_mib: int = _fact(FAR, NONE, "MiB", default=0)
    """Last cache before the memory (GPUs)."""
    pcie: str = _fact(NEAR, NONE, default="")
    """``gen 5 x16``, the best that card and slot do."""
    network: str = _fact(NEAR, NONE, default="")
    """Active ports of the node, ``8 x 400 Gb/s InfiniBand``."""
    clock_max_mhz: int = _fact(NEAR, NONE, default=0)
    """Highest clock of the multiprocessors."""

    def __post_init__(self) -> None:
        check_settings(self, {fact.name: (0, 2**40) for fact in fields(self) if fact.type == "int"})
        told = self.software.items() if isinstance(self.software, dict) else [(None, None)]
        if not all(isinstance(one, str) for pair in told for one in pair):
            raise ValueError(f"Expected software to map names to versions, got {self.software!r:.80}.")

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> DeviceFingerprint:
        """Read what :meth:`to_dict` wrote; raise RoutePackError if a field is missing or unknown."""
        try:
            return cls(**value)
        except (TypeError, ValueError) as error:
            raise RoutePackError(f"Device fingerprint {value!r:.80} is damaged: {error} Profile again.") from None


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
    for fact in (one for one in fields(wanted) if one.metadata):
        ours, theirs, unit = getattr(wanted, fact.name), getattr(found, fact.name), fact.metadata["unit"]
        close = unit and abs(ours - theirs) <= TOLERANCE * max(ours, theirs)
        if ours != theirs:
            expected, seen = (f"{value} {unit}".rstrip() if value else "unknown" for value in (ours, theirs))
            differs = NEAR if close else fact.metadata["differs"]
            name = fact.name.rpartition("_")[0] if unit else fact.name
            level = fact.metadata["unknown"] if "unknown" in (expected, seen) else differs
            reasons[level].append(f"{name} is {seen}, expected {expected}")
    for key in sorted(wanted.software.keys() | found.software.keys()):
        expected, seen = (one.software.get(key, "absent") for one in (wanted, found))
        if expected != seen:
            reasons[NEAR].append(f"{key} is {seen}, expected {expected}")
    return Match(next((level for level in (FAR, NEAR) if reasons[level]), NONE), (*reasons[FAR], *reasons[NEAR]))


def fingerprint_device(device: str | None = None) -> DeviceFingerprint:
    """Return the facts of ``cpu`` or ``cuda`` on this machine; None takes CUDA where torch can see a device.

    RoutePackError if CUDA is asked for and torch sees no device.
    """
    if device not in (None, "cpu", "cuda"):
        raise RoutePackError(f"Unknown device {device!r}: expected cpu or cuda.")
    # torch takes seconds to import: without a driver there is nothing to ask it. Only Linux has these files.
    drivers = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/proc/driver/nvidia")
    asked = device == "cuda" or platform.system() != "Linux" or any(Path(path).exists() for path in drivers)
    if device != "cpu" and asked:
        import torch

        if torch.cuda.is_available():
            return _fingerprint_cuda()
    if device == "cuda":
        raise RoutePackError(
            "Device cuda was asked for, but torch sees no CUDA device here. Run on a GPU node with a CUDA build of "
            "torch, or use --device cpu."
        )
    return _fingerprint_cpu()


def _fingerprint_cuda() -> DeviceFingerprint:
    import torch

    facts, amd = torch.cuda.get_device_properties(torch.cuda.current_device()), torch.version.hip is not None
    uuid = f"GPU-{facts.uuid}"
    driver = driver_facts(uuid)
    runtime = {"cuda": str(torch.version.hip if amd else torch.version.cuda), "driver": driver["driver"]}
    return DeviceFingerprint(
        kind="cuda",
        vendor="amd" if amd else "nvidia",
        arch=facts.gcnArchName.split(":")[0] if amd else f"sm_{facts.major}{facts.minor}",
        name=facts.name,
        units=facts.multi_processor_count,
        memory_gib=round(facts.total_memory / GIB),
        interconnect=nvlink_total(uuid),
        ranks_per_node=torch.cuda.device_count(),
        software={"torch": str(torch.__version__), **runtime, **_versions(*KERNEL_PACKAGES)},
        l2_mib=round(facts.L2_cache_size / 2**20),
        pcie=driver["pcie"],
        network=network_cards(),
        clock_max_mhz=int(driver["clock_max_mhz"]),
    )


def _fingerprint_cpu() -> DeviceFingerprint:
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
        software={"system": platform.system(), **_versions("torch")},
        network=network_cards(),
    )


def _versions(*packages: str) -> dict[str, str]:
    """Return the versions of those that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def read_text(path: Path | str) -> str:
    """Return what a file of the kernel says, empty where it cannot be read."""
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
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
    found: Counter[tuple[float, str]] = Counter()
    for port in system.glob("class/infiniband/*/ports/*"):
        rate = re.match(r"([\d.]+) Gb/sec", read_text(port / "rate"))
        if rate and "ACTIVE" in read_text(port / "state"):
            found[float(rate[1]), read_text(port / "link_layer") or "InfiniBand"] += 1
    for card in () if found else system.glob("class/net/*"):
        speed = read_text(card / "speed")
        # Bridges and virtual pairs have no device behind them; a port without a cable says -1.
        if (card / "device").exists() and speed.isdigit() and int(speed) > 0:
            found[int(speed) / 1e3, "Ethernet"] += 1
    ordered = sorted(found.items(), key=lambda item: (-item[0][0], item[0][1]))
    return ", ".join(f"{count} x {gbit:g} Gb/s {layer}" for (gbit, layer), count in ordered)


def link_rates(fingerprint: DeviceFingerprint) -> tuple[float, float]:
    """Return bytes per second and direction of one rank's links and of all its node's network cards; 0 if unknown."""
    inside = re.search(r"(\d{1,9}(?:\.\d{1,9})?) GB/s", fingerprint.interconnect)
    cards = re.findall(r"(\d{1,9}) x (\d{1,9}(?:\.\d{1,9})?) Gb/s", fingerprint.network)
    return (float(inside[1]) * 1e9 if inside else 0.0, sum(int(count) * float(rate) for count, rate in cards) * 1e9 / 8)


def own_cores() -> set[int]:
    """Return the cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Return the cores this process may use: its affinity, and the quota of its container."""
    cores = len(own_cores())
    quota, _, period = read_text("/sys/fs/cgroup/cpu.max").partition(" ")
    if not quota:
        quota, period = (read_text(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    # Without a quota it says "max" or -1.
    return max(1, min(cores, int(quota) // int(period))) if quota.isdigit() else cores

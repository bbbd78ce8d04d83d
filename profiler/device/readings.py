"""What a device says of itself while it works: clocks, temperature, power and why it slows down, as plain numbers.

NVML answers for NVIDIA GPUs through its Python binding (the ``nvidia`` extra); a CPU tells its clock where the kernel
does. A reading that is not offered is absent, never 0.

Legend: ``clock_mhz`` (streaming multiprocessors, or the mean of the cores), ``memory_clock_mhz``, ``temperature_c``,
``power_w``, ``power_limit_w``, ``slowed_by`` (NVML's bit mask of the reasons why clocks are held down).
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

SLOWDOWNS = {
    0x004: "the power cap", 0x008: "a hardware slowdown", 0x020: "its temperature (software)",
    0x040: "its temperature (hardware)", 0x080: "the power brake",
}  # fmt: skip
"""Bits of ``slowed_by`` that cost time; idle, application clocks and display clocks are no faults."""
FAULTS = ("a hardware slowdown", "its temperature (hardware)", "its temperature (software)", "the power brake")
"""Those that no setting asked for: cooling or power supply fail the card."""


def read_gpu(uuid: str) -> dict[str, float]:
    """Return the readings of the NVIDIA GPU with this UUID; empty where NVML or its Python binding is missing."""
    uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
        return _by_nvml(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except pynvml.NVMLError:
        return {}


def _by_nvml(nvml: object, handle: object) -> dict[str, float]:
    def ask(name: str, *arguments: object) -> float:
        return float(getattr(nvml, name)(handle, *arguments))

    asked = {
        "clock_mhz": lambda: ask("nvmlDeviceGetClockInfo", 1),  # NVML_CLOCK_SM
        "memory_clock_mhz": lambda: ask("nvmlDeviceGetClockInfo", 2),  # NVML_CLOCK_MEM
        "temperature_c": lambda: ask("nvmlDeviceGetTemperature", 0),  # NVML_TEMPERATURE_GPU
        "power_w": lambda: ask("nvmlDeviceGetPowerUsage") / 1e3,
        "power_limit_w": lambda: ask("nvmlDeviceGetEnforcedPowerLimit") / 1e3,
        "slowed_by": lambda: ask("nvmlDeviceGetCurrentClocksThrottleReasons"),
    }
    found = {}
    for name, answer in asked.items():
        # One reading that this card or a tenant may not have hides no other; a name that a binding dropped neither.
        with contextlib.suppress(nvml.NVMLError, AttributeError):  # type: ignore[attr-defined]
            found[name] = answer()
    return found


def slowdowns(mask: float) -> list[str]:
    """Return the reasons of a ``slowed_by`` that cost time, in words."""
    return [reason for bit, reason in SLOWDOWNS.items() if int(mask) & bit]


def read_cpu() -> dict[str, float]:
    """Return the mean clock of the cores, where the kernel tells it."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return {}
    clocks = re.findall(r"^cpu MHz\s*:\s*([\d.]+)$", text, re.MULTILINE)
    return {"clock_mhz": sum(map(float, clocks)) / len(clocks)} if clocks else {}

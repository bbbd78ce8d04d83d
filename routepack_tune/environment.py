"""What a study ran on: versions of what decides its numbers, and the machine without names, users or paths."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any


def version(package: str = "routepack-tune") -> str:
    """Return the installed version of a package; ``0`` when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "0"


def environment() -> dict[str, Any]:
    """Return ``versions`` and ``machine``, ready for JSON."""
    from profiler import fingerprint_device

    packages = ("routepack-tune", "numpy", "numba", "optuna", "mlflow", "lightgbm")
    host = fingerprint_device("cpu")
    machine = {
        "processor": host.name,
        "arch": host.arch,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": host.memory_gib,
        "system": f"{platform.system()} {platform.release()}",
    }
    versions = {"python": platform.python_version(), **{name: version(name) for name in packages}}
    return {"versions": versions, "machine": machine}

"""What a study ran on: versions of what decides its numbers, and the machine without names, users or paths."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

PACKAGES = ("numpy", "numba", "optuna", "mlflow", "lightgbm")


def environment() -> dict[str, Any]:
    """Return ``versions`` and ``machine``, ready for JSON."""
    from profiler import fingerprint_device
    from routepack_tune.version import version

    versions = {"routepack-tune": version(), "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    host = fingerprint_device("cpu")
    machine = {
        "processor": host.name,
        "arch": host.arch,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": host.memory_gib,
        "system": f"{platform.system()} {platform.release()}",
    }
    return {"versions": versions, "machine": machine}

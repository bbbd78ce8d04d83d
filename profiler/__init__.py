"""Floor 1, time it: model and hardware facts, cases, backends, measurements."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from profiler.device.fingerprint import DeviceFingerprint, Match, compare_fingerprints, fingerprint_device
from profiler.errors import RoutePackError
from profiler.extras import extras_named
from profiler.measurements import Measurements
from profiler.model_spec import SHIPPED_MODELS, ModelSpec, load_model
from profiler.observer import Observer
from profiler.params import ProfileParams, Topology

if TYPE_CHECKING:
    from profiler.published.rows import import_published
    from profiler.sweep import profile_device

__all__ = [
    "SHIPPED_MODELS",
    "DeviceFingerprint",
    "Match",
    "Measurements",
    "ModelSpec",
    "Observer",
    "ProfileParams",
    "RoutePackError",
    "Topology",
    "compare_fingerprints",
    "fingerprint_device",
    "import_published",
    "load_model",
    "profile_device",
]


_LAZY = {"import_published": "profiler.published.rows", "profile_device": "profiler.sweep"}
"""What times or reads tables is imported only when it is asked for: torch and pandas take seconds."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module 'profiler' has no attribute {name!r}")
        with extras_named():
            return getattr(import_module(_LAZY[name]), name)

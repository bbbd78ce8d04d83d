"""The version of the installed distribution."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """Return the installed version; ``0`` when run from a source tree that is not installed."""
    try:
        return importlib.metadata.version("routepack-tune")
    except importlib.metadata.PackageNotFoundError:
        return "0"

"""What the verbs read from a cost model's folder without its trees."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.errors import RoutePackError
from profiler.files import read_json
from routepack_tune.config import Config

COST_MODEL_FILE = "costmodel.json"
"""As :data:`costmodels.COST_MODEL_FILE`; importing that takes longer than the command's help may."""

if TYPE_CHECKING:
    from costmodels import StepTables
    from profiler import DeviceFingerprint


def tables_of(costmodel: Path | str, settings: Config) -> StepTables:
    """Return the frozen tables of a cost model for the model, topology and cap of a configuration."""
    from costmodels import tables_for

    return tables_for(costmodel, settings.model, settings.topology, settings.max_tokens_per_microbatch)


def cost_model_header(costmodel: Path) -> dict[str, Any]:
    """Return what ``costmodel.json`` says of device, data and errors."""
    header = read_json(costmodel / COST_MODEL_FILE, "Cost model")
    if not isinstance(header, dict) or "fingerprint" not in header:
        raise RoutePackError(f"Cost model {costmodel} names no device. Run `routepack fit` again.")
    return header


def fingerprint_of(value: dict[str, Any]) -> DeviceFingerprint:
    """Return the fingerprint that a header holds."""
    from profiler import DeviceFingerprint

    return DeviceFingerprint.from_dict(value)

"""What the cost of an operation depends on: raw features, their units, and what the trees see of them.

An operation is one entry of :data:`costmodels.operations.catalog.OPERATIONS`: raw features (columns of the
measurements), a physics baseline over them, and the inputs of the learned residual. Everything else (fitting,
validation, files, tables) works from that entry, so a new operation is one new file.

Invariant: features are found by name, never by position; a missing, extra, non-finite or non-positive one is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from profiler import RoutePackError

Columns = dict[str, np.ndarray]
"""Named float64 columns of equal length."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """Hold one positive parameter of a baseline."""

    default: float
    unit: str
    device_power: int = 1
    """How it follows the speed of a device: 1 a cost, -1 a rate, 0 a pure number."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Hold what is known about one timed operation before any measurement."""

    name: str
    features: Mapping[str, str]
    """Raw features in their order, with their units."""
    shape: tuple[str, ...]
    """Raw features that make a shape; the others are sizes. Rows of a shape that was never timed are extrapolated."""
    family: tuple[str, ...]
    """Raw features of the model behind a shape, whatever its parallel sizes: validation holds them out whole."""
    size: tuple[str, ...]
    """Raw features by which sizes are held out in validation: the first of them that is not 0."""
    parameters: Mapping[str, Parameter]
    baseline: Callable[[Columns, Mapping[str, float]], np.ndarray]
    """Microseconds from raw features and parameters; grows with every size."""
    derive: Callable[[Columns], Columns]
    """Inputs of the trees from raw features, all dimensionless or in the units the entry's file states."""
    dimensionless: tuple[str, ...]
    """Those derived inputs that keep their meaning in a shape that was never timed."""
    floor: Callable[[Columns, Mapping[str, float]], np.ndarray]
    """Microseconds of the operation with nothing to do: what launching it costs."""
    zero_allowed: frozenset[str] = frozenset()
    """Raw features that may be 0 (no window, no routing inside the timed region)."""


def checked_columns(operation: Operation, features: Mapping[str, np.ndarray]) -> Columns:
    """Return the operation's raw features by name, in its order, as float64 vectors of one length.

    Raises
    ------
    RoutePackError
        If a feature is missing, unknown, not finite or not positive.
    """
    missing = [name for name in operation.features if name not in features]
    extra = [name for name in features if name not in operation.features]
    if missing or extra:
        raise RoutePackError(
            f"Features of {operation.name} do not match: missing {missing or 'none'}, unknown {extra or 'none'}. "
            f"Give exactly {list(operation.features)}."
        )
    columns = {name: np.atleast_1d(np.asarray(features[name], dtype=np.float64)) for name in operation.features}
    length = max(column.size for column in columns.values())
    for name, column in columns.items():
        if column.ndim != 1 or column.size not in (1, length):
            raise RoutePackError(f"Feature {name} of {operation.name} has shape {column.shape}, expected ({length},).")
        good = np.isfinite(column) & ((column >= 0) if name in operation.zero_allowed else (column > 0))
        if not good.all():
            bound = ">= 0" if name in operation.zero_allowed else "> 0"
            raise RoutePackError(
                f"Feature {name} of {operation.name} must be finite and {bound}, got {column[~good][0]}."
            )
        columns[name] = np.broadcast_to(column, length)
    return columns


def size_of(operation: Operation, columns: Columns) -> np.ndarray:
    """Return every row's size, by which validation holds rows out."""
    size = np.zeros_like(columns[operation.size[0]])
    for name in operation.size:
        size = np.where(size > 0, size, columns[name])
    return size


def smooth_max(*terms: np.ndarray, sharpness: float) -> np.ndarray:
    """Return the p-norm of non-negative terms: their maximum, rounded where two are close."""
    largest = np.maximum.reduce(terms)
    safe = np.where(largest > 0, largest, 1.0)
    return largest * sum((term / safe) ** sharpness for term in terms) ** (1.0 / sharpness)


def tiles(size: np.ndarray, tile: int) -> np.ndarray:
    """Return ``size`` rounded up to whole tiles."""
    return np.ceil(size / tile) * tile

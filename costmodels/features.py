"""What the cost of an operation depends on: raw features, their units, what is learned from them, and what was timed.

An operation is one entry of :data:`costmodels.operations.OPERATIONS`. Everything else (fitting, validation,
files, tables) works from that entry, so a new operation is one new declaration.

Invariant: features are found by name, never by position; a missing, extra, non-finite or non-positive one is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from profiler import RoutePackError

Columns = dict[str, np.ndarray]
"""Named float64 columns of equal length."""
Names = tuple[str, ...]
Parameters = Mapping[str, float]
"""Values of a baseline's parameters, by name."""
Ranges = Mapping[tuple[int, ...], Mapping[str, tuple[float, float]]]
"""Timed shapes, each with the range of every size feature."""
MOST_LOG = 100.0
"""Largest log of a ratio of times: no model is off by so much."""
MOST = 1e30
"""Largest other number of a learned model, so that no sum of products is infinite."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """Hold one positive parameter of a baseline."""

    default: float
    unit: str
    device_power: int = 1
    """How it follows the speed of a device: 1 a cost, -1 a rate, 0 a pure number."""


def constant_floor(columns: Columns, parameters: Parameters) -> np.ndarray:
    """Return the parameter ``floor_us`` for every row; 0 where there is none."""
    return np.full_like(next(iter(columns.values())), parameters.get("floor_us", 0.0))


@dataclass(frozen=True, slots=True)
class Operation:
    """Hold what is known about one timed operation before any measurement."""

    name: str
    features: Mapping[str, str]
    """Raw features in their order, with their units."""
    family: Names
    """Raw features of the model behind a shape, whatever its parallel sizes: validation holds them out whole."""
    size: Names
    """Raw features by which sizes are held out in validation: the first of them that is not 0."""
    parameters: Mapping[str, Parameter]
    baseline: Callable[[Columns, Parameters], np.ndarray]
    """Microseconds from raw features and parameters; grows with every size."""
    derive: Callable[[Columns], Columns]
    """Inputs of the trees from raw features, all dimensionless or in the units the entry's file states."""
    dimensionless: Names
    """Those derived inputs that keep their meaning in a shape that was never timed."""
    shape: Names = ()
    """Raw features that make a shape; the others are sizes. Rows of a shape that was never timed are extrapolated."""
    floor: Callable[[Columns, Parameters], np.ndarray] = constant_floor
    """Microseconds of the operation with nothing to do: what launching it costs."""
    zero_allowed: frozenset[str] = frozenset()
    """Raw features that may be 0 (no window, no routing inside the timed region)."""
    curve: Names = ()
    """Raw features that, beside the shape, are equal along a measured curve."""
    settings: Callable[[Columns], tuple[np.ndarray, ...]] = lambda columns: ()
    """Logs of what changes slowly along a measured curve; a row with NaN lies on none."""


def checked_columns(operation: Operation, features: Mapping[str, np.ndarray]) -> Columns:
    """Return the operation's raw features by name, in its order, as float64 vectors of one length."""
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
        if column.shape not in ((1,), (length,)):
            raise RoutePackError(f"Feature {name} of {operation.name} has shape {column.shape}, expected ({length},).")
        zero = name in operation.zero_allowed
        good = np.isfinite(column) & (column >= 0 if zero else column > 0)
        if not good.all():
            raise RoutePackError(
                f"Feature {name} of {operation.name} must be finite and {'>= 0' if zero else '> 0'}, "
                f"got {column[~good][0]}."
            )
        columns[name] = np.broadcast_to(column, length)
    return columns


def check_array(name: str, array: np.ndarray, dtype: type, shape: tuple[int, ...], most: float = MOST) -> None:
    """Raise ValueError unless an array of a learned model has this type and shape, and holds no larger number."""
    if array.dtype != dtype or array.shape != shape or not ((array >= -most) & (array <= most)).all():
        raise ValueError(
            f"expected {name} to be {np.dtype(dtype)} {shape} of finite numbers within +-{most:g}, got {array.dtype} "
            f"{array.shape}"
        )


def check_limits(limits: tuple[float, float]) -> None:
    """Raise ValueError unless the least and largest answer of a residual, logs, are in order."""
    if not -MOST_LOG <= limits[0] <= limits[1] <= MOST_LOG:
        raise ValueError(f"expected limits that ascend within +-{MOST_LOG:g}, got {limits}")


def take(columns: Columns, rows: np.ndarray | slice) -> Columns:
    """Return some rows (a mask, positions or a slice) of every column."""
    return {name: column[rows] for name, column in columns.items()}


def rows_by(columns: Columns, names: Sequence[str]) -> dict[tuple[int, ...], np.ndarray]:
    """Return the positions of the rows with the same whole numbers in ``names``, by those numbers in order."""
    length = next(iter(columns.values())).size
    if not names or not length:
        return {(): np.arange(length)} if length else {}
    keys = np.stack([columns[name] for name in names], axis=1).astype(np.int64)
    distinct, inverse, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    order = np.argsort(inverse.reshape(-1), kind="stable")
    return dict(zip(map(tuple, distinct.tolist()), np.split(order, np.cumsum(counts)[:-1]), strict=True))


def size_of(operation: Operation, columns: Columns) -> np.ndarray:
    """Return every row's size, by which validation holds rows out."""
    size = np.zeros_like(columns[operation.size[0]])
    for name in operation.size:
        size = np.where(size > 0, size, columns[name])
    return size


def shape_ranges(operation: Operation, columns: Columns) -> Ranges:
    """Return every timed shape with the range of each size feature; of one that may be 0 where it ever was more."""
    sizes = {
        name: column
        for name, column in columns.items()
        if name not in operation.shape and (name not in operation.zero_allowed or column.any())
    }
    return {
        shape: {name: (float(column[rows].min()), float(column[rows].max())) for name, column in sizes.items()}
        for shape, rows in rows_by(columns, operation.shape).items()
    }


def union(here: Ranges, there: Ranges) -> Ranges:
    """Return what lies in the ranges of one or of the other."""
    found = {shape: dict(ranges) for shape, ranges in there.items()}
    for shape, ranges in here.items():
        known = found.setdefault(shape, {})
        for name, (low, high) in ranges.items():
            least, most = known.get(name, (low, high))
            known[name] = (min(low, least), max(high, most))
    return found


def excess_octaves(operation: Operation, ranges: Ranges, columns: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Return how many octaves the worst size feature lies above its shape's range, and whether any lies outside it.

    Shapes that were never timed have 0 octaves, and are outside.
    """
    length = columns[operation.size[0]].size
    excess, outside = np.zeros(length), np.ones(length, dtype=bool)
    for shape, rows in rows_by(columns, operation.shape).items():
        outside[rows] = shape not in ranges
        for name, (low, high) in ranges.get(shape, {}).items():
            # Bytes between nodes go with all bytes, and routing inside the timed region is an accident of timing.
            if name not in operation.zero_allowed:
                value = columns[name][rows]
                excess[rows] = np.maximum(excess[rows], np.log2(value / high))
                outside[rows] |= (value < low) | (value > high)
    return excess, outside


def known_families(operation: Operation, ranges: Ranges, columns: Columns) -> np.ndarray:
    """Return a mask of rows whose model shape, whatever its parallel sizes, was timed."""
    names = [name for name in operation.family if name in operation.shape]
    places = [operation.shape.index(name) for name in names]
    families = {tuple(shape[place] for place in places) for shape in ranges}
    known = np.zeros(columns[operation.size[0]].size, dtype=bool)
    for family, rows in rows_by(columns, names).items():
        known[rows] = family in families
    return known


def smooth_max(*terms: np.ndarray, sharpness: float) -> np.ndarray:
    """Return the p-norm of non-negative terms: their maximum, rounded where two are close."""
    largest = np.maximum.reduce(terms)
    safe = np.where(largest > 0, largest, 1.0)
    return largest * sum((term / safe) ** sharpness for term in terms) ** (1.0 / sharpness)

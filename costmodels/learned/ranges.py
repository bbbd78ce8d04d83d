"""What was timed: shapes, each with the range of every size feature, and how far a question lies outside."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from costmodels.features import Columns, Operation

Ranges = Mapping[tuple[int, ...], Mapping[str, tuple[float, float]]]
"""Timed shapes, each with the range of every size feature."""


def shape_ranges(operation: Operation, columns: Columns) -> dict[tuple[int, ...], dict[str, tuple[float, float]]]:
    """Return every timed shape with the range of each size feature; of one that may be 0 where it ever was more."""
    shapes, inverse = distinct(columns, operation.shape)
    sizes = [
        name for name in operation.features
        if name not in operation.shape and (name not in operation.zero_allowed or columns[name].any())
    ]  # fmt: skip
    order = np.argsort(inverse, kind="stable")
    starts = np.searchsorted(inverse[order], np.arange(len(shapes)))
    low = {name: np.minimum.reduceat(columns[name][order], starts) for name in sizes}
    high = {name: np.maximum.reduceat(columns[name][order], starts) for name in sizes}
    return {
        shape: {name: (float(low[name][place]), float(high[name][place])) for name in sizes}
        for place, shape in enumerate(shapes)
    }


def shape_of(operation: Operation, features: Mapping[str, np.ndarray | float]) -> tuple[int, ...]:
    """Return one shape, as :data:`Ranges` names it."""
    return tuple(int(features[name]) for name in operation.shape)


def excess_octaves(operation: Operation, ranges: Ranges, columns: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Return how many octaves the worst size feature lies above its shape's range, and whether any lies outside it.

    Shapes that were never timed have 0 octaves, and are outside.
    """
    shapes, inverse = distinct(columns, operation.shape)
    excess, outside = np.zeros(inverse.size), np.ones(inverse.size, dtype=bool)
    for place, shape in enumerate(shapes):
        known = ranges.get(shape)
        if known is None:
            continue
        rows = np.flatnonzero(inverse == place)
        outside[rows] = False
        for name, (low, high) in known.items():
            # Bytes between nodes go with all bytes, and routing inside the timed region is an accident of timing.
            if name in operation.zero_allowed:
                continue
            value = columns[name][rows]
            excess[rows] = np.maximum(excess[rows], np.log2(value / high))
            outside[rows] |= (value < low) | (value > high)
    return excess, outside


def known_families(operation: Operation, ranges: Ranges, columns: Columns) -> np.ndarray:
    """Return a mask of rows whose model shape, whatever its parallel sizes, was timed."""
    names = [name for name in operation.family if name in operation.shape]
    places = [operation.shape.index(name) for name in names]
    families = {tuple(shape[place] for place in places) for shape in ranges}
    shapes, inverse = distinct(columns, names)
    return np.array([shape in families for shape in shapes], dtype=bool)[inverse]


def distinct(columns: Columns, names: tuple[str, ...] | list[str]) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Return the distinct values of some features and every row's place among them."""
    length = next(iter(columns.values())).size
    if not names:
        return [()], np.zeros(length, dtype=np.int64)
    keys = np.stack([columns[name] for name in names], axis=1).astype(np.int64)
    shapes, inverse = np.unique(keys, axis=0, return_inverse=True)
    return [tuple(int(value) for value in shape) for shape in shapes], np.asarray(inverse).reshape(-1)

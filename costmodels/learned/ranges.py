"""What was timed: shapes, each with the range of every size feature, and how far a question lies outside."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from costmodels.features import Columns, Operation, rows_by

Ranges = Mapping[tuple[int, ...], Mapping[str, tuple[float, float]]]
"""Timed shapes, each with the range of every size feature."""


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


def joined(here: Ranges, there: Ranges) -> Ranges:
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

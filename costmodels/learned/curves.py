"""Interpolation along measured curves: rows that differ in size alone.

A curve is all rows of one shape that were timed in one setting: one routing distribution for experts, one number of
equal sequences for attention, one (n, k) for a dense GEMM, one number of ranks for an exchange. A setting is known by
numbers that a question also carries (``curve`` and ``settings`` of the operation): a row lies on a curve where those
that must be equal are equal, and the others are within :data:`TOLERANCE` of what the curve has at that size. Between
its sizes the residual is linear in the log of size; beyond them it is held; a row on no curve gets NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodels.features import MOST_LOG, Columns, Operation, check_array, rows_by, size_of, take

TOLERANCE = 0.4
"""Largest difference between the logs of a row's setting and of the curve's at that size."""
STEP = 1.0
"""Largest difference between the logs of the settings of two neighbours on one curve: drawn routings scatter."""


@dataclass(frozen=True)
class Curves:
    """Hold the residual of every measured curve: nodes sorted by curve, then by size."""

    keys: np.ndarray
    """[curves, equal features] int64: the shape, then what is equal beside it."""
    starts: np.ndarray
    """[curves + 1] int64: first node of each."""
    log_size: np.ndarray
    settings: np.ndarray
    """[nodes, settings] float32"""
    residual: np.ndarray
    """[nodes] float32: log of time over baseline."""

    def __post_init__(self) -> None:
        curves, nodes = self.keys.shape[0] if self.keys.ndim == 2 else 0, self.log_size.size
        check_array("keys", self.keys, np.int64, (curves, *self.keys.shape[1:2]))
        check_array("starts", self.starts, np.int64, (curves + 1,))
        check_array("log_size", self.log_size, np.float64, (nodes,))
        check_array("settings", self.settings, np.float32, (nodes, *self.settings.shape[1:2]))
        check_array("residual", self.residual, np.float32, (nodes,), MOST_LOG)
        if self.starts[0] != 0 or self.starts[-1] != nodes or (np.diff(self.starts) < 1).any():
            raise ValueError("expected the starts of curves to ascend from 0 to their last node")
        inside = np.delete(np.arange(1, nodes), self.starts[1:-1] - 1)
        if (self.log_size[inside] <= self.log_size[inside - 1]).any():
            raise ValueError("expected sizes to ascend along every curve")

    def check_for(self, operation: Operation) -> None:
        """Raise ValueError unless curves are told apart by what tells this operation's rows apart."""
        one = {name: np.ones(1) for name in operation.features}
        wanted = len(operation.shape) + len(operation.curve), len(operation.settings(one))
        if (found := (self.keys.shape[1], self.settings.shape[1])) != wanted:
            raise ValueError(f"curves of {operation.name} have {found} keys and settings, this version {wanted}")

    def log_ratio(self, operation: Operation, columns: Columns) -> np.ndarray:
        """Return the residual of every row by its curve, NaN where it lies on none."""
        size, settings = np.log(size_of(operation, columns)), operation.settings(columns)
        nearest, found = np.full(size.size, TOLERANCE), np.full(size.size, np.nan)
        rows_of = rows_by(columns, (*operation.shape, *operation.curve))
        for c, key in enumerate(map(tuple, self.keys.tolist())):
            if (rows := rows_of.get(key)) is None:
                continue
            nodes = slice(int(self.starts[c]), int(self.starts[c + 1]))
            apart = np.zeros(rows.size)
            for asked, curve in zip(settings, self.settings[nodes].T, strict=True):
                along = np.interp(size[rows], self.log_size[nodes], curve)
                apart = np.maximum(apart, np.abs(asked[rows] - along))
            closer = apart < nearest[rows]  # False for NaN
            rows = rows[closer]
            nearest[rows] = apart[closer]
            found[rows] = np.interp(size[rows], self.log_size[nodes], self.residual[nodes])
        return found


def fit_curves(operation: Operation, columns: Columns, residual: np.ndarray) -> Curves | None:
    """Return the curves of these rows; None where no curve has two sizes."""
    points = np.column_stack([np.log(size_of(operation, columns)), *operation.settings(columns)])
    usable = np.isfinite(points).all(axis=1)
    points, residual, keys, curves = points[usable], residual[usable], [], []
    for key, rows in rows_by(take(columns, usable), (*operation.shape, *operation.curve)).items():
        # Points timed twice are one, their mean.
        nodes, where = np.unique(points[rows], axis=0, return_inverse=True)
        where = where.reshape(-1)
        nodes = np.column_stack([nodes, np.bincount(where, residual[rows]) / np.bincount(where)])
        found = [nodes[curve] for curve in _follow(nodes[:, 0], nodes[:, 1:-1]) if len(curve) > 1]
        keys += [key] * len(found)
        curves += found
    if not curves:
        return None
    every = np.concatenate(curves)
    return Curves(
        keys=np.array(keys, dtype=np.int64).reshape(len(keys), -1),
        starts=np.cumsum([0, *map(len, curves)]).astype(np.int64),
        log_size=every[:, 0],
        settings=every[:, 1:-1].astype(np.float32),
        residual=every[:, -1].astype(np.float32),
    )


def _follow(size: np.ndarray, settings: np.ndarray) -> list[list[int]]:
    """Split rows into curves, from size to size by the nearest setting: how a row was routed is not a feature."""
    if settings.shape[1] == 0:
        return [list(range(size.size))]
    curves: list[list[int]] = []
    for value in np.unique(size):
        rows = np.flatnonzero(size == value)
        last = settings[[curve[-1] for curve in curves]]
        apart = np.abs(settings[rows, None, :] - last[None]).max(axis=2)
        alone = dict.fromkeys(rows.tolist())
        for flat in np.argsort(apart, axis=None, kind="stable"):
            row, curve = divmod(int(flat), len(last))
            if apart[row, curve] > STEP:
                break
            if int(rows[row]) in alone and size[curves[curve][-1]] < value:
                curves[curve].append(int(rows[row]))
                del alone[int(rows[row])]
        curves += [[row] for row in alone]
    return curves

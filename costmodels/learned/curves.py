"""Interpolation along measured curves: rows that differ in size alone.

A curve is all rows of one shape that were timed in one setting: one routing distribution for experts, one number of
equal sequences for attention, one (n, k) for a dense GEMM, one number of ranks for an exchange. A setting is known by
numbers that a question also carries (:class:`Rule`): a row lies on a curve where those that must be equal are equal,
and the others are within :data:`TOLERANCE` of what the curve has at that size. Between its sizes the residual is linear
in the log of size; beyond them it is held; a row on no curve gets NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from costmodels.features import Columns, Operation, size_of

TOLERANCE = 0.4
"""Largest difference between the logs of a row's setting and of the curve's at that size."""
STEP = 1.0
"""Largest difference between the logs of the settings of two neighbours on one curve: drawn routings scatter."""


def _no_settings(columns: Columns) -> list[np.ndarray]:
    return []


@dataclass(frozen=True, slots=True)
class Rule:
    """Say what two rows on one curve have in common beside the shape."""

    equal: tuple[str, ...] = ()
    """Raw features that are equal along a curve."""
    settings: Callable[[Columns], list[np.ndarray]] = _no_settings
    """Logs of what changes slowly along a curve, NaN where there is none."""


def _evenness(columns: Columns) -> list[np.ndarray]:
    # Eight times: sequences may be a twentieth shorter than the longest one on average.
    return [8.0 * np.log(columns["tokens"] / columns["num_sequences"] / columns["max_length"])]


def _inter_share(columns: Columns) -> list[np.ndarray]:
    # A share of 0 and one of a tenth are on different curves.
    return [np.log1p(10.0 * columns["inter_bytes"] / columns["bytes"])]


def _routing(columns: Columns) -> list[np.ndarray]:
    tokens = np.where(columns["router_tokens"] > 0, columns["router_tokens"], np.nan)
    # Without routing in the timed region no row lies on a curve that was timed with it.
    return [np.log(columns["rows"] / tokens), np.log(columns["max_rows"] / columns["rows"])]


RULES: dict[str, Rule] = {
    "attention": Rule(("num_sequences",), _evenness),
    "experts": Rule((), _routing),
    "dense": Rule(("n", "k")),
    "alltoall": Rule(("ranks",), _inter_share),
    "linear_attention": Rule(("num_sequences",), _evenness),
    "transfer": Rule((), _inter_share),
}
"""By operation; one that is not named has a curve per shape."""


@dataclass(frozen=True)
class Curves:
    """Hold the residual of every measured curve: nodes sorted by curve, then by size."""

    keys: np.ndarray
    """[curves, equal features] int64: shape, then what :class:`Rule` holds equal."""
    starts: np.ndarray
    """[curves + 1] int64: first node of each."""
    log_size: np.ndarray
    settings: np.ndarray
    """[nodes, settings] float32"""
    residual: np.ndarray
    """[nodes] float32: log of time over baseline."""

    def log_ratio(self, operation: Operation, columns: Columns) -> np.ndarray:
        """Return the residual of every row by its curve, NaN where it lies on none."""
        size = np.log(size_of(operation, columns))
        settings = _settings(operation, columns)
        keys = _keys(operation, columns)
        nearest, found = np.full(size.size, TOLERANCE), np.full(size.size, np.nan)
        rows_of = _rows_by_key(keys)
        for c, key in enumerate(map(tuple, self.keys.tolist())):
            rows = rows_of.get(key)
            if rows is None:
                continue
            nodes = slice(int(self.starts[c]), int(self.starts[c + 1]))
            apart = np.zeros(rows.size)
            for s in range(settings.shape[1]):
                along = np.interp(size[rows], self.log_size[nodes], self.settings[nodes, s])
                apart = np.maximum(apart, np.abs(settings[rows, s] - along))
            here = apart < nearest[rows]  # False for NaN
            nearest[rows[here]] = apart[here]
            found[rows[here]] = np.interp(size[rows[here]], self.log_size[nodes], self.residual[nodes])
        return found


def fit_curves(operation: Operation, columns: Columns, residual: np.ndarray) -> Curves | None:
    """Return the curves of these rows; None where no curve has two sizes."""
    settings = _settings(operation, columns)
    usable = np.isfinite(settings).all(axis=1)
    size, settings, residual = np.log(size_of(operation, columns))[usable], settings[usable], residual[usable]
    parts = []
    for key, rows in sorted(_rows_by_key(_keys(operation, columns)[usable]).items()):
        # Points timed twice are one, their mean.
        points, where = np.unique(np.column_stack([size, settings])[rows], axis=0, return_inverse=True)
        where = np.asarray(where).reshape(-1)
        mean = np.bincount(where, residual[rows]) / np.bincount(where)
        for nodes in _follow(points[:, 0], points[:, 1:]):
            if nodes.size > 1:
                values = np.column_stack([points[nodes, 1:], mean[nodes]]).astype(np.float32)
                parts.append((key, points[nodes, 0], values))
    if not parts:
        return None
    values = np.concatenate([part[2] for part in parts])
    return Curves(
        keys=np.array([part[0] for part in parts], dtype=np.int64).reshape(len(parts), -1),
        starts=np.cumsum([0, *(part[1].size for part in parts)]).astype(np.int64),
        log_size=np.concatenate([part[1] for part in parts]), settings=values[:, :-1], residual=values[:, -1],
    )  # fmt: skip


def _follow(size: np.ndarray, settings: np.ndarray) -> list[np.ndarray]:
    """Split rows into curves, from size to size by the nearest setting: how a row was routed is not a feature."""
    if settings.shape[1] == 0:
        return [np.arange(size.size)]
    curves: list[list[int]] = []
    last = np.zeros((0, settings.shape[1]))
    for value in np.unique(size):
        rows = np.flatnonzero(size == value)
        apart = np.abs(settings[rows, None, :] - last[None]).max(axis=2)
        open_rows = dict.fromkeys(rows.tolist())
        for flat in np.argsort(apart, axis=None, kind="stable"):
            row, curve = divmod(int(flat), len(curves))
            if apart[row, curve] > STEP:
                break
            if int(rows[row]) in open_rows and size[curves[curve][-1]] < value:
                curves[curve].append(int(rows[row]))
                del open_rows[int(rows[row])]
        curves += [[row] for row in open_rows]
        last = settings[[curve[-1] for curve in curves]]
    return [np.array(curve) for curve in curves]


def _settings(operation: Operation, columns: Columns) -> np.ndarray:
    logs = RULES.get(operation.name, Rule()).settings(columns)
    return np.stack(logs, axis=1) if logs else np.zeros((columns[operation.size[0]].size, 0))


def _keys(operation: Operation, columns: Columns) -> np.ndarray:
    names = (*operation.shape, *RULES.get(operation.name, Rule()).equal)
    length = columns[operation.size[0]].size
    return np.stack([columns[n] for n in names], axis=1).astype(np.int64) if names else np.zeros((length, 0), np.int64)


def _rows_by_key(keys: np.ndarray) -> dict[tuple[int, ...], np.ndarray]:
    if not len(keys):
        return {}
    distinct, inverse = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(np.asarray(inverse).reshape(-1), kind="stable")
    ends = np.cumsum(np.bincount(np.asarray(inverse).reshape(-1), minlength=len(distinct)))[:-1]
    return {tuple(key): rows for key, rows in zip(distinct.tolist(), np.split(order, ends), strict=True)}

"""The learned part: LightGBM on log(time / baseline), and what a prediction may rest on.

One :class:`OperationModel` prices one operation in one direction. Known shapes use trees over all derived features,
shapes that were never timed use trees over the dimensionless ones (validated on held-out shapes), or the physics
baseline alone. Outside the timed sizes trees keep the residual of the nearest leaf, so that the baseline sets how time
grows (a tree alone would answer a flat line), and the row is marked as extrapolated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from costmodels.features import Columns, Operation, checked_columns
from costmodels.params import FitParams


@dataclass(frozen=True)
class Trees:
    """Hold a LightGBM model as text, with the names of its inputs in order."""

    names: tuple[str, ...]
    text: str

    @cached_property
    def _booster(self) -> Any:
        import lightgbm
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

        # One thread: a forked child inherits no working thread pool, and LightGBM would wait for it for ever.
        with threadpool_limits(1, user_api="openmp"):
            return lightgbm.Booster(model_str=self.text)

    def log_ratio(self, derived: Columns) -> np.ndarray:
        """Return the log of time over baseline."""
        matrix = np.stack([derived[name] for name in self.names], axis=1)
        return np.asarray(self._booster.predict(matrix, num_threads=1), dtype=np.float64)


def grow_trees(
    derived: Columns, names: tuple[str, ...], target: np.ndarray, params: FitParams, unseen: bool = False
) -> Trees:
    """Fit trees to ``target`` (a log) by absolute error for known shapes, by Huber's loss for unseen ones."""
    import lightgbm

    rows, small = target.size, target.size < params.small_rows
    settings: dict[str, Any] = {
        "objective": "huber" if unseen else "l1",
        "num_leaves": min(8 if small else params.num_leaves, max(2, rows // 4)),
        "learning_rate": params.learning_rate / 2 if small else params.learning_rate,
        # The library's default of 20 rows a leaf allows no split at all under 41 rows.
        "min_data_in_leaf": max(3, min(10, rows // 20)),
        "lambda_l2": 1.0 if small else 0.0,
        "max_bin": 255,
        "num_threads": 1,
        "force_row_wise": True,
        "deterministic": True,
        "seed": params.seed,
        "verbosity": -1,
    }
    if unseen:
        settings["alpha"] = 0.2
    trees = 60 if small else (params.unseen_trees if unseen else params.num_trees)
    matrix = np.stack([derived[name] for name in names], axis=1)
    data = lightgbm.Dataset(matrix, target, feature_name=list(names), params={"verbosity": -1, "num_threads": 1})
    # What is used is what a file holds: predictions before saving equal those after loading to the bit.
    return Trees(names, lightgbm.train(settings, data, trees).model_to_string())


@dataclass(frozen=True)
class OperationModel:
    """Price one operation in one direction."""

    operation: Operation
    direction: str
    parameters: Mapping[str, float]
    """Fitted parameters of the baseline."""
    seen: Trees | None
    """Residual for shapes that were timed; None where it did not beat the baseline."""
    unseen: Trees | None
    """Residual for shapes that were not timed; None where it did not beat the baseline."""
    shapes: Mapping[tuple[int, ...], Mapping[str, tuple[float, float]]]
    """Timed shapes, each with the range of every size feature."""
    empty_us: float | None = None
    """Measured time of a call with nothing to do, where one was timed."""
    rows: int = 0
    flagged_rows: int = 0
    """Rows left out because they contradict their neighbours."""
    reasons: tuple[str, ...] = ()
    """Why trees were refused, where they were."""
    validation: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """``lightgbm`` where the learned residual is used, ``baseline`` where physics alone is."""
        return "baseline" if self.seen is None else "lightgbm"

    @cached_property
    def _families(self) -> set[tuple[int, ...]]:
        places = [self.operation.shape.index(name) for name in self.operation.family if name in self.operation.shape]
        return {tuple(shape[place] for place in places) for shape in self.shapes}

    def predict_us(self, features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return microseconds and, per row, whether it lies outside what was timed."""
        columns = checked_columns(self.operation, features)
        time_us = np.asarray(self.operation.baseline(columns, self.parameters), dtype=np.float64)
        known = self._known_family(columns)
        derived = self.operation.derive(columns)
        for trees, mask in ((self.seen, known), (self.unseen, ~known)):
            if trees is not None and mask.any():
                time_us[mask] *= np.exp(trees.log_ratio({name: derived[name][mask] for name in trees.names}))
        return time_us, self._outside(columns)

    def floor_us(self, features: Mapping[str, np.ndarray]) -> float:
        """Return the time of a call with nothing to do, for one shape."""
        if self.empty_us is not None:
            return self.empty_us
        columns = {name: np.atleast_1d(np.asarray(value, dtype=np.float64)) for name, value in features.items()}
        return float(self.operation.floor(columns, self.parameters)[0])

    def knows(self, features: Mapping[str, np.ndarray | float]) -> Mapping[str, tuple[float, float]] | None:
        """Return the timed range of every size feature of a shape, None if the shape was never timed."""
        return self.shapes.get(tuple(int(features[name]) for name in self.operation.shape))

    def _known_family(self, columns: Columns) -> np.ndarray:
        names = [name for name in self.operation.family if name in self.operation.shape]
        shapes, inverse = _distinct(columns, names)
        return np.array([shape in self._families for shape in shapes], dtype=bool)[inverse]

    def _outside(self, columns: Columns) -> np.ndarray:
        shapes, inverse = _distinct(columns, self.operation.shape)
        outside = np.zeros(inverse.size, dtype=bool)
        for place, shape in enumerate(shapes):
            mask = inverse == place
            ranges = self.shapes.get(shape)
            if ranges is None:
                outside[mask] = True
                continue
            for name, (low, high) in ranges.items():
                value = columns[name][mask]
                outside[mask] |= (value < low) | (value > high)
        return outside


def _distinct(columns: Columns, names: tuple[str, ...] | list[str]) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Return the distinct shapes and every row's place among them."""
    length = next(iter(columns.values())).size
    if not names:
        return [()], np.zeros(length, dtype=np.int64)
    keys = np.stack([columns[name] for name in names], axis=1).astype(np.int64)
    shapes, inverse = np.unique(keys, axis=0, return_inverse=True)
    return [tuple(int(value) for value in shape) for shape in shapes], np.asarray(inverse).reshape(-1)


def shape_ranges(operation: Operation, columns: Columns) -> dict[tuple[int, ...], dict[str, tuple[float, float]]]:
    """Return every timed shape with the range of each size feature."""
    shapes, inverse = _distinct(columns, operation.shape)
    # Routing inside the timed region is an accident of how rows were timed, not a size of the work.
    sizes = [name for name in operation.features if name not in operation.shape and name not in operation.zero_allowed]
    return {
        shape: {name: _range(columns[name][inverse == place]) for name in sizes} for place, shape in enumerate(shapes)
    }


def _range(values: np.ndarray) -> tuple[float, float]:
    return float(values.min()), float(values.max())

"""LightGBM on the log residual: constant leaves under the absolute error, linear leaves under Huber's, averaged.

Constant leaves follow what tiles and kernel switches do; linear ones carry a trend on where sizes end, and are held to
the residuals that were seen, so that a slope cannot run away. Their mean is better than either on held-out rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from costmodels.features import Columns
from costmodels.params import FitParams

LEAST_LINEAR_ROWS = 300
"""Below this, leaves are too small for a slope of their own."""


@dataclass(frozen=True)
class Trees:
    """Hold one or two LightGBM models as text, with the names of their inputs in order."""

    names: tuple[str, ...]
    text: str
    linear_text: str = ""
    """Model with linear leaves, averaged with the first; empty for none."""
    limits: tuple[float, float] = (0.0, 0.0)
    """Least and largest value that linear leaves may answer."""

    @cached_property
    def _boosters(self) -> list[Any]:
        import lightgbm
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

        # One thread: a forked child inherits no working thread pool, and LightGBM would wait for it for ever.
        with threadpool_limits(1, user_api="openmp"):
            return [lightgbm.Booster(model_str=text) for text in (self.text, self.linear_text) if text]

    def log_ratio(self, derived: Columns) -> np.ndarray:
        """Return the log of time over baseline."""
        matrix = np.stack([derived[name] for name in self.names], axis=1)
        found = [np.asarray(b.predict(matrix, num_threads=1), dtype=np.float64) for b in self._boosters]
        return found[0] if len(found) == 1 else 0.5 * (found[0] + np.clip(found[1], *self.limits))


def grow_trees(
    derived: Columns, names: tuple[str, ...], target: np.ndarray, params: FitParams, unseen: bool = False
) -> Trees:
    """Fit constant leaves to ``target`` (a log): by absolute error in known shapes, by Huber's loss in unseen ones."""
    trees = 60 if target.size < params.small_rows else (params.unseen_trees if unseen else params.num_trees)
    loss = {"objective": "huber", "alpha": 0.2} if unseen else {"objective": "l1"}
    # What is used is what a file holds: predictions before saving equal those after loading to the bit.
    return Trees(names, _grow(derived, names, target, params, trees, loss))


def grow_pair(derived: Columns, names: tuple[str, ...], target: np.ndarray, params: FitParams) -> Trees:
    """Fit constant and linear leaves to ``target`` (a log); constant ones alone where rows are few."""
    flat = grow_trees(derived, names, target, params)
    if target.size < max(LEAST_LINEAR_ROWS, params.small_rows):
        return flat
    loss = {"objective": "huber", "alpha": 0.2, "linear_tree": True, "linear_lambda": 1.0}
    text = _grow(derived, names, target, params, params.linear_trees, loss)
    return Trees(names, flat.text, text, (float(target.min()), float(target.max())))


def _grow(
    derived: Columns, names: tuple[str, ...], target: np.ndarray, params: FitParams, trees: int, loss: dict[str, Any]
) -> str:
    import lightgbm

    rows, small = target.size, target.size < params.small_rows
    settings: dict[str, Any] = {
        **loss,
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
    matrix = np.stack([derived[name] for name in names], axis=1)
    data = lightgbm.Dataset(
        matrix, target, feature_name=list(names),
        params={"verbosity": -1, "num_threads": 1, "linear_tree": bool(loss.get("linear_tree", False))},
    )  # fmt: skip
    return _slim(str(lightgbm.train(settings, data, trees).model_to_string()))


UNUSED = ("leaf_weight=", "leaf_count=", "internal_value=", "internal_weight=", "internal_count=", "tree_sizes=")


def _slim(text: str) -> str:
    """Drop what no prediction reads: statistics of nodes, and the byte sizes that would have to agree with the rest."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(UNUSED))

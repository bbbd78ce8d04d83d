"""LightGBM on the log residual: constant leaves under the absolute error, linear leaves under Huber's, averaged.

Constant leaves follow what tiles and kernel switches do; linear ones carry a trend on where sizes end, and are held to
the residuals that were seen, so that a slope cannot run away. Their mean is better than either on held-out rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from costmodels.features import Columns, Names, check_limits
from costmodels.learned.lightgbm_text import check_text, stored_text
from costmodels.params import FitParams

Loss = dict[str, Any]
ABSOLUTE: Loss = {"objective": "l1"}
HUBER: Loss = {"objective": "huber", "alpha": 0.2}
LINEAR_TREES = 80
LEAST_LINEAR_ROWS = 300
"""Below this, leaves are too small for a slope of their own."""


@dataclass(frozen=True)
class Trees:
    """Hold one or two LightGBM models as text, with the names of their inputs in order."""

    names: Names
    text: str
    linear_text: str = ""
    """Model with linear leaves, averaged with the first; empty for none."""
    limits: tuple[float, float] = (0.0, 0.0)
    """Least and largest value that linear leaves may answer."""

    def __post_init__(self) -> None:
        for text in (self.text, *filter(None, [self.linear_text])):
            check_text(text, self.names)
        check_limits(self.limits)

    @cached_property
    def boosters(self) -> list[Any]:
        """LightGBM's models of constant and of linear leaves."""
        import lightgbm
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

        # One thread: a forked child inherits no working thread pool, and LightGBM would wait for it for ever.
        with threadpool_limits(1, user_api="openmp"):
            return [lightgbm.Booster(model_str=text) for text in (self.text, self.linear_text) if text]

    def log_ratio(self, derived: Columns) -> np.ndarray:
        """Return the log of time over baseline."""
        matrix = np.stack([derived[name] for name in self.names], axis=1)
        found = [np.asarray(b.predict(matrix, num_threads=1), dtype=np.float64) for b in self.boosters]
        return found[0] if len(found) == 1 else 0.5 * (found[0] + np.clip(found[1], *self.limits))


def grow_trees(
    derived: Columns, names: Names, target: np.ndarray, params: FitParams, loss: Loss = ABSOLUTE, linear: bool = False
) -> Trees:
    """Fit ``target`` (a log) by constant leaves; with many rows, by ``linear`` leaves beside them if asked for."""
    matrix = np.stack([derived[name] for name in names], axis=1)
    # What is used is what a file holds: predictions before saving equal those after loading to the bit.
    text = _grow(matrix, names, target, params, loss, params.num_trees)
    if not linear or target.size < max(LEAST_LINEAR_ROWS, params.small_rows):
        return Trees(names, text)
    sloped = {**HUBER, "linear_tree": True, "linear_lambda": 1.0}
    linear_text = _grow(matrix, names, target, params, sloped, LINEAR_TREES)
    return Trees(names, text, linear_text, (float(target.min()), float(target.max())))


def _grow(matrix: np.ndarray, names: Names, target: np.ndarray, params: FitParams, loss: Loss, trees: int) -> str:
    import lightgbm

    rows, small = target.size, target.size < params.small_rows
    settings = {
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
    data = lightgbm.Dataset(matrix, target, feature_name=list(names), params=settings)
    return stored_text(lightgbm.train(settings, data, 60 if small else trees))

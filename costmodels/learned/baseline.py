"""Fit the physics baseline of an operation: positive parameters in log space, robust to wild rows.

The loss is soft-L1 (pseudo-Huber) on the log of time, so that a row is judged by its ratio and an outlier counts by its
size only once. Every parameter is pulled weakly to its default, scaled to the speed of the device at hand, so that what
few rows leave open stays physical. A parameter that no row depends on (bytes between nodes, where every row is of one
node) is not fitted at all.
"""

from __future__ import annotations

import numpy as np

from costmodels.features import Columns, Operation, Parameters, take
from costmodels.params import FitParams

MOST_ROWS = 4000
"""An even sample of the time-sorted rows stands for more."""
SOFT_L1_SCALE = 0.05
"""Log error at which the loss turns from square to absolute."""
MAX_EVALUATIONS = 80


def scaled_defaults(operation: Operation, columns: Columns, time_us: np.ndarray) -> dict[str, float]:
    """Return the defaults, moved as a whole to the speed of the device: costs up, rates down by one factor."""
    defaults = {name: parameter.default for name, parameter in operation.parameters.items()}
    factor = float(np.exp(np.median(np.log(time_us / operation.baseline(columns, defaults)))))
    return {name: p.default * factor**p.device_power for name, p in operation.parameters.items()}


def fit_baseline(
    operation: Operation, columns: Columns, time_us: np.ndarray, params: FitParams, start: Parameters | None = None
) -> dict[str, float]:
    """Return the baseline's parameters for these rows.

    ``start`` (the fit on all rows, for a fold of it) only shortens the search; the pull is to the scaled defaults.
    """
    from scipy.optimize import least_squares

    if time_us.size > MOST_ROWS:
        order = np.argsort(time_us, kind="stable")
        kept = np.sort(order[np.linspace(0, time_us.size - 1, MOST_ROWS).round().astype(np.int64)])
        columns, time_us = take(columns, kept), time_us[kept]
    centre, log_time = scaled_defaults(operation, columns, time_us), np.log(time_us)
    unmoved = operation.baseline(columns, centre)
    names = [
        name
        for name, value in centre.items()
        if not np.array_equal(unmoved, operation.baseline(columns, {**centre, name: 2.0 * value}))
    ]
    log_centre = np.log([centre[name] for name in names])

    def fitted(point: np.ndarray) -> dict[str, float]:
        return {**centre, **dict(zip(names, np.exp(point), strict=True))}

    def residuals(point: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", under="ignore"):
            scaled = (np.log(operation.baseline(columns, fitted(point))) - log_time) / SOFT_L1_SCALE
        soft = np.sign(scaled) * np.sqrt(2.0 * (np.sqrt(1.0 + scaled**2) - 1.0)) * SOFT_L1_SCALE
        return np.concatenate([soft, params.baseline_pull * (point - log_centre)])

    first = log_centre if start is None else np.log([start[name] for name in names])
    bounds, ends = (log_centre - 12.0, log_centre + 12.0), {"ftol": 1e-6, "xtol": 1e-6, "gtol": 1e-9}
    found = least_squares(residuals, first, bounds=bounds, max_nfev=MAX_EVALUATIONS, **ends)
    # Six digits hide the last bits, in which LAPACK builds and thread counts differ: same rows, same bytes.
    return {name: float(f"{value:.6g}") for name, value in fitted(found.x).items()}

"""Fit the physics baseline of an operation: positive parameters in log space, robust to wild rows.

The loss is soft-L1 (pseudo-Huber) on the log of time, so that a row is judged by its ratio and an outlier counts by its
size only once. Every parameter is pulled weakly to its default, scaled to the speed of the device at hand, so that what
few rows leave open stays physical. A parameter that no row depends on (bytes between nodes, where every row is of one
node) is not fitted at all.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from costmodels.features import Columns, Operation
from costmodels.params import FitParams

MAX_EVALUATIONS = 80


def scaled_defaults(operation: Operation, columns: Columns, time_us: np.ndarray) -> dict[str, float]:
    """Return the defaults, moved as a whole to the speed of the device: costs up, rates down by one factor."""
    defaults = {name: parameter.default for name, parameter in operation.parameters.items()}
    factor = float(np.exp(np.median(np.log(time_us / operation.baseline(columns, defaults)))))
    return {name: p.default * factor**p.device_power for name, p in operation.parameters.items()}


def fit_baseline(
    operation: Operation,
    columns: Columns,
    time_us: np.ndarray,
    params: FitParams,
    start: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Return the baseline's parameters for these rows.

    ``start`` (the fit on all rows, for a fold of it) only shortens the search; the pull is to the scaled defaults.
    """
    from scipy.optimize import least_squares

    columns, time_us = _even_sample(columns, time_us, params.baseline_rows)
    centre = scaled_defaults(operation, columns, time_us)
    names, log_time = _in_use(operation, columns, centre), np.log(time_us)
    log_centre = np.log([centre[name] for name in names])

    def residuals(point: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", under="ignore"):
            here = {**centre, **dict(zip(names, np.exp(point), strict=True))}
            error = np.log(operation.baseline(columns, here)) - log_time
        scaled = error / params.soft_l1_scale
        soft = np.sign(scaled) * np.sqrt(2.0 * (np.sqrt(1.0 + scaled**2) - 1.0)) * params.soft_l1_scale
        return np.concatenate([soft, params.baseline_pull * (point - log_centre)])

    first = log_centre if start is None else np.log([start[name] for name in names])
    found = least_squares(
        residuals, first, bounds=(log_centre - 12.0, log_centre + 12.0), max_nfev=MAX_EVALUATIONS, x_scale=1.0,
        ftol=1e-6, xtol=1e-6, gtol=1e-9,
    )  # fmt: skip
    # Six digits hide the last bits, in which LAPACK builds and thread counts differ: same rows, same bytes.
    fitted = {**centre, **dict(zip(names, np.exp(found.x), strict=True))}
    return {name: float(f"{value:.6g}") for name, value in fitted.items()}


def _in_use(operation: Operation, columns: Columns, centre: Mapping[str, float]) -> list[str]:
    """Return the parameters whose change changes the baseline of some row."""
    before = operation.baseline(columns, centre)
    changed = {name: operation.baseline(columns, {**centre, name: 2.0 * value}) for name, value in centre.items()}
    return [name for name, times in changed.items() if not np.array_equal(times, before)]


def _even_sample(columns: Columns, time_us: np.ndarray, limit: int) -> tuple[Columns, np.ndarray]:
    if time_us.size <= limit:
        return columns, time_us
    order = np.argsort(time_us, kind="stable")
    kept = np.sort(order[np.linspace(0, time_us.size - 1, limit).round().astype(np.int64)])
    return {name: column[kept] for name, column in columns.items()}, time_us[kept]

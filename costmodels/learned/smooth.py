"""A residual without steps: a sum of kernels around some of the timed rows.

Many rows: kernel ridge regression on a sample of the rows as centres (subset of regressors), Matern 3/2, refitted with
Huber's weights so that wild rows count less. Few rows: a Gaussian process (constant x radial + linear + white) whose
hyper-parameters maximise the likelihood. Far from all timed rows the answer falls to nothing (Matern) or is held
(Gaussian process, by its limits), and physics is left.

Shape suffixes: R rows, M centres, D inputs.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodels.features import MOST, Columns, Names, check_array, check_limits
from costmodels.params import FitParams

MATERN_LENGTH = 4.0
"""Correlation length in standard deviations of the inputs."""
RIDGE = 1e-6
"""Weight of the ridge per row."""
HUBER = 0.03
"""Log error from which a row's weight falls."""
PASSES = 2
RIDGE_ROWS = 9000
"""Rows at most in the ridge regression, a sample: many times its centres are enough to average over noise."""
CENTRES = 800
"""Centres at most in the ridge regression."""
LIKELIHOOD_ROWS = 120
"""Rows at most by which a Gaussian process chooses its hyper-parameters: each trial costs their cube."""
CHUNK_ROWS = 4096


@dataclass(frozen=True)
class Kernel:
    """Hold a kernel expansion over named inputs."""

    names: Names
    radial: bool
    """A Gaussian bell where True, Matern 3/2 where False."""
    length: float
    centre: np.ndarray
    """[D] taken off the inputs, which are then divided by ``scale``."""
    scale: np.ndarray
    points: np.ndarray
    """[M, D] scaled centres, of ``weights`` [M]."""
    weights: np.ndarray
    slope: np.ndarray
    """[D] linear part over the scaled inputs."""
    offset: float
    limits: tuple[float, float]
    """Least and largest answer."""

    def __post_init__(self) -> None:
        inputs, centres = len(self.names), len(self.points)
        for name in ("centre", "scale", "slope"):
            check_array(name, getattr(self, name), np.float64, (inputs,))
        check_array("points", self.points, np.float64, (centres, inputs))
        check_array("weights", self.weights, np.float64, (centres,))
        if not (self.scale > 0).all() or not 1e-9 <= self.length <= MOST or not abs(self.offset) <= MOST:
            raise ValueError("expected a kernel's scale and length to be positive, and its offset finite")
        check_limits(self.limits)

    def log_ratio(self, derived: Columns) -> np.ndarray:
        """Return the log of time over baseline."""
        inputs = (np.stack([derived[name] for name in self.names], axis=1) - self.centre) / self.scale
        found = np.empty(len(inputs))
        for first in range(0, len(inputs), CHUNK_ROWS):
            part = inputs[first : first + CHUNK_ROWS]
            # Sums by numpy in one order, never by BLAS: a row's answer depends on no other row and no thread.
            total = (_kernel(part, self.points, self.length, self.radial) * self.weights).sum(axis=1)
            found[first : first + CHUNK_ROWS] = total + (part * self.slope).sum(axis=1)
        return np.clip(found + self.offset, *self.limits)


def squares(a_RD: np.ndarray, b_MD: np.ndarray, length: float = 1.0) -> np.ndarray:
    """Return squared distances [R, M] in units of ``length``, summed in one order whatever the machine."""
    total = np.zeros((len(a_RD), len(b_MD)))
    for d in range(a_RD.shape[1]):
        total += ((a_RD[:, d, None] - b_MD[None, :, d]) / length) ** 2
    return total


def _kernel(a_RD: np.ndarray, b_MD: np.ndarray, length: float, radial: bool) -> np.ndarray:
    square = squares(a_RD, b_MD, length)
    return np.asarray(np.exp(-0.5 * square)) if radial else _bent(np.sqrt(3.0 * square))


def _matern(a_RD: np.ndarray, b_MD: np.ndarray) -> np.ndarray:
    """Return what :func:`_kernel` does by one matrix product: faster, equal to rounding."""
    square = (a_RD**2).sum(axis=1)[:, None] + (b_MD**2).sum(axis=1) - 2.0 * (a_RD @ b_MD.T)
    return _bent(np.sqrt(np.maximum(square, 0.0) * (3.0 / MATERN_LENGTH**2)))


def _bent(distance: np.ndarray) -> np.ndarray:
    return np.asarray((1.0 + distance) * np.exp(-distance))


def fit_kernel(derived: Columns, names: Names, target: np.ndarray, params: FitParams) -> Kernel:
    """Fit a smooth residual to ``target`` (a log ratio): a Gaussian process to few rows, kernel ridge to many."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    matrix = np.stack([derived[name] for name in names], axis=1)
    centre, spread = matrix.mean(axis=0), matrix.std(axis=0)
    scale = np.where(spread > 1e-9, spread, 1.0)
    few = target.size < params.small_rows
    some = np.random.default_rng(params.seed).permutation(target.size)[:RIDGE_ROWS]
    # One thread: the order of sums, and so the last bits, must not depend on the machine's load or settings.
    with threadpool_limits(1):
        fitted = (_gaussian_process if few else _ridge)((matrix - centre) / scale, target, some)
    limits = float(target[some].min()), float(target[some].max())
    return Kernel(names=names, radial=few, centre=centre, scale=scale, limits=limits, **fitted)


def _ridge(inputs: np.ndarray, target: np.ndarray, some: np.ndarray) -> dict[str, Any]:
    inputs, target = inputs[some], target[some]
    _, first = np.unique(inputs, axis=0, return_index=True)
    points = inputs[np.sort(first)[:CENTRES]]
    design, between = _matern(inputs, points), _matern(points, points)
    ridge = RIDGE * target.size * (between + 0.01 * np.eye(len(points)))
    weight, solution = np.ones(target.size), np.zeros(len(points))
    for _ in range(PASSES):
        weighted = design * weight[:, None]
        solution = np.linalg.solve(weighted.T @ design + ridge, weighted.T @ target)
        weight = 1.0 / np.maximum(1.0, np.abs(target - design @ solution) / HUBER)
    still = np.zeros(inputs.shape[1])
    return {"length": MATERN_LENGTH, "points": points, "weights": solution, "slope": still, "offset": 0.0}


def _gaussian_process(inputs: np.ndarray, target: np.ndarray, some: np.ndarray) -> dict[str, Any]:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, WhiteKernel

    bell = ConstantKernel(0.01, (1e-5, 1.0)) * RBF(3.0, (0.3, 30.0))
    line = ConstantKernel(1e-3, (1e-7, 0.1)) * DotProduct(1.0, "fixed")
    some, offset = some[:LIKELIHOOD_ROWS], float(np.median(target))
    with warnings.catch_warnings():
        # A hyper-parameter at its bound only says that this part of the kernel is not needed.
        warnings.simplefilter("ignore", ConvergenceWarning)
        process = GaussianProcessRegressor(bell + line + WhiteKernel(1e-3, (1e-5, 0.1)))
        process.fit(inputs[some], target[some] - offset)
    # In the order bell's height and length, line's tilt, noise.
    height, length, tilt, noise = (float(f"{value:.6g}") for value in np.exp(process.kernel_.theta))
    covariance = height * _kernel(inputs, inputs, length, True) + tilt * (1.0 + inputs @ inputs.T)
    alpha = np.linalg.solve(covariance + noise * np.eye(len(inputs)), target - offset)
    return {
        "length": length,
        "points": inputs,
        "weights": height * alpha,
        "slope": tilt * (inputs.T @ alpha),
        "offset": offset + tilt * float(alpha.sum()),
    }

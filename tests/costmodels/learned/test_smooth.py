"""The smooth residual: it learns, it has no steps, and a row's answer depends on no other row."""

import numpy as np
import pytest

from costmodels import FitParams
from costmodels.learned.smooth import _kernel, _matern, fit_kernel

NAMES = ("x", "y")


def wave(x, y):
    return 0.2 * np.sin(x) + 0.05 * y


def inputs(rows, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.uniform(-3, 3, rows), "y": rng.uniform(-1, 1, rows)}


@pytest.mark.parametrize(("rows", "error"), [(40, 0.03), (250, 0.01), (2000, 0.01)])
def test_it_learns_a_wave_from_noisy_rows(rows, error):
    """Few rows by a Gaussian process, many by ridge regression."""
    data = inputs(rows)
    noisy = wave(**data) + 0.02 * np.random.default_rng(1).standard_normal(rows)
    found = fit_kernel(data, NAMES, noisy, FitParams()).log_ratio(inputs(500, seed=2))
    assert np.abs(found - wave(**inputs(500, seed=2))).mean() < error


def test_wild_rows_count_less():
    data = inputs(2000)
    target = wave(**data)
    target[::25] += 1.0
    found = fit_kernel(data, NAMES, target, FitParams()).log_ratio(data)
    assert np.median(np.abs(found - wave(**data))) < 0.02


@pytest.mark.parametrize("rows", [100, 1000])
def test_it_has_no_steps(rows):
    data = inputs(rows)
    kernel = fit_kernel(data, NAMES, wave(**data), FitParams())
    line = {"x": np.linspace(-3, 3, 4001), "y": np.zeros(4001)}
    assert np.abs(np.diff(kernel.log_ratio(line))).max() < 2 * 0.2 * 6 / 4000


@pytest.mark.parametrize("rows", [100, 1000])
def test_a_row_alone_and_among_others_has_the_same_bits(rows):
    data = inputs(rows)
    kernel = fit_kernel(data, NAMES, wave(**data), FitParams())
    asked = inputs(300, seed=3)
    together = kernel.log_ratio(asked)
    alone = [kernel.log_ratio({name: column[i : i + 1] for name, column in asked.items()})[0] for i in range(300)]
    assert together.tobytes() == np.array(alone).tobytes()


@pytest.mark.parametrize("rows", [100, 1000])
def test_answers_never_leave_the_residuals_seen(rows):
    data = inputs(rows)
    target = wave(**data)
    far = {"x": np.array([-1e6, 50.0, 1e6]), "y": np.array([1e6, -50.0, 0.0])}
    found = fit_kernel(data, NAMES, target, FitParams()).log_ratio(far)
    assert (found >= target.min()).all()
    assert (found <= target.max()).all()


def test_an_input_that_does_not_vary_is_no_trouble():
    data = inputs(100) | {"z": np.full(100, 7.0)}
    kernel = fit_kernel(data, (*NAMES, "z"), wave(data["x"], data["y"]), FitParams())
    assert np.isfinite(kernel.log_ratio(data)).all()


def test_the_fast_kernel_is_the_plain_one():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((50, 4)), rng.standard_normal((30, 4))
    assert _matern(a, b) == pytest.approx(_kernel(a, b, 4.0, False), abs=1e-6)

"""The script for the first GPU: its own arithmetic, on published rows."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "experiments" / "gpu_check" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Rows:
    """Measurements of one operation each."""

    def __init__(self, features):
        self.rows = {name: np.array([64.0, 128.0, 256.0]) for name in features} | {"time_us": np.array([2.0, 4.0, 8.0])}

    def select(self, **_):
        return self


class Twice:
    """A model that answers (time, mark): half of what the rows say."""

    def predict_us(self, op, direction, features):
        return np.array([1.0, 2.0, 4.0]), np.zeros(3, bool)


def test_fitted_ratios_are_one_a_row_and_finite(gpu_check):
    features = {name for op in ("attention", "dense", "experts") for name in gpu_check.OPERATIONS[op].features}
    lines = gpu_check.fitted_parity(Rows(features), Twice())
    assert [line[:3] for line in lines] == [("fitted", op, 3) for op in ("attention", "dense", "experts")]
    assert all(line[3:] == (2.0, 2.0, 2.0) for line in lines)  # once divided by the pair: 2 x N, with inf

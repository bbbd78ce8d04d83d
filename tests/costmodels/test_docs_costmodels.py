"""The worked example of docs/cost-models.md does what it says."""

import re
from pathlib import Path

import numpy as np
import pytest

from costmodels import FitParams
from costmodels.fit import fit_operation

DOCS = Path(__file__).resolve().parents[2] / "docs" / "cost-models.md"


def test_the_added_operation_is_fitted_and_prices_beyond_its_rows():
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    space = {}
    exec(code, space)
    norm = space["NORM"]
    tokens, hidden = (
        a.ravel().astype(np.float64) for a in np.meshgrid(2 ** np.arange(6, 15), (1024, 2048, 4096, 7168))
    )
    true_us = 5.0 + 4.0 * tokens * hidden / 2.0e6
    rows = {"tokens": tokens, "hidden_size": hidden, "time_us": true_us * np.exp(0.1 * np.sin(np.log2(tokens)))}
    model, held_out = fit_operation(norm, "forward", rows, FitParams(folds=3))
    assert held_out is not None
    assert {"unseen sizes", "unseen shapes"} <= set(model.validation)
    time_us, outside = model.predict_us({"tokens": [512.0, 65536.0, 512.0], "hidden_size": [2048.0, 4096.0, 3072.0]})
    assert outside.tolist() == [False, True, True]
    assert time_us == pytest.approx([7.1, 541.9, 8.1], rel=0.2)

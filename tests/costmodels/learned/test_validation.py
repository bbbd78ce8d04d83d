"""Held-out rows share no group with the rows that were fitted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.fit import fit_operation
from costmodels.learned.files import save_model
from costmodels.learned.validation import (
    HeldOut,
    Intervals,
    assign_folds,
    calibrate,
    error_summary,
    family_groups,
    size_groups,
)
from costmodels.operations import OPERATIONS
from profiler.files import canonical_json


@given(st.lists(st.integers(0, 40), min_size=1, max_size=200), st.integers(2, 7))
def test_a_group_is_in_one_fold_and_folds_are_even(groups, folds):
    groups = np.array(groups)
    fold = assign_folds(groups, folds)
    assert all(np.unique(fold[groups == group]).size == 1 for group in np.unique(groups))
    sizes = [np.unique(groups[fold == k]).size for k in range(fold.max() + 1)]
    assert max(sizes) - min(sizes) <= 1
    assert fold.max() < folds


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_no_shape_and_size_is_on_both_sides(name, synthetic):
    operation = OPERATIONS[name]
    rows = list(synthetic.rows[name]())
    columns = {key: np.array([row[key] for row in rows], dtype=np.float64) for key in rows[0]}
    shape_and_size = [tuple(row[key] for key in (*operation.shape, *operation.size)) for row in rows]
    splits = [size_groups(operation, columns)]
    if operation.shape:
        splits.append(family_groups(operation, columns))
    for groups in splits:
        fold = assign_folds(groups, 5)
        where = {}
        for key, k in zip(shape_and_size, fold, strict=True):
            where.setdefault(key, set()).add(int(k))
        assert all(len(folds) == 1 for folds in where.values())


def test_sizes_of_published_experts_are_global_tokens():
    operation = OPERATIONS["experts"]
    columns = {name: np.array([64.0, 64.0, 64.0]) for name in operation.features}
    columns["router_tokens"] = np.array([512.0, 0.0, 1024.0])
    assert np.array_equal(size_groups(operation, columns), [36, 24, 40])


def test_error_summary_by_hand():
    found = error_summary(np.array([1.0, 2.2, 0.5]), np.array([1.0, 2.0, 1.0]))
    assert found == {"median_pct": 10.0, "mape_pct": 20.0, "p95_pct": 46.0, "worst_pct": 50.0}


def test_a_constant_correction_is_not_useful():
    true = np.array([2.0, 4.0, 8.0])
    assert not HeldOut(true, true / 2, true).useful()
    assert HeldOut(true, true / 2, true * [1.0, 1.01, 0.99]).useful()
    assert not HeldOut(true, true * 1.01, true * [1.5, 1.0, 1.0]).useful()


def test_report_names_all_contestants(fitted):
    validation = fitted.validation["attention/forward"]
    assert fitted.models["attention", "forward"].kind != "baseline"
    errors = validation["unseen sizes"]
    assert errors["model"]["median_pct"] < errors["baseline"]["median_pct"]
    assert errors["model"]["median_pct"] < errors["lightgbm_alone"]["median_pct"]
    assert {"rows", "baseline", "trees", "smooth", "model"} <= set(validation["unseen shapes"])
    assert {"rows", "baseline", "trees", "smooth", "curve", "model"} <= set(validation["largest sizes"])


@given(st.lists(st.floats(0, 3), max_size=60), st.integers(0, 5))
def test_an_interval_is_finite_or_unknown(errors, octaves):
    errors = np.array(errors)
    size = np.geomspace(1, 2**octaves, errors.size) if errors.size else errors
    found = calibrate(size, errors)
    assert (found is None) == (errors.size < 5)
    if found is not None:
        assert np.isfinite([*found.half_log, *found.edges]).all()
        assert min(found.half_log) >= 0
    if 5 <= errors.size < 9:
        assert found == Intervals((), (2 * errors.max(),))


@pytest.mark.parametrize("name", ["attention", "experts", "dense", "alltoall"])
@pytest.mark.parametrize("rows", [6, 12, 20, 40])
def test_few_points_give_an_honest_interval_or_none_and_never_nan(name, rows, synthetic, tmp_path):
    everything = synthetic.measurements(ops=(name,), noise=0.05, seed=rows).rows
    rng = np.random.default_rng(rows)
    chosen = np.sort(rng.choice(everything["time_us"].size, rows, replace=False))
    operation = OPERATIONS[name]
    columns = {key: everything[key][chosen].astype(np.float64) for key in (*operation.features, "time_us")}
    model, _ = fit_operation(operation, "forward", columns, synthetic.fast)
    entry = canonical_json(save_model(tmp_path, model))
    assert "NaN" not in entry
    if rows >= 20:
        assert model.intervals is not None
        assert all(0 < half < 5 for half in model.intervals.half_log)

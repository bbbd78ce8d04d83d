"""Which member answers where, how far a prediction may be off, and points that are left out of the fit."""

import dataclasses

import numpy as np
import pytest

from costmodels import CostModel, FitParams, fit_cost_model
from costmodels.learned.residual import SMOOTH_PRICE, best_mix, known_log_ratio, mean_of
from costmodels.learned.trees import grow_trees
from costmodels.learned.validation import (
    LARGEST,
    calibrate,
    conformal_quantile,
    coverage,
    held_out_folds,
    size_groups,
)
from profiler import Topology

NAN = np.nan
MEMBERS = {"trees": np.array([0.1, 0.1]), "smooth": np.array([0.3, 0.3]), "curve": np.array([0.5, NAN])}


def test_a_mix_is_the_mean_of_those_that_answer():
    assert mean_of(MEMBERS, ("trees", "curve"), 2) == pytest.approx([0.3, 0.1])
    assert mean_of(MEMBERS, ("curve",), 2) == pytest.approx([0.5, 0.0])
    assert mean_of(MEMBERS, (), 2) == pytest.approx([0.0, 0.0])


def test_regimes_and_the_ramp_between_them():
    mixes = {"measured": ("trees",), "between": ("smooth",), "larger": ("curve",), "beyond": ()}
    for octaves, expected in ((0.0, [0.1, 0.3]), (0.25, [0.3, 0.15]), (0.5, [0.5, 0.0]), (9.0, [0.5, 0.0])):
        assert known_log_ratio(MEMBERS, mixes, np.full(2, octaves)) == pytest.approx(expected)


def test_the_smooth_residual_is_preferred_within_its_price_and_off_curves_alone():
    true = np.zeros(100)
    for trees, smooth, wanted in ((0.10, 0.99 * SMOOTH_PRICE * 0.10, ("smooth",)), (0.10, 0.2, ("trees",))):
        members = {"trees": np.full(100, trees), "smooth": np.full(100, smooth)}
        assert best_mix(members, true, steady=True, small=False) == wanted
        assert best_mix(members, true, steady=False, small=False) == ("trees",)


def test_few_rows_are_never_left_to_trees_alone():
    members = {"trees": np.zeros(20), "smooth": np.full(20, 0.2)}
    assert best_mix(members, np.zeros(20), steady=False, small=True) == ("trees", "smooth")


def test_linear_leaves_cannot_run_away():
    x = np.random.default_rng(0).uniform(0, 1, 1000)
    trees = grow_trees({"x": x}, ("x",), x, FitParams(num_trees=50), linear=True)
    assert trees.linear_text
    assert trees.log_ratio({"x": np.array([1e3, -1e3])}) == pytest.approx([1.0, 0.0], abs=0.02)


def test_largest_sizes_are_predicted_from_smaller_ones(synthetic):
    from costmodels.operations import OPERATIONS

    operation = OPERATIONS["dense"]
    rows = list(synthetic.rows["dense"]())
    columns = {key: np.array([row[key] for row in rows], dtype=np.float64) for key in rows[0]}
    fold, groups = held_out_folds(operation, columns, LARGEST, 5), size_groups(operation, columns)
    assert set(fold) == {-1, 0}
    assert np.unique(groups[fold == 0]).size == 3
    assert groups[fold == 0].min() > groups[fold == -1].max()
    few = {name: column[groups <= np.unique(groups)[4]] for name, column in columns.items()}
    assert held_out_folds(operation, few, LARGEST, 5) is None


@pytest.mark.parametrize(("rows", "rank"), [(9, 9), (19, 18), (99, 90)])
def test_the_quantile_covers_one_more_row(rows, rank):
    """The rank is the ceiling of nine tenths of one row more, so that a new row is covered nine times in ten."""
    errors = np.random.default_rng(0).permutation(np.arange(1.0, rows + 1))
    assert conformal_quantile(errors) == rank


def test_intervals_cover_nine_in_ten_where_errors_grow_with_size():
    rng = np.random.default_rng(0)
    size = np.exp(rng.uniform(0, 8, 6000))
    error = np.abs(rng.standard_normal(6000)) * (0.01 + 0.01 * np.log(size))
    intervals = calibrate(size, error)
    assert all(low < high for low, high in zip(intervals.half_log, intervals.half_log[1:], strict=False))
    assert coverage(size, error, np.arange(6000) % 5) == pytest.approx(0.9, abs=0.02)


def test_fitted_intervals_are_stored(fitted, saved):
    intervals = fitted.models["dense", "forward"].intervals
    assert 0 < min(intervals.half_log) < 1
    assert CostModel.load(saved).models["dense", "forward"].intervals == intervals
    assert 80 < fitted.validation["attention/forward"]["intervals"]["inside_pct"] < 97


def test_flagged_points_are_no_part_of_the_fit(fitted, synthetic):
    measurements = synthetic.measurements()
    place = int(np.flatnonzero(measurements.rows["op"] == "dense")[40])
    rows = {name: column.copy() for name, column in measurements.rows.items()}
    rows["flag"] = rows["flag"].astype("<U32")
    rows["flag"][place], rows["time_us"][place] = "slower than more rows", 9e6
    flagged = dataclasses.replace(measurements, rows=rows)
    model = fit_cost_model(flagged, synthetic.spec(), Topology(), 2048, synthetic.fast)
    features = {name: rows[name][place : place + 1].astype(float) for name in ("tokens", "n", "k")}
    plain, _ = model.predict_us("dense", "forward", features)
    assert plain == pytest.approx(fitted.predict_us("dense", "forward", features)[0], rel=0.1)
    assert model.models["dense", "forward"].flagged_rows == 1

"""Which member answers where, how far a prediction may be off, and points that are kept as they were timed."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels import CostModel, FitParams, fit_cost_model
from costmodels.learned.intervals import calibrate, conformal_quantile, coverage
from costmodels.learned.residual import SMOOTH_PRICE, best_mix, known_log_ratio, mean_of
from costmodels.learned.trees import grow_pair
from costmodels.learned.validation import LARGEST, held_out_folds, size_groups
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
        assert best_mix(members, true, smooth=True, small=False) == wanted
        assert best_mix(members, true, smooth=False, small=False) == ("trees",)


def test_few_rows_are_never_left_to_trees_alone():
    members = {"trees": np.zeros(20), "smooth": np.full(20, 0.2)}
    assert best_mix(members, np.zeros(20), smooth=False, small=True) == ("trees", "smooth")


def test_linear_leaves_cannot_run_away():
    x = np.random.default_rng(0).uniform(0, 1, 1000)
    trees = grow_pair({"x": x}, ("x",), x, FitParams(num_trees=50))
    assert trees.linear_text
    assert trees.log_ratio({"x": np.array([1e3, -1e3])}) == pytest.approx([1.0, 0.0], abs=0.02)


def test_largest_sizes_are_predicted_from_smaller_ones(synthetic):
    from costmodels.operations.catalog import OPERATIONS

    operation = OPERATIONS["dense"]
    rows = list(synthetic.rows["dense"]())
    columns = {key: np.array([row[key] for row in rows], dtype=np.float64) for key in rows[0]}
    fold, groups = held_out_folds(operation, columns, LARGEST, 5), size_groups(operation, columns)
    assert set(fold) == {-1, 0}
    assert np.unique(groups[fold == 0]).size == 3
    assert groups[fold == 0].min() > groups[fold == -1].max()
    few = {name: column[groups <= np.unique(groups)[4]] for name, column in columns.items()}
    assert held_out_folds(operation, few, LARGEST, 5) is None


@given(st.lists(st.floats(0, 1), min_size=1, max_size=300))
def test_the_quantile_covers_its_share(errors):
    errors = np.array(errors)
    assert (errors <= conformal_quantile(errors)).mean() >= 0.9 or errors.max() == conformal_quantile(errors)


def test_intervals_cover_nine_in_ten_where_errors_grow_with_size():
    rng = np.random.default_rng(0)
    size = np.exp(rng.uniform(0, 8, 6000))
    error = np.abs(rng.standard_normal(6000)) * (0.01 + 0.01 * np.log(size))
    intervals = calibrate(size, error, None)
    assert all(low < high for low, high in zip(intervals.half_log, intervals.half_log[1:], strict=False))
    assert coverage(size, error, np.arange(6000) % 5) == pytest.approx(0.9, abs=0.02)
    known, outside = np.array([True, True, False]), np.array([False, True, False])
    half = np.log1p(intervals.half_widths(np.full(3, 5.0), known, outside))
    assert half[1] == pytest.approx(2 * half[0])
    assert half[2] == pytest.approx(2 * max(intervals.half_log))


def test_fitted_intervals_are_stored_and_widen_outside(fitted, saved):
    features = {"tokens": np.array([512.0, 10_000.0]), "n": np.array([512.0, 512.0]), "k": np.array([512.0, 512.0])}
    half = fitted.half_width("dense", "forward", features)
    assert 0 < half[0] < half[1] < 1
    assert CostModel.load(saved).half_width("dense", "forward", features).tobytes() == half.tobytes()
    assert 80 < fitted.validation["attention/forward"]["intervals"]["inside_pct"] < 97


def test_flagged_points_are_no_part_of_the_fit_and_are_answered_where_asked(fitted, synthetic, tmp_path):
    measurements = synthetic.measurements()
    place = int(np.flatnonzero(measurements.rows["op"] == "dense")[40])
    rows = {name: column.copy() for name, column in measurements.rows.items()}
    rows["flag"] = rows["flag"].astype("<U32")
    rows["flag"][place], rows["time_us"][place] = "slower than more rows", 9e6
    flagged = dataclasses.replace(measurements, rows=rows)
    model = fit_cost_model(flagged, synthetic.spec(), Topology(), 2048, synthetic.fast)
    model.save(tmp_path / "costmodel")
    features = {name: rows[name][place : place + 1].astype(float) for name in ("tokens", "n", "k")}
    for one in (model, CostModel.load(tmp_path / "costmodel")):
        plain, _ = one.predict_us("dense", "forward", features)
        exact, extrapolated = one.predict_us("dense", "forward", features, overrides=True)
        assert exact == pytest.approx([9e6])
        assert not extrapolated[0]
        assert plain == pytest.approx(fitted.predict_us("dense", "forward", features)[0], rel=0.1)
        near = {**features, "tokens": features["tokens"] + 1}
        assert np.array_equal(*(one.predict_us("dense", "forward", near, overrides=asked)[0] for asked in (0, 1)))
        assert one.validation["dense/forward"]["overrides"] == 1

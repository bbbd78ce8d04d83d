"""Prices of single operations: by name, honest outside the timed range, refused where nothing was learned."""

import numpy as np
import pytest

from costmodels import FitParams, fit_cost_model
from costmodels.features import Operation, Parameter
from costmodels.fit import fit_operation
from costmodels.learned.trees import grow_trees
from costmodels.operations import OPERATIONS
from profiler import RoutePackError, Topology
from profiler.cases.case import OPERATIONS as TIMED

LINE = Operation(
    name="line",
    features={"x": "requests"},
    shape=(),
    family=("x",),
    size=("x",),
    parameters={"start": Parameter(1.0, "us"), "slope": Parameter(0.1, "us per request")},
    baseline=lambda c, p: p["start"] + p["slope"] * c["x"],
    derive=lambda c: {"log_x": np.log(c["x"])},
    dimensionless=("log_x",),
    floor=lambda c, p: np.full_like(c["x"], p["start"]),
)
"""All it takes to add an operation."""


def line_rows(x, bump=0.1, noise=0.0, seed=0):
    x = np.asarray(x, dtype=np.float64)
    wave = np.exp(bump * np.sin(3 * np.log(x)) + noise * np.random.default_rng(seed).standard_normal(x.size))
    return {"x": x, "time_us": (0.01 * x + 0.5) * wave}


def test_features_are_those_of_the_measurements():
    assert {name: tuple(operation.features) for name, operation in OPERATIONS.items()} == {
        name: one.features for name, one in TIMED.items()
    }


def test_derived_inputs_are_finite_and_named_consistently(synthetic):
    for name, operation in OPERATIONS.items():
        rows = list(synthetic.rows[name]())
        columns = {key: np.array([row[key] for row in rows], dtype=np.float64) for key in rows[0]}
        derived = operation.derive(columns)
        assert all(np.isfinite(column).all() for column in derived.values())
        assert set(operation.dimensionless) <= set(derived)
        assert set(operation.shape) | set(operation.size) | operation.zero_allowed <= set(operation.features)


def test_beyond_the_range_physics_scales_and_the_row_is_marked():
    """FC-35: trees alone answer the same for 1000, 2000 and 10000."""
    x = np.arange(1.0, 1001.0)
    rows = line_rows(x)
    model, _ = fit_operation(LINE, "forward", rows, FitParams())
    asked = np.array([500.0, 1000.0, 2000.0, 10000.0])
    found, extrapolated = model.predict_us({"x": asked})
    assert model.kind != "baseline"
    assert extrapolated.tolist() == [False, False, True, True]
    assert found[2] / found[1] == pytest.approx(2.0, rel=0.05)
    assert found[3] / found[2] == pytest.approx(5.0, rel=0.05)
    alone = grow_trees(LINE.derive(rows), ("log_x",), np.log(rows["time_us"]), FitParams())
    assert np.ptp(alone.log_ratio(LINE.derive({"x": asked[1:]}))) == 0.0


def test_sequences_beyond_the_measured_ones_keep_growing(fitted, synthetic):
    lengths = np.array([4096, 8192, 16384, 65536])
    shape = {"num_heads": [8], "num_kv_heads": [2], "qk_head_dim": [64], "v_head_dim": [64], "window": [0]}
    features = {
        "tokens": lengths, "pairs": lengths * (lengths + 1) // 2, "num_sequences": [1], "max_length": lengths, **shape
    }  # fmt: skip
    time_us, extrapolated = fitted.predict_us("attention", "forward", features)
    assert extrapolated.tolist() == [False, True, True, True]
    assert (time_us[1:] / time_us[:-1] > 3.0).all()


def test_columns_are_found_by_name_never_by_position(fitted):
    """FC-37: reordered columns must not give other numbers."""
    features = {"tokens": np.array([64.0, 700.0]), "n": np.array([512.0, 4096.0]), "k": np.array([2048.0, 256.0])}
    expected, _ = fitted.predict_us("dense", "forward", features)
    found, _ = fitted.predict_us("dense", "forward", dict(reversed(features.items())))
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": None}, "missing \\['n'\\]"),
        ({"m": [1.0]}, "unknown \\['m'\\]"),
        ({"n": [float("nan")]}, "Feature n of dense must be finite and > 0, got nan"),
        ({"n": [float("inf")]}, "must be finite"),
        ({"k": [0.0]}, "must be finite and > 0, got 0"),
        ({"tokens": [-3.0]}, "got -3"),
        ({"tokens": [1.0, 2.0], "k": [1.0, 2.0, 3.0]}, "has shape"),
    ],
)
def test_wrong_features_are_errors(fitted, change, message):
    features = {"tokens": [64.0], "n": [512.0], "k": [512.0], **change}
    with pytest.raises(RoutePackError, match=message):
        fitted.predict_us("dense", "forward", {name: value for name, value in features.items() if value is not None})


def test_unknown_operation_and_direction_are_errors(fitted):
    with pytest.raises(RoutePackError, match="no times of 'convolution'"):
        fitted.predict_us("convolution", "forward", {})
    with pytest.raises(RoutePackError, match="Unknown direction"):
        fitted.predict_us("dense", "sideways", {})


def test_forty_rows_are_enough_for_trees_that_are_not_constant():
    """FC-39: the library's default leaf size allows no split with 40 rows."""
    rows = line_rows(np.geomspace(1, 1000, 40), bump=0.4)
    model, _ = fit_operation(LINE, "forward", rows, FitParams())
    assert model.kind != "baseline"
    ratio = model.predict_us({"x": rows["x"]})[0] / LINE.baseline({"x": rows["x"]}, model.parameters)
    assert np.unique(ratio).size > 5


def test_too_few_rows_are_priced_by_physics_alone():
    model, held_out = fit_operation(LINE, "forward", line_rows(np.geomspace(1, 1000, 15), bump=0.0), FitParams())
    assert model.kind == "baseline"
    assert model.reasons == ("unseen sizes: 15 rows, a residual needs 20",)
    assert held_out is not None
    assert model.validation["unseen sizes"]["baseline"]["median_pct"] < 1.0
    assert model.predict_us({"x": [4000.0]})[0] == pytest.approx([40.5], rel=0.05)


def test_trees_that_learn_nothing_are_refused():
    model, held_out = fit_operation(
        LINE, "forward", line_rows(np.geomspace(1, 1000, 200), bump=0.0, noise=0.05), FitParams()
    )
    assert model.kind == "baseline"
    assert "no better than the baseline" in model.reasons[0]
    assert not held_out.useful()


def test_refusal_is_said_in_the_notes(synthetic):
    measurements = synthetic.measurements(keep=0.03, seed=3)
    model = fit_cost_model(measurements, synthetic.spec(), Topology(), 2048, synthetic.fast)
    assert model.models["dense", "forward"].kind == "baseline"
    assert any("priced by the physics baseline alone" in note for note in model.tables.notes)


def test_wild_rows_do_not_move_the_fit():
    rows = line_rows(np.geomspace(1, 1000, 400), bump=0.0)
    rows["time_us"][::40] *= 30.0
    model, _ = fit_operation(LINE, "forward", rows, FitParams())
    assert model.predict_us({"x": [1000.0]})[0] == pytest.approx([10.5], rel=0.03)


def test_shapes_nobody_timed_are_priced_and_marked(fitted, synthetic):
    features = {
        "rows": [4096], "active_experts": [4], "padded_rows": [4096], "max_rows": [1024], "local_experts": [4],
        "hidden_size": [1536], "inter_size": [640], "router_tokens": [0], "num_experts": [48],
    }  # fmt: skip
    time_us, extrapolated = fitted.predict_us("experts", "forward", features)
    true_us = synthetic.true_us["experts"]({name: np.float64(value[0]) for name, value in features.items()})
    assert extrapolated.all()
    assert time_us == pytest.approx([true_us], rel=0.25)


def test_measured_backward_has_its_own_model(synthetic):
    measurements = synthetic.measurements(ops=("attention", "experts"), backward=True)
    model = fit_cost_model(measurements, synthetic.spec(), Topology(), 4096, synthetic.fast)
    assert ("experts", "backward") in model.models
    rows = list(synthetic.rows["experts"]())[100:140]
    features = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    forward, _ = model.predict_us("experts", "forward", features)
    backward, _ = model.predict_us("experts", "backward", features)
    assert np.median(backward / forward) == pytest.approx(3.0, rel=0.05)
    assert not any("backward" in note for note in model.tables.notes)
    assert model.tables.priced.startswith("priced: attention cores, experts; not priced: ")


def test_absent_backward_is_a_stated_factor(fitted):
    features = {"tokens": [256.0], "n": [512.0], "k": [512.0]}
    forward, backward = (fitted.predict_us("dense", direction, features)[0] for direction in ("forward", "backward"))
    assert backward == pytest.approx(2.0 * forward)
    (note,) = (note for note in fitted.tables.notes if note.startswith("backward of attention is assumed"))
    assert "3.1x forward (up to 1024 attended tokens) to 2.5x" in note
    assert "tritonbench #1267" in note
    assert fitted.backward_ratio("alltoall", {}) == 1.0


def test_empty_calls_set_the_floor(synthetic):
    measurements = synthetic.measurements(ops=("attention", "experts"))
    rows = [{name: column[i] for name, column in measurements.rows.items()} for i in range(len(measurements))]
    empty = {**rows[-1], "rows": 0, "active_experts": 0, "padded_rows": 0, "max_rows": 0, "time_us": 7.0}
    with_empty = type(measurements).from_rows([*rows, empty], measurements.meta)
    model = fit_cost_model(with_empty, synthetic.spec(), Topology(expert_model_parallel_size=1), 1024, synthetic.fast)
    assert model.models["experts", "forward"].empty_us == 7.0
    assert model.tables.expert_rank_ns[0] == 21_000


def test_measurements_without_experts_are_refused(synthetic):
    with pytest.raises(RoutePackError, match="no usable forward time of experts"):
        fit_cost_model(synthetic.measurements(ops=("attention",)), synthetic.spec(), Topology(), 1024)
    with pytest.raises(RoutePackError, match="No measurements"):
        fit_cost_model([], synthetic.spec(), Topology(), 1024)


def test_two_devices_are_not_mixed(synthetic):
    one = synthetic.measurements(ops=("attention",))
    other = synthetic.measurements(ops=("experts",))
    meta = {**other.meta, "fingerprint": {**other.meta["fingerprint"], "arch": "another"}}
    with pytest.raises(RoutePackError, match="different devices"):
        fit_cost_model([one, type(other)(other.rows, meta)], synthetic.spec(), Topology(), 1024)


@pytest.mark.parametrize(
    "change",
    [{"folds": 1}, {"seed": -1}, {"num_trees": 0}, {"gemm_backward_factor": float("nan")}, {"learning_rate": 2.0},
     {"num_leaves": 1.5}, {"min_rows": True}],
)  # fmt: skip
def test_fit_params_are_checked(change):
    with pytest.raises(ValueError, match="Expected"):
        FitParams(**change)

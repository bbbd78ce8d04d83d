"""What people who do this job ran into with learned times, each with the value that is right.

FC-35 flat answers outside the timed range; FC-37 columns by position; FC-39 too few rows; FC-41 forks after LightGBM.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import lightgbm
import numpy as np
import pytest
from patience import PATIENCE_S

from costmodels import CostModel, FitParams, fit_cost_model
from costmodels.features import Operation, Parameter
from costmodels.fit import fit_operation
from profiler import RoutePackError, Topology

REQUESTS = Operation(
    name="requests",
    features={"x": "tokens of a request", "rank": "ranks"},
    shape=(),
    family=("x",),
    size=("x",),
    parameters={"start": Parameter(1.0, "us"), "slope": Parameter(0.1, "us per token")},
    baseline=lambda c, p: p["start"] + p["slope"] * c["x"] + 0.0 * c["rank"],
    derive=lambda c: {"log_x": np.log(c["x"]), "log_rank": np.log(c["rank"])},
    dimensionless=("log_x",),
    floor=lambda c, p: np.full_like(c["x"], p["start"]),
)


def request_rows(x, wave=0.1):
    """Times of the case's line, 0.01 x + 0.5, with a wave that no line has; ``rank`` tells nothing."""
    x = np.asarray(x, dtype=np.float64)
    time_us = (0.01 * x + 0.5) * np.exp(wave * np.sin(3.0 * np.log(x)))
    return {"x": x, "rank": 2.0 + np.arange(x.size) % 3, "time_us": time_us}


def stock_lightgbm(x, y):
    """The library as it comes: defaults, times as they are."""
    booster = lightgbm.train({"verbosity": -1, "num_threads": 1}, lightgbm.Dataset(x, y), 100)
    return lambda asked: np.asarray(booster.predict(asked, num_threads=1))


class TestOutsideTheTimedRange:
    """FC-35: trees answered 10.3 for 1000, 2000 and 10000 where 10.5, 20.5 and 100.5 are right."""

    asked = np.array([1000.0, 2000.0, 10000.0])
    right = np.array([10.5, 20.5, 100.5])

    @pytest.fixture(scope="class")
    def model(self):
        return fit_operation(REQUESTS, "forward", request_rows(np.arange(1.0, 1001.0)), FitParams())[0]

    def test_trees_alone_answer_one_value(self):
        x = np.arange(1.0, 1001.0)[:, None]
        answer = stock_lightgbm(x, 0.01 * x[:, 0] + 0.5)(self.asked[:, None])
        assert np.ptp(answer) == 0.0
        assert answer[0] == pytest.approx(10.5, rel=0.05)

    def test_the_analytic_tail_answers_the_right_ones(self, model):
        found, extrapolated = model.predict_us({"x": self.asked, "rank": [2.0]})
        assert model.kind != "baseline"
        assert extrapolated.tolist() == [False, True, True]
        # The wave at the edge (up to 10 %) goes along; a flat answer would be wrong by half and by nine tenths.
        assert found == pytest.approx(self.right, rel=0.12)

    def test_below_the_range_is_marked_too(self):
        rows = request_rows(np.arange(100.0, 1001.0))
        model, _ = fit_operation(REQUESTS, "forward", rows, FitParams())
        _, extrapolated = model.predict_us({"x": [50.0, 100.0], "rank": [2.0]})
        assert extrapolated.tolist() == [True, False]

    def test_tables_grow_beyond_the_range_and_say_where_it_ends(self, synthetic):
        model = fit_cost_model(synthetic.measurements(), synthetic.spec(), Topology(), 16384, synthetic.fast)
        tables = model.tables
        assert tables.measured_length_max == 4096
        assert any("sequences of more than 4096 tokens are extrapolated" in note for note in tables.notes)
        node = 1 << tables.length_shift
        at_edge, beyond = (int(tables.sequence_ns[0][length // node]) for length in (4096, 16384))
        # Attention is quadratic in length: four times the tokens, at least eight times the time.
        assert beyond > 8 * at_edge


class TestColumnsByName:
    """FC-37: columns in another order gave silently other numbers."""

    rows = request_rows(np.geomspace(1, 1000, 400))

    @pytest.fixture(scope="class")
    def model(self):
        return fit_operation(REQUESTS, "forward", self.rows, FitParams())[0]

    def test_positions_do_matter_to_lightgbm(self):
        x = np.stack([self.rows["x"], self.rows["rank"]], axis=1)
        answer = stock_lightgbm(x, self.rows["time_us"])
        assert np.abs(answer(x) - answer(x[:, ::-1])).max() > 5.0

    def test_order_does_not_matter_to_us(self, model):
        given = {"x": self.rows["x"], "rank": self.rows["rank"]}
        expected, _ = model.predict_us(given)
        found, _ = model.predict_us(dict(reversed(given.items())))
        assert found.tobytes() == expected.tobytes()

    @pytest.mark.parametrize(
        ("given", "message"),
        [({"x": [1.0]}, r"missing \['rank'\], unknown none"),
         ({"x": [1.0], "rank": [2.0], "experts": [8.0]}, r"missing none, unknown \['experts'\]"),
         ({"X": [1.0], "rank": [2.0]}, r"missing \['x'\], unknown \['X'\]")],
    )  # fmt: skip
    def test_missing_and_extra_are_errors(self, model, given, message):
        with pytest.raises(RoutePackError, match=message):
            model.predict_us(given)

    def test_names_order_and_units_are_stored(self, fitted, saved):
        entries = json.loads((saved / "costmodel.json").read_text())["operations"].values()
        assert len(entries) == len(fitted.models)
        for entry in entries:
            operation = fitted.models[entry["operation"], entry["direction"]].operation
            assert list(entry["features"].items()) == list(operation.features.items())

    def test_a_stored_order_that_is_not_ours_is_refused(self, saved, tmp_path):
        shutil.copytree(saved, tmp_path / "costmodel")
        path = tmp_path / "costmodel" / "costmodel.json"
        header = json.loads(path.read_text())
        entry = next(one for one in header["operations"].values() if one["operation"] == "dense")
        entry["features"] = dict(reversed(entry["features"].items()))
        path.write_text(json.dumps(header))
        with pytest.raises(RoutePackError, match="features of dense"):
            CostModel.load(tmp_path / "costmodel")


class TestFewRows:
    """FC-39: 40 rows gave one distinct prediction, 41 gave two."""

    def test_defaults_of_the_library_learn_nothing_from_forty_rows(self):
        x = np.geomspace(1, 1000, 40)[:, None]
        assert np.unique(stock_lightgbm(x, 0.01 * x[:, 0])(x)).size == 1

    @pytest.mark.parametrize("count", [40, 41, 80])
    def test_our_trees_are_not_constant(self, count):
        model, _ = fit_operation(REQUESTS, "forward", request_rows(np.geomspace(1, 1000, count), 0.4), FitParams())
        x = np.geomspace(1, 1000, count)
        ratio = model.predict_us({"x": x, "rank": [2.0]})[0] / REQUESTS.baseline(
            {"x": x, "rank": np.full(count, 2.0)}, model.parameters
        )
        assert model.kind != "baseline"
        assert np.unique(ratio).size > 5

    def test_too_few_rows_publish_no_trees_and_say_so(self):
        model, _ = fit_operation(REQUESTS, "forward", request_rows(np.geomspace(1, 1000, 15), 0.4), FitParams())
        assert (model.known.trees, model.kind) == (None, "baseline")
        assert "15 rows" in model.reasons[0]
        # Physics is never constant: ten times the tokens, about ten times the time.
        few, many = model.predict_us({"x": [100.0, 1000.0], "rank": [2.0]})[0]
        assert 4.0 < many / few < 12.0

    def test_rows_that_teach_nothing_publish_no_trees(self):
        rows = request_rows(np.geomspace(1, 1000, 300), 0.0)
        rows["time_us"] = rows["time_us"] * np.exp(0.05 * np.random.default_rng(0).standard_normal(300))
        model, held_out = fit_operation(REQUESTS, "forward", rows, FitParams())
        assert model.known.trees is None
        assert held_out is not None
        assert not held_out.useful()

    def test_a_saved_model_of_few_rows_holds_no_trees(self, synthetic, tmp_path):
        measured = synthetic.measurements(ops=("attention", "experts", "alltoall"), keep=0.04, seed=3)
        model = fit_cost_model(measured, synthetic.spec(), Topology(), 2048, synthetic.fast)
        assert model.models["alltoall", "forward"].kind == "baseline"
        model.save(tmp_path / "costmodel")
        loaded = CostModel.load(tmp_path / "costmodel")
        again = loaded.models["alltoall", "forward"]
        assert (again.known.trees, again.kind) == (None, "baseline")
        assert any("alltoall forward: priced by the physics baseline alone" in note for note in loaded.tables.notes)


FORK = """
import multiprocessing, sys
import numpy as np
import lightgbm

def ask(folder):
    from costmodels import CostModel
    features = {"tokens": np.arange(1.0, 500.0), "n": np.array([512.0]), "k": np.array([512.0])}
    return float(CostModel.load(folder).predict_us("dense", "forward", features)[0].sum())

if __name__ == "__main__":
    inputs = np.random.default_rng(0).random((5000, 8))
    data = lightgbm.Dataset(inputs, inputs[:, 0])
    lightgbm.train({"num_threads": 4, "verbosity": -1}, data, 10).predict(inputs)
    expected = ask(sys.argv[1])
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(ask, [sys.argv[1]] * 4) == [expected] * 4
    print("answered")
"""


class TestForks:
    """FC-41: a parent that used LightGBM with four threads, and a forked pool that loads and predicts, hung."""

    def test_a_forked_pool_answers_what_its_parent_answers(self, saved, tmp_path):
        script = tmp_path / "fork.py"
        script.write_text(FORK)
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
        done = subprocess.run(
            [sys.executable, str(script), str(saved)], env=environment, capture_output=True, text=True,
            timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout == "answered\n"

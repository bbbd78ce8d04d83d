"""A new GPU from few points: synthetic siblings whose true times are known."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from costmodels import CostModel, fit_cost_model, freeze_tables, tables_for
from costmodels.choose import choose_points
from costmodels.fit import fit_operation
from costmodels.learned.files import Entry, load_model, save_model
from costmodels.learned.predictor import PRIOR_RESIDUAL
from costmodels.learned.residual import fit_discrepancy, mean_of
from costmodels.operations import OPERATIONS
from profiler import RoutePackError, Topology
from profiler.files import write_json
from profiler.readers import build, read_json

OP = OPERATIONS["experts"]
FLOOR_US, WORK_US, ROW_US = 12.0, 6.0 / 1.2e8, 0.002
TOPOLOGY = Topology(data_parallel_size=4, expert_model_parallel_size=4)


def new_gpu_us(rows):
    """The synthetic device with another floor, arithmetic and bandwidth, and the same bump."""
    work = WORK_US * rows["padded_rows"] * rows["hidden_size"] * rows["inter_size"]
    bump = np.exp(0.15 * np.sin(np.log2(rows["rows"] / rows["active_experts"])))
    return (FLOOR_US + work + ROW_US * rows["rows"]) * bump


@pytest.fixture(scope="module")
def new_gpu(synthetic):
    """Raw features and times of all experts cases on the new GPU, one percent of noise."""
    kept = synthetic.measurements(ops=("experts",)).rows
    rows = {name: np.asarray(kept[name], dtype=np.float64) for name in OP.features}
    noise = np.random.default_rng(7).standard_normal(rows["rows"].size)
    return {**rows, "time_us": new_gpu_us(rows) * np.exp(0.01 * noise)}


def take(rows, index):
    return {name: column[index] for name, column in rows.items()}


def features_of(rows):
    return {name: rows[name] for name in OP.features}


def fresh_points(rows, count, seed=0):
    return choose_points(OP, features_of(rows), count, seed)


def join(rows, index, priors, params, fingerprint):
    own, _ = fit_operation(OP, "forward", take(rows, index), params)
    return own, fit_operation(OP, "forward", take(rows, index), params, priors, fingerprint.arch)[0]


def median_error(model, rows, index):
    asked = take(rows, np.setdiff1d(np.arange(rows["rows"].size), index))
    predicted, _ = model.predict_us(features_of(asked))
    return float(np.median(np.abs(predicted / new_gpu_us(asked) - 1.0)))


def sibling(fitted, name, arch="none", twist=None):
    """The fitted cost model under another device's name; ``twist`` replaces its experts model."""
    models = dict(fitted.models)
    if twist is not None:
        models["experts", "forward"] = twist
    return replace(fitted, models=models, fingerprint=replace(fitted.fingerprint, name=name, arch=arch))


@pytest.fixture(scope="module")
def misleading(fitted, synthetic):
    """A model of the same operation with a wild residual of its own: worse than knowing nothing."""
    kept = synthetic.measurements(ops=("experts",)).rows
    rows = {name: np.asarray(kept[name], dtype=np.float64) for name in (*OP.features, "time_us")}
    rows["time_us"] = rows["time_us"] * np.exp(1.5 * np.sin(2.5 * np.log2(rows["rows"])))
    return fit_operation(OP, "forward", rows, synthetic.fast)[0]


@pytest.mark.parametrize("count", [20, 40])
def test_few_points_with_a_sibling_beat_few_points_alone(fitted, synthetic, new_gpu, count):
    index = fresh_points(new_gpu, count)
    own, model = join(new_gpu, index, [fitted], synthetic.fast, fitted.fingerprint)
    assert model.kind == "prior"
    assert median_error(model, new_gpu, index) < 0.6 * median_error(own, new_gpu, index)
    assert "the same architecture" in model.reasons[-1]


def test_a_prior_that_makes_it_worse_is_refused_and_named(fitted, synthetic, new_gpu, misleading):
    index = fresh_points(new_gpu, 60)
    bad = sibling(fitted, "misleading", twist=misleading)
    own, model = join(new_gpu, index, [bad], synthetic.fast, fitted.fingerprint)
    assert model.prior is None
    assert "misleading" in model.reasons[-1]
    assert "refused" in model.reasons[-1]
    asked = features_of(new_gpu)
    assert model.predict_us(asked)[0].tobytes() == own.predict_us(asked)[0].tobytes()


def test_of_one_architecture_the_prior_with_the_least_error_is_taken(fitted, synthetic, new_gpu, misleading):
    index = fresh_points(new_gpu, 40)
    priors = [sibling(fitted, "misleading", twist=misleading), sibling(fitted, "helpful")]
    _, model = join(new_gpu, index, priors, synthetic.fast, fitted.fingerprint)
    assert model.prior.name == "helpful"
    assert "least held-out error" in model.reasons[-1]


def test_the_same_architecture_goes_before_another_one(fitted, synthetic, new_gpu, misleading):
    index = fresh_points(new_gpu, 40)
    priors = [sibling(fitted, "foreign", arch="sm_1"), sibling(fitted, "kin")]
    _, model = join(new_gpu, index, priors, synthetic.fast, fitted.fingerprint)
    assert model.prior.name == "kin"
    assert "foreign passed over" in model.reasons[-1]
    _, model = join(new_gpu, index, priors[:1], synthetic.fast, fitted.fingerprint)
    assert model.prior.name == "foreign"
    assert "another architecture" in model.reasons[-1]


def test_rows_too_few_to_tell_use_the_prior_and_say_so(fitted, synthetic, new_gpu):
    index = fresh_points(new_gpu, 4)
    _, model = join(new_gpu, index, [fitted], synthetic.fast, fitted.fingerprint)
    assert model.kind == "prior"
    assert "cannot tell" in model.reasons[-1]
    assert median_error(model, new_gpu, index) < median_error(fitted.models["experts", "forward"], new_gpu, index)


def test_an_operation_that_no_prior_holds_says_so(fitted, synthetic, new_gpu):
    models = {key: model for key, model in fitted.models.items() if key[0] != "experts"}
    _, model = join(new_gpu, fresh_points(new_gpu, 20), [replace(fitted, models=models)], synthetic.fast,
                    fitted.fingerprint)  # fmt: skip
    assert model.reasons[-1] == "no prior holds experts forward"


def test_a_shape_timed_on_the_sibling_alone_counts_as_timed(fitted, synthetic, new_gpu):
    here = np.flatnonzero(new_gpu["hidden_size"] == 1024)
    _, model = join(new_gpu, here, [fitted], synthetic.fast, fitted.fingerprint)
    there = take(new_gpu, np.flatnonzero(new_gpu["hidden_size"] == 512))
    predicted, outside = model.predict_us(features_of(there))
    assert not outside.any()
    assert np.median(np.abs(predicted / new_gpu_us(there) - 1.0)) < 0.05


def test_intervals_are_those_of_the_joint_model(fitted, synthetic, new_gpu, tmp_path):
    own, model = join(new_gpu, fresh_points(new_gpu, 60), [fitted], synthetic.fast, fitted.fingerprint)
    assert np.median(model.intervals.half_log) < np.median(own.intervals.half_log)
    # What a saved cost model states, and `routepack check` allows, is the joint model's too.
    entry = save_model(tmp_path, model)
    assert entry["intervals"]["half_log"] == model.intervals.half_log
    write_json(tmp_path / "entry.json", entry)
    read = build(Entry, read_json(tmp_path / "entry.json", "Entry"), "entry")
    assert load_model(tmp_path, read).intervals == model.intervals


@pytest.fixture(scope="module")
def transferred(fitted, synthetic):
    """A whole cost model from a tenth of the rows, with a prior."""
    few = synthetic.measurements(keep=0.1, seed=3)
    return fit_cost_model(few, fitted.spec, TOPOLOGY, 4096, synthetic.fast, priors=[fitted])


@pytest.fixture(scope="module")
def folder(transferred, tmp_path_factory):
    path = tmp_path_factory.mktemp("transfer") / "costmodel"
    transferred.save(path)
    return path


def test_saved_and_loaded_predict_the_same_bits(transferred, folder, synthetic):
    loaded = CostModel.load(folder)
    kinds = [model.kind for model in transferred.models.values()]
    assert "prior" in kinds
    assert [model.kind for model in loaded.models.values()] == kinds
    for (op, direction), model in transferred.models.items():
        asked = {name: np.array([float(row[name]) for row in synthetic.rows[op]()]) for name in OPERATIONS[op].features}
        again = loaded.models[op, direction]
        for one, other in zip(model.predict_us(asked), again.predict_us(asked), strict=True):
            assert one.tobytes() == other.tobytes()
    assert loaded.validation == transferred.validation
    assert (
        freeze_tables(loaded, loaded.spec, loaded.topology, loaded.max_tokens).tables_hash
        == transferred.tables.tables_hash
    )


def test_a_transferred_model_is_a_prior_itself(transferred, folder, synthetic, new_gpu, tmp_path):
    index = fresh_points(new_gpu, 30)
    prior = CostModel.load(folder)
    _, model = join(new_gpu, index, [prior], synthetic.fast, prior.fingerprint)
    assert model.kind == "prior"
    chain = replace(transferred, models={**transferred.models, ("experts", "forward"): model})
    chain.save(tmp_path / "chain")
    asked = features_of(new_gpu)
    loaded = CostModel.load(tmp_path / "chain").models["experts", "forward"]
    assert loaded.predict_us(asked)[0].tobytes() == model.predict_us(asked)[0].tobytes()


def test_damage_to_the_prior_is_noticed(transferred, tmp_path):
    transferred.save(tmp_path / "costmodel")
    victim = tmp_path / "costmodel" / "residuals" / "experts-forward.npz"
    assert any(name.startswith("prior.known.") for name in np.load(victim).files)
    victim.write_bytes(victim.read_bytes()[:-1] + b"x")
    with pytest.raises(RoutePackError, match="changed after it was written"):
        CostModel.load(tmp_path / "costmodel")


def test_planning_needs_no_learning_library(transferred, folder):
    assert tables_for(folder, transferred.spec, TOPOLOGY, 4096).tables_hash == transferred.tables.tables_hash
    code = (
        "import sys\nfrom costmodels import StepTables\n"
        f"StepTables.load({str(folder / 'tables.npz')!r})\n"
        "print([name for name in ('lightgbm', 'sklearn', 'scipy.optimize') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_discrepancy_is_the_mean_of_its_parts(synthetic, new_gpu):
    columns = take(features_of(new_gpu), np.arange(40))
    inputs = {"a": np.random.default_rng(0).normal(size=40), PRIOR_RESIDUAL: np.zeros(40)}
    target = 0.1 + 0.05 * inputs["a"]

    def answer(*wanted):
        members = fit_discrepancy(wanted, inputs, target, synthetic.fast).members(OP, columns, inputs)
        return mean_of(members, members, 40)

    mean = np.mean([answer("scale"), answer("smooth"), answer("trees")], axis=0)
    assert np.allclose(answer("scale", "smooth", "trees"), mean, rtol=0, atol=1e-12)
    assert not answer().any()
    assert np.allclose(answer("smooth"), target, atol=0.02)

"""What is saved is what was fitted: same bits back, same bytes again, damage noticed."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from patience import PATIENCE_S

from costmodels import CostModel, StepTables, fit_cost_model, freeze_tables, tables_for, tables_key
from profiler import Measurements, RoutePackError, Topology

HEAVY = ("lightgbm", "scipy.optimize", "scipy.special", "sklearn", "pandas", "pyarrow", "torch")


def random_features(op, rng, synthetic, rows=200):
    known = list(synthetic.rows[op]())
    picked = [known[i] for i in rng.integers(0, len(known), rows)]
    return {name: np.array([row[name] for row in picked], dtype=np.float64) for name in picked[0]}


def folder_bytes(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("op", ["attention", "dense", "experts", "alltoall"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_loaded_model_predicts_the_same_bits(fitted, saved, synthetic, op, direction):
    features = random_features(op, np.random.default_rng(1), synthetic)
    before, marked = fitted.predict_us(op, direction, features)
    after, marked_again = CostModel.load(saved).predict_us(op, direction, features)
    assert before.tobytes() == after.tobytes()
    assert np.array_equal(marked, marked_again)


def test_loaded_model_freezes_the_same_tables(fitted, saved):
    loaded = CostModel.load(saved)
    assert loaded.tables.tables_hash == fitted.tables.tables_hash
    assert (
        freeze_tables(loaded, loaded.spec, loaded.topology, loaded.max_tokens).tables_hash == fitted.tables.tables_hash
    )
    assert loaded.validation == fitted.validation


def test_same_measurements_give_the_same_bytes_also_through_a_file(fitted, saved, synthetic, tmp_path):
    measurements = Measurements.load(synthetic.measurements().save(tmp_path / "measurements"))
    again = fit_cost_model(measurements, fitted.spec, fitted.topology, fitted.max_tokens, synthetic.fast)
    again.save(tmp_path / "again")
    assert folder_bytes(tmp_path / "again") == folder_bytes(saved)


def test_saving_over_an_older_folder_leaves_nothing_of_it(fitted, saved, tmp_path):
    (tmp_path / "costmodel" / "residuals").mkdir(parents=True)
    (tmp_path / "costmodel" / "residuals" / "stale.npz").write_text("stale")
    fitted.save(tmp_path / "costmodel")
    assert folder_bytes(tmp_path / "costmodel") == folder_bytes(saved)


def test_the_folder_holds_text_json_and_plain_arrays(saved):
    assert {path.suffix for path in saved.rglob("*") if path.is_file()} == {".json", ".npz"}
    header = json.loads((saved / "costmodel.json").read_text())
    assert header["schema_version"] == 4
    entry = header["operations"]["experts-forward"]
    assert entry["kind"] in ("lightgbm", "smooth")
    assert list(entry["features"])[:2] == ["rows", "active_experts"]
    assert entry["baseline"]["compute_tflops"]["unit"] == "TFLOP/s"
    assert set(entry["validation"]["unseen sizes"]) == {
        "rows", "baseline", "lightgbm_alone", "trees", "smooth", "model"
    }  # fmt: skip


def test_parity_holds_every_row_of_the_validation(fitted):
    held_out = fitted.parity["experts_forward"]
    for times_us in (held_out.true_us, held_out.model_us, held_out.baseline_us):
        assert times_us.size == fitted.models["experts", "forward"].rows


def test_tables_for_checks_what_they_were_frozen_for(fitted, saved, synthetic):
    tables = tables_for(saved, fitted.spec, fitted.topology, fitted.max_tokens)
    assert tables.key == tables_key(fitted.spec, fitted.topology, fitted.max_tokens)
    renamed = synthetic.spec(name="another name")
    assert tables_for(saved, renamed, fitted.topology, fitted.max_tokens).key == tables.key
    for spec, topology, cap in (
        (synthetic.spec(top_k=8), fitted.topology, fitted.max_tokens),
        (fitted.spec, Topology(data_parallel_size=8, expert_model_parallel_size=8), fitted.max_tokens),
        (fitted.spec, fitted.topology, 8192),
    ):
        with pytest.raises(RoutePackError, match=r"was fitted for synthetic .*Run `routepack fit` again"):
            tables_for(saved, spec, topology, cap)


@pytest.mark.parametrize(
    "damage", ["missing", "changed residual", "missing residual", "newer", "older", "json", "tables", "renamed"]
)
def test_damage_is_one_clear_line(fitted, tmp_path, damage):
    folder = tmp_path / "costmodel"
    fitted.save(folder)
    header = json.loads((folder / "costmodel.json").read_text())
    if damage == "missing":
        (folder / "costmodel.json").unlink()
    elif damage == "changed residual":
        path = folder / "residuals" / "experts-forward.npz"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    elif damage == "missing residual":
        (folder / "residuals" / "experts-forward.npz").unlink()
    elif damage in ("newer", "older"):
        version = header["schema_version"] + (1 if damage == "newer" else -1)
        (folder / "costmodel.json").write_text(json.dumps({**header, "schema_version": version}))
    elif damage == "json":
        (folder / "costmodel.json").write_text(json.dumps(header)[:-100])
    elif damage == "tables":
        data = (folder / "tables.npz").read_bytes()
        (folder / "tables.npz").write_bytes(data[: len(data) // 2])
    else:
        features = header["operations"]["dense-forward"]["features"]
        header["operations"]["dense-forward"]["features"] = {"size": "", **features}
        (folder / "costmodel.json").write_text(json.dumps(header))
    with pytest.raises(RoutePackError) as caught:
        CostModel.load(folder)
    assert "\n" not in str(caught.value)


def test_planning_loads_tables_without_heavy_libraries(fitted, saved):
    code = f"""
import sys
from costmodels import tables_for
from costmodels.tables import StepTables, lookup_many_ns
from profiler import Topology
tables = StepTables.load({str(saved / "tables.npz")!r})
assert lookup_many_ns(tables.expert_rank_ns, tables.rows_shift, 100) > 0
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.strip() == "[]"


def test_step_tables_survive_a_file(fitted, tmp_path):
    fitted.tables.save(tmp_path / "tables.npz")
    assert StepTables.load(tmp_path / "tables.npz").tables_hash == fitted.tables.tables_hash


def test_sizes_that_cannot_divide_the_model_are_refused_before_any_work(fitted, saved, synthetic, tmp_path):
    wrong = Topology(data_parallel_size=3, expert_model_parallel_size=3)
    with pytest.raises(RoutePackError, match=r"= 3 cannot divide .* Nearest"):
        fit_cost_model([], fitted.spec, wrong, fitted.max_tokens, synthetic.fast)
    with pytest.raises(RoutePackError, match=r"= 3 cannot divide .* Nearest"):
        freeze_tables(fitted, fitted.spec, wrong, fitted.max_tokens)
    folder = shutil.copytree(saved, tmp_path / "costmodel")
    header = json.loads((folder / "costmodel.json").read_text())
    header["topology"] |= {"data_parallel_size": 3, "expert_model_parallel_size": 3}
    (folder / "costmodel.json").write_text(json.dumps(header))
    with pytest.raises(RoutePackError, match=r"= 3 cannot divide .* Nearest"):
        CostModel.load(folder)

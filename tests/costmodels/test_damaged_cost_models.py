"""A cost model's files with one value changed, hashes recomputed: refused in one line, whatever was changed."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from costmodels import CostModel, tables_for
from costmodels.learned.residual import fit_residual
from costmodels.operations import OPERATIONS
from costmodels.tables import npz_bytes
from profiler import RoutePackError
from profiler.files import file_hash
from profiler.readers import read_npz


@pytest.fixture(scope="module")
def whole(fitted, synthetic, tmp_path_factory):
    """A cost model whose dense GEMMs have every kind of residual."""
    operation, rows = OPERATIONS["dense"], list(synthetic.rows["dense"]())
    columns = {name: np.array([row[name] for row in rows], dtype=np.float64) for name in operation.features}
    target = np.sin(np.log(columns["tokens"]))
    residual = fit_residual(operation, columns, target, synthetic.fast, False, ("trees", "smooth", "curve"))
    models = fitted.models | {("dense", "forward"): replace(fitted.models["dense", "forward"], known=residual)}
    folder = tmp_path_factory.mktemp("whole") / "costmodel"
    replace(fitted, models=models).save(folder)
    assert CostModel.load(folder).models["dense", "forward"].known.curve is not None
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "costmodel")


def refused(folder, words):
    with pytest.raises(RoutePackError, match=words) as caught:
        CostModel.load(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def edit(folder, *path, value):
    """Set one value of ``costmodel.json``."""
    header = json.loads((folder / "costmodel.json").read_text())
    place = header
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (folder / "costmodel.json").write_text(json.dumps(header))


EXPERTS, DENSE = ("operations", "experts-forward"), ("operations", "dense-forward")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("max_tokens",), "4096", "max_tokens to be a whole number"),
        (("max_tokens",), 2**62, "max_tokens to be an integer from 1"),
        (("topology",), [], "topology to be a mapping"),
        (("topology", "data_parallel_size"), 0, "data_parallel_size"),
        (("params", "num_trees"), True, "num_trees"),
        (("fingerprint", "units"), -1, "units"),
        (("fingerprint", "software"), {"torch": 2}, "software"),
        (("model", "num_experts"), "64", "num_experts"),
        (("operations",), {}, "holds no operation"),
        ((*EXPERTS, "operation"), "../../secret", "entry 'experts-forward' is of '../../secret'"),
        ((*EXPERTS, "direction"), "sideways", "direction"),
        ((*EXPERTS, "kind"), "baseline", "of kind 'baseline'"),
        ((*EXPERTS, "rows"), -1, "rows"),
        ((*EXPERTS, "empty_us"), 0, "empty_us"),
        ((*EXPERTS, "file"), "../../elsewhere.npz", "file"),
        ((*EXPERTS, "baseline", "floor_us", "value"), -1.0, "positive numbers"),
        ((*EXPERTS, "baseline", "floor_us", "value"), None, "value"),
        ((*EXPERTS, "baseline"), {}, "positive numbers"),
        ((*EXPERTS, "shapes", 0, "shape"), [1], "timed sizes"),
        ((*EXPERTS, "shapes", 0, "ranges", "rows"), [9.0, 1.0], "timed sizes"),
        ((*EXPERTS, "shapes", 0, "ranges", "beyond"), [1.0, 9.0], "timed sizes"),
        ((*EXPERTS, "mixes", "measured"), ["oracle"], "measured"),
        ((*EXPERTS, "mixes", "sideways"), ["trees"], "sideways"),
        ((*EXPERTS, "intervals", "half_log"), [0.1], "half-width"),
        ((*EXPERTS, "intervals", "edges", 0), -5.0, "edges"),
        ((*DENSE, "known", "trees", "names", 0), "unheard", "asks for 'unheard'"),
        ((*DENSE, "known", "trees", "names"), [], "max_feature_idx"),
        ((*DENSE, "known", "trees", "limits"), [2.0, 1.0], "limits"),
        ((*EXPERTS, "known", "scale"), 1e9, "scale"),
        ((*EXPERTS, "known", "smooth", "length"), 0.0, "length"),
        ((*DENSE, "known", "curve"), None, "does not name"),
        ((*DENSE, "sha256"), "", "array .* is missing"),
        ((*EXPERTS, "validation"), {"unseen sizes": [1]}, "validation"),
        (("table_errors",), {"experts": {"mean": "5"}}, "table_errors"),
    ],
)
def test_every_value_of_the_header_is_checked(folder, path, value, words):
    edit(folder, *path, value=value)
    refused(folder, words)


def test_a_header_of_another_kind_is_one_line(folder):
    for text in ("[]", "3", "null", '{"schema_version": "4"}', '{"schema_version": 4}'):
        (folder / "costmodel.json").write_text(text)
        refused(folder, "schema_version|the key .* is missing")


def edit_arrays(folder, change):
    """Change the arrays of one residual, hash recomputed."""
    path = folder / "residuals" / "dense-forward.npz"
    arrays = read_npz(path, "Residual")
    change(arrays)
    path.write_bytes(npz_bytes(arrays))
    edit(folder, *DENSE, "sha256", value=file_hash(path))


def text_of(change):
    def changed(arrays):
        text = change(arrays["known.trees.text"].tobytes().decode())
        arrays["known.trees.text"] = np.frombuffer(text.encode("latin-1"), np.uint8)

    return changed


def put(name, change):
    return lambda arrays: arrays.update({name: change(arrays[name])})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda arrays: arrays.pop("known.trees.text"), "known.trees.text is missing"),
        (lambda arrays: arrays.update(extra=np.zeros(3)), "'extra'"),
        (text_of(lambda text: ""), "expected 'tree'"),
        (text_of(lambda text: text[: len(text) // 2]), "of a LightGBM text"),
        (text_of(lambda text: text.replace("left_child=", "left_child=9999 ", 1)), "left_child"),
        (text_of(lambda text: text + "\xff"), "ascii|end of trees"),
        (put("known.trees.text", lambda text: text.astype(np.float64)), "of another kind"),
        (put("known.smooth.points", lambda points: points[:-1, :-1]), "points"),
        (put("known.smooth.weights", lambda weights: weights * np.nan), "weights"),
        (put("known.smooth.weights", lambda weights: weights[:-1]), "weights"),
        (put("known.smooth.scale", np.zeros_like), "scale"),
        (put("known.curve.starts", lambda starts: starts + 5), "starts"),
        (put("known.curve.starts", lambda starts: starts[::-1].copy()), "starts"),
        (put("known.curve.keys", lambda keys: keys[:, :-1]), "keys and settings"),
        (put("known.curve.log_size", lambda sizes: sizes[::-1].copy()), "sizes"),
        (put("known.curve.residual", lambda logs: logs + 1e30), "residual"),
        (put("known.curve.settings", lambda settings: settings.astype(np.int64)), "settings"),
        (put("known.curve.keys", lambda keys: keys.astype(np.uint8)), "of another kind"),
    ],
)
def test_arrays_are_checked_against_each_other(folder, change, words):
    edit_arrays(folder, change)
    refused(folder, words)


def test_tables_must_be_those_of_the_header(folder, fitted):
    edit(folder, "tables_hash", value="0" * 64)
    for load in (CostModel.load, lambda path: tables_for(path, fitted.spec, fitted.topology, fitted.max_tokens)):
        with pytest.raises(RoutePackError, match=r"tables.npz is of another fit than its costmodel.json"):
            load(folder)

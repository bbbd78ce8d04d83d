"""``study.json`` with one value changed: refused in one line that names the place."""

import copy
import json

import pytest

from profiler import RoutePackError
from routepack_tune.study.folder import read_study


@pytest.fixture(scope="module")
def document(study_template):
    return json.loads((study_template.folder / "study" / "study.json").read_text())


def write(folder, document):
    (folder / "study.json").write_text(json.dumps(document))
    return folder


def test_what_tuning_writes_is_read(document, tmp_path):
    assert read_study(write(tmp_path, document)) == document
    running = {name: value for name, value in document.items() if name != "trials"}
    running |= {"state": "running", "summary": None, "tracking": {}}
    assert read_study(write(tmp_path, running)) == running


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("study_name",), "../elsewhere", "name of letters"), (("study_name",), 3, "study_name to be text"),
        (("state",), "done", "one of 'running', 'finished'"), (("steps",), [], "expected step batches"),
        (("steps", 0, "data_hash"), "0", "its batches and those of its signature differ"),
        (("tables_hash",), "0", "its tables and those of its signature"),
        (("signature", "base", "starts"), 3, "its base and those of its signature"),
        (("signature",), [], "signature to be a mapping"),
        (("config", "max_tokens_per_microbatch"), 2**62, "from 1 to 16777216"),
        (("config", "planner", "starts"), 600, "starts"), (("config", "planner", "starts"), "2", "starts"),
        (("config", "topology", "data_parallel_size"), 0, "data_parallel_size"),
        (("config", "model", "num_experts"), -8, "num_experts"), (("config", "fit", "folds"), None, "folds"),
        (("config", "tune", "caps"), [2**40], "every cap"), (("config", "surprise"), 1, "unknown key 'surprise'"),
        (("files",), {}, "hashes of tables.npz, costmodel.json"),
        (("files", "../../etc/passwd"), "0", "hashes of tables.npz"),
        (("files", "tables.npz"), 5, "files.tables.npz to be text"),
        (("workload", 0, "tokens"), 0, "positive numbers of step batch"),
        (("workload", 0, "length_quantiles"), [1.0], "11 quantiles"), (("workload",), None, "workload"),
        (("fingerprint", "units"), "two", "fingerprint.units"), (("environment", "versions"), [], "versions"),
        (("tracking",), {"run_id": 3}, "tracking.run_id"), (("notes",), "none", "notes"),
        (("summary", "best", "params", "starts"), 0, "starts"), (("summary", "best", "value"), "fast", "value"),
        (("summary", "best", "max_tokens"), 17, "a cap of 17 tokens"), (("summary", "best", "number"), -1, "trial -1"),
        (("summary", "best"), None, "summary.best"), (("summary", "export"), "all", "'best', 'defaults'"),
        (("summary", "study"), "another", "another study"), (("summary", "holdout", "gain"), None, "of neither"),
        (("summary", "holdout", "best", 0, "lower_bound_s"), 0.0, "positive times"),
        (("summary", "holdout", "means"), {}, "means of best"), (("summary", "history", 0, "state"), "x", "state"),
        (("summary", "importances"), {"starts": "high"}, "importances"), (("summary", "overhead"), 3, "overhead"),
    ],
)  # fmt: skip
def test_every_value_is_checked(document, tmp_path, path, value, words):
    changed = place = copy.deepcopy(document)
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(RoutePackError, match=words) as caught:
        read_study(write(tmp_path, changed))
    assert "is damaged" in str(caught.value)
    assert str(caught.value).endswith("Tune again.")
    assert "\n" not in str(caught.value)


def test_every_part_is_needed(document, tmp_path):
    for name in document.keys() - {"trials", "schema_version"}:
        with pytest.raises(RoutePackError, match=f"the key '{name}' is missing"):
            read_study(write(tmp_path, {key: value for key, value in document.items() if key != name}))
    for text in ("[]", "3", "null", "{}", "[" * 9000):
        (tmp_path / "study.json").write_text(text)
        with pytest.raises(RoutePackError, match=r"schema_version|cannot be read"):
            read_study(tmp_path)

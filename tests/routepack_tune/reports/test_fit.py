"""What `routepack fit` leaves beside the model: a table, a page that loads nothing, and a registered MLflow model."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import warnings
from functools import partial
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from patience import PATIENCE_S

from costmodels import FitParams
from costmodels.learned.residual import Residual
from costmodels.learned.trees import grow_trees
from costmodels.learned.validation import HeldOut, error_summary
from costmodels.operations import OPERATIONS
from profiler import DeviceFingerprint, Measurements, RoutePackError
from profiler.cases.case import case_id, causal_pairs
from routepack_tune import facts, fit, summaries
from routepack_tune.reports.figures import panels, plot_bars
from routepack_tune.reports.fit import (
    MOST_POINTS,
    REPORT_FILE,
    contestants,
    coverages,
    error_lines,
    error_table,
    errors_by_shape,
    errors_by_size,
    fit_verdict,
    gains,
    held_out_rows,
    input_words,
    own_reasons,
    plot_errors_by_shape,
    plot_errors_by_size,
    plot_parity,
)
from routepack_tune.tracking.fit_tracking import REGISTERED_PREFIX, fit_metrics, input_example, predict_frame, track_fit
from routepack_tune.tracking.store import own_uri, quiet_mlflow, tracking_at

CONFIG = """
model: tiny.json
topology: {data_parallel_size: 2, expert_model_parallel_size: 2}
max_tokens_per_microbatch: 256
fit: {num_trees: 40, folds: 3}
"""


def synthetic_rows():
    """Attention and experts of two shapes by formulas with a bump that no roofline has; nothing is a device's."""
    rng = np.random.default_rng(0)
    for heads in (4, 8):
        for length in (16, 32, 48, 64, 96, 128, 192, 256, 384, 512):
            for count in (1, 2, 4):
                pairs = int(count * causal_pairs(length, 0))
                work = 2.0 * pairs * heads * 32 / 1e5
                yield "attention", (10.0 + work) * np.exp(0.2 * np.sin(np.log2(length)) + 0.01 * rng.normal()), {
                    "tokens": count * length, "pairs": pairs, "num_sequences": count, "max_length": length,
                    "num_heads": heads, "num_kv_heads": 2, "qk_head_dim": 16, "v_head_dim": 16, "window": 0,
                }  # fmt: skip
    for hidden, experts in ((64, 8), (128, 16)):
        for rows in (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024):
            for hottest in (1, 2, 3):
                largest = min(rows, -(-rows // 4) * hottest)
                work = 6.0 * rows * hidden * 32 / 1e5
                yield "experts", (20.0 + work) * np.exp(0.2 * np.sin(np.log2(rows)) + 0.01 * rng.normal()), {
                    "rows": rows, "active_experts": 4, "padded_rows": rows + 256, "max_rows": largest,
                    "local_experts": 4, "hidden_size": hidden, "inter_size": 32, "router_tokens": 0,
                    "num_experts": experts,
                }  # fmt: skip


def save_measurements(folder):
    rows = [
        {**features, "op": op, "direction": "forward", "status": "ok", "time_us": float(time_us), "spread_us": 0.0,
         "case_id": case_id(op, "forward", "float16", features), "source": "measured", "dtype": "float16"}
        for op, time_us, features in synthetic_rows()
    ]  # fmt: skip
    fingerprint = DeviceFingerprint("cpu", "synthetic", "none", "formulas <1>", 1, 1, "", 8, {}, "measured")
    meta = {"schema_version": 1, "fingerprint": fingerprint.to_dict(), "model": None, "topology": None, "params": {},
            "provenance": {"note": "synthetic"}, "backward": "absent"}  # fmt: skip
    measured = Measurements.from_rows(rows, meta)
    measured.save(folder)
    return measured


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """One fit by the verb, with the default store."""
    folder = tmp_path_factory.mktemp("fit")
    (folder / "tiny.json").write_text(json.dumps({
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 128,
    }))  # fmt: skip
    (folder / "routepack.yaml").write_text(CONFIG)
    measured = save_measurements(folder / "measurements")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        model = fit(folder / "measurements", folder / "routepack.yaml", folder / "costmodel")
    return SimpleNamespace(folder=folder, out=folder / "costmodel", model=model, measured=measured)


@pytest.fixture(scope="module")
def rows(done):
    return held_out_rows(done.model, [done.measured])


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.found += [v for k, v in attrs if k in ("src", "href", "xlink:href") and not v.startswith(("#", "data:"))]


def test_page_is_whole_and_loads_nothing(done):
    page = (done.out / REPORT_FILE).read_text()
    links = Links()
    links.feed(page)
    assert links.found == []
    assert not {"script", "link", "iframe"} & set(links.tags)
    assert links.tags.count("svg") >= 4
    for words in ("formulas &lt;1&gt;", "fitted baseline", "LightGBM alone", "unseen sizes", "unseen shapes",
                  "assumed 3.1x forward", "share of their gain", "priced: attention cores (backward ass"):  # fmt: skip
        assert words in page
    clips = [set(re.findall(r'<clipPath id="([^"]+)"', svg)) for svg in page.split("<svg")[1:]]
    assert sum(map(len, clips)) == len(set().union(*clips))


def test_table_shows_every_split_and_contestant(done):
    lines = error_table(done.model.validation)
    assert lines[0].split()[-3:] == ["fitted", "baseline", "model"]
    assert {len(line) for line in lines} == {len(lines[0])}
    for operation in ("attention/forward", "experts/forward"):
        report = done.model.validation[operation]["unseen sizes"]["model"]
        shown = f"{report['median_pct']:.1f} / {report['p95_pct']:.1f}"
        assert any(line.startswith(f"{operation}, unseen sizes") and line.endswith(shown) for line in lines)
    told = facts.cost_model_facts(done.model, done.out)
    assert set(told) == {"costmodel", "held_out", "reasons", "notes", "report"}  # as docs/tuning.md says
    assert json.loads(json.dumps(facts.finite(told), default=str))["report"] == str(done.out / REPORT_FILE)
    assert len(told["held_out"]) == len(list(error_lines(done.model.validation)))
    said = summaries.cost_model_summary(done.model, done.out)
    assert all(line in said for line in lines)
    assert str(done.out / REPORT_FILE) in said


def test_the_first_line_says_whether_it_is_good_enough(done):
    model = done.model
    sizes = {op: model.validation[f"{op}/forward"]["unseen sizes"]["model"] for op in ("attention", "experts")}
    lead, said = fit_verdict(model)
    assert lead == "Good enough to plan by:"
    assert all(f"{op} forward {errors['median_pct']:.1f}%" in said for op, errors in sizes.items())
    assert summaries.cost_model_summary(model, done.out).splitlines()[1] == f"  {lead} {said}"
    page = (done.out / REPORT_FILE).read_text()
    assert page.index(f"<b>{lead}</b>") < page.index("<table")

    def judged(**changes):
        return fit_verdict(dataclasses.replace(model, **changes))

    off = {"unseen sizes": {"model": {"median_pct": 23.0}}}
    wrong = {key: dataclasses.replace(one, validation=one.validation | off)
             for key, one in model.models.items() if key[0] == "experts"}  # fmt: skip
    lead, said = judged(models=model.models | wrong)
    assert lead == "Not good enough yet:"
    assert "profile more cases of experts forward 23.0%" in said
    assert judged(doubts=("Table x is slow.",))[0] == "Do not rely on it:"
    few = {key: dataclasses.replace(one, validation={}) for key, one in model.models.items()}
    assert judged(models=few) == (
        "Not known:", "nothing could be held out; not validated, too few rows: attention forward, experts forward."
    )  # fmt: skip
    lead, said = judged(spec=dataclasses.replace(model.spec, hidden_size=96))
    assert "experts forward (its shape was not timed: unseen shapes)" in said


def test_a_reason_is_said_once(done):
    reasons = {key: dataclasses.replace(one, reasons=("few rows", "noisy")) for key, one in done.model.models.items()}
    tables = dataclasses.replace(done.model.tables, notes=("priced by physics (noisy)",))
    model = dataclasses.replace(done.model, models=reasons, tables=tables)
    assert own_reasons(model) == {"few rows": ["attention/forward", "experts/forward"]}
    said = summaries.cost_model_summary(model, done.out)
    assert said.count("few rows") == said.count("noisy") == 1


def test_inputs_of_trees_are_named_for_people():
    for operation in OPERATIONS.values():
        derived = operation.derive({name: np.array([4.0]) for name in operation.features})
        words = [input_words(name) for name in derived]
        assert len(set(words)) == len(words)
        assert not any("_" in word for word in words)


def test_lines_of_a_validation_by_hand():
    errors = {"median_pct": 1.0, "mape_pct": 2.0, "p95_pct": 3.0, "worst_pct": 4.0}
    entry = {"rows": 9, "kind": "lightgbm", "unseen sizes": {"rows": 7, "lightgbm_alone": errors}}
    validation = {"experts/forward": entry, "tables": {"exchange_ns": {"mean_pct": 0.1}}}
    (line,) = error_lines(validation)
    where = {"operation": "experts/forward", "split": "unseen sizes", "contestant": "LightGBM alone", "rows": 7}
    assert line == where | errors
    assert error_table({}) == []


def test_rows_are_found_again_with_size_and_shape(done, rows):
    found = rows["experts", "forward"]
    assert set(found.index.unique("shape")) == {"hidden size 64, experts 8", "hidden size 128, experts 16"}
    assert found.index.get_level_values("size").max() == 1024
    assert list(found)[-1] == "model"
    true_us = done.model.parity["experts_forward"].true_us
    assert np.array_equal(found.index.get_level_values("true_us"), true_us)
    report = done.model.validation["experts/forward"]["unseen sizes"]["model"]
    assert error_summary(found["model"].to_numpy(), true_us)["median_pct"] == report["median_pct"]


def test_rows_of_other_measurements_are_not_guessed(done):
    half = done.measured.take(np.arange(len(done.measured)) % 2 == 0)
    found = held_out_rows(done.model, [half])["experts", "forward"]
    assert errors_by_size(found).empty
    assert errors_by_shape(found).empty


def by_hand():
    size = np.repeat([8.0, 64.0], 6)
    index = pd.MultiIndex.from_arrays([np.full(12, 100.0), size, ["a", "b"] * 6], names=["true_us", "size", "shape"])
    model, baseline = np.where(size == 8.0, 110.0, 102.0), np.where(size == 8.0, np.nan, 150.0)
    return pd.DataFrame({"fitted baseline": baseline, "model": model}, index)


def test_errors_by_size_and_shape_by_hand():
    curves = errors_by_size(by_hand())
    assert curves.index.tolist() == [8.0, 64.0]
    assert curves["model"].tolist() == pytest.approx([10.0, 2.0])
    assert np.isnan(curves["fitted baseline"][8.0])
    assert curves["fitted baseline"][64.0] == pytest.approx(50.0)
    worst = errors_by_shape(by_hand())
    assert sorted(worst.index) == ["a", "b"]
    assert worst["model"]["a"] == pytest.approx(6.0)
    assert worst["fitted baseline"]["a"] == pytest.approx(50.0)


def test_parity_keeps_ends_and_error_of_all():
    true = np.arange(1.0, 5001.0)
    answers = pd.DataFrame({"x": true[::-1] * 1.1, "y": np.nan}, pd.Index(true[::-1], name="true_us"))
    full, empty = panels(5, 3, *(partial(plot_parity, answers[name], "blue") for name in answers)).axes
    points = full.get_lines()[0].get_xdata()
    assert (points.size, points[0], points[-1]) == (MOST_POINTS, 1.0, 5000.0)
    assert full.get_title() == "x\nmedian error 10.0%"
    assert empty.get_title() == "y\nno answers"
    assert empty.get_lines()[0].get_xdata().size == 0


def test_contestants_of_a_validation():
    true = np.array([1.0, 2.0])
    found = contestants(HeldOut(true, true * 2, true * 1.1))
    assert list(found) == ["fitted baseline", "model"]
    assert found["model"] == pytest.approx(true * 1.1)


def test_gains_are_shares_of_lightgbms_own(done):
    import lightgbm

    x = np.random.default_rng(0).random((400, 3))
    named = {name: x[:, k] for k, name in enumerate(("log_rows", "padding", "skew"))}
    trees = grow_trees(named, tuple(named), np.sin(5 * x[:, 0]) + 0.3 * x[:, 1], FitParams(num_trees=20))
    model = dataclasses.replace(done.model.models["experts", "forward"], known=Residual(trees=trees))
    booster = lightgbm.Booster(model_str=trees.text)
    expected = dict(zip(booster.feature_name(), booster.feature_importance("gain"), strict=True))
    found = gains(model)
    assert next(iter(found)) == "log_rows"
    assert sum(found.values()) == pytest.approx(100.0)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    for name, share in found.items():
        assert share == pytest.approx(100.0 * expected[name] / sum(expected.values()), abs=0.01)


def test_coverages_are_read_off_a_validation():
    entry = {"rows": 9, "intervals": {"inside_pct": 91.0, "largest_sizes_pct": 97.5}}
    assert coverages(entry) == {"inside the timed sizes": 91.0, "at the largest sizes": 97.5}
    assert coverages({"rows": 9}) == {}


def test_plots_draw_what_there_is():
    draws = partial(plot_errors_by_size, by_hand(), "rows"), partial(plot_errors_by_shape, by_hand())
    figure = panels(9, 3, *draws, partial(plot_bars, {}, "none"))
    assert len(figure.axes) == 3
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["fitted baseline", "model"]


def client(folder):
    uri = own_uri(folder)
    return quiet_mlflow().MlflowClient(tracking_uri=uri, registry_uri=uri)


def runs(folder):
    store = client(folder)
    return store.search_runs([store.get_experiment_by_name("routepack-tune").experiment_id])


def test_run_holds_errors_pictures_and_facts(done):
    (run,) = runs(done.out)
    assert run.info.status == "FINISHED"
    for name, value in fit_metrics(done.model).items():
        assert run.data.metrics[name] == pytest.approx(value)
    for split in ("unseen_sizes", "unseen_shapes"):
        assert f"experts/forward/{split}/model/median_pct" in run.data.metrics
    assert run.data.params["fit.num_trees"] == "40"
    assert run.data.params["data_hash"] == done.model.data_hash
    pictures = {item.path for item in client(done.out).list_artifacts(run.info.run_id, "plots")}
    assert {"plots/experts-forward-parity.svg", "plots/attention-forward-errors.svg"} <= pictures
    assert REPORT_FILE in {item.path for item in client(done.out).list_artifacts(run.info.run_id)}


LOAD = """
import json, sys
import mlflow
mlflow.set_tracking_uri(sys.argv[1])
mlflow.set_registry_uri(sys.argv[1])
model = mlflow.pyfunc.load_model(sys.argv[2])
example = model.input_example
shuffled = example[sorted(example.columns, reverse=True)]
signature = model.metadata.signature
print(json.dumps({
    "times": model.predict(example)["time_us"].tolist(),
    "shuffled": model.predict(shuffled)["time_us"].tolist(),
    "inputs": signature.inputs.input_names(), "outputs": signature.outputs.input_names(),
}))
"""


def test_registered_model_answers_by_name_in_another_process(done):
    store = client(done.out)
    (version,) = store.search_model_versions(f"name = '{REGISTERED_PREFIX}{done.model.spec.name}'")
    assert version.tags["device"] == done.model.fingerprint.name
    assert f"for {done.model.spec.name}: times of attention, " in version.description
    assert "`@champion` is the latest" in store.get_registered_model(version.name).description
    assert store.get_run(version.run_id).data.tags["mlflow.note.content"] == version.description
    uri = f"models:/{version.name}/{version.version}"
    ran = subprocess.run(
        [sys.executable, "-c", LOAD, own_uri(done.out), uri],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout.splitlines()[-1])
    expected = predict_frame(done.model, input_example(done.model))
    assert answer["times"] == expected["time_us"].tolist()
    assert answer["shuffled"] == answer["times"]
    assert answer["outputs"] == ["time_us", "extrapolated"]
    assert {"op", "direction", "rows", "max_length"} <= set(answer["inputs"])
    assert not expected["extrapolated"].any()


def test_logged_model_does_not_hold_its_own_store(done):
    assert (done.out / "mlflow.db").is_file()
    logged = list(done.out.glob("artifacts/**/costmodel.json"))
    assert logged
    assert not list((done.out / "artifacts").rglob("mlflow.db*"))


def test_frames_are_answered_by_name_or_refused(done):
    example = input_example(done.model)
    with pytest.raises(RoutePackError, match="no column 'direction'"):
        predict_frame(done.model, example.drop(columns="direction"))
    with pytest.raises(RoutePackError, match=r"Unknown columns \['colour'\]"):
        predict_frame(done.model, example.assign(colour=1.0))
    with pytest.raises(RoutePackError, match=r"missing \['rows'\]"):
        predict_frame(done.model, example.assign(rows=np.nan))
    with pytest.raises(RoutePackError, match="no times of 'convolution'"):
        predict_frame(done.model, example.assign(op="convolution"))


@pytest.mark.parametrize("given", [None, "http://127.0.0.1:9"])
def test_the_callers_own_store_is_put_back(done, monkeypatch, given):
    """MLflow writes its URI into the environment: a later study of this process must not follow it."""
    mlflow = quiet_mlflow()
    monkeypatch.delenv("MLFLOW_REGISTRY_URI", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if given:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", given)
    before = mlflow.get_tracking_uri()
    with tracking_at(mlflow, own_uri(done.out)):
        assert mlflow.get_tracking_uri() == mlflow.get_registry_uri() == own_uri(done.out)
    assert os.environ.get("MLFLOW_TRACKING_URI") == given
    assert "MLFLOW_REGISTRY_URI" not in os.environ
    assert mlflow.get_tracking_uri() == before
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:10")
    assert mlflow.get_tracking_uri() == "http://127.0.0.1:10"


def test_an_outage_costs_a_warning_and_nothing_else(done):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        track_fit(done.model, done.out, {}, f"http://127.0.0.1:{port}", "x")
    assert any("could not log the cost model" in str(one.message) for one in caught)


def test_a_folder_store_is_refused_before_anything_is_fitted(done, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:./runs")
    with pytest.raises(RoutePackError, match="folder store"):
        fit(done.folder / "measurements", done.folder / "routepack.yaml", done.folder / "other")
    assert not (done.folder / "other").exists()

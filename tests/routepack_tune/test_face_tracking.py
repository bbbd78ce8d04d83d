"""The tracker: finite metrics only, the same parent again, and an outage costs a warning."""

from __future__ import annotations

import json
import math
import socket
import time
import warnings

import pytest

from profiler import RoutePackError
from routepack_tune import tracking, tune
from routepack_tune.config import check_tracking_uri
from routepack_tune.tracking import StudyTracker, own_uri, quiet_mlflow, tracking_uri

SUMMARY = {
    "best": {"number": 1, "value": 0.9, "params": {}},
    "default": {"number": 0, "value": 1.0, "params": {}},
    "trials": {"complete": 2, "infeasible": 1, "failed": 0},
    "history": [{"number": 0, "value": 1.0, "params": {"x": 1}}, {"number": 1, "value": 0.9, "params": {"x": 2}}],
    "holdout": {"best_value": None, "default_value": None},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One SQLite store for the module: making one takes seconds."""
    return tmp_path_factory.mktemp("store")


def tracker(store, name):
    return StudyTracker(store, own_uri(store), "test", name, {"model": "tiny"})


def client(store):
    return quiet_mlflow().MlflowClient(tracking_uri=own_uri(store))


def test_non_finite_numbers_become_tags(store):
    made = tracker(store, "nonfinite")
    made.study_started({})
    metrics = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.5, "step_time_s.odd=name(1)": 2.0}
    made.trial_finished(0, {"x": 1}, metrics, "infeasible", "no packing under the cap")
    run = client(store).get_run(made.where(0)["trial_run_id"])
    assert run.data.metrics == {"d": 1.5, "step_time_s.odd_name_1_": 2.0}
    assert run.data.tags["not_a_metric.a"] == "nan"
    assert run.data.tags["not_a_metric.b"] == "inf"
    assert run.data.tags["routepack.reason"] == "no packing under the cap"
    assert run.info.status == "FINISHED"


def test_resumed_tracker_finds_its_parent_and_sends_only_what_is_missing(store):
    first = tracker(store, "resumed")
    first.study_started({})
    first.trial_finished(0, {"x": 1}, {"objective": 1.0}, "complete")
    second = tracker(store, "resumed")
    second.study_started({})
    assert second.run_id == first.run_id
    assert client(store).get_run(second.run_id).info.status == "RUNNING"
    second.study_finished(SUMMARY)
    runs = client(store).search_runs(
        [client(store).get_experiment_by_name("test").experiment_id], f"tags.`mlflow.parentRunId` = '{first.run_id}'"
    )
    assert sorted(run.data.tags["routepack.trial"] for run in runs) == ["0", "1"]
    parent = client(store).get_run(first.run_id)
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["best_objective"] == 0.9
    assert "holdout_best_objective" not in parent.data.metrics


def test_trial_cut_short_by_a_kill_is_written_again(store):
    made = tracker(store, "cut")
    made.study_started({})
    half = client(store).create_run(
        made._experiment_id, tags={"mlflow.parentRunId": made.run_id, "routepack.trial": "0", "routepack.kind": "trial"}
    )
    again = tracker(store, "cut")
    again.study_started({})
    again.trial_finished(0, {"x": 1}, {"objective": 1.0}, "complete")
    assert again.where(0)["trial_run_id"] == half.info.run_id
    assert client(store).get_run(half.info.run_id).data.metrics == {"objective": 1.0}


def test_failures_are_warnings_and_later_resent(store, monkeypatch):
    made = tracker(store, "outage")
    made.study_started({})
    broken = True

    def log_batch(*arguments, **keywords):
        if broken:
            raise ConnectionError("server is away")
        return real(*arguments, **keywords)

    real = made._client.log_batch
    monkeypatch.setattr(made._client, "log_batch", log_batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(5):
            made.trial_finished(number, {"x": number}, {"objective": 1.0}, "complete")
    assert len(caught) == tracking.MAX_FAILURES
    assert "could not log trial 0 (ConnectionError: server is away)" in str(caught[0].message)
    assert "until the study ends" in str(caught[-1].message)
    broken = False
    history = [{"number": n, "value": 1.0, "params": {"x": n}} for n in range(5)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.study_finished({**SUMMARY, "history": history})
    assert made._sent == set(range(5))


def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_dead_server_costs_a_warning_and_seconds(job, small_ranges, monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{closed_port()}")
    begin = time.monotonic()
    with pytest.warns(UserWarning, match="MLflow at http://127.0.0.1"):
        document = tune(job.steps, job.costmodel, job.config, tmp_path / "study", trials=2)
    assert time.monotonic() - begin < 60
    assert document["summary"]["trials"]["complete"] == 2
    assert json.loads((tmp_path / "study" / "study.json").read_text())["state"] == "finished"


def test_folder_stores_are_refused_before_any_work(job, monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:./mlruns")
    with pytest.raises(RoutePackError, match=r"MLFLOW_TRACKING_URI.*sqlite:///.*migrate-filestore"):
        tune(job.steps, job.costmodel, job.config, tmp_path / "study")
    assert not (tmp_path / "study").exists()
    for uri in ("mlruns", "file:///a", "./x"):
        with pytest.raises(ValueError, match="folder store"):
            check_tracking_uri(uri)
    for uri in ("", "sqlite:///x.db", "http://127.0.0.1:5000", "postgresql://a@b/c", "databricks", "databricks://p"):
        check_tracking_uri(uri)


def test_configuration_beats_environment_beats_default(monkeypatch, tmp_path):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri("", tmp_path) == own_uri(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    assert tracking_uri("", tmp_path) == "http://127.0.0.1:1"
    assert tracking_uri("sqlite:///x.db", tmp_path) == "sqlite:///x.db"


def test_passwords_stay_out_of_what_is_stored(tmp_path):
    made = StudyTracker(tmp_path, "postgresql://me:secret@127.0.0.1/db", "e", "s")
    assert "secret" not in json.dumps(made.where())
    with pytest.warns(UserWarning, match=r"me:\*\*\*@") as caught:
        made.study_started({})
    assert "secret" not in str(caught[0].message)

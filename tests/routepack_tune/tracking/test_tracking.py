"""Tracking: on disk first, finite metrics only, every trial in the store exactly once, whatever the store does."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from pathlib import Path

import pytest

from profiler import RoutePackError
from routepack_tune import tune
from routepack_tune.config import check_tracking_uri
from routepack_tune.tracking import study_tracker
from routepack_tune.tracking.outbox import Outbox, trial_record
from routepack_tune.tracking.store import own_uri, quiet_mlflow, tracking_uri
from routepack_tune.tracking.study_runs import StudyRuns
from routepack_tune.tracking.study_tracker import StudyTracker

SUMMARY = {
    "best": {"number": 1, "value": 0.9, "params": {}},
    "default": {"number": 0, "value": 1.0, "params": {}},
    "names": {"tuned": ["a", "b"], "holdout": []},
    "trials": {"complete": 2, "infeasible": 1, "failed": 0},
    "history": [
        {"number": 0, "value": 1.0, "params": {"x": 1}, "state": "complete"},
        {"number": 1, "value": 0.9, "params": {"x": 2}, "state": "complete"},
    ],
    "holdout": {"best": [], "default_settings": [], "best_value": None, "default_value": None, "gain_pct": None},
    "export": "defaults",
    "export_reason": "No batch was held out.",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One SQLite store for the module: making one takes seconds."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def track(store, tmp_path):
    """Make trackers of the module's store whose outboxes lie in the test's folder; end their threads."""
    made = []

    def make(name, folder=None, uri=None):
        made.append(StudyTracker(folder or tmp_path, uri or own_uri(store), "test", name, ("a", "b"), {"model": "t"}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def client(uri):
    return quiet_mlflow().MlflowClient(tracking_uri=uri)


def nested(uri, parent):
    """Return {trial: run} of a parent run; two runs of one trial are an error."""
    experiment = client(uri).get_run(parent).info.experiment_id
    runs = client(uri).search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent}'")
    numbers = [int(run.data.tags["routepack.trial"]) for run in runs]
    assert len(set(numbers)) == len(numbers)
    return dict(zip(numbers, runs, strict=True))


def test_record_splits_batches_into_series_and_keeps_no_broken_number():
    metrics = {"objective": 0.5, "value.a": 0.4, "value.b": 0.6, "value.c": 1.0, "plan_s": math.inf}
    record = trial_record(3, {"x": 1}, metrics, "complete", "", ("a", "b"))
    assert record["metrics"] == {"objective": 0.5, "value.c": 1.0}
    assert record["series"] == {"value": [[0, 0.4], [1, 0.6]]}
    assert record["not_finite"] == {"plan_s": "inf"}


def test_outbox_survives_a_line_cut_short(tmp_path):
    outbox = Outbox(tmp_path)
    assert outbox.records() == {}
    for number in (0, 1):
        outbox.append({"number": number, "state": "complete"})
    whole = outbox.path.read_bytes()
    outbox.path.write_bytes(whole[:-8])
    assert sorted(outbox.records()) == [0]
    outbox.append({"number": 2, "state": "complete"})
    outbox.append({"number": 0, "state": "pruned"})
    assert {n: r["state"] for n, r in outbox.records().items()} == {0: "pruned", 2: "complete"}


def test_trial_is_a_run_with_series_and_tags(track, store):
    made = track("nonfinite")
    made.study_started({})
    metrics = {"a": math.nan, "b": math.inf, "d": 1.5, "odd=name(1)": 2.0, "value.a": 0.8, "value.b": 0.7}
    made.trial_finished(0, {"x": 1}, metrics, "infeasible", "no packing under the cap")
    made.finish(SUMMARY)
    run = client(own_uri(store)).get_run(made.where(0)["trial_run_id"])
    assert run.data.metrics == {"d": 1.5, "odd_name_1_": 2.0, "batch/value": 0.7}
    points = client(own_uri(store)).get_metric_history(run.info.run_id, "batch/value")
    assert [(point.step, point.value) for point in points] == [(0, 0.8), (1, 0.7)]
    assert run.data.tags["not_a_metric.a"] == "nan"
    assert run.data.tags["not_a_metric.b"] == "inf"
    assert run.data.tags["routepack.reason"] == "no packing under the cap"
    assert run.info.status == "FINISHED"


def test_resumed_tracker_finds_its_parent_and_sends_only_what_is_missing(track, store):
    first = track("resumed")
    first.study_started({})
    first.trial_finished(0, {"x": 1}, {"objective": 1.0}, "complete")
    first.close()
    second = track("resumed")
    second.study_started({})
    assert second.runs.run_id == first.runs.run_id
    assert second.runs.sent == {0}
    assert client(own_uri(store)).get_run(second.runs.run_id).info.status == "RUNNING"
    second.finish(SUMMARY)
    assert sorted(nested(own_uri(store), first.runs.run_id)) == [0, 1]
    parent = client(own_uri(store)).get_run(first.runs.run_id)
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["best_objective"] == 0.9
    assert parent.data.tags["routepack.export"] == "defaults: No batch was held out."
    assert "holdout_best_objective" not in parent.data.metrics


def test_half_written_and_doubled_runs_become_one(track, store):
    made = track("doubled")
    made.study_started({})
    uri, runs = own_uri(store), made.runs
    tags = {"mlflow.parentRunId": runs.run_id, "routepack.trial": "0", "routepack.kind": "trial"}
    twins = [client(uri).create_run(runs._experiment_id, start_time=1000 + k, tags=tags) for k in range(2)]
    parent = {"routepack.study": "doubled", "routepack.kind": "study"}
    other = client(uri).create_run(runs._experiment_id, start_time=int(time.time() * 1000) + 10_000, tags=parent)
    again = track("doubled")
    again.study_started({})
    again.trial_finished(0, {"x": 1}, {"objective": 1.0}, "complete")
    again.finish(SUMMARY)
    assert nested(uri, runs.run_id)[0].info.run_id == twins[0].info.run_id
    assert nested(uri, runs.run_id)[0].data.metrics == {"objective": 1.0}
    assert client(uri).get_run(other.info.run_id).info.lifecycle_stage == "deleted"


def test_without_a_parent_id_nothing_is_logged(store):
    # FC-51: never the Default experiment.
    runs = StudyRuns(own_uri(store), "test", "lost", {}, {})
    with pytest.raises(RoutePackError, match="without its id nothing is logged"):
        runs.send_trial(trial_record(0, {}, {}, "complete"))
    assert not client(own_uri(store)).search_runs(["0"])


def test_trial_that_the_store_refuses_holds_up_no_other(track, store, monkeypatch):
    monkeypatch.setattr(study_tracker, "FIRST_PAUSE_S", 0.05)
    made = track("refused")
    made.study_started({})
    send = made.runs.send_trial

    def picky(record):
        if record["number"] == 0:
            raise ValueError("params cannot change")
        send(record)

    monkeypatch.setattr(made.runs, "send_trial", picky)
    with pytest.warns(UserWarning, match=r"could not log trial 0 \(ValueError: params cannot change\)"):
        made.trial_finished(0, {"x": 0}, {"objective": 1.0}, "complete")
    for number in (1, 2):
        made.trial_finished(number, {"x": number}, {"objective": 1.0}, "complete")
    with pytest.warns(UserWarning, match=r"1 record\(s\) are not sent"):
        made.finish(SUMMARY)
    assert sorted(nested(own_uri(store), made.runs.run_id)) == [1, 2]
    assert sorted(made.outbox.records()) == [0, 1, 2]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A real `mlflow server` on a port of this machine, stopped and started again at will."""

    def __init__(self, folder):
        self.folder, self.port, self.process = folder, free_port(), None

    @property
    def uri(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
        environment.pop("MLFLOW_TRACKING_URI", None)
        command = [Path(sys.executable).with_name("mlflow"), "server", "--host", "127.0.0.1", "--port", self.port,
                   "--workers", 1, "--backend-store-uri", f"sqlite:///{self.folder / 'server.db'}",
                   "--artifacts-destination", self.folder / "artifacts"]  # fmt: skip
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                list(map(str, command)), env=environment, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=5):
                return
            time.sleep(0.2)
        raise AssertionError((self.folder / "log").read_text()[-2000:])

    def stop(self):
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, 9)
            self.process.wait()
            self.process = None


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if not Path(sys.executable).with_name("mlflow").exists():
        pytest.skip("the mlflow command is not installed beside this Python")
    made = Server(tmp_path_factory.mktemp("server"))
    made.start()
    yield made
    made.stop()


def test_launchers_at_once_share_the_experiment_and_the_parent(server, track, tmp_path):
    # FC-51: a race to make one experiment.
    trackers = [track("raced", tmp_path / str(k), server.uri) for k in range(2)]
    threads = [threading.Thread(target=one.study_started, args=({},)) for one in trackers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in trackers:  # each has its own trial, and all of them believe that trial 9 is theirs to send
        one.trial_finished(9, {"x": 9}, {"objective": 1.0}, "complete")
        one.trial_finished(trackers.index(one), {"x": 1}, {"objective": 1.0}, "complete")
    for one in trackers:
        one.finish(SUMMARY)
    found = client(server.uri)
    experiments = [e for e in found.search_experiments() if e.name == "test"]
    assert len(experiments) == 1
    runs = found.search_runs([experiments[0].experiment_id], "tags.`routepack.study` = 'raced'")
    assert len(runs) == 1
    assert sorted(nested(server.uri, runs[0].info.run_id)) == [0, 1, 9]
    assert not found.search_runs(["0"])


def test_server_stopped_in_the_middle_of_a_study_loses_and_doubles_nothing(
    server, job, small_ranges, monkeypatch, tmp_path
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    out, waits = tmp_path / "study", []

    class Saboteur(StudyTracker):
        def trial_finished(self, number, *rest):
            begin = time.monotonic()
            super().trial_finished(number, *rest)
            waits.append(time.monotonic() - begin)
            if number == 1:
                server.stop()

    monkeypatch.setattr(study_tracker, "StudyTracker", Saboteur)
    with pytest.warns(UserWarning, match="MLflow at http://127.0.0.1.*could not") as caught:
        first = tune(job.steps, job.costmodel, job.config, out, trials=4)
    assert first["summary"]["trials"]["complete"] + first["summary"]["trials"]["pruned"] == 4
    told = [str(one.message) for one in caught if "MLflow at" in str(one.message)]
    assert len(told) == 2  # once when it went away, once at the end
    assert "the same command sends them" in told[1]
    assert max(waits) < 10  # one request's time at most, of which there are none without a server
    server.start()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="MLflow")
        done = tune(job.steps, job.costmodel, job.config, out, trials=5)
    assert done["tracking"]["run_id"] == first["tracking"]["run_id"]
    runs = nested(server.uri, done["tracking"]["run_id"])
    assert sorted(runs) == list(range(5))
    for trial in done["summary"]["history"]:
        assert runs[trial["number"]].data.tags["routepack.state"] == trial["state"]
        assert runs[trial["number"]].info.status == "FINISHED"
        points = client(server.uri).get_metric_history(runs[trial["number"]].info.run_id, "batch/value")
        assert len(points) == trial["batches"]
        if trial["state"] == "complete":
            assert runs[trial["number"]].data.metrics["objective"] == pytest.approx(trial["value"])
    parent = done["tracking"]["run_id"]
    assert client(server.uri).get_run(parent).info.status == "FINISHED"
    assert {"tuning-report.html", "summary.json", "environment.json", "inputs.json"} <= {
        file.path for file in client(server.uri).list_artifacts(parent)
    }


def test_server_that_comes_back_gets_the_rest_while_the_study_runs(server, track, monkeypatch, tmp_path):
    monkeypatch.setattr(study_tracker, "FIRST_PAUSE_S", 0.05)
    made = track("back", tmp_path, server.uri)
    made.study_started({})
    alive, real = threading.Event(), made.runs.send_trial

    def send(record):
        if not alive.is_set():
            raise ConnectionError("away")
        real(record)

    monkeypatch.setattr(made.runs, "send_trial", send)
    with pytest.warns(UserWarning, match="could not log trial 0"):
        made.trial_finished(0, {"x": 0}, {"objective": 1.0}, "complete")
    made.trial_finished(1, {"x": 1}, {"objective": 1.0}, "complete")
    alive.set()
    deadline = time.monotonic() + 60
    while made.runs.sent != {0, 1} and time.monotonic() < deadline:
        time.sleep(0.05)
    assert made.runs.sent == {0, 1}


def test_a_server_that_never_answers_holds_up_the_start_once(track, monkeypatch, tmp_path):
    monkeypatch.setattr(study_tracker, "OPEN_S", 0.2)
    monkeypatch.setattr(study_tracker, "PATIENCE_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)  # accepts, never answers
        made = track("silent", tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}")
        made.study_started({})
        begin = time.monotonic()
        for number in range(50):
            made.trial_finished(number, {"x": number}, {"objective": 1.0}, "complete")
        assert time.monotonic() - begin < 8  # 50 waits of a second each would be 50
        with pytest.warns(UserWarning, match=r"51 record\(s\) are not sent"):
            made.finish(SUMMARY)
    assert sorted(made.outbox.records()) == list(range(50))


def test_a_dead_server_costs_a_warning_and_seconds(job, small_ranges, monkeypatch, tmp_path):
    # FC-53: tracking that is away must not end a run.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    with pytest.warns(UserWarning, match=r"MLflow at http://127.0.0.1.*kept in"):
        document = tune(job.steps, job.costmodel, job.config, tmp_path / "study", trials=2)
    assert document["summary"]["trials"]["complete"] == 2
    assert document["tracking"]["run_id"] == ""
    assert json.loads((tmp_path / "study" / "study.json").read_text())["state"] == "finished"
    assert len((tmp_path / "study" / "trials.jsonl").read_text().splitlines()) == 2


def test_folder_stores_are_refused_before_any_work(job, monkeypatch, tmp_path):
    # FC-49: newer MLflow refuses folder stores.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:./mlruns")
    with pytest.raises(RoutePackError, match=r"MLFLOW_TRACKING_URI.*sqlite:///.*migrate-filestore"):
        tune(job.steps, job.costmodel, job.config, tmp_path / "study")
    assert not (tmp_path / "study").exists()
    for uri in ("mlruns", "file:///a", "./x"):
        with pytest.raises(ValueError, match="folder store"):
            check_tracking_uri(uri)
    for uri in ("", "sqlite:///x.db", "http://127.0.0.1:5000", "postgresql://a@b/c", "databricks", "databricks://p"):
        check_tracking_uri(uri)


def test_artifacts_of_a_sqlite_store_lie_beside_it(store, track):
    track("beside").runs.open()
    experiment = client(own_uri(store)).get_experiment_by_name("test")
    assert experiment.artifact_location == (store / "artifacts").as_uri()


def test_configuration_beats_environment_beats_default(monkeypatch, tmp_path):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri("", tmp_path) == own_uri(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    assert tracking_uri("", tmp_path) == "http://127.0.0.1:1"
    assert tracking_uri("sqlite:///x.db", tmp_path) == "sqlite:///x.db"


def test_passwords_stay_out_of_what_is_stored(track):
    made = track("secret", uri=f"http://me:secret@127.0.0.1:{free_port()}")
    assert "secret" not in made.where()["tracking_uri"]
    with pytest.warns(UserWarning, match=r"me:\*\*\*@") as caught:
        made.study_started({})
    assert "me:secret" not in str(caught[0].message)

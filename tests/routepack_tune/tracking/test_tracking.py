"""Tracking: finite metrics only, every trial in the store exactly once, whatever the store does."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState, create_trial
from patience import PATIENCE_S
from small_tasks import make_task

from profiler import RoutePackError
from routepack_tune import tune
from routepack_tune.config import check_tracking_uri
from routepack_tune.tracking import sync
from routepack_tune.tracking.describe import number_metrics
from routepack_tune.tracking.store import Store, own_uri, quiet_mlflow, tracking_uri, what_mlflow_said
from routepack_tune.tracking.sync import StudySync, trial_metrics
from search import BatchScore

SUMMARY = {
    "best": {"number": 1, "value": 0.9, "params": {}},
    "default": {"number": 0, "value": 1.0, "params": {}},
    "names": {"tuned": ["a", "b"], "holdout": []},
    "trials": {"complete": 2, "infeasible": 1, "failed": 0},
    "history": [
        {"number": 0, "value": 1.0, "params": {"x": 1}, "state": "complete"},
        {"number": 1, "value": 0.9, "params": {"x": 2}, "state": "complete"},
    ],
    "holdout": {
        "best": [],
        "default_settings": [],
        "gain": None,
        "means": {"best": {}, "default_settings": {}},
    },
    "overhead": {},
    "export": "defaults",
    "export_reason": "No batch was held out.",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One SQLite store for the module: making one takes seconds."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def track(store, tmp_path):
    """Make what syncs a study with the module's store."""

    def make(name, folder=None, uri=None):
        return StudySync(folder or tmp_path, uri or own_uri(store), TASK, {**DOCUMENT, "study_name": name})

    return make


TASK = make_task(batches=2, holdout_share=0.0, experiment="test")
DOCUMENT = {
    **dict.fromkeys(("steps", "tables_hash")),
    "config": {
        "model": {"name": TASK.spec.name},
        "topology": asdict(TASK.topology),
        "max_tokens_per_microbatch": TASK.max_tokens,
    },
    "signature": TASK.signature,
    "fingerprint": {"name": "a card", "origin": "published"},
    "cost_model": {"sha256": "", "data_hash": ""},
    "environment": {"versions": {"python": "3"}, "machine": {}},
}


def score(name, step_s):
    """A batch's score, worth as many seconds as its step takes."""
    return BatchScore(name, 0, step_s, 0.0, 0.1, 2.0, 0.5, 1.0, 0.1)


def trial(number, scores=(("step0", 1.0),), **attrs):
    """A finished trial as Optuna's storages give it."""
    state = TrialState.PRUNED if set(attrs) - {"machine"} else TrialState.COMPLETE
    attrs["scores"] = [asdict(score(*one)) for one in scores]
    chosen = {"params": {"stickiness": 0.5}, "distributions": {"stickiness": FloatDistribution(0.25, 10.0)}}
    made = create_trial(state=state, value=None if state == TrialState.PRUNED else 1.0, user_attrs=attrs, **chosen)
    made.number = number
    made.datetime_complete = datetime.fromtimestamp(number + 0.001)
    return made


def client(uri):
    return quiet_mlflow().MlflowClient(tracking_uri=uri)


def nested(uri, parent):
    """Return {trial: run} of a parent run; two runs of one trial are an error."""
    experiment = client(uri).get_run(parent).info.experiment_id
    runs = client(uri).search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent}'")
    numbers = [int(run.data.tags["routepack.trial"]) for run in runs]
    assert len(set(numbers)) == len(numbers)
    return dict(zip(numbers, runs, strict=True))


def test_metrics_of_batches_are_means_and_series_in_order_of_time():
    metrics = trial_metrics(TASK, [asdict(score("step1", 0.6)), asdict(score("step0", 0.4))])
    assert (metrics["objective"], metrics["step_time_s"], metrics["gap_to_bound"]) == pytest.approx((0.5, 0.5, 0.0))
    assert metrics["batch/step_time_s"] == metrics["batch/value"] == [(1, 0.6), (0, 0.4)]
    assert trial_metrics(TASK, ()) == {}


def test_trial_is_a_run_with_series_and_tags(track, store):
    made = track("nonfinite")
    made([trial(0, [("step0", 0.8), ("step1", math.inf)], pruned="slower"), trial(1, infeasible="no packing")])
    made.finish(SUMMARY)
    run = client(own_uri(store)).get_run(made.trial_runs[0])
    assert run.data.metrics == {"batch/step_time_s": 0.8, "batch/value": 0.8, "move_s": 0.0, "plan_s": 0.1}
    points = client(own_uri(store)).get_metric_history(run.info.run_id, "batch/value")
    assert [(point.step, point.value, point.timestamp) for point in points] == [(0, 0.8, 1)]
    assert run.data.tags["not_a_metric.step_time_s"] == "inf"
    assert (run.data.tags["routepack.state"], run.data.tags["routepack.reason"]) == ("pruned", "slower")
    assert run.data.params == {"stickiness": "0.5"}  # what no trial changes is the parent's
    parent = client(own_uri(store)).get_run(made.run_id).data.params
    assert parent["planner.horizon_steps"] == "10.0"
    assert "planner.stickiness" not in parent
    assert run.info.status == "FINISHED"
    other = client(own_uri(store)).get_run(made.trial_runs[1])
    assert other.data.metrics == {}
    assert (other.data.tags["routepack.state"], other.data.tags["routepack.reason"]) == ("infeasible", "no packing")


def test_names_that_mlflow_refuses_are_written_in_its_letters(track, store):
    made = track("letters")
    made([])
    odd = {"odd=name(1)": 2.0, "../a//./b/": 3.0, "..": 4.0}
    Store(own_uri(store), "test").log(made.run_id, metrics=odd, tags={"no\0text": "\udcff\0", "": "empty"})
    data = client(own_uri(store)).get_run(made.run_id).data
    assert (data.metrics["odd_name_1_"], data.metrics["a/b"], data.metrics["_"]) == (2.0, 3.0, 4.0)
    assert data.tags["no_text"] == "\\udcff\\0"


def test_any_number_of_syncs_gives_each_trial_once(track, store):
    first = track("resumed")
    first([trial(0)])
    first([trial(0), trial(1)])
    again = track("resumed")
    again([trial(0), trial(1)])
    assert (again.run_id, again.trial_runs) == (first.run_id, first.trial_runs)
    assert client(own_uri(store)).get_run(again.run_id).info.status == "RUNNING"
    again([trial(0), trial(1), trial(2)])
    where = again.finish(SUMMARY)
    assert where["trial_run_id"] == first.trial_runs[1]
    assert sorted(nested(own_uri(store), first.run_id)) == [0, 1, 2]
    parent = client(own_uri(store)).get_run(first.run_id)
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["device"] == "a card"
    assert parent.data.metrics["best_objective"] == 0.9
    assert parent.data.tags["routepack.export"] == "defaults: No batch was held out."
    assert "holdout_best_objective" not in parent.data.metrics


def test_parent_run_tells_before_and_after(track, store):
    made, holdout = track("telling"), {**SUMMARY["holdout"]}
    holdout["default_settings"] = [asdict(score("step1", step_s)) for step_s in (1.0, 2.0)]
    holdout["best"] = [asdict(score("step1", step_s)) for step_s in (0.8, 1.6)]
    summary = {**SUMMARY, "holdout": holdout, "export": "best", "export_reason": "Trial 1: it is good."}
    made([trial(0)])
    made.finish(summary)
    run = client(own_uri(store)).get_run(made.run_id)
    told = {name: run.data.metrics[f"step_time_s_{name}"] for name in ("before", "after")}
    assert told == pytest.approx({"before": 1.5, "after": 1.2})
    assert run.data.metrics["gap_to_bound_after"] == pytest.approx(1.4)
    assert run.data.metrics["plan_s_before"] == run.data.metrics["plan_s_after"] == 0.1
    assert run.data.metrics["move_s_after"] == 0
    assert run.data.metrics["step_and_moves_gain_pct"] == pytest.approx(20.0)
    note = run.data.tags["mlflow.note.content"]
    assert note.startswith("**Trial 1 is exported.** Trial 1: it is good.")
    assert "| step time, s (predicted) | 1.5 | 1.2 |" in note
    assert "Times were published on a card." in note
    assert run.data.tags["mlflow.source.name"] == "routepack tune"
    used = {one.dataset.name: one.tags[0].value for one in run.inputs.dataset_inputs}
    assert used == dict.fromkeys(("step0", "step1"), "tuned on")
    assert run.info.run_name.startswith("tune ")
    experiment = client(own_uri(store)).get_experiment(run.info.experiment_id)
    assert "predicted" in experiment.tags["mlflow.note.content"]
    kept = number_metrics({**summary, "export": "defaults"})
    assert kept["step_time_s_after"] == kept["step_time_s_before"] == 1.5
    assert number_metrics(SUMMARY) == {}


def test_a_second_machine_shares_the_parent_and_changes_no_parameter(track, store, monkeypatch):
    first = track("machines")
    first([trial(0, machine="one, 4 cores")])
    before = client(own_uri(store)).get_run(first.run_id).data.params
    assert not [name for name in before if name.startswith(("version.", "machine.", "cost_model_"))]
    elsewhere = {"versions": {"python": "4"}, "machine": {"cpu": "another"}}
    monkeypatch.setitem(DOCUMENT, "environment", elsewhere)
    monkeypatch.setitem(DOCUMENT, "cost_model", {"sha256": "fitted there", "data_hash": "too"})
    monkeypatch.setitem(DOCUMENT, "fingerprint", {"name": "a card of another name", "origin": "published"})
    second = track("machines")
    with warnings.catch_warnings(action="error", category=UserWarning):
        second([trial(0), trial(1, machine="two, 1 cores")])
        first([trial(0, machine="one, 4 cores")])
    run = client(own_uri(store)).get_run(second.run_id)
    assert run.data.params == before
    assert (run.data.tags["version.python"], run.data.tags["machine.cpu"]) == ("4", "another")
    assert len(client(own_uri(store)).list_artifacts(second.run_id, "environment")) == 2
    trials = nested(own_uri(store), second.run_id)
    machines = [trials[number].data.tags["routepack.machine"] for number in sorted(trials)]
    assert machines == ["one, 4 cores", "two, 1 cores"]


def mlflow_error(text, code):
    from mlflow.exceptions import MlflowException
    from mlflow.protos import databricks_pb2

    return MlflowException(text, getattr(databricks_pb2, code))


@pytest.mark.parametrize(
    ("error", "cured"),
    [
        (lambda: mlflow_error("API request failed with exception", "INTERNAL_ERROR"), True),
        (lambda: mlflow_error("(OperationalError) database is locked", "TEMPORARILY_UNAVAILABLE"), True),
        (lambda: mlflow_error("too many", "REQUEST_LIMIT_EXCEEDED"), True),
        (lambda: ConnectionError("away"), True),
        (lambda: TimeoutError("late"), True),
        (lambda: sqlite3.OperationalError("database is locked"), True),
        (lambda: mlflow_error("Changing param values is not allowed.", "INVALID_PARAMETER_VALUE"), False),
        (lambda: mlflow_error("you may not", "PERMISSION_DENIED"), False),
        (lambda: mlflow_error("who are you", "UNAUTHENTICATED"), False),
        (lambda: mlflow_error("what", "BAD_REQUEST"), False),
        (lambda: mlflow_error("attempt to write a readonly database", "TEMPORARILY_UNAVAILABLE"), False),
        (lambda: sqlite3.DatabaseError("database disk image is malformed"), False),
        (lambda: PermissionError(13, "Permission denied", "x"), False),
        (lambda: OSError(28, "No space left on device"), False),
        (lambda: ModuleNotFoundError("No module named 'psycopg2'"), False),
        (lambda: RoutePackError("is no SQLite database"), False),
    ],
)  # fmt: skip
def test_nobody_waits_for_what_no_waiting_cures(track, monkeypatch, error, cured):
    made = track("cures")
    monkeypatch.setattr(Store, "find", lambda *_: (_ for _ in ()).throw(error()))
    with pytest.warns(UserWarning, match="The study goes on") as first:
        made([])
    with pytest.warns(UserWarning, match="The study is whole without it") as last:
        made.finish(SUMMARY)
    for told in (first, last):
        texts = [str(one.message) for one in told if "MLflow at" in str(one.message)]
        assert len(texts) == 1
        assert ("when it is back" in texts[0]) == cured
        assert ("no waiting cures this: mend it" in texts[0]) != cured
        assert "\n" not in texts[0]


def test_a_study_that_fails_or_is_left_leaves_no_run_running(track, store, job, small_ranges, monkeypatch, tmp_path):
    made = track("left")
    made([])
    client(own_uri(store)).create_run(
        client(own_uri(store)).get_run(made.run_id).info.experiment_id, tags={"mlflow.parentRunId": made.run_id}
    )
    track("another").end("KILLED", "left")
    runs = Store(own_uri(store), "test").find("tags.`routepack.study` = 'left'")
    assert [run.info.status for run in runs] == ["KILLED"]
    assert not [one for one in Store(own_uri(store), "test").find("") if one.info.status == "RUNNING" and
                one.data.tags.get("mlflow.parentRunId") == made.run_id]  # fmt: skip

    uri = own_uri(store)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    page = "routepack_tune.reports.tuning.tuning_page"
    for number, (error, status) in enumerate(((KeyboardInterrupt(), "KILLED"), (OSError(28, "No room"), "FAILED"))):
        with monkeypatch.context() as patch:
            patch.setattr(page, lambda *_, error=error: (_ for _ in ()).throw(error))
            with pytest.raises(type(error)):
                tune(job.steps, job.costmodel, job.config, tmp_path / "study", trials=1)
        name = json.loads((tmp_path / "study" / "study.json").read_text())["study_name"]
        (run,) = Store(uri, "routepack-tune").find(f"tags.`routepack.study` = '{name}'")
        assert (run.info.status, number) == (status, number)
    tune(job.steps, job.costmodel, job.config, tmp_path / "study", trials=1)
    (run,) = Store(uri, "routepack-tune").find(f"tags.`routepack.study` = '{name}'")
    assert run.info.status == "FINISHED"


def test_page_of_runs_is_named_where_there_is_a_server(monkeypatch):
    monkeypatch.setattr(Store, "experiment_id", "7")
    page = Store("http://me:secret@host:5000/", "any").runs_page
    assert page == "http://me:***@host:5000/#/experiments/7/runs?workflowType=machine_learning"
    assert Store("sqlite:///x.db", "any").runs_page == ""


def test_half_written_and_doubled_runs_become_one(track, store):
    made = track("doubled")
    made([])
    uri, experiment = own_uri(store), client(own_uri(store)).get_experiment_by_name("test").experiment_id
    tags = {"mlflow.parentRunId": made.run_id, "routepack.trial": "0", "routepack.kind": "trial"}
    twins = [client(uri).create_run(experiment, start_time=1000 + k, tags=tags) for k in range(2)]
    parent = {"routepack.study": "doubled", "routepack.kind": "study"}
    other = client(uri).create_run(experiment, start_time=int(time.time() * 1000) + 10_000, tags=parent)
    again = track("doubled")
    again([trial(0)])
    again.finish(SUMMARY)
    assert nested(uri, made.run_id)[0].info.run_id == twins[0].info.run_id
    assert nested(uri, made.run_id)[0].data.metrics["objective"] == 1.0
    assert client(uri).get_run(other.info.run_id).info.lifecycle_stage == "deleted"


def test_trial_that_the_store_refuses_holds_up_no_other(track, store, monkeypatch):
    made, write = track("refused"), Store.log

    def picky(self, run_id, params=None, *rest, **named):
        if named.get("time_ms") == 1:  # the first trial's
            raise ValueError("params cannot change")
        write(self, run_id, params, *rest, **named)

    monkeypatch.setattr(Store, "log", picky)
    trials = [trial(number) for number in range(3)]
    with pytest.warns(UserWarning, match=r"could not be brought up .*ValueError: params cannot change"):
        made(trials)
    with pytest.warns(UserWarning, match="the same command sends"):
        made.finish(SUMMARY)
    whole = [n for n, run in nested(own_uri(store), made.run_id).items() if run.info.status == "FINISHED"]
    assert sorted(whole) == [1, 2]
    monkeypatch.undo()
    again = track("refused")
    again(trials)
    assert {run.info.status for run in nested(own_uri(store), made.run_id).values()} == {"FINISHED"}


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
        deadline = time.monotonic() + PATIENCE_S
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
    launchers = [track("raced", tmp_path / str(k), server.uri) for k in range(2)]
    threads = [threading.Thread(target=one, args=([],)) for one in launchers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in launchers:  # each has its own trial, and all of them believe that trial 9 is theirs to send
        one([trial(9), trial(launchers.index(one))])
    for one in launchers:
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

    class Saboteur(StudySync):
        def __call__(self, trials):
            begin = time.monotonic()
            super().__call__(trials)
            waits.append(time.monotonic() - begin)
            if len(trials) == 2:
                server.stop()

    monkeypatch.setattr(sync, "StudySync", Saboteur)
    with pytest.warns(UserWarning, match="MLflow at http://127.0.0.1.*could not") as caught:
        first = tune(job.steps, job.costmodel, job.config, out, trials=4)
    assert first["summary"]["trials"]["complete"] + first["summary"]["trials"]["pruned"] == 4
    told = [str(one.message) for one in caught if "MLflow at" in str(one.message)]
    assert len(told) == 2  # once when it went away, once at the end
    assert "the same command sends" in told[1]
    assert max(waits[2:]) < 60  # at once, without a server; MLflow's own repeats take minutes
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
    assert {"tuning-report.html", "summary.json", "environment", "inputs.json"} <= {
        file.path for file in client(server.uri).list_artifacts(parent)
    }


def test_a_store_that_comes_back_gets_the_rest_while_the_study_runs(track, store, monkeypatch):
    monkeypatch.setattr(sync, "FIRST_PAUSE_S", 0.05)
    made, real = track("back"), Store.find
    monkeypatch.setattr(Store, "find", lambda *_: (_ for _ in ()).throw(ConnectionError("away")))
    with pytest.warns(UserWarning, match="ConnectionError: away.*The study goes on"):
        made([trial(0)])
    time.sleep(0.1)
    with warnings.catch_warnings(action="error"):  # of one outage, once
        made([trial(0), trial(1)])
    monkeypatch.setattr(Store, "find", real)
    time.sleep(0.2)
    made([trial(0), trial(1)])
    assert sorted(nested(own_uri(store), made.run_id)) == [0, 1]


def test_a_server_that_never_answers_costs_one_time_out(track, monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)  # accepts, never answers
        made = track("silent", tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}")
        begin = time.monotonic()
        with pytest.warns(UserWarning, match="The study goes on"):
            made([])
        for number in range(50):
            made([trial(k) for k in range(number)])
        assert time.monotonic() - begin < 40  # 50 waits of a second each would be 50
        with pytest.warns(UserWarning, match="the same command sends what is missing"):
            assert made.finish(SUMMARY)["run_id"] == ""


def test_a_dead_server_costs_a_warning_and_seconds(job, small_ranges, monkeypatch, tmp_path):
    # FC-53: tracking that is away must not end a run.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    with pytest.warns(UserWarning, match=r"MLflow at http://127.0.0.1.*the same command"):
        document = tune(job.steps, job.costmodel, job.config, tmp_path / "study", trials=2)
    assert document["summary"]["trials"]["complete"] == 2
    assert document["tracking"]["run_id"] == ""
    assert json.loads((tmp_path / "study" / "study.json").read_text())["state"] == "finished"


def test_folder_stores_are_refused_before_any_work(job, monkeypatch, tmp_path):
    # FC-49: newer MLflow refuses folder stores.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:./mlruns")
    with pytest.raises(RoutePackError, match=r"MLFLOW_TRACKING_URI.*sqlite:///.*migrate-filestore"):
        tune(job.steps, job.costmodel, job.config, tmp_path / "study")
    assert not (tmp_path / "study").exists()
    for uri in ("mlruns", "file:///a", "./x"):
        with pytest.raises(RoutePackError, match="folder store"):
            check_tracking_uri(uri)
    for uri in ("", "sqlite:///x.db", "http://127.0.0.1:5000", "postgresql://a@b/c", "databricks", "databricks://p"):
        check_tracking_uri(uri)


def test_artifacts_of_a_sqlite_store_lie_beside_it(store, track):
    track("beside")([])
    experiment = client(own_uri(store)).get_experiment_by_name("test")
    assert experiment.artifact_location == (store / "artifacts").as_uri()


def test_configuration_beats_environment_beats_default(monkeypatch, tmp_path):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri("", tmp_path) == own_uri(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    assert tracking_uri("", tmp_path) == "http://127.0.0.1:1"
    assert tracking_uri("sqlite:///x.db", tmp_path) == "sqlite:///x.db"


def test_no_password_is_cut_in_two():
    url = "postgresql://user:verysecretpassword@host/db"
    said = [what_mlflow_said(ValueError("x" * blanks + url)) for blanks in range(240, 300)]
    assert all(len(text) <= 300 and "secret" not in text for text in said)


def test_passwords_stay_out_of_what_is_stored(track):
    made = track("secret", uri=f"http://me:secret@127.0.0.1:{free_port()}")
    with pytest.warns(UserWarning, match=r"me:\*\*\*@") as caught:
        where = made.finish(SUMMARY)
    assert "secret" not in where["tracking_uri"]
    assert not any("me:secret" in str(one.message) for one in caught)

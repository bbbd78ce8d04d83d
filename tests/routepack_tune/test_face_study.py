"""tune and deploy through files: resumable, tracked in a real MLflow store, re-checked, registered."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from costmodels import StepTables
from profiler import RoutePackError
from routepack_tune import deploy, load_planner, tune
from routepack_tune.cli import main
from routepack_tune.tracking import own_uri, quiet_mlflow


@pytest.fixture
def study(study_template, tmp_path):
    """A copy of a finished study of three trials."""
    shutil.copytree(study_template.folder / "study", tmp_path / "study")
    return tmp_path / "study"


def nested_runs(folder):
    """Return {trial number: run} and the parent runs of a study's own MLflow store."""
    client = quiet_mlflow().MlflowClient(tracking_uri=own_uri(folder))
    experiment = client.get_experiment_by_name("routepack-tune")
    runs = client.search_runs([experiment.experiment_id])
    trials = [run for run in runs if run.data.tags["routepack.kind"] == "trial"]
    parents = [run for run in runs if run.data.tags["routepack.kind"] == "study"]
    assert len({run.data.tags["routepack.trial"] for run in trials}) == len(trials)
    return {int(run.data.tags["routepack.trial"]): run for run in trials}, parents


def test_study_folder_is_complete_and_true(study_template):
    folder = study_template.folder / "study"
    document = json.loads((folder / "study.json").read_text())
    assert document["state"] == "finished"
    assert document["summary"]["trials"] == {"complete": 3, "infeasible": 0, "failed": 0}
    assert document["summary"]["names"]["holdout"] == ["step03"]
    assert document["config"]["planner"]["max_iterations"] == 2000
    assert [step["name"] for step in document["steps"]] == ["step00", "step01", "step02", "step03"]
    assert document["tracking"]["tracking_uri"] == ""
    assert {"study.json", "study.db", "mlflow.db", "artifacts", "tables.npz", "costmodel.json", "recheck.npz"} <= {
        path.name for path in folder.iterdir()
    }


def test_every_trial_is_a_nested_run_under_one_parent(study_template):
    folder = study_template.folder / "study"
    document = json.loads((folder / "study.json").read_text())
    trials, parents = nested_runs(folder)
    assert sorted(trials) == [0, 1, 2]
    assert [run.info.run_id for run in parents] == [document["tracking"]["run_id"]]
    assert {run.data.tags["mlflow.parentRunId"] for run in trials.values()} == {parents[0].info.run_id}
    assert parents[0].info.status == "FINISHED"
    assert parents[0].data.params["data_parallel_size"] == "2"
    best = document["summary"]["best"]
    assert parents[0].data.metrics["best_objective"] == pytest.approx(best["value"])
    assert trials[best["number"]].info.run_id == document["tracking"]["trial_run_id"]
    for trial in document["summary"]["history"]:
        run = trials[trial["number"]]
        assert run.data.metrics["objective"] == pytest.approx(trial["value"])
        assert run.data.tags["routepack.state"] == "complete"
        assert run.data.params["max_iterations"] == str(trial["params"]["max_iterations"])
    client = quiet_mlflow().MlflowClient(tracking_uri=own_uri(folder))
    assert [file.path for file in client.list_artifacts(parents[0].info.run_id, "plots")] == ["plots/history.png"]
    assert list((folder / "artifacts").rglob("history.png"))


def test_trials_is_the_total_and_a_resumed_study_keeps_its_parent(study_template, small_ranges, study):
    again = tune(study_template.steps, study_template.costmodel, study_template.config, study, trials=3)
    assert again["summary"]["trials"]["complete"] == 3
    more = tune(study_template.steps, study_template.costmodel, study_template.config, study, trials=4)
    assert more["summary"]["trials"]["complete"] == 4
    assert more["summary"]["history"][:3] == again["summary"]["history"]
    trials, parents = nested_runs(study)
    assert sorted(trials) == [0, 1, 2, 3]
    assert len(parents) == 1


@pytest.mark.parametrize("change", ["batches", "base", "tables"])
def test_other_inputs_are_refused(study_template, small_ranges, study, job, change):
    steps, costmodel, config = study_template.steps, study_template.costmodel, study_template.config
    if change == "batches":
        (job.steps / "step00.npz").unlink()
        steps = job.steps
    elif change == "base":
        config = job.config
        config.write_text(config.read_text().replace("alternations: 1", "alternations: 2"))
    else:
        costmodel = job.costmodel
        tables = StepTables.load(costmodel / "tables.npz")
        replace(tables, row_fixed_ns=tables.row_fixed_ns + 1).save(costmodel / "tables.npz")
    before = (study / "study.json").read_bytes()
    with pytest.raises(RoutePackError, match="Give another --out"):
        tune(steps, costmodel, config, study, trials=4)
    assert (study / "study.json").read_bytes() == before


def test_one_process_at_a_time(study_template, small_ranges, study):
    from routepack_tune.study import locked_study

    with locked_study(study), pytest.raises(RoutePackError, match="Another process"):
        tune(study_template.steps, study_template.costmodel, study_template.config, study, trials=4)


def finished_trials(database):
    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            return connection.execute("select count(*) from trials where state = 'COMPLETE'").fetchone()[0]
    except sqlite3.OperationalError:
        return 0


def test_killed_tune_goes_on_and_loses_no_trial(job):
    out = job.folder / "study"
    command = [sys.executable, "-m", "routepack_tune", "tune", job.steps, "--costmodel", job.costmodel, "--config",
               job.config, "--out", out, "--trials"]  # fmt: skip
    running = subprocess.Popen([*map(str, command), "1000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while finished_trials(out / "study.db") < 2 and time.monotonic() < deadline:
        assert running.poll() is None
        time.sleep(0.05)
    running.send_signal(signal.SIGKILL)
    running.wait()
    done = finished_trials(out / "study.db")
    assert done >= 2
    document = json.loads((out / "study.json").read_text())
    assert document["state"] == "running"
    with pytest.raises(RoutePackError, match="no feasible, finished trial"):
        deploy(out, job.folder / "bundle")
    summary = tune(job.steps, job.costmodel, job.config, out, trials=done + 1)["summary"]
    assert summary["trials"]["complete"] == done + 1
    trials, parents = nested_runs(out)
    assert {trial["number"] for trial in summary["history"]} <= set(trials)
    assert len(parents) == 1


def test_deploy_writes_a_bundle_with_its_ancestry(study, study_template, tmp_path, capsys):
    assert main(["deploy", str(study), "--out", str(tmp_path / "bundle")]) == 0
    assert "load_planner" in capsys.readouterr().out
    document = json.loads((study / "study.json").read_text())
    planner = load_planner(tmp_path / "bundle")
    best = document["summary"]["best"]
    assert planner.params.max_iterations == best["params"]["max_iterations"]
    ancestry = planner.provenance
    assert ancestry["study"] == document["study_name"]
    assert ancestry["trial"] == best["number"]
    assert ancestry["mlflow"]["run_id"] == document["tracking"]["run_id"]
    assert ancestry["data_hashes"] == {step["name"]: step["data_hash"] for step in document["steps"]}
    assert ancestry["cost_model"] == document["cost_model"]
    assert ancestry["recheck"]["step_time_s"] > 0
    assert planner.plan(study_template.step).num_rows >= 1


def test_study_without_feasible_trial_deploys_nothing(study, tmp_path, capsys):
    document = json.loads((study / "study.json").read_text())
    (study / "study.json").write_text(json.dumps({**document, "summary": None}))
    assert main(["deploy", str(study), "--out", str(tmp_path / "bundle")]) == 1
    assert "no feasible" in capsys.readouterr().err
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("name", ["tables.npz", "recheck.npz", "costmodel.json"])
def test_changed_study_files_are_refused(study, tmp_path, name):
    (study / name).write_bytes((study / name).read_bytes() + b" ")
    with pytest.raises(RoutePackError, match=f"{name} is missing or was changed"):
        deploy(study, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_winner_that_fails_its_recheck_is_not_deployed(study, tmp_path, monkeypatch):
    import search

    real = search.plan_step
    monkeypatch.setattr(search, "plan_step", lambda *a, **k: replace(real(*a, **k), num_rows=99))
    with pytest.raises(RoutePackError, match="re-check"):
        deploy(study, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_newer_or_edited_studies_are_refused(study, tmp_path):
    document = json.loads((study / "study.json").read_text())
    for changed, words in (({**document, "schema_version": 2}, "schema_version 2"), ({"schema_version": 1}, "lacks")):
        (study / "study.json").write_text(json.dumps(changed))
        with pytest.raises(RoutePackError, match=words):
            deploy(study, tmp_path / "bundle")


def test_registered_bundle_resolves_by_alias_and_is_the_same(study_template, small_ranges, tmp_path, capsys):
    job = study_template
    study = tmp_path / "own"
    tune(job.steps, job.costmodel, job.config, study, trials=1)
    assert main(["deploy", str(study), "--out", str(tmp_path / "bundle"), "--register", "tiny"]) == 0
    captured = capsys.readouterr()
    assert "models:/tiny@champion" in captured.out
    assert captured.err == ""
    mlflow = quiet_mlflow()
    before = mlflow.get_tracking_uri(), mlflow.get_registry_uri()
    mlflow.set_tracking_uri(own_uri(study))
    mlflow.set_registry_uri(own_uri(study))
    try:
        version = mlflow.MlflowClient().get_model_version_by_alias("tiny", "champion")
        assert int(version.version) == 1
        assert version.run_id == json.loads((study / "study.json").read_text())["tracking"]["run_id"]
        loaded = load_planner("models:/tiny@champion")
        model = mlflow.pyfunc.load_model("models:/tiny@champion")
        planned = model.predict([str(job.step)])
        copy = tmp_path / "copy"
        mlflow.artifacts.download_artifacts(artifact_uri="models:/tiny@champion", dst_path=str(copy))
        with pytest.raises(RoutePackError, match="nobody"):
            load_planner("models:/nobody@champion")
    finally:
        mlflow.set_tracking_uri(before[0])
        mlflow.set_registry_uri(before[1])
    expected = load_planner(tmp_path / "bundle")
    assert loaded.plan(job.step).plan_hash == expected.plan(job.step).plan_hash == planned[0]["plan_hash"]
    for name in ("planner.yaml", "tables.npz"):
        assert (copy / "artifacts" / "bundle" / name).read_bytes() == (tmp_path / "bundle" / name).read_bytes()
    assert not list(copy.rglob("*.pkl"))


def test_registry_failure_leaves_the_bundle_and_says_so(study, tmp_path, capsys):
    document = json.loads((study / "study.json").read_text())
    document["tracking"]["tracking_uri"] = "sqlite:////nowhere/at/all/mlflow.db"
    (study / "study.json").write_text(json.dumps(document))
    assert main(["deploy", str(study), "--out", str(tmp_path / "bundle"), "--register", "tiny"]) == 1
    err = capsys.readouterr().err
    assert sum(line.startswith("Error: ") for line in err.splitlines()) == 1
    assert "is written, but" in err
    load_planner(tmp_path / "bundle")

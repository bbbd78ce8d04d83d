"""tune and deploy through files: resumable, tracked in a real MLflow store, re-checked, registered."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import optuna
import pytest
from patience import PATIENCE_S
from strategies import make_tables

from costmodels import StepTables, tables_key
from profiler import RoutePackError
from profiler.files import file_hash
from routepack_tune import deploy, load_planner, tune
from routepack_tune.bundle import typed_parts
from routepack_tune.cli import main
from routepack_tune.study.folder import read_study
from routepack_tune.study.verbs import _tune_task, best_setting
from routepack_tune.tracking.store import own_uri, quiet_mlflow
from search import TUNABLE, Range


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
    assert sum(document["summary"]["trials"].values()) == 3
    assert document["schema_version"] == 1
    assert document["environment"]["machine"]["cores"] >= 1
    assert str(folder) not in (folder / "study.json").read_text()
    assert document["summary"]["names"]["holdout"] == ["step03"]
    assert document["config"]["planner"]["max_iterations"] == 2000
    assert [step["name"] for step in document["steps"]] == ["step00", "step01", "step02", "step03"]
    assert document["tracking"]["tracking_uri"] == ""
    assert document["notes"] == list(StepTables.load(folder / "tables.npz").notes) != []
    assert all(note in (folder / "tuning-report.html").read_text() for note in document["notes"])
    assert {
        "study.json",
        "study.journal",
        "mlflow.db",
        "artifacts",
        "tables.npz",
        "costmodel.json",
        "recheck.npz",
        "tuning-report.html",
    } <= {path.name for path in folder.iterdir()}


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
        if trial["state"] == "complete":
            assert run.data.metrics["objective"] == pytest.approx(trial["value"])
        assert run.data.tags["routepack.state"] == trial["state"]
        assert run.data.params["max_iterations"] == str(trial["params"]["max_iterations"])
    client = quiet_mlflow().MlflowClient(tracking_uri=own_uri(folder))
    plots = {file.path for file in client.list_artifacts(parents[0].info.run_id, "plots")}
    assert {"plots/history.png", "plots/importances.png"} <= plots
    assert list((folder / "artifacts").rglob("history.png"))


def test_trials_is_the_total_and_a_resumed_study_keeps_its_parent(study_template, small_ranges, study):
    again = tune(study_template.steps, study_template.costmodel, study_template.config, study, trials=3)
    assert len(again["summary"]["history"]) == 3
    more = tune(study_template.steps, study_template.costmodel, study_template.config, study, trials=4)
    assert len(more["summary"]["history"]) == 4
    assert more["summary"]["history"][:3] == again["summary"]["history"]
    trials, parents = nested_runs(study)
    assert sorted(trials) == [0, 1, 2, 3]
    assert len(parents) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("batches", "removed step00"),
        ("base", "alternations 1 -> 2"),
        ("tables", "times of .*: [0-9a-f]{8} -> "),
        ("space", "extra_rows: changed high 8 -> 7"),
    ],
)
def test_other_inputs_are_refused_with_the_difference(
    study_template, small_ranges, study, job, monkeypatch, change, words
):
    steps, costmodel, config = study_template.steps, study_template.costmodel, study_template.config
    if change == "batches":
        (job.steps / "step00.npz").unlink()
        steps = job.steps
    elif change == "base":
        config = job.config
        config.write_text(config.read_text().replace("alternations: 1", "alternations: 2"))
    elif change == "space":
        monkeypatch.setitem(TUNABLE, "extra_rows", Range(0, 7, integer=True))
    else:
        costmodel = job.costmodel
        tables = StepTables.load(costmodel / "tables.npz")
        changed = replace(tables, row_fixed_ns=tables.row_fixed_ns + 1)
        changed.save(costmodel / "tables.npz")
        header = (costmodel / "costmodel.json").read_text()
        (costmodel / "costmodel.json").write_text(header.replace(tables.tables_hash, changed.tables_hash))
    before = (study / "study.json").read_bytes()
    with pytest.raises(RoutePackError, match=f"{words}.*--new-study"):
        tune(steps, costmodel, config, study, trials=4)
    assert (study / "study.json").read_bytes() == before


def test_one_process_at_a_time(study_template, small_ranges, study):
    from routepack_tune.study.folder import locked_study

    with locked_study(study), pytest.raises(RoutePackError, match="Another process"):
        tune(study_template.steps, study_template.costmodel, study_template.config, study, trials=4)


def finished_trials(journal):
    """Count lines that end a trial (state 1 complete, 2 pruned), a last one cut short left out."""
    lines = journal.read_text().split("\n")[:-1] if journal.exists() else []
    ended = [line for line in map(json.loads, lines) if line["op_code"] == 6 and line["state"] in (1, 2)]
    return len(ended)


def test_killed_tune_goes_on_and_loses_no_trial(job):
    out = job.folder / "study"
    command = [sys.executable, "-m", "routepack_tune", "tune", job.steps, "--costmodel", job.costmodel, "--config",
               job.config, "--out", out, "--trials"]  # fmt: skip
    running = subprocess.Popen([*map(str, command), "1000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + PATIENCE_S
    while finished_trials(out / "study.journal") < 2 and time.monotonic() < deadline:
        assert running.poll() is None
        time.sleep(0.05)
    running.send_signal(signal.SIGKILL)
    running.wait()
    done = finished_trials(out / "study.journal")
    assert done >= 2
    document = json.loads((out / "study.json").read_text())
    assert document["state"] == "running"
    with pytest.raises(RoutePackError, match="no feasible, finished trial"):
        deploy(out, job.folder / "bundle")
    summary = tune(job.steps, job.costmodel, job.config, out, trials=done + 1)["summary"]
    assert summary["trials"]["complete"] + summary["trials"]["pruned"] == done + 1
    trials, parents = nested_runs(out)
    assert {trial["number"] for trial in summary["history"]} <= set(trials)
    assert len(parents) == 1


def group_lives(number):
    """Tell whether a group of processes has a member."""
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_ctrl_c_ends_all_workers_and_leaves_no_trial_running(job):
    out = job.folder / "study"
    command = [sys.executable, "-m", "routepack_tune", "tune", job.steps, "--costmodel", job.costmodel, "--config",
               job.config, "--out", out, "--workers", "2", "--trials", "1000"]  # fmt: skip
    running = subprocess.Popen(
        [*map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + PATIENCE_S
    while finished_trials(out / "study.journal") < 2 and time.monotonic() < deadline:
        assert running.poll() is None
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to the whole group
    _, said = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130
    assert "the same command continues" in said
    assert "Traceback" not in said
    while group_lives(running.pid) and time.monotonic() < deadline:  # multiprocessing's own helper ends a moment later
        time.sleep(0.05)
    assert not group_lives(running.pid)
    name = json.loads((out / "study.json").read_text())["study_name"]
    journal = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(out / "study.journal")))
    trials = optuna.load_study(study_name=name, storage=journal).trials
    assert not [t for t in trials if t.state.name == "RUNNING"]
    assert sum(trial.state.name in ("COMPLETE", "PRUNED") for trial in trials) >= 2


def test_deploy_writes_a_bundle_with_its_ancestry(study, study_template, tmp_path, capsys):
    assert main(["deploy", str(study), "--out", str(tmp_path / "bundle")]) == 0
    assert "load_planner" in capsys.readouterr().out
    document = json.loads((study / "study.json").read_text())
    planner = load_planner(tmp_path / "bundle")
    summary = document["summary"]
    exported = summary["best" if summary["export"] == "best" else "default"]
    assert planner.params.max_iterations == exported["params"]["max_iterations"]
    ancestry = planner.provenance
    assert ancestry["study"] == document["study_name"]
    assert ancestry["trial"] == exported["number"]
    assert ancestry["export_reason"] == summary["export_reason"]
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
    for changed, words in (
        ({**document, "schema_version": 2}, "schema_version 2"),
        ({"schema_version": 1}, "is missing"),
    ):
        (study / "study.json").write_text(json.dumps(changed))
        with pytest.raises(RoutePackError, match=words):
            deploy(study, tmp_path / "bundle")


def with_export(study, export, reason="because"):
    """Let a study say what it exports, and give its best trial other settings than the defaults."""
    document = json.loads((study / "study.json").read_text())
    summary = document["summary"]
    summary["best"]["params"]["max_iterations"] = 1234
    summary |= {"export": export, "export_reason": reason}
    (study / "study.json").write_text(json.dumps(document))
    return document


@pytest.mark.parametrize("export", ["best", "defaults"])
def test_deploy_exports_what_the_study_says_and_why(study, tmp_path, capsys, export):
    document = with_export(study, export, "interval -0.2 to 0.4%")
    assert main(["deploy", str(study), "--out", str(tmp_path / "bundle")]) == 0
    captured = capsys.readouterr()
    assert "interval -0.2 to 0.4%" in captured.out + captured.err
    planner = load_planner(tmp_path / "bundle")
    assert planner.provenance["export"] == export
    assert planner.provenance["export_reason"] == "interval -0.2 to 0.4%"
    wanted = 1234 if export == "best" else document["config"]["planner"]["max_iterations"]
    assert planner.params.max_iterations == wanted


def test_new_study_sets_the_earlier_one_aside(study, study_template, small_ranges):
    before = json.loads((study / "study.json").read_text())
    arguments = (study_template.steps, study_template.costmodel, study_template.config, study)
    fresh = tune(*arguments, trials=1, new_study=True)
    name = before["study_name"]
    assert fresh["study_name"] == f"{name}-2"
    assert len(fresh["summary"]["history"]) == 1
    assert json.loads((study / "earlier" / name / "study.json").read_text()) == before
    again = tune(*arguments, trials=2)
    assert again["study_name"] == fresh["study_name"]
    assert len(again["summary"]["history"]) == 2
    runs = quiet_mlflow().MlflowClient(tracking_uri=own_uri(study))
    experiment = runs.get_experiment_by_name("routepack-tune").experiment_id
    parents = runs.search_runs([experiment], "tags.`routepack.kind` = 'study'")
    assert sorted(run.data.tags["routepack.study"] for run in parents) == [name, f"{name}-2"]


def test_warm_start_tries_the_other_clusters_settings_second(study, job, small_ranges, tmp_path, monkeypatch):
    best = with_export(study, "best")["summary"]["best"]["params"]
    task, _ = _tune_task(job.steps, job.costmodel, job.settings(), 0)
    wanted = {name: best[name] for name in task.space}
    assert best_setting(study, task) == wanted
    assert best_setting(deploy(study, tmp_path / "bundle"), task) == wanted
    monkeypatch.setenv("MLFLOW_TRACKING_URI", own_uri(study))  # a store that is there: making one takes seconds
    made = tune(job.steps, job.costmodel, job.config, tmp_path / "own", trials=2, warm_start=[study])
    assert made["summary"]["history"][1]["params"] == wanted
    with pytest.raises(RoutePackError, match="it is no study"):
        tune(job.steps, job.costmodel, job.config, tmp_path / "other", warm_start=[tmp_path])
    assert not (tmp_path / "other").exists()


def test_warm_start_values_outside_the_ranges_become_their_ends(study, study_template):
    document = json.loads((study / "study.json").read_text())
    document["summary"]["best"]["params"] |= {"max_iterations": 10**9, "stickiness": 0.0}
    (study / "study.json").write_text(json.dumps(document))
    task, _ = _tune_task(study_template.steps, study_template.costmodel, study_template.settings(), 0)
    setting = best_setting(study, task)
    assert setting["max_iterations"] == task.space["max_iterations"].high
    assert setting["stickiness"] == task.space["stickiness"].low
    replace(task, enqueue=(setting,))


def test_chosen_cap_and_its_tables_reach_the_bundle(study, tmp_path):
    document = with_export(study, "best")
    spec, topology, _ = typed_parts(
        document["config"]["model"], document["config"]["topology"], document["summary"]["best"]["params"], "test"
    )
    tables = make_tables(np.random.default_rng(0), spec, topology, 300)
    replace(tables, key=tables_key(spec, topology, 300)).save(study / "tables-300.npz")
    document["files"]["tables-300.npz"] = file_hash(study / "tables-300.npz")
    document["config"]["tune"]["caps"] = [300]
    document["summary"]["best"]["max_tokens"] = 300
    (study / "study.json").write_text(json.dumps(document))
    deploy(study, tmp_path / "bundle")
    assert load_planner(tmp_path / "bundle").max_tokens == 300


def test_registry_failure_leaves_the_bundle_and_says_so(study, tmp_path, capsys):
    document = json.loads((study / "study.json").read_text())
    document["tracking"]["tracking_uri"] = "sqlite:////proc/nowhere/mlflow.db"
    (study / "study.json").write_text(json.dumps(document))
    assert main(["deploy", str(study), "--out", str(tmp_path / "bundle"), "--register", "tiny"]) == 1
    err = capsys.readouterr().err
    assert sum(line.startswith("Error: ") for line in err.splitlines()) == 1
    assert "is written, but" in err
    load_planner(tmp_path / "bundle")


def test_password_of_the_store_is_asked_for_not_replaced_by_another_store(study, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    document = json.loads((study / "study.json").read_text())
    document["tracking"]["tracking_uri"] = "postgresql://me:***@db/mlflow"
    (study / "study.json").write_text(json.dumps(document))
    with pytest.raises(RoutePackError, match="Set MLFLOW_TRACKING_URI"):
        deploy(study, tmp_path / "bundle", register="tiny")
    assert not (tmp_path / "bundle").exists()


def test_held_out_numbers_are_what_plan_gives(study_template, tmp_path):
    """What the report tells of a held-out batch is what the deployed bundle plans for it, step by step."""
    bundle = deploy(study_template.folder / "study", tmp_path / "bundle")
    planner, document = load_planner(bundle), read_study(study_template.folder / "study")
    told = document["summary"]["holdout"]["best" if document["summary"]["export"] == "best" else "default_settings"]
    files = [study_template.steps / step["file"] for step in document["steps"]]
    first = len(document["summary"]["names"]["tuned"])
    for seed in {score["seed"] for score in told}:
        plan = planner.plan(files[first - 1], seed=seed)
        for score, path in zip([one for one in told if one["seed"] == seed], files[first:], strict=True):
            plan = planner.plan(path, seed=seed, previous=plan)
            assert (score["step_time_s"], score["move_s"]) == (plan.predicted.step_time_s, plan.moves.seconds)

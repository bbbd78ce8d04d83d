"""A study resumes, counts the total, refuses other inputs, and never completes what is infeasible."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from strategies import TOPOLOGIES, make_batch, make_spec, make_tables

from profiler import RoutePackError
from search import PlannerParams, TrialObserver, TuneParams, TuneTask, run_study
from search.params import TUNABLE, Range
from search.tuner import suggest_params

optuna = pytest.importorskip("optuna")
FAST = {"max_iterations": Range(100, 3000, log=True, integer=True), "hot_temperature": Range(1.0, 300.0, log=True)}


@pytest.fixture(autouse=True)
def small_space(monkeypatch):
    for name in list(TUNABLE):
        monkeypatch.delitem(TUNABLE, name)
    for name, knob in FAST.items():
        monkeypatch.setitem(TUNABLE, name, knob)


def make_task(batches=4, cap=64, **params):
    rng = np.random.default_rng(0)
    spec, topology = make_spec(), TOPOLOGIES[0]
    made = tuple(make_batch(rng, spec, rng.integers(2, 30, 12)) for _ in range(batches))
    base = PlannerParams(max_iterations=1000, starts=1, placement_swaps=50)
    names, tables = tuple(f"step{i}" for i in range(batches)), make_tables(rng, spec, topology, 64)
    return TuneTask(names, made, tables, spec, topology, cap, base, TuneParams(**params))


class Recorder(TrialObserver):
    def __init__(self):
        self.trials = []

    def trial_finished(self, number, params, metrics, state, reason):
        self.trials.append((number, state, metrics, reason))


def test_study_counts_the_total_and_starts_from_the_defaults(tmp_path):
    storage, task, seen = f"sqlite:///{tmp_path}/study.db", make_task(), Recorder()
    summary = run_study(task, storage, "s", 3, trial_observer=seen)
    assert summary["trials"]["complete"] == 3
    assert summary["history"][0]["params"]["max_iterations"] == 1000
    assert summary["names"] == {"tuned": ["step0", "step1", "step2"], "holdout": ["step3"]}
    assert summary["best"]["value"] == min(t["value"] for t in summary["history"])
    assert set(summary["holdout"]) >= {"best_value", "default_value"}
    assert [state for _, state, _, _ in seen.trials] == ["complete"] * 3
    again = Recorder()
    summary = run_study(task, storage, "s", 5, trial_observer=again)
    assert summary["trials"]["complete"] == 5
    assert [number for number, *_ in again.trials] == [3, 4]
    assert run_study(task, storage, "s", 5)["trials"]["complete"] == 5


def test_other_batches_are_refused(tmp_path):
    storage = f"sqlite:///{tmp_path}/study.db"
    run_study(make_task(), storage, "s", 1)
    with pytest.raises(RoutePackError, match="other batches, tables, objective"):
        run_study(make_task(batches=3, holdout_share=0.5), storage, "s", 2)


def test_infeasible_settings_are_pruned_with_their_reason_and_nothing_is_exported(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise RoutePackError("cannot plan")

    task = make_task()
    monkeypatch.setattr("search.tuner._warm_up", lambda task: None)
    monkeypatch.setattr("search.tuner.plan_step", refuse)
    seen = Recorder()
    with pytest.raises(RoutePackError, match="No trial of study 's' is feasible: cannot plan"):
        run_study(task, f"sqlite:///{tmp_path}/study.db", "s", 2, trial_observer=seen)
    assert [(state, metrics) for _, state, metrics, _ in seen.trials] == [("infeasible", {})] * 2


def test_a_non_finite_value_never_completes(tmp_path, monkeypatch):
    monkeypatch.setattr("search.tuner.study_value", lambda scores, params: float("nan"))
    with pytest.raises(RoutePackError, match="objective is nan"):
        run_study(make_task(), f"sqlite:///{tmp_path}/study.db", "s", 1)
    study = optuna.load_study(study_name="s", storage=f"sqlite:///{tmp_path}/study.db")
    assert [t.state.name for t in study.trials] == ["PRUNED"]


KILLED = """
import sys; sys.path[:0] = {path!r}
import os, signal
import test_search_tuner as here
from search import run_study
from search.params import TUNABLE
TUNABLE.clear(); TUNABLE.update(here.FAST)
import search.tuner as tuner
real, calls = tuner.score_batches, []
def dying(*args, **kwargs):
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)
tuner.score_batches = dying
run_study(here.make_task(), {storage!r}, "s", 6)
"""


def test_killed_in_a_trial_it_continues_and_loses_none(tmp_path):
    storage = f"sqlite:///{tmp_path}/study.db"
    path = [os.path.dirname(__file__), *[p for p in sys.path if p]]
    done = subprocess.run([sys.executable, "-c", KILLED.format(path=path, storage=storage)], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    before = optuna.load_study(study_name="s", storage=storage).trials
    assert [t.state.name for t in before] == ["COMPLETE", "COMPLETE", "RUNNING"]
    summary = run_study(make_task(), storage, "s", 6)
    after = optuna.load_study(study_name="s", storage=storage).trials
    assert [t.value for t in after[:2]] == [t.value for t in before[:2]]
    assert after[2].state.name == "FAIL"
    assert after[3].params == before[2].params  # the interrupted setting gets another go
    assert summary["trials"] == {"complete": 6, "infeasible": 0, "failed": 1}


def test_storage_that_cannot_be_opened_is_one_line():
    with pytest.raises(RoutePackError, match="cannot be opened"):
        run_study(make_task(), "sqlite:////nonexistent/folder/x.db", "s", 1)


def test_suggested_params_stay_in_their_ranges():
    base = PlannerParams()
    study = optuna.create_study()
    for _ in range(20):
        params = suggest_params(study.ask(), base)
        for name, knob in TUNABLE.items():
            assert knob.low <= getattr(params, name) <= knob.high
    assert replace(params, **{name: getattr(base, name) for name in TUNABLE}) == base

"""A study resumes, counts the total, stops losers, and never completes what is infeasible."""

import itertools
import math
import os
import signal
from dataclasses import replace

import pytest
from small_tasks import FAST, make_task, new_study, run_here, warm_processes

import search.tuning.objective
from profiler import RoutePackError
from search import Range, run_study
from search.params import TUNABLE
from search.tuning.storage import open_study
from search.tuning.study import summarise
from search.tuning.trials import MAX_REPEATS, state_of

optuna = pytest.importorskip("optuna")


@pytest.fixture(autouse=True)
def small_space(monkeypatch):
    for name in list(TUNABLE):
        monkeypatch.delitem(TUNABLE, name)
    for name, knob in FAST.items():
        monkeypatch.setitem(TUNABLE, name, knob)


def test_study_counts_the_total_and_starts_from_the_defaults(tmp_path):
    storage, task, seen = f"journal:{tmp_path}/j", make_task(), []
    summary = run_study(task, storage, "s", 3, listener=lambda records: seen.append([r.number for r in records]))
    assert sum(summary["trials"].values()) == 3
    assert summary["history"][0]["params"]["max_iterations"] == 1000
    assert summary["default"]["value"] == 1
    assert summary["names"] == {"tuned": ["step0", "step1", "step2"], "holdout": ["step3"]}
    assert summary["best"]["value"] == min(t["value"] for t in summary["history"] if t["state"] == "complete")
    assert seen == [[], [0], [0, 1], [0, 1, 2], [0, 1, 2]]
    summary = run_study(task, storage, "s", 5)
    assert len(summary["history"]) == 5
    assert len(run_study(task, storage, "s", 5)["history"]) == 5


def test_a_gain_that_is_not_proven_exports_the_defaults():
    task = make_task()
    study = new_study(task)
    run_here(task, study, 1)
    summary = summarise(task, study)
    assert summary["export"] == "defaults"
    assert summary["best"]["number"] == summary["default"]["number"] == 0
    assert summary["holdout"]["gain"]["gain_pct"] == 0


def test_a_trial_that_loses_batch_by_batch_is_stopped_early(monkeypatch):
    monkeypatch.setitem(TUNABLE, "max_iterations", Range(100, 200_000, log=True, integer=True))
    # Long planning costs dearly here, and the given setting plans two hundred times as long as the defaults.
    task = make_task(batches=9, hidden_planning_s=0.0, enqueue=[{"max_iterations": 200_000}])
    study = new_study(task)
    told = run_here(task, study, 2)[1]
    loser = study.trials[1]
    assert loser.state.name == "PRUNED"
    assert len(loser.user_attrs["scores"]) == 3 < len(task.tuned)
    assert (told.number, state_of(told)) == (1, "pruned")
    assert "3 of 7 batches" in told.user_attrs["pruned"]
    summary = summarise(task, study)
    assert summary["trials"]["pruned"] == 1
    assert summary["history"][1] == {"number": 1, "value": pytest.approx(summary["history"][1]["value"]),
                                     "params": loser.params, "state": "pruned", "batches": 3}  # fmt: skip


def test_fc45_infeasible_settings_are_violations_with_their_reason_and_nothing_is_exported():
    task = make_task(cap=64)
    task = replace(task, base=replace(task.base, max_received_rows=1))
    study = new_study(task)
    seen = run_here(task, study, 2)
    assert [state_of(trial) for trial in seen] == ["infeasible"] * 2
    assert [list(t.constraints.values()) for t in study.trials] == [[1.0], [1.0]]
    assert "max_received_rows = 1" in seen[0].user_attrs["infeasible"]
    with pytest.raises(RoutePackError, match=r"No trial of study .* is feasible: .*max_received_rows"):
        summarise(task, study)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_fc45_a_non_finite_objective_never_completes_nor_wins(monkeypatch, bad):
    real = search.tuning.objective.plan_step

    def planned(batch, tables, spec, topology, cap, params, **how):
        plan = real(batch, tables, spec, topology, cap, params, **how)
        if params.max_iterations != 300:
            return plan
        return replace(plan, predicted=replace(plan.predicted, step_time_s=bad))

    monkeypatch.setattr(search.tuning.objective, "plan_step", planned)
    task = make_task(enqueue=[{"max_iterations": 300}])
    study = new_study(task)
    told = run_here(task, study, 3)[1]
    assert study.trials[1].state.name == "PRUNED"
    assert f"expected step_time_s to be a finite number, got {bad}" in study.trials[1].user_attrs["infeasible"]
    assert state_of(told) == "infeasible"
    assert summarise(task, study)["best"]["number"] != 1


def test_repeated_settings_are_counted_but_not_planned_again_and_an_exhausted_space_ends(monkeypatch):
    monkeypatch.delitem(TUNABLE, "first_share")
    monkeypatch.delitem(TUNABLE, "stickiness")
    monkeypatch.setitem(TUNABLE, "max_iterations", replace(FAST["max_iterations"], low=999, high=1000))
    task = make_task()
    study = new_study(task)
    study.enqueue_trial(task.given_settings[0])
    assert len(run_here(task, study, 50)) == 2
    counts = summarise(task, study)["trials"]
    assert counts["complete"] + counts["pruned"] == 2
    assert counts["duplicate"] >= MAX_REPEATS


def test_two_objectives_give_a_front_and_never_plan_longer_than_the_defaults():
    task = make_task(two_objectives=True)
    study = new_study(task)
    run_here(task, study, 6)
    summary = summarise(task, study)
    assert summary["trials"]["complete"] == 6
    front = [(point["step_value"], point["plan_value"]) for point in summary["pareto"]]
    assert front == sorted(front)
    assert all(a[1] >= b[1] for a, b in itertools.pairwise(front))
    best = study.trials[summary["best"]["number"]]
    assert best.values[1] <= 1
    assert summary["default"]["value"] == 1


def test_overhead_and_importances_are_told():
    task = make_task()
    study = new_study(task)
    run_here(task, study, 5)
    summary = summarise(task, study)
    assert 0 < summary["overhead"]["planning_s"] <= summary["overhead"]["total_s"]
    assert set(summary["importances"]) <= set(FAST)


def test_ctrl_c_leaves_no_trial_running_and_its_setting_gets_another_go(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    task, storage = make_task(), f"journal:{tmp_path}/j"
    with monkeypatch.context() as patch:
        patch.setattr(search.tuning.objective.Scorer, "score", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_study(task, storage, "s", 2)
    assert [t.state.name for t in open_study(task, storage, "s").trials] == ["FAIL", "WAITING"]
    summary = run_study(task, storage, "s", 1)
    assert [trial["params"] for trial in summary["history"]] == task.given_settings


def test_a_trial_that_another_machine_failed_meanwhile_does_not_end_its_worker(monkeypatch):
    task = make_task()
    study, real = new_study(task), search.tuning.objective.Scorer.score

    def slow(scorer, setting, index):
        if len(study.trials) == 1:
            study.tell(0, state=optuna.trial.TrialState.FAIL)  # as if its connection had ended
        return real(scorer, setting, index)

    monkeypatch.setattr(search.tuning.objective.Scorer, "score", slow)
    assert [record.number for record in run_here(task, study, 2)] == [1, 2]


def study_until_killed(storage, calls):
    """Run a study in a process that is killed in the middle of a trial."""
    TUNABLE.clear()
    TUNABLE.update(FAST)
    real, left = search.tuning.objective.Scorer.score, iter(range(calls))

    def dying(*arguments):
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    search.tuning.objective.Scorer.score = dying
    run_study(make_task(), storage, "s", 6)


def test_killed_in_a_trial_it_continues_and_loses_none(tmp_path):
    storage = f"journal:{tmp_path}/j"
    running = warm_processes().Process(target=study_until_killed, args=(storage, 7))
    running.start()
    running.join(120)
    assert running.exitcode == -signal.SIGKILL
    before = open_study(make_task(), storage, "s").trials
    assert [t.state.name for t in before][-1] == "RUNNING"
    killed = len(before) - 1
    summary = run_study(make_task(), storage, "s", 6)
    after = open_study(make_task(), storage, "s").trials
    assert [t.values for t in after[:killed]] == [t.values for t in before[:killed]]
    assert after[killed].state.name == "FAIL"
    assert after[killed + 1].params == before[killed].params  # the interrupted setting gets another go
    assert len(summary["history"]) == 6
    assert summary["trials"]["failed"] == 1

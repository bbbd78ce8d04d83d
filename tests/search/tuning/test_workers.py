"""Workers share a study: one may die, none finishes a trial twice, all dying is explained."""

import builtins
import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest
from tiny_study import Recorder, make_task

import search.tuning.claims
from profiler import RoutePackError
from search.tuning.claims import MAX_RETRIES, count_finished, fail_abandoned, next_trial, working_on
from search.tuning.storage import open_study
from search.tuning.workers import run_on_ray, run_workers

optuna = pytest.importorskip("optuna")


def kill_one_in_a_trial(storage, killed, only_one=True):
    """Stop a worker, make sure that its trial still runs, then kill it."""
    while True:
        time.sleep(0.05)
        study = open_study(make_task(), storage, "s", read_only=True)
        for trial in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
            pid = trial.user_attrs.get("pid")
            if "machine" not in trial.user_attrs or pid in killed:
                continue
            os.kill(pid, signal.SIGSTOP)
            now = study.trials[trial.number]
            if now.state.name != "RUNNING" or now.params.keys() != make_task().space.keys():
                os.kill(pid, signal.SIGCONT)
                continue
            killed[pid] = trial.number
            os.kill(pid, signal.SIGKILL)
            if only_one:
                return


@pytest.mark.parametrize(("kind", "workers"), [("journal", 2), ("postgresql", 4)])
def test_one_killed_in_a_trial_loses_nothing_and_its_setting_is_tried_again(tmp_path, kind, workers, request):
    storage = request.getfixturevalue("postgresql") if kind == "postgresql" else f"journal:{tmp_path}/j"
    name, task, seen, killed = "s", make_task(enqueued=9), Recorder(), {}
    study = open_study(task, storage, name, new_study=True)
    assert study.study_name == name
    killer = threading.Thread(target=kill_one_in_a_trial, args=(storage, killed), daemon=True)
    killer.start()
    with pytest.warns(UserWarning, match=r"1 of \d workers died, the others went on: worker \d was ended by SIGKILL"):
        run_workers(task, storage, name, 8, workers, trial_observer=seen)
    trials = study.get_trials()
    (number,) = killed.values()
    finished = [t.number for t in trials if t.state.name in ("COMPLETE", "PRUNED")]
    assert trials[number].state.name == "FAIL"
    assert len(finished) == 8  # the total, neither more nor less
    assert sorted(seen.numbers) == finished  # each reported once
    again = [t for t in trials if t.user_attrs.get("retry_of") == number]
    assert [t.params for t in again] == [trials[number].params]
    assert multiprocessing.active_children() == []


def test_resumed_workers_report_what_no_parent_reported_and_nothing_twice(tmp_path):
    storage, task, first, second = f"journal:{tmp_path}/j", make_task(enqueued=3), Recorder(), Recorder()
    study = open_study(task, storage, "s")
    run_workers(task, storage, "s", 2, 1, trial_observer=first)
    assert first.numbers == [0, 1]
    (key,) = [key for key in study.user_attrs if key.startswith("reported")]
    study.set_user_attr(key, [0])  # as if that parent had been killed before it told of trial 1
    run_workers(task, storage, "s", 3, 1, trial_observer=second)
    assert second.numbers == [1, 2]


def test_all_killed_is_an_error_that_says_of_what(tmp_path):
    storage, killed = f"journal:{tmp_path}/j", {}
    open_study(make_task(), storage, "s")
    killer = threading.Thread(target=kill_one_in_a_trial, args=(storage, killed, False), daemon=True)
    killer.start()
    with pytest.raises(RoutePackError, match=r"All 1 workers .* died with \d+ of 500 .*SIGKILL \(out of memory\?\)"):
        run_workers(make_task(), storage, "s", 500, 1)
    states = {t.state.name for t in open_study(make_task(), storage, "s").trials}
    assert "RUNNING" not in states


def test_what_a_worker_said_last_is_shown(tmp_path, monkeypatch):
    (tmp_path / "optuna.py").write_text("raise RuntimeError('broken on purpose')")
    monkeypatch.syspath_prepend(tmp_path)  # children import it, this process has the real one
    with pytest.raises(RoutePackError, match=r"worker 0 ended with exit code 1: .*broken on purpose"):
        run_workers(make_task(), f"journal:{tmp_path}/j", "s", 2, 1)


def test_claims_never_exceed_the_target_and_the_last_one_goes_to_whoever_is_left(tmp_path, monkeypatch):
    storage = f"journal:{tmp_path}/j"
    one, two = open_study(make_task(), storage, "s"), open_study(make_task(), storage, "s")
    first, claimed = next_trial(one, 1, 0), []
    waiting = threading.Thread(target=lambda: claimed.append(next_trial(two, 1, 1)), daemon=True)
    waiting.start()
    waiting.join(1)
    assert waiting.is_alive()  # no place is free, none is certain either
    one.tell(first, state=optuna.trial.TrialState.FAIL)
    waiting.join(20)
    assert [trial.number for trial in claimed] == [1]
    two.tell(claimed[0], 1.0)
    assert next_trial(one, 1, 0) is None


def test_a_claim_too_many_is_given_back_with_its_setting(tmp_path, monkeypatch):
    storage = f"journal:{tmp_path}/j"
    one, two = (open_study(make_task(), storage, "s") for _ in range(2))
    two.enqueue_trial({"starts": 2})
    asked, rivals = one.ask, []

    def ask_after_another():
        rivals.append(two.ask())
        monkeypatch.setattr(one, "ask", asked)
        two.tell(rivals[0], 1.0)
        return asked()

    monkeypatch.setattr(one, "ask", ask_after_another)
    assert next_trial(one, 1, 0) is None
    assert [t.state.name for t in one.trials] == ["COMPLETE", "WAITING"]
    assert next_trial(one, 2, 0).suggest_int("starts", 1, 4) == 2


def test_a_setting_that_always_kills_is_given_up(tmp_path):
    study = open_study(make_task(), f"journal:{tmp_path}/j", "s")
    for _ in range(MAX_RETRIES + 1):
        trial = next_trial(study, 9, 0)
        trial.set_user_attr("started", 1)  # a process of that number that is long gone
        fail_abandoned(study)
    assert [t.state.name for t in study.trials] == ["FAIL"] * (MAX_RETRIES + 1)
    assert [t.user_attrs.get("retries", 0) for t in study.trials] == list(range(MAX_RETRIES + 1))


def test_a_worker_of_another_machine_is_known_by_its_heartbeats(postgresql, monkeypatch):
    monkeypatch.setattr("search.tuning.storage.HEARTBEAT_S", 1)
    monkeypatch.setattr("search.tuning.storage.GRACE_S", 2)
    study = open_study(make_task(), postgresql, "s")
    monkeypatch.setattr(search.tuning.claims, "_machine", lambda: "another")
    alive, silent = next_trial(study, 9, 0), next_trial(study, 9, 1)
    monkeypatch.undo()
    with working_on(study, alive):
        end = time.monotonic() + 30
        while study.trials[silent.number].state.name == "RUNNING" and time.monotonic() < end:
            time.sleep(0.2)
            fail_abandoned(study)
        states = [study.trials[t.number].state.name for t in (alive, silent)]
    assert states == ["RUNNING", "FAIL"]


def test_without_ray_the_way_out_is_said(tmp_path, monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "ray":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(RoutePackError, match=r"routepack-tune\[ray\]"):
        run_on_ray(make_task(), f"journal:{tmp_path}/j", "s", 1, 1)


@pytest.mark.slow
def test_ray_tasks_share_a_study(tmp_path):
    ray = pytest.importorskip("ray")
    path = os.pathsep.join(p for p in sys.path if p)
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    try:
        seen, storage = Recorder(), f"journal:{tmp_path}/j"
        run_on_ray(make_task(), storage, "s", 5, 2, trial_observer=seen)
    finally:
        ray.shutdown()
    study = open_study(make_task(), storage, "s")
    assert count_finished(study) == len(seen.numbers) == 5
    assert {t.user_attrs["worker"] for t in study.trials if t.state.is_finished()} == {0, 1}

"""Workers share a study: one may die, none finishes a trial twice, all dying is explained."""

import builtins
import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest
from small_tasks import lasting_settings, make_task, warm_processes

from profiler import RoutePackError
from search.tuning.storage import open_study, study_locks
from search.tuning.study import run_study
from search.tuning.trials import MAX_RETRIES, begin_trial, finished_trials
from search.tuning.workers import run_workers

optuna = pytest.importorskip("optuna")


def run(task, storage, trials, workers, ray=False):
    """Run a study with workers and return it."""
    study = open_study(task, storage, "s")
    run_workers((task, storage, "s", trials), study, range(workers), lambda: None, ray=ray)
    return study


class Worker:
    """One worker's study, locks and trials."""

    def __init__(self, storage, target, number=0):
        self.study, self.locks = open_study(make_task(), storage, "s"), study_locks(storage, "s")
        self.target, self.number, self.end = target, number, self.locks.close

    def begin(self, space):
        return begin_trial(self.study, self.locks, self.target, space, self.number)


def kill_one_in_a_trial(storage, killed, only_one=True):
    """Stop a worker, make sure that its trial still runs, then kill it."""
    study = open_study(make_task(), storage, "s")
    while True:
        time.sleep(0.02)
        pids = {process.name: process.pid for process in multiprocessing.active_children()}
        for trial in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
            pid = pids.get(f"worker {trial.user_attrs.get('worker')}")
            if pid is None or pid in killed or "lock" not in trial.user_attrs:
                continue
            os.kill(pid, signal.SIGSTOP)
            now = study.trials[trial.number]
            if now.state.name != "RUNNING":
                os.kill(pid, signal.SIGCONT)
                continue
            killed[pid] = trial.number
            os.kill(pid, signal.SIGKILL)
            if only_one:
                return


@pytest.fixture(params=["journal", "postgresql"])
def storage(request, tmp_path):
    return request.getfixturevalue("postgresql") if request.param == "postgresql" else f"journal:{tmp_path}/j"


def test_one_killed_in_a_trial_loses_nothing_and_its_setting_is_tried_again(storage):
    task, killed = make_task(enqueue=lasting_settings(5)), {}
    open_study(task, storage, "s")
    killer = threading.Thread(target=kill_one_in_a_trial, args=(storage, killed), daemon=True)
    killer.start()
    with pytest.warns(UserWarning, match=r"1 of 2 workers died, the others went on: worker \d was ended by SIGKILL"):
        study = run(task, storage, 4, 2)
    trials = study.get_trials()
    (number,) = killed.values()
    finished = [t.number for t in trials if t.state.name in ("COMPLETE", "PRUNED")]
    assert trials[number].state.name == "FAIL"
    assert len(finished) == 4  # the total, neither more nor less
    again = [t for t in trials if t.user_attrs.get("retry_of") == number]
    assert [t.params for t in again] == [trials[number].params]
    assert "RUNNING" not in {t.state.name for t in trials}
    assert multiprocessing.active_children() == []


def test_all_killed_is_an_error_that_says_of_what(tmp_path):
    storage, killed = f"journal:{tmp_path}/j", {}
    task = make_task()
    open_study(task, storage, "s")
    killer = threading.Thread(target=kill_one_in_a_trial, args=(storage, killed, False), daemon=True)
    killer.start()
    with pytest.raises(RoutePackError, match=r"All 1 workers .* died with \d+ of 500 .*SIGKILL \(out of memory\?\)"):
        run(task, storage, 500, 1)
    states = {t.state.name for t in open_study(task, storage, "s").trials}
    assert "RUNNING" not in states


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_server_that_stops_in_the_middle_is_one_line_and_the_same_command_goes_on(
    postgresql_server, postgresql, workers
):
    task = make_task(batches=2, holdout_share=0.0)

    def stop_once(trials):
        if trials and postgresql_server.running:
            postgresql_server.stop()

    try:
        with pytest.raises(RoutePackError, match=r"^Storage postgresql.* failed: .*runs the rest") as error:
            run_study(task, postgresql, "s", 3, workers=workers, listener=stop_once)
    finally:
        postgresql_server.start()
    assert "\n" not in str(error.value)
    assert "s3cret" not in str(error.value)
    assert multiprocessing.active_children() == []
    summary = run_study(task, postgresql, "s", 3, workers=workers)
    states = [trial.state.name for trial in open_study(task, postgresql, "s").trials]
    assert states.count("COMPLETE") + states.count("PRUNED") == 3
    assert "RUNNING" not in states
    assert summary["trials"]["failed"] <= workers


def test_what_a_worker_said_last_is_shown(tmp_path, monkeypatch):
    (tmp_path / "optuna.py").write_text("raise RuntimeError('broken on purpose')")
    monkeypatch.syspath_prepend(tmp_path)  # children import it, this process has the real one
    with pytest.raises(RoutePackError, match=r"worker 0 ended with exit code 1: .*broken on purpose"):
        run(make_task(), f"journal:{tmp_path}/j", 2, 1)


def test_claims_never_exceed_the_target_and_the_last_one_goes_to_whoever_is_left(storage):
    first, second = (Worker(storage, 1, number) for number in range(2))
    first.begin({})
    claimed = []
    waiting = threading.Thread(target=lambda: claimed.append(second.begin({})), daemon=True)
    waiting.start()
    waiting.join(0.6)
    assert waiting.is_alive()  # no place is free, none is certain either
    first.end()  # without an outcome
    waiting.join(20)
    assert [trial.number for trial in claimed] == [1]
    second.study.tell(claimed[0], 1.0)
    assert first.begin({}) is None
    assert [t.state.name for t in first.study.trials] == ["FAIL", "COMPLETE"]


def test_nobody_begins_between_anothers_look_and_its_beginning(storage):
    first, second = (Worker(storage, 1, number) for number in range(2))
    one, begun, ask = first.study, [], first.study.ask
    waiting = threading.Thread(target=lambda: begun.append(second.begin({})), daemon=True)

    def asking(space):
        waiting.start()
        waiting.join(0.6)
        assert waiting.is_alive()
        return ask(space)

    one.ask = asking
    one.tell(first.begin({}), 1.0)
    waiting.join(20)
    assert begun == [None]
    assert len(one.trials) == 1


def test_a_trial_that_ends_between_two_looks_is_not_missed(tmp_path, monkeypatch):
    first, second = (Worker(f"journal:{tmp_path}/j", 1, number) for number in range(2))
    trial, reads, read = first.begin({}), [], second.study.get_trials

    def reading(*arguments, **options):
        found = read(*arguments, **options)
        reads.append(options)
        if len(reads) == 2:  # the first of the two that count; the one before looked for dead workers
            first.study.tell(trial, 1.0)
        return found

    monkeypatch.setattr(second.study, "get_trials", reading)
    assert second.begin({}) is None
    assert len(first.study.trials) == 1


def begin_and_die(storage, when):
    """Be a process that is killed while it begins a trial."""
    ours = Worker(storage, 9)

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    ask = ours.study.ask
    if when == "looked":
        ours.study.ask = die
    elif when == "asked":
        ours.study.ask = lambda space: die(ask(space))
    ours.begin({"starts": optuna.distributions.IntDistribution(1, 4)})
    die()


@pytest.mark.parametrize("when", ["looked", "asked", "begun"])
def test_killed_while_it_claims_it_holds_nobody_up_and_leaves_no_trial_running(storage, when):
    ours = Worker(storage, 1)
    killed = warm_processes().Process(target=begin_and_die, args=(storage, when))
    killed.start()
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    trial = ours.begin({})
    assert trial.number == (when != "looked")
    assert [t.state.name for t in ours.study.trials[: trial.number]] == ["FAIL"] * trial.number


def test_a_setting_that_always_kills_is_given_up(tmp_path):
    ours = Worker(f"journal:{tmp_path}/j", 9)
    for _ in range(MAX_RETRIES + 1):
        ours.begin({})
        ours.end()  # as if its process had been killed
    assert ours.begin({}).number == MAX_RETRIES + 1
    states = [t.state.name for t in ours.study.trials]
    assert states == [*["FAIL"] * (MAX_RETRIES + 1), "RUNNING"]
    assert [t.user_attrs.get("retries", 0) for t in ours.study.trials] == [*range(MAX_RETRIES + 1), 0]


def test_without_ray_the_way_out_is_said(tmp_path, monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "ray":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(RoutePackError, match=r"routepack-tune\[ray\]"):
        run(make_task(), f"journal:{tmp_path}/j", 1, 1, ray=True)


@pytest.mark.slow
def test_ray_tasks_share_a_study(tmp_path):
    ray = pytest.importorskip("ray")
    path = os.pathsep.join(p for p in sys.path if p)
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    try:
        study = run(make_task(), f"journal:{tmp_path}/j", 5, 2, ray=True)
    finally:
        ray.shutdown()
    assert len(finished_trials(study)) == 5
    assert {t.user_attrs["worker"] for t in study.trials if t.state.is_finished()} == {0, 1}

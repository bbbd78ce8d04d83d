"""Workers share a study: one may die, none finishes a trial twice, all dying is explained."""

import builtins
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
from small_tasks import lasting_settings, make_task

import search.tuning.claims
from profiler import Observer, RoutePackError
from search.tuning.claims import MAX_RETRIES, Claims, fail_abandoned, finished_trials
from search.tuning.storage import claim_lock, is_server, open_study
from search.tuning.trials import Watch
from search.tuning.workers import run_workers

optuna = pytest.importorskip("optuna")


def run(task, storage, trials, workers, ray=False):
    """Run a study with workers; return it and the numbers that a listener was told last."""
    study, told = open_study(task, storage, "s"), []
    watch = Watch(task, study, trials, Observer(), lambda records: told.append([record.number for record in records]))
    run_workers(task, storage, study, trials, workers, watch, ray=ray)
    watch.finish()
    return study, told[-1]


def claims(storage, target, worker=0):
    """Open a study like a worker and return it with the worker's claims."""
    study = open_study(make_task(), storage, "s")
    return study, Claims(study, claim_lock(storage, "s"), target, worker, server=is_server(storage))


def begin(study, ours):
    """Begin a trial, or return None where none is missing."""
    if not ours.take():
        return None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Heartbeat of storage")
        trial = study.ask()
    ours.sign(trial)
    return trial


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


@pytest.fixture(params=["journal", "postgresql"])
def storage(request, tmp_path):
    return request.getfixturevalue("postgresql") if request.param == "postgresql" else f"journal:{tmp_path}/j"


def test_one_killed_in_a_trial_loses_nothing_and_its_setting_is_tried_again(storage):
    task, killed = make_task(enqueue=lasting_settings(9)), {}
    open_study(task, storage, "s")
    killer = threading.Thread(target=kill_one_in_a_trial, args=(storage, killed), daemon=True)
    killer.start()
    with pytest.warns(UserWarning, match=r"1 of 3 workers died, the others went on: worker \d was ended by SIGKILL"):
        study, told = run(task, storage, 8, 3)
    trials = study.get_trials()
    (number,) = killed.values()
    finished = [t.number for t in trials if t.state.name in ("COMPLETE", "PRUNED")]
    assert trials[number].state.name == "FAIL"
    assert len(finished) == 8  # the total, neither more nor less
    assert told == finished
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


def test_what_a_worker_said_last_is_shown(tmp_path, monkeypatch):
    (tmp_path / "optuna.py").write_text("raise RuntimeError('broken on purpose')")
    monkeypatch.syspath_prepend(tmp_path)  # children import it, this process has the real one
    with pytest.raises(RoutePackError, match=r"worker 0 ended with exit code 1: .*broken on purpose"):
        run(make_task(), f"journal:{tmp_path}/j", 2, 1)


def test_claims_never_exceed_the_target_and_the_last_one_goes_to_whoever_is_left(storage):
    (one, first), (two, second) = (claims(storage, 1, worker) for worker in range(2))
    trial, claimed = begin(one, first), []
    waiting = threading.Thread(target=lambda: claimed.append(begin(two, second)), daemon=True)
    waiting.start()
    waiting.join(1)
    assert waiting.is_alive()  # no place is free, none is certain either
    one.tell(trial, state=optuna.trial.TrialState.FAIL)
    waiting.join(20)
    assert [trial.number for trial in claimed] == [1]
    two.tell(claimed[0], 1.0)
    assert begin(one, first) is None


def test_nobody_begins_between_anothers_look_and_its_beginning(storage):
    (one, first), (two, second) = (claims(storage, 1, worker) for worker in range(2))
    assert first.take()
    begun = []
    waiting = threading.Thread(target=lambda: begun.append(begin(two, second)), daemon=True)
    waiting.start()
    waiting.join(1)
    assert waiting.is_alive()
    trial = one.ask()
    first.sign(trial)
    one.tell(trial, 1.0)
    waiting.join(20)
    assert begun == [None]
    assert len(one.trials) == 1


def test_a_trial_that_ends_between_two_looks_is_not_missed(tmp_path, monkeypatch):
    (one, first), (two, second) = (claims(f"journal:{tmp_path}/j", 1, worker) for worker in range(2))
    trial, reads, read = begin(one, first), [], two.get_trials

    def reading(*arguments, **options):
        found = read(*arguments, **options)
        reads.append(options)
        if len(reads) == 2:  # the first of the two that count; the one before looked for dead workers
            one.tell(trial, 1.0)
        return found

    monkeypatch.setattr(two, "get_trials", reading)
    assert begin(two, second) is None
    assert len(one.trials) == 1


CLAIM = """
import os, signal, sys
sys.path[:0] = {path!r}
from test_workers import claims
study, ours = claims({storage!r}, 9)
assert ours.take()
if {asks}:
    study.ask().suggest_int("starts", 1, 4)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("asks", [False, True])
def test_killed_while_it_claims_it_holds_nobody_up_and_leaves_no_trial_running(storage, asks):
    path = [os.path.dirname(__file__), *[p for p in sys.path if p]]
    study, ours = claims(storage, 1)
    code = CLAIM.format(path=path, storage=storage, asks=asks)
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    trial = begin(study, ours)
    assert trial.number == int(asks)
    assert [t.state.name for t in study.trials[: trial.number]] == ["FAIL"] * asks


def test_a_setting_that_always_kills_is_given_up(tmp_path):
    study, ours = claims(f"journal:{tmp_path}/j", 9)
    for _ in range(MAX_RETRIES + 1):
        trial = begin(study, ours)
        trial.set_user_attr("started", 1)  # a process of that number that is long gone
    assert begin(study, ours).number == MAX_RETRIES + 1
    states = [t.state.name for t in study.trials]
    assert states == [*["FAIL"] * (MAX_RETRIES + 1), "RUNNING"]
    assert [t.user_attrs.get("retries", 0) for t in study.trials] == [*range(MAX_RETRIES + 1), 0]


def test_a_worker_of_another_machine_is_known_by_its_heartbeats(postgresql, monkeypatch):
    monkeypatch.setattr("search.tuning.storage.HEARTBEAT_S", 1)
    monkeypatch.setattr("search.tuning.storage.GRACE_S", 2)
    study, ours = claims(postgresql, 9)
    monkeypatch.setattr(search.tuning.claims, "machine", lambda: "another")
    seen = []

    def watched(trial):
        ours.sign(trial)
        monkeypatch.undo()
        end = time.monotonic() + 30
        while time.monotonic() < end:
            time.sleep(0.2)
            fail_abandoned(study, claim_lock(postgresql, "s"), True)
            seen[:] = [t.state.name for t in study.trials]
            if "FAIL" in seen:
                break
        return 1.0

    silent = begin(study, ours)
    study._storage.record_heartbeat(silent._trial_id)  # the last one it sent
    ours.take()
    study.optimize(watched, n_trials=1)
    assert seen[:2] == ["FAIL", "RUNNING"]


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
        study, told = run(make_task(), f"journal:{tmp_path}/j", 5, 2, ray=True)
    finally:
        ray.shutdown()
    assert len(finished_trials(study)) == len(told) == 5
    assert {t.user_attrs["worker"] for t in study.trials if t.state.is_finished()} == {0, 1}

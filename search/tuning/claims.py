"""Who works on which trial: claims that never overshoot a target, and trials whose worker died.

Invariants: a trial is counted once, whatever dies; together, workers never begin more trials than are missing; the
setting of a dead worker's trial is tried again, at most ``MAX_RETRIES`` times.

A dead worker is known by its process on this machine and by missed heartbeats elsewhere. A storage without
heartbeats (a file) cannot tell about other machines: their running trials are not waited for.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEARTBEAT_S = 15
GRACE_S = 60
"""Time without a heartbeat after which a trial's worker is taken for dead."""
MAX_RETRIES = 2
"""A setting that kills its worker every time must not end the study."""
POLL_S = 0.2


def count_finished(study: Any) -> int:
    """Return how many trials have an outcome: complete or pruned."""
    from optuna.trial import TrialState

    return len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)))


def next_trial(study: Any, target: int, worker: int) -> Any:
    """Claim a trial, or return None once the study holds ``target`` finished ones.

    While the last missing trials run elsewhere it waits: if their worker dies, they are this one's.
    """
    jitter = random.Random(os.getpid())
    unsigned: dict[int, float] = {}
    while True:
        fail_abandoned(study)
        running = _running(study)
        if (finished := count_finished(study)) >= target:
            return None
        if finished + len(running) < target:
            with warnings.catch_warnings():  # Optuna beats only inside Study.optimize, here `working_on` does
                warnings.filterwarnings("ignore", message="Heartbeat of storage")
                trial = study.ask()
            others = sum(other.number != trial.number for other in _running(study))
            if count_finished(study) + others < target:
                for name, value in _signed(worker).items():
                    trial.set_user_attr(name, value)
                if _beats(study):
                    study._storage.record_heartbeat(trial._trial_id)
                return trial
            _give_back(study, trial)
        unsigned = {
            t.number: unsigned.get(t.number, time.monotonic()) for t in running if "machine" not in t.user_attrs
        }
        for trial in running:  # killed between asking and signing
            if time.monotonic() - unsigned.get(trial.number, time.monotonic()) > GRACE_S:
                _fail(study, trial)
        time.sleep(POLL_S * jitter.uniform(0.5, 1.5))


@contextlib.contextmanager
def working_on(study: Any, trial: Any) -> Iterator[None]:
    """Tell the storage, while the block runs, that the trial's worker is alive; a no-op for storages in files."""
    store, trial_id = study._storage, trial._trial_id
    if not _beats(study):
        yield
        return
    done = threading.Event()

    def beat() -> None:
        while not done.wait(store.get_heartbeat_interval()):
            with contextlib.suppress(Exception):  # a server that is away for a moment must not end a trial
                store.record_heartbeat(trial_id)

    thread = threading.Thread(target=beat, name=f"heartbeat-{trial.number}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def fail_abandoned(study: Any) -> None:
    """Mark running trials whose worker is gone as failed, and give their settings another go."""
    import optuna

    beats = _beats(study)
    for trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
        if _is_abandoned(trial.user_attrs, beats):
            _fail(study, trial)
    if beats:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            optuna.storages.fail_stale_trials(study)


def retry(study: Any, trial: Any) -> None:
    """Enqueue the setting of a failed trial once more."""
    setting = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
    retries = trial.user_attrs.get("retries", 0)
    if setting and retries < MAX_RETRIES:
        study.enqueue_trial(setting, user_attrs={"retries": retries + 1, "retry_of": trial.number})


def first_worker(server: bool) -> int:
    """Return the number of this process's first worker: 0, or one that no other machine's process is likely to have."""
    if not server:
        return 0
    return int.from_bytes(f"{_machine()}{os.getpid()}".encode(), "big") % 1_000_003 * 1000


def _running(study: Any) -> list[Any]:
    """Return the running trials that may still finish."""
    from optuna.trial import TrialState

    trials, beats, host = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)), _beats(study), _host()
    return [trial for trial in trials if beats or trial.user_attrs.get("host", host) == host]


def _give_back(study: Any, trial: Any) -> None:
    """Return a trial that was one too many to the queue, unsigned, for whoever extends the study."""
    from optuna.trial import TrialState

    study._storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)


def _fail(study: Any, trial: Any) -> None:
    """Fail a running trial; of several processes that try, one succeeds and enqueues its setting again."""
    import optuna

    with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
        study._storage.set_trial_state_values(trial._trial_id, optuna.trial.TrialState.FAIL)
        retry(study, trial)


def _beats(study: Any) -> bool:
    from optuna.storages._heartbeat import is_heartbeat_enabled

    return is_heartbeat_enabled(study._storage)


def _signed(worker: int) -> dict[str, Any]:
    """Return what a trial says of its worker; written one by one, the machine last."""
    pid = os.getpid()
    return {"worker": worker, "host": _host(), "pid": pid, "started": _started(pid), "machine": _machine()}


def _is_abandoned(signed: dict[str, Any], beats: bool) -> bool:
    """Tell whether the worker that signed a running trial is certainly gone."""
    if "machine" not in signed:
        return False
    if signed.get("machine") == _machine():
        return _started(signed["pid"]) != signed["started"]
    # Another machine of this name, unless this one was restarted: only a file's study must belong to it.
    return not beats and signed.get("host") == _host()


def _host() -> str:
    return socket.gethostname()


@functools.cache
def _machine() -> str:
    """Return a name of this boot and space of process numbers: names of hosts are not unique, containers share them."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> int:
    """Return when a process started, in ticks since boot; 0 if it is gone: numbers of processes are used again."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return 0
    return 0 if state in "ZX" else int(fields[18])

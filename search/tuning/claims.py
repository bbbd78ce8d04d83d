"""Who may begin a trial: workers of one study never begin more than are missing, whatever dies when.

A worker takes the study's lock, and while it holds it, looks how many trials are finished or running, begins one if
some are missing, signs it, and lets go. The lock is the system's (a file's or the database's) and goes with its holder.

Invariants: under the lock, every running trial is signed, or its worker was killed before it could sign; a trial whose
worker is gone is failed once and its setting tried again, at most ``MAX_RETRIES`` times.

A worker of this machine is gone when its process is; one of another machine when Optuna misses its heartbeats. A study
in a file belongs to one machine.
"""

from __future__ import annotations

import functools
import os
import random
import time
import warnings
from pathlib import Path
from typing import Any, Protocol

MAX_RETRIES = 2
"""A setting that kills its worker every time must not end the study."""
POLL_S = 0.2


class Lock(Protocol):
    """What lets one process at a time begin a trial of a study."""

    def acquire(self) -> Any:
        """Wait for the lock."""

    def release(self) -> None:
        """Let go."""


class Claims:
    """One worker's way to its next trial, until the study holds ``target`` finished ones."""

    def __init__(self, study: Any, lock: Lock, target: int, worker: int, *, server: bool = False) -> None:
        self._study, self._lock, self._server = study, lock, server
        self.target, self.worker = target, worker
        self._held = False

    def take(self) -> bool:
        """Hold the lock and return True where a trial may begin; return False where all are finished.

        While the last missing trials run elsewhere it waits: if their worker dies, they are this one's.
        """
        jitter = random.Random(os.getpid())
        while True:
            self._lock.acquire()
            self._held = True
            try:
                _fail_abandoned(self._study, self._server)
                # In this order a trial that ends in between counts twice, which costs a look; else it would be missed.
                running, finished = len(_running(self._study)), count_finished(self._study)
            except BaseException:
                self.let_go()
                raise
            if finished + running < self.target:
                return True
            self.let_go()
            if finished >= self.target:
                return False
            time.sleep(POLL_S * jitter.uniform(0.5, 1.5))

    def sign(self, trial: Any) -> None:
        """Write into a trial who works on it, then let others begin theirs."""
        pid = os.getpid()
        signature = {"worker": self.worker, "pid": pid, "started": _started(pid), "machine": machine()}
        for name, value in signature.items():  # one by one, the machine last
            trial.set_user_attr(name, value)
        self.let_go()

    def let_go(self) -> None:
        """Release the lock if it is held."""
        if self._held:
            self._held = False
            self._lock.release()


def fail_abandoned(study: Any, lock: Lock, server: bool) -> None:
    """Fail running trials whose worker is gone, and give their settings another go."""
    lock.acquire()
    try:
        _fail_abandoned(study, server)
    finally:
        lock.release()


def _fail_abandoned(study: Any, server: bool) -> None:
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)  # known by heartbeats, which only servers keep
    for trial in _running(study):
        if _is_abandoned(trial.user_attrs, server):
            told = study.tell(trial.number, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)
            if told.state == optuna.trial.TrialState.FAIL:  # not one that finished a moment ago
                retry(study, trial)


def retry(study: Any, trial: Any) -> None:
    """Enqueue the setting of a failed trial once more."""
    setting = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
    retries = trial.user_attrs.get("retries", 0)
    if setting and retries < MAX_RETRIES:
        study.enqueue_trial(setting, user_attrs={"retries": retries + 1, "retry_of": trial.number})


def count_finished(study: Any) -> int:
    """Return how many trials have an outcome: complete or pruned."""
    return len(finished_trials(study))


def finished_trials(study: Any) -> list[Any]:
    """Return the trials with an outcome, complete or pruned, by number."""
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))


def first_worker(server: bool) -> int:
    """Return the number of this process's first worker: 0, or one that no other machine's process is likely to have."""
    return int.from_bytes(f"{machine()}{os.getpid()}".encode(), "big") % 1_000_003 * 1000 if server else 0


def _running(study: Any) -> list[Any]:
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))


def _is_abandoned(signed: dict[str, Any], server: bool) -> bool:
    """Tell whether the worker of a running trial is certainly gone."""
    if "machine" not in signed:  # killed between beginning and signing, both under the lock
        return True
    if signed["machine"] == machine():
        return _started(signed["pid"]) != signed["started"]
    return not server  # this machine before it was restarted, or a container that is gone


@functools.cache
def machine() -> str:
    """Return a name of this boot and space of process numbers: names of hosts are not unique, containers share them."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> int:
    """Return when a process started, in ticks since boot; 0 if it is gone: numbers of processes are used again."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return 0
    return 0 if state in "ZX" else int(fields[18])

"""Who may begin a trial: workers of one study never begin more than are missing, whatever dies when.

A worker takes the study's lock, and while it holds it, looks how many trials are finished or running, and begins one if
some are missing. A second lock, whose number the trial carries, it holds for as long as it works on the trial. Locks
are the system's and go with their holder: a running trial whose lock is free has lost its worker. It is failed once and
its setting tried again, at most ``MAX_RETRIES`` times.

Invariant: under the study's lock, every running trial carries the number of its lock, or its worker was killed before
it could write it.
"""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

from search.tuning.locks import Locks, alone

MAX_RETRIES = 2
"""A setting that kills its worker every time must not end the study."""
POLL_S = 0.2


class Claims:
    """One worker's way to its next trial, until the study holds ``target`` finished ones."""

    def __init__(self, study: Any, locks: Locks, target: int, worker: int) -> None:
        self.study, self.worker = study, worker
        self._locks, self._target = locks, target

    def begin(self, space: dict[str, Any]) -> Any:
        """Begin a trial, with a value for every knob of a space; return None where all are finished.

        While the last missing trials run elsewhere it waits: if their worker dies, they are this one's.
        """
        while True:
            with alone(self._locks):
                _fail_abandoned(self.study, self._locks)
                # In this order a trial that ends in between counts twice, which costs a look; else it would be missed.
                running, finished = len(_running(self.study)), len(finished_trials(self.study))
                if finished + running < self._target:
                    lock = next(number for number in itertools.count(1) if self._locks.take(number))
                    trial = self.study.ask(space)
                    trial.set_user_attr("worker", self.worker)
                    trial.set_user_attr("lock", lock)
                    return trial
            if finished >= self._target:
                return None
            time.sleep(POLL_S * random.uniform(0.5, 1.5))

    def end(self) -> None:
        """Let go of the trial begun last: unless it was told of, it is abandoned."""
        self._locks.close()


def fail_abandoned(study: Any, locks: Locks) -> None:
    """Fail running trials whose worker is gone, and give their settings another go."""
    with alone(locks):
        _fail_abandoned(study, locks)
    locks.close()


def _fail_abandoned(study: Any, locks: Locks) -> None:
    from optuna.trial import TrialState

    for trial in _running(study):
        lock = trial.user_attrs.get("lock")
        if lock is not None:
            if not locks.take(lock):
                continue
            locks.free(lock)
        told = study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
        if told.state == TrialState.FAIL:  # not one that finished a moment ago
            _retry(study, trial)


def _retry(study: Any, trial: Any) -> None:
    """Enqueue the setting of a failed trial once more."""
    setting = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
    retries = trial.user_attrs.get("retries", 0)
    if setting and retries < MAX_RETRIES:
        study.enqueue_trial(setting, user_attrs={"retries": retries + 1, "retry_of": trial.number})


def finished_trials(study: Any) -> list[Any]:
    """Return the trials with an outcome, complete or pruned, by number."""
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))


def _running(study: Any) -> list[Any]:
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))

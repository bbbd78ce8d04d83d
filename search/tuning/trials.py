"""Trials: begun by one worker at a time, planned batch by batch, stopped when they lose.

Trial states: complete with finite values; pruned when stopped early (attribute ``pruned``) or infeasible (attribute
``infeasible`` with the reason, and a constraint); failed when its process died, or when it repeats a finished setting
(``duplicate``; nothing is planned then, and the sampler does not hear of it). Only complete and pruned ones are
*finished* and count: workers of one study never begin more than are missing, whatever dies when.

A worker takes the study's lock, and while it holds it, looks how many trials are finished or running, and begins one if
some are missing. A second lock, whose number the trial carries, it holds for as long as it works on the trial. Locks
are the system's and go with their holder: a running trial whose lock is free has lost its worker. It is failed once and
its setting tried again, at most ``MAX_RETRIES`` times.

Invariant: under the study's lock, every running trial carries the number of its lock, or its worker was killed before
it could write it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from profiler import RoutePackError, fingerprint_device
from search.tuning.objective import BatchScore, Scorer, objectives_of
from search.tuning.samplers import distributions, make_pruner, make_sampler
from search.tuning.storage import Locks, alone
from search.tuning.task import TuneTask

MAX_REPEATS = 20
"""Proposals in a row that repeat finished trials before a worker takes the space for exhausted."""
MAX_RETRIES = 2
"""A setting that kills its worker every time must not end the study."""
POLL_S = 0.2


def run_trials(
    task: TuneTask,
    study: Any,
    locks: Locks,
    target: int,
    worker: int = 0,
    after_trial: Callable[[], None] = lambda: None,
) -> None:
    """Run trials until the study holds ``target`` finished ones, or the space is exhausted; leave none running."""
    from optuna.exceptions import UpdateFinishedTrialError
    from optuna.trial import TrialState

    scorer, space = Scorer(task), distributions(task)
    order = np.random.default_rng(task.seed).permutation(task.tuned).tolist()
    study.sampler = make_sampler(task, worker, len(finished_trials(study)))
    study.pruner = make_pruner(task)
    ended_s, repeats = time.perf_counter(), 0
    scorer.warm_up()
    try:
        while repeats < MAX_REPEATS and (trial := begin_trial(study, locks, target, space, worker)) is not None:
            with contextlib.suppress(UpdateFinishedTrialError):  # others took this worker for dead and failed its trial
                same = [other.number for other in finished_trials(study) if other.params == trial.params]
                if same:
                    trial.set_user_attr("duplicate", same[0])
                    values, state, repeats = None, TrialState.FAIL, repeats + 1
                else:
                    planned_s, repeats = scorer.planning_s, 0
                    values, state = _plan(trial, scorer, order)
                    now_s = time.perf_counter()
                    spent = {"planning_s": scorer.planning_s - planned_s, "total_s": now_s - ended_s}
                    trial.set_user_attr("time", spent)
                    ended_s = now_s
                study.tell(trial, values, state, skip_if_finished=True)
            locks.close()
            after_trial()
    finally:
        locks.close()
        fail_abandoned(study, locks)


def _plan(trial: Any, scorer: Scorer, order: Sequence[int]) -> tuple[list[float] | None, Any]:
    """Plan batch by batch; return a trial's values, None where it was stopped early or is infeasible, and its state."""
    from optuna.trial import TrialState

    params, scores = scorer.task.params, list[BatchScore]()
    values, state = None, TrialState.PRUNED
    try:
        for position, index in enumerate(order):
            scores.append(scorer.score(trial.params, index))
            if params.two_objectives:
                continue
            trial.report(scores[-1].value(params), position)
            if position < len(order) - 1 and trial.should_prune():
                told = f"Slower than the best trial on {len(scores)} of {len(order)} batches."
                trial.set_user_attr("pruned", told)
                break
        else:
            values, state = objectives_of(scores, params), TrialState.COMPLETE
    except RoutePackError as error:
        trial.set_user_attr("infeasible", str(error))
        trial.set_constraint("batches left unplanned", 1 - len(scores) / len(order))
    trial.set_user_attr("scores", [asdict(score) for score in scores])
    return values, state


def begin_trial(study: Any, locks: Locks, target: int, space: dict[str, Any], worker: int) -> Any:
    """Begin a trial, with a value for every knob of a space; return None where all are finished.

    While the last missing trials run elsewhere it waits: if their worker dies, they are this one's. The trial is the
    worker's until it closes its locks: unless it was told of by then, it is abandoned.
    """
    while True:
        with alone(locks):
            _fail_abandoned(study, locks)
            # In this order a trial that ends in between counts twice, which costs a look; else it would be missed.
            running, finished = len(_trials(study, "RUNNING")), len(finished_trials(study))
            if finished + running < target:
                lock = next(number for number in itertools.count(1) if locks.take(number))
                trial = study.ask(space)
                trial.set_user_attr("worker", worker)
                trial.set_user_attr("machine", _machine())
                trial.set_user_attr("lock", lock)
                return trial
        if finished >= target:
            return None
        time.sleep(POLL_S * random.uniform(0.5, 1.5))


@functools.cache
def _machine() -> str:
    """Return what planning times hang on and what may differ from worker to worker."""
    host = fingerprint_device("cpu")
    return f"{host.name} ({host.arch}), {host.units} cores, Python {platform.python_version()}"


def fail_abandoned(study: Any, locks: Locks) -> None:
    """Fail running trials whose worker is gone, and give their settings another go."""
    with alone(locks):
        _fail_abandoned(study, locks)
    locks.close()


def _fail_abandoned(study: Any, locks: Locks) -> None:
    from optuna.trial import TrialState

    for trial in _trials(study, "RUNNING"):
        lock = trial.user_attrs.get("lock")
        if lock is not None:
            if not locks.take(lock):
                continue
            locks.free(lock)
        told = study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
        setting = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
        retries = trial.user_attrs.get("retries", 0)
        if told.state == TrialState.FAIL and setting and retries < MAX_RETRIES:  # not one that finished a moment ago
            study.enqueue_trial(setting, user_attrs={"retries": retries + 1, "retry_of": trial.number})


def finished_trials(study: Any) -> list[Any]:
    """Return the trials with an outcome, complete or pruned, by number."""
    return _trials(study, "COMPLETE", "PRUNED")


def _trials(study: Any, *states: str) -> list[Any]:
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=[TrialState[state] for state in states])


def state_of(trial: Any) -> str:
    """Return the state of a trial of the storage in our words: see above."""
    if trial.state.name == "PRUNED" and "infeasible" in trial.user_attrs:
        return "infeasible"
    if trial.state.name == "FAIL":
        return "duplicate" if "duplicate" in trial.user_attrs else "failed"
    return str(trial.state.name).lower()


def best_trials(task: TuneTask, trials: Sequence[Any]) -> list[Any]:
    """Return the complete trials by value, the least first; with two objectives by step time, those that plan no longer
    than the defaults (all, where none does)."""
    complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
    if task.params.two_objectives:
        complete = [t for t in complete if t.values[1] <= 1] or complete
    return sorted(complete, key=lambda trial: (*trial.values, trial.number))

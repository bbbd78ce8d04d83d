"""Trials: drawn by a sampler, planned batch by batch, stopped when they lose, and told to whoever listens.

Trial states: complete with finite values; pruned when stopped early (attribute ``pruned``) or infeasible (attribute
``infeasible`` with the reason, and a constraint); failed when its process died, or when it repeats a finished setting
(``duplicate``; nothing is planned then, and the sampler does not hear of it). Only complete and pruned ones are
*finished* and count.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from profiler import Observer, RoutePackError
from search.tuning.claims import Claims, finished_trials
from search.tuning.objective import BatchScore, Scorer, objectives_of, trial_metrics
from search.tuning.samplers import distributions, make_pruner, make_sampler
from search.tuning.task import CAP, TrialListener, TrialRecord, TuneTask

MAX_REPEATS = 20
"""Proposals in a row that repeat finished trials before a worker takes the space for exhausted."""


def run_trials(task: TuneTask, claims: Claims, after_trial: Callable[[], None] = lambda: None) -> None:
    """Run trials until the study holds the claims' target of finished ones, or the space is exhausted."""
    from optuna.exceptions import UpdateFinishedTrialError
    from optuna.trial import TrialState

    study, scorer, space = claims.study, Scorer(task), distributions(task)
    order = np.random.default_rng(task.seed).permutation(task.tuned).tolist()
    study.sampler = make_sampler(task, claims.worker, len(finished_trials(study)))
    study.pruner = make_pruner(task)
    ended_s, repeats = time.perf_counter(), 0
    scorer.warm_up()
    try:
        while repeats < MAX_REPEATS and (trial := claims.begin(space)) is not None:
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
            claims.end()
            after_trial()
    finally:
        claims.end()


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


class Watch:
    """Tell an observer of a study's progress, and a listener of what its own workers finished."""

    def __init__(
        self, task: TuneTask, study: Any, target: int, workers: range, observer: Observer, listener: TrialListener
    ) -> None:
        self._task, self._study, self._workers = task, study, workers
        self._observer, self._listener = observer, listener
        self._seen = -1
        observer.start("trials", target)
        self.look()

    def look(self) -> None:
        """Tell what finished since the last look, on any machine."""
        finished = finished_trials(self._study)
        if len(finished) == self._seen:
            return
        best = best_trial(self._task, finished)
        told = f"best {100 * (1 - best.values[0]):+.2f}% against the defaults" if best else ""
        for _ in range(len(finished) - max(0, self._seen)):
            self._observer.advance("trials", told)
        self._seen = len(finished)
        # Others tell of theirs: several launchers that sent the same trial would double it.
        self._tell([trial for trial in finished if trial.user_attrs.get("worker") in self._workers])

    def finish(self) -> None:
        """Tell the rest."""
        self.look()
        self._tell(finished_trials(self._study))
        self._observer.finish("trials")

    def _tell(self, trials: Sequence[Any]) -> None:
        self._listener([record_of(self._task, trial) for trial in trials])


def record_of(task: TuneTask, trial: Any) -> TrialRecord:
    """Return what a finished trial of the storage came to."""
    attrs, state = trial.user_attrs, state_of(trial)
    scores = [] if state == "infeasible" else [BatchScore(**score) for score in attrs.get("scores", ())]
    cap = {CAP: trial.params[CAP]} if CAP in trial.params else {}
    return TrialRecord(
        number=trial.number,
        state=state,
        reason=attrs.get("infeasible") or attrs.get("pruned", ""),
        setting=asdict(task.planner_of(trial.params)[0]) | cap,
        metrics=trial_metrics(scores, task.params),
        time_ms=int(trial.datetime_complete.timestamp() * 1000),
    )


def state_of(trial: Any) -> str:
    """Return the state of a trial of the storage in our words: see above."""
    if trial.state.name == "PRUNED" and "infeasible" in trial.user_attrs:
        return "infeasible"
    if trial.state.name == "FAIL":
        return "duplicate" if "duplicate" in trial.user_attrs else "failed"
    return str(trial.state.name).lower()


def best_trial(task: TuneTask, trials: Sequence[Any]) -> Any:
    """Return the complete trial with the least value; with two objectives that with the least step time among those
    that plan no longer than the defaults (all, where none does)."""
    complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
    if task.params.two_objectives:
        complete = [t for t in complete if t.values[1] <= 1] or complete
    return min(complete, key=lambda trial: (*trial.values, trial.number), default=None)

"""Trials: drawn by a sampler, planned batch by batch, stopped when they lose, and told to whoever listens.

Trial states: complete with finite values; pruned when stopped early (attribute ``pruned``) or infeasible (attribute
``infeasible`` with the reason, and a constraint); failed when its process died, or when it repeats a finished setting
(``duplicate``; nothing is planned then, and the sampler does not hear of it). Only complete and pruned ones are
*finished* and count.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from profiler import Observer, RoutePackError
from search.tuning.claims import Claims, count_finished, finished_trials, machine, retry
from search.tuning.objective import (
    BatchScore,
    Scorer,
    batch_value,
    objectives_of,
    scores_of_json,
    scores_to_json,
    trial_metrics,
)
from search.tuning.samplers import distributions, draw, make_pruner, make_sampler
from search.tuning.task import CAP, TrialListener, TrialRecord, TuneTask

MAX_REPEATS = 20
"""Proposals in a row that repeat finished trials before a worker takes the space for exhausted."""


class _Repeat(Exception):
    """A trial repeats a finished one."""


def run_trials(task: TuneTask, study: Any, claims: Claims, after_trial: Callable[[], None] = lambda: None) -> None:
    """Run trials until the study holds the claims' target of finished ones, or the space is exhausted."""
    runner = _Runner(task, claims)
    study.sampler = make_sampler(task, claims.worker, count_finished(study))
    study.pruner = make_pruner(task)
    runner.scorer.warm_up()
    while runner.repeats < MAX_REPEATS and claims.take():
        try:
            study.optimize(runner.run, n_trials=1, catch=(_Repeat,))
        except KeyboardInterrupt:
            if runner.trial is not None:  # Optuna has failed it
                retry(study, study.trials[runner.trial.number])
            raise
        except ValueError as error:
            if not str(error).startswith("Cannot tell a FAIL trial"):
                raise  # else another machine took this worker for dead and failed its trial meanwhile
        finally:
            claims.let_go()
        after_trial()


class _Runner:
    """What one worker keeps from trial to trial."""

    def __init__(self, task: TuneTask, claims: Claims) -> None:
        self.scorer, self.repeats = Scorer(task), 0
        self.trial: Any = None
        """The trial begun last."""
        self._task, self._claims, self._space = task, claims, distributions(task)
        self._order = np.random.default_rng(task.seed).permutation(task.tuned).tolist()
        self._clock = time.perf_counter()

    def run(self, trial: Any) -> list[float]:
        """Plan a trial's setting and return its values; Optuna's objective."""
        import optuna

        self.trial = trial
        self._claims.sign(trial)
        draw(trial, self._space)
        same = [other.number for other in finished_trials(trial.study) if other.params == trial.params]
        if same:
            self.repeats += 1
            trial.set_user_attr("duplicate", same[0])
            raise _Repeat
        self.repeats, planned_s = 0, self.scorer.planning_s
        scores: list[BatchScore] = []
        try:
            whole = self._plan(trial, scores)
        except RoutePackError as error:
            whole = False
            trial.set_user_attr("infeasible", str(error))
            trial.set_constraint("batches left unplanned", 1 - len(scores) / len(self._order))
        trial.set_user_attr("scores", scores_to_json(scores))
        now = time.perf_counter()
        trial.set_user_attr("time", {"planning_s": self.scorer.planning_s - planned_s, "total_s": now - self._clock})
        self._clock = now
        if not whole:
            raise optuna.TrialPruned
        return objectives_of(scores, self._task.params)

    def _plan(self, trial: Any, scores: list[BatchScore]) -> bool:
        """Plan batch by batch, adding to ``scores``; return False where the trial was stopped early."""
        for position, index in enumerate(self._order):
            scores.append(self.scorer.score(trial.params, index))
            if self._task.params.two_objectives:
                continue
            trial.report(batch_value(scores[-1], self._task.params), position)
            if position < len(self._order) - 1 and trial.should_prune():
                told = f"Slower than the best trial on {len(scores)} of {len(self._order)} batches."
                trial.set_user_attr("pruned", told)
                return False
        return True


class Watch:
    """Tell an observer of a study's progress, and a listener of its finished trials."""

    def __init__(self, task: TuneTask, study: Any, target: int, observer: Observer, listener: TrialListener) -> None:
        self._task, self._study, self._observer, self._listener = task, study, observer, listener
        self._seen = -1
        observer.start("trials", target)
        self.look()

    def look(self) -> None:
        """Tell what finished since the last look, on any machine."""
        finished = finished_trials(self._study)
        if len(finished) == self._seen:
            return
        best = best_trial(self._task, [trial for trial in finished if trial.state.name == "COMPLETE"])
        told = f"best {100 * (1 - best.values[0]):+.2f}% against the defaults" if best else ""
        for _ in range(len(finished) - max(0, self._seen)):
            self._observer.advance("trials", told)
        self._seen = len(finished)
        # Others tell of theirs: several launchers that sent the same trial would double it.
        self._tell([trial for trial in finished if trial.user_attrs.get("machine") == machine()])

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
    scores = [] if state == "infeasible" else scores_of_json(attrs.get("scores", ()))
    return TrialRecord(
        number=trial.number,
        state=state,
        reason=attrs.get("infeasible") or attrs.get("pruned", ""),
        setting=_setting_of(task, trial.params),
        metrics=trial_metrics(scores, task.params),
        time_ms=int(trial.datetime_complete.timestamp() * 1000),
    )


def state_of(trial: Any) -> str:
    """Return ``complete``, ``pruned`` or ``infeasible`` for a finished trial of the storage."""
    if "infeasible" in trial.user_attrs:
        return "infeasible"
    return "pruned" if "pruned" in trial.user_attrs else "complete"


def _setting_of(task: TuneTask, drawn: Mapping[str, Any]) -> dict[str, Any]:
    """Return all the planner's parameters, and the cap where it is tuned; as drawn where they do not go together."""
    cap = {CAP: drawn[CAP]} if CAP in drawn else {}
    with contextlib.suppress(RoutePackError):
        return asdict(task.planner_of(drawn)[0]) | cap
    return asdict(task.base) | dict(drawn)


def complete_trials(study: Any) -> list[Any]:
    """Return the trials that planned every batch."""
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def best_trial(task: TuneTask, complete: Sequence[Any]) -> Any:
    """Return the trial with the least value; with two objectives that with the least step time among those that plan
    no longer than the defaults (all, where none does)."""
    if task.params.two_objectives:
        complete = [t for t in complete if t.values[1] <= 1] or complete
    return min(complete, key=lambda trial: (*trial.values, trial.number), default=None)

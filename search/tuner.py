"""Tune the planner's knobs for one cluster: an Optuna study over ``TUNABLE`` on recorded step batches.

The value of a setting is the mean over the tuning batches of (predicted step time + exposed planning time) divided by
the predicted step time of the default plan (first-fit decreasing, experts in place); less is better. The latest batches
are held out and only priced at the end. Trial 0 is always the planner's own defaults.
"""

from __future__ import annotations

import math
import os
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from costmodels import StepTables
from profiler import ModelSpec, Observer, RoutePackError, Topology
from profiler.files import content_hash
from search.joint import plan_step
from search.params import TUNABLE, PlannerParams
from search.plan import check_plan
from search.problem import StepBatch


@dataclass(frozen=True, slots=True)
class TuneParams:
    """Hold the settings of a study."""

    holdout_share: float = 0.25
    """Share of the step batches, the latest ones, on which only the winner is tried; at least one where there are
    two."""
    hidden_planning_s: float = 0.0
    """Planning time hidden behind the rollout's tail; only what exceeds it is charged."""
    tracking_uri: str = ""
    """MLflow tracking URI; empty: an SQLite file in the study's folder."""
    experiment: str = "routepack-tune"
    """MLflow experiment the study's runs belong to."""

    def __post_init__(self) -> None:
        if not 0 <= self.holdout_share < 1:
            raise ValueError(f"Expected holdout_share in [0, 1), got {self.holdout_share}.")
        if not 0 <= self.hidden_planning_s < math.inf:
            raise ValueError(f"Expected hidden_planning_s >= 0 and finite, got {self.hidden_planning_s}.")
        if not self.experiment:
            raise ValueError("Expected a name for experiment, got an empty one.")


class TrialObserver:
    """Receive what happens in a study; every method does nothing, override what you need."""

    def study_started(self, info: dict[str, Any]) -> None:
        """Begin (or resume) a study described by ``info``."""

    def trial_finished(
        self, number: int, params: dict[str, Any], metrics: dict[str, float], state: str, reason: str
    ) -> None:
        """Record one trial: ``state`` is ``complete`` or ``infeasible`` with its ``reason``."""

    def study_finished(self, summary: dict[str, Any]) -> None:
        """End the study."""


@dataclass(frozen=True, slots=True)
class TuneTask:
    """Hold what a study tunes on: named batches of one job, oldest first."""

    names: tuple[str, ...]
    batches: tuple[StepBatch, ...]
    tables: StepTables
    spec: ModelSpec
    topology: Topology
    max_tokens: int
    base: PlannerParams
    params: TuneParams
    seed: int = 0

    @property
    def num_holdout(self) -> int:
        """Batches held out: the share rounded, at least one where there are two."""
        count = len(self.batches)
        if count < 2 or self.params.holdout_share == 0:
            return 0
        return min(count - 1, max(1, round(count * self.params.holdout_share)))

    @property
    def signature(self) -> dict[str, Any]:
        """What must not change when a study is resumed."""
        return {
            "batches": dict(zip(self.names, (b.data_hash for b in self.batches), strict=True)),
            "tables": self.tables.tables_hash,
            "space": content_hash({name: asdict(range_) for name, range_ in TUNABLE.items()}),
            "base": content_hash(asdict(self.base)),
            "objective": {"holdout": self.num_holdout, "hidden_planning_s": self.params.hidden_planning_s},
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True)
class BatchScore:
    """Hold how one setting did on one batch; seconds."""

    name: str
    step_time_s: float
    plan_s: float
    default_s: float
    """Predicted step time of the default plan."""
    lower_bound_s: float

    def value(self, hidden_planning_s: float) -> float:
        """Return (step time + exposed planning time) over the default plan's step time."""
        return (self.step_time_s + max(0.0, self.plan_s - hidden_planning_s)) / self.default_s


def score_batches(
    task: TuneTask, params: PlannerParams, indices: Sequence[int], seed: int, observer: Observer | None = None
) -> list[BatchScore]:
    """Plan the batches of a task with one setting, check every plan, and return the scores.

    Raises
    ------
    RoutePackError
        If a batch cannot be planned: the setting is infeasible.
    """
    scores = []
    for index in indices:
        batch = task.batches[index]
        start = time.perf_counter()
        plan = plan_step(batch, task.tables, task.spec, task.topology, task.max_tokens, params, seed=seed)
        plan_s = time.perf_counter() - start
        check_plan(plan, batch.lengths, task.spec.num_experts)
        scores.append(
            BatchScore(
                task.names[index], plan.predicted.step_time_s, plan_s, plan.default.step_time_s, plan.lower_bound_s
            )
        )
        if observer:
            observer.advance("batches", task.names[index])
    return scores


def study_value(scores: Sequence[BatchScore], params: TuneParams) -> float:
    """Return the mean value over batches; less is better."""
    return statistics.fmean(score.value(params.hidden_planning_s) for score in scores)


def run_study(
    task: TuneTask,
    storage: str,
    study_name: str,
    trials: int,
    *,
    observer: Observer | None = None,
    trial_observer: TrialObserver | None = None,
) -> dict[str, Any]:
    """Run or resume a study until it holds ``trials`` finished trials; return its summary.

    Parameters
    ----------
    storage
        Optuna storage URL. A trial that was running when its process died is marked failed and does not count.
    trials
        The total, those of earlier runs included.

    Returns
    -------
    dict
        ``best`` (number, params, value), ``default`` (value of trial 0), ``history``, ``holdout`` scores of both.

    Raises
    ------
    RoutePackError
        If the stored study was made from other batches, tables or settings, or no trial is feasible.
    """
    observer, trial_observer = observer or Observer(), trial_observer or TrialObserver()
    study = _open_study(task, storage, study_name)
    tuned = range(len(task.batches) - task.num_holdout)
    _warm_up(task)
    trial_observer.study_started({"study": study_name, "trials": trials, "signature": task.signature})
    observer.start("trials", trials)
    for _ in range(finished := _count_finished(study)):
        observer.advance("trials")
    while finished < trials:
        trial = study.ask()
        _run_trial(task, study, trial, tuned, trial_observer)
        finished += 1
        observer.advance("trials", f"best {_best_value(study):.4f} of the default plan's step time")
    observer.finish("trials")
    summary = _summarise(task, study, study_name, tuned, observer)
    trial_observer.study_finished(summary)
    return summary


def _open_study(task: TuneTask, storage: str, study_name: str) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        sampler = optuna.samplers.TPESampler(seed=task.seed, multivariate=True, n_startup_trials=8)
        study = optuna.create_study(
            storage=storage, study_name=study_name, sampler=sampler, direction="minimize", load_if_exists=True
        )
    except RoutePackError:
        raise
    except Exception as error:
        raise RoutePackError(
            f"Optuna storage {storage} cannot be opened: {type(error).__name__}: {str(error).splitlines()[0]}. "
            "Check the URL and that its server runs."
        ) from None
    stored = study.user_attrs.get("signature")
    if stored is None:
        study.set_user_attr("signature", task.signature)
        study.enqueue_trial({name: getattr(task.base, name) for name in TUNABLE}, skip_if_exists=True)
    elif stored != task.signature:
        changed = ", ".join(key for key, value in task.signature.items() if stored.get(key) != value)
        raise RoutePackError(
            f"Study {study_name!r} was made with other {changed}: its trials cannot be compared with new ones. "
            "Give another --out, or the earlier inputs."
        )
    _fail_abandoned(study)
    # Another start of the sampler for every resumption, the same one for a fresh study.
    study.sampler = optuna.samplers.TPESampler(
        seed=task.seed + len(study.trials), multivariate=True, n_startup_trials=8
    )
    return study


def _fail_abandoned(study: Any) -> None:
    """Mark trials whose process on this host is gone as failed, and give their parameters another go."""
    from optuna.trial import TrialState

    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if trial.user_attrs.get("host") == socket.gethostname() and not _alive(trial.user_attrs.get("pid", -1)):
            study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
            study.enqueue_trial(trial.params)


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _count_finished(study: Any) -> int:
    from optuna.trial import TrialState

    return len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)))


def _best_value(study: Any) -> float:
    from optuna.trial import TrialState

    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return min((trial.value for trial in complete), default=math.nan)


def suggest_params(trial: Any, base: PlannerParams) -> PlannerParams:
    """Draw every tunable knob from an Optuna trial; the others stay as in ``base``."""
    drawn: dict[str, Any] = {}
    for name, knob in TUNABLE.items():
        if knob.integer:
            drawn[name] = trial.suggest_int(name, int(knob.low), int(knob.high), log=knob.log)
        else:
            drawn[name] = trial.suggest_float(name, knob.low, knob.high, log=knob.log)
    return replace(base, **drawn)


def _run_trial(task: TuneTask, study: Any, trial: Any, tuned: Sequence[int], observer: TrialObserver) -> None:
    from optuna.trial import TrialState

    trial.set_user_attr("host", socket.gethostname())
    trial.set_user_attr("pid", os.getpid())
    params = suggest_params(trial, task.base)
    try:
        scores = score_batches(task, params, tuned, task.seed)
        value = study_value(scores, task.params)
        if not math.isfinite(value):
            raise RoutePackError(f"The objective is {value}.")
    except RoutePackError as error:
        trial.set_user_attr("infeasible", str(error))
        study.tell(trial, state=TrialState.PRUNED)
        observer.trial_finished(trial.number, asdict(params), {}, "infeasible", str(error))
        return
    trial.set_user_attr("scores", [asdict(score) for score in scores])
    study.tell(trial, value)
    observer.trial_finished(trial.number, asdict(params), _metrics(scores, value), "complete", "")


def _metrics(scores: Sequence[BatchScore], value: float) -> dict[str, float]:
    metrics = {
        "objective": value,
        "step_time_s": statistics.fmean(s.step_time_s for s in scores),
        "plan_s": statistics.fmean(s.plan_s for s in scores),
        "gap_to_bound": statistics.fmean(s.step_time_s / s.lower_bound_s - 1 for s in scores),
    }
    for score in scores:
        metrics[f"step_time_s.{score.name}"] = score.step_time_s
    return metrics


def _warm_up(task: TuneTask) -> None:
    """Compile the kernels before the first trial is timed."""
    tiny = replace(task.base, max_iterations=1, starts=1, alternations=1, placement_swaps=1, extra_rows=0)
    plan_step(task.batches[0], task.tables, task.spec, task.topology, task.max_tokens, tiny)


def _summarise(task: TuneTask, study: Any, study_name: str, tuned: Sequence[int], observer: Observer) -> dict[str, Any]:
    from optuna.trial import TrialState

    trials = study.get_trials(deepcopy=False)
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    if not complete:
        reasons = {trial.user_attrs.get("infeasible", "failed") for trial in trials}
        raise RoutePackError(f"No trial of study {study_name!r} is feasible: {'; '.join(sorted(reasons))}")
    best = min(complete, key=lambda trial: (trial.value, trial.number))
    best_params = replace(task.base, **best.params)
    holdout = range(len(tuned), len(task.batches))
    observer.start("batches", 2 * len(holdout))
    seed = task.seed + 1  # a seed no trial has seen
    best_scores = score_batches(task, best_params, holdout, seed, observer)
    base_scores = score_batches(task, task.base, holdout, seed, observer)
    observer.finish("batches")
    return {
        "study": study_name,
        "signature": task.signature,
        "names": {"tuned": [task.names[i] for i in tuned], "holdout": [task.names[i] for i in holdout]},
        "trials": {"complete": len(complete), "infeasible": sum(t.state == TrialState.PRUNED for t in trials),
                   "failed": sum(t.state == TrialState.FAIL for t in trials)},
        "best": {"number": best.number, "value": best.value, "params": asdict(best_params),
                 "scores": best.user_attrs["scores"]},
        "default": {"number": complete[0].number, "value": complete[0].value, "params": asdict(task.base)},
        "history": [{"number": t.number, "value": t.value, "params": t.params} for t in complete],
        "holdout": {
            "best": [asdict(score) for score in best_scores],
            "default_settings": [asdict(score) for score in base_scores],
            "best_value": study_value(best_scores, task.params) if best_scores else None,
            "default_value": study_value(base_scores, task.params) if base_scores else None,
        },
    }  # fmt: skip

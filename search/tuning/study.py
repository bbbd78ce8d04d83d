"""Tune the planner's knobs for one cluster: an Optuna study over ``TUNABLE`` on recorded step batches.

Trials plan the tuning batches one by one, in an order that the seed shuffles once, and minimise the mean value of
``search.tuning.objective``; trial 0 is always the planner's own defaults, which are worth 1. A trial that loses batch
by batch is stopped early. The latest batches are held out: on them the winner must prove itself.

Trial states: complete with finite values; pruned when stopped early (attribute ``pruned``) or infeasible (attributes
``infeasible`` with the reason, ``violation``); failed when its process died, or when it repeats a finished setting
(``duplicate``; nothing is planned then, and the sampler does not hear of it).
Only complete and pruned ones are *finished* and count.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from profiler import Observer, RoutePackError
from search.tuning.claims import count_finished, first_worker, next_trial, working_on
from search.tuning.holdout import choose_export, compare_on_holdout
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
from search.tuning.task import CAP, TrialObserver, TuneParams, TuneTask

MAX_REPEATS = 20
"""Proposals in a row that repeat finished trials before a worker takes the space for exhausted."""

__all__ = ["TrialObserver", "TuneParams", "TuneTask", "report_trial", "run_study", "run_trials", "summarise"]


def run_study(
    task: TuneTask,
    storage: str,
    study_name: str,
    trials: int,
    *,
    workers: int = 1,
    ray: bool = False,
    new_study: bool = False,
    observer: Observer | None = None,
    trial_observer: TrialObserver | None = None,
) -> dict[str, Any]:
    """Run or resume a study until it holds ``trials`` finished trials; return its summary.

    Parameters
    ----------
    storage
        Optuna storage URL or journal file. A trial that was running when its process died does not count.
    trials
        The total, those of earlier runs included.
    workers, ray
        Processes of this machine, or tasks of a Ray cluster.

    Returns
    -------
    dict
        ``best`` and ``default``, ``history``, ``pareto``, ``holdout``, what to ``export`` and why, ``overhead``.

    Raises
    ------
    RoutePackError
        If the stored study was made from other batches, tables or settings, or no trial is feasible.
    """
    from search.tuning.storage import is_server, open_study
    from search.tuning.workers import run_on_ray, run_workers

    observer, trial_observer = observer or Observer(), trial_observer or TrialObserver()
    study = open_study(task, storage, study_name, new_study=new_study)
    trial_observer.study_started({"study": study.study_name, "trials": trials, "signature": task.signature})
    if ray or workers > 1:
        spread = run_on_ray if ray else run_workers
        spread(task, storage, study.study_name, trials, workers, observer, trial_observer)
    else:
        run_trials(task, study, trials, first_worker(is_server(storage)), trial_observer, observer)
    summary = summarise(task, study, observer)
    trial_observer.study_finished(summary)
    return summary


def run_trials(
    task: TuneTask,
    study: Any,
    target: int,
    worker: int,
    trial_observer: TrialObserver | None = None,
    observer: Observer | None = None,
) -> int:
    """Ask and tell until the study holds ``target`` finished trials; return how many were ours."""
    observer, trial_observer = observer or Observer(), trial_observer or TrialObserver()
    clock, scorer, space = time.perf_counter(), Scorer(task), distributions(task)
    finished = count_finished(study)
    study.sampler, study.pruner = make_sampler(task, worker, finished), make_pruner(task)
    observer.start("trials", target)
    for _ in range(finished):
        observer.advance("trials")
    scorer.warm_up()
    done = repeats = 0
    while repeats < MAX_REPEATS and (trial := next_trial(study, target, worker)) is not None:
        with working_on(study, trial):
            draw(trial, space)
            if (twin := _twin(study, trial)) is not None:
                trial.set_user_attr("duplicate", twin)
                _tell(study, trial, "FAIL")
                repeats += 1
                continue
            repeats, planned_s = 0, scorer.planning_s
            state, values = _evaluate(scorer, trial)
        now = time.perf_counter()
        trial.set_user_attr("time", {"planning_s": scorer.planning_s - planned_s, "total_s": now - clock})
        clock = now
        if not _tell(study, trial, state, values):
            continue
        done += 1
        report_trial(task, study.trials[trial.number], trial_observer)
        observer.advance("trials", _progress(task, study))
    observer.finish("trials")
    return done


def _evaluate(scorer: Scorer, trial: Any) -> tuple[str, list[float] | None]:
    """Plan the tuning batches with a trial's setting; return its state and values, and store what was seen."""
    task = scorer.task
    order = np.random.default_rng(task.seed).permutation(task.tuned).tolist()
    scores: list[BatchScore] = []
    state, values = "PRUNED", None
    try:
        for position, index in enumerate(order):
            scores.append(scorer.score(trial.params, index))
            if task.params.two_objectives:
                continue
            trial.report(batch_value(scores[-1], task.params), position)
            if position < len(order) - 1 and trial.should_prune():
                trial.set_user_attr("pruned", f"Slower than the best trial on {len(scores)} of {len(order)} batches.")
                break
        else:
            state, values = "COMPLETE", objectives_of(scores, task.params)
    except RoutePackError as error:
        trial.set_user_attr("infeasible", str(error))
        trial.set_user_attr("violation", 1 - len(scores) / len(order))
    trial.set_user_attr("scores", scores_to_json(scores))
    return state, values


def _tell(study: Any, trial: Any, state: str, values: list[float] | None = None) -> bool:
    """Finish a trial; return False where another process took this one for dead and failed it meanwhile."""
    from optuna.trial import TrialState

    wanted = TrialState[state]
    return bool(study.tell(trial, values, state=wanted, skip_if_finished=True).state == wanted)


def _twin(study: Any, trial: Any) -> int | None:
    """Return the number of a finished trial with the same setting."""
    from optuna.trial import TrialState

    states = (TrialState.COMPLETE, TrialState.PRUNED)
    same = [t.number for t in study.get_trials(deepcopy=False, states=states) if t.params == trial.params]
    return same[0] if same else None


def report_trial(task: TuneTask, trial: Any, observer: TrialObserver) -> None:
    """Tell an observer of a finished trial of the storage."""
    observer.trial_finished(*_event(task, trial))


def _event(task: TuneTask, trial: Any) -> tuple[int, dict[str, Any], dict[str, float], str, str]:
    """Return the arguments of :meth:`TrialObserver.trial_finished` for a finished trial of the storage."""
    attrs = trial.user_attrs
    params = _setting_of(task, trial.params)
    if reason := attrs.get("infeasible"):
        return trial.number, params, {}, "infeasible", reason
    metrics = trial_metrics(scores_of_json(attrs.get("scores", ())), task.params)
    reason = attrs.get("pruned", "")
    return trial.number, params, metrics, "pruned" if reason else "complete", reason


def _setting_of(task: TuneTask, drawn: Mapping[str, Any]) -> dict[str, Any]:
    """Return all the planner's parameters, and the cap where it is tuned; as drawn where they do not go together."""
    cap = {CAP: drawn[CAP]} if CAP in drawn else {}
    with contextlib.suppress(RoutePackError):
        return asdict(task.planner_of(drawn)[0]) | cap
    return asdict(task.base) | dict(drawn)


def _progress(task: TuneTask, study: Any) -> str:
    best = _best_trial(task, _complete(study))
    return "" if best is None else f"best {100 * (1 - best.values[0]):+.2f}% against the defaults"


def _complete(study: Any) -> list[Any]:
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def _best_trial(task: TuneTask, complete: Sequence[Any]) -> Any:
    """Return the trial with the least value; with two objectives that with the least step time among those that plan
    no longer than the defaults (all, where none does)."""
    if task.params.two_objectives:
        complete = [t for t in complete if t.values[1] <= 1] or complete
    return min(complete, key=lambda trial: (*trial.values, trial.number), default=None)


def summarise(task: TuneTask, study: Any, observer: Observer | None = None) -> dict[str, Any]:
    """Try the winner on the held-out batches and return all there is to tell of a study.

    Raises
    ------
    RoutePackError
        If no trial is feasible: nothing can be exported.
    """
    trials, complete = study.get_trials(deepcopy=False), _complete(study)
    best = _best_trial(task, complete)
    if best is None:
        reasons = {trial.user_attrs.get("infeasible", "failed") for trial in trials}
        raise RoutePackError(f"No trial of study {study.study_name!r} is feasible: {'; '.join(sorted(reasons))}")
    default_setting = task.given_settings[0]
    default = next((t for t in complete if t.params == default_setting), None)
    holdout = compare_on_holdout(task, best.params, observer)
    export, reason = choose_export(best.number, best.params == default_setting, holdout)
    times = [t.user_attrs["time"] for t in trials if "time" in t.user_attrs]
    finished = [t for t in trials if t.state.name in ("COMPLETE", "PRUNED")]
    return {
        "study": study.study_name,
        "signature": task.signature,
        "names": {"tuned": [task.names[i] for i in task.tuned], "holdout": [task.names[i] for i in task.held_out]},
        "trials": _count(trials),
        "best": _told(task, best) | {"scores": best.user_attrs["scores"]},
        "default": _told(task, default) if default else None,
        "history": [
            {"number": t.number, "value": _value(t), "params": t.params, "state": _event(task, t)[3],
             "batches": len(t.user_attrs.get("scores", ()))}
            for t in finished
        ],
        "pareto": _pareto(study) if task.params.two_objectives else [],
        "importances": _importances(study, complete),
        "holdout": holdout,
        "export": export,
        "export_reason": reason,
        "overhead": {key: sum(time_[key] for time_ in times) for key in ("planning_s", "total_s")},
    }  # fmt: skip


def _told(task: TuneTask, trial: Any) -> dict[str, Any]:
    params, cap = task.planner_of(trial.params)
    return {"number": trial.number, "value": trial.values[0], "params": asdict(params), CAP: cap}


def _value(trial: Any) -> float | None:
    """Return a complete trial's (first) value, the mean over the batches seen of one stopped early, else nothing."""
    if trial.state.name == "COMPLETE":
        return float(trial.values[0])
    seen = list(trial.intermediate_values.values())
    return math.fsum(seen) / len(seen) if seen and "infeasible" not in trial.user_attrs else None


def _count(trials: Sequence[Any]) -> dict[str, int]:
    pruned = [t for t in trials if t.state.name == "PRUNED"]
    infeasible = sum("infeasible" in t.user_attrs for t in pruned)
    failed = [t for t in trials if t.state.name == "FAIL"]
    duplicate = sum("duplicate" in t.user_attrs for t in failed)
    return {"complete": sum(t.state.name == "COMPLETE" for t in trials), "infeasible": infeasible,
            "pruned": len(pruned) - infeasible, "failed": len(failed) - duplicate, "duplicate": duplicate}  # fmt: skip


def _pareto(study: Any) -> list[dict[str, Any]]:
    front = sorted(study.best_trials, key=lambda trial: trial.values)
    return [{"number": t.number, "step_value": t.values[0], "plan_value": t.values[1], "params": t.params}
            for t in front]  # fmt: skip


def _importances(study: Any, complete: Sequence[Any]) -> dict[str, float]:
    """Return each knob's share of what varies the (first) objective; empty where too few trials show it."""
    import optuna

    if len({trial.values[0] for trial in complete}) < 2:
        return {}
    # A study of several objectives, or of one, is asked for the first.
    shares = optuna.importance.get_param_importances(
        study, evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0), target=lambda trial: trial.values[0]
    )
    return {name: float(share) for name, share in shares.items() if math.isfinite(share)}

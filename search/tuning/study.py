"""Tune the planner's knobs for one cluster: an Optuna study over ``TUNABLE`` on recorded step batches.

Trials plan the tuning batches one by one, in an order that the seed shuffles once, and minimise the mean value of
``search.tuning.objective``; trial 0 is always the planner's own defaults, which are worth 1. A trial that loses batch
by batch is stopped early. The latest batches are held out: on them the winner must prove itself.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from profiler import Observer, RoutePackError
from search.tuning.objective import FINALISTS, best_again, choose_export, compare_on_holdout, told_slack
from search.tuning.storage import explained_storage, is_server, open_study
from search.tuning.task import CAP, TuneTask
from search.tuning.trials import best_trials, finished_trials, state_of
from search.tuning.workers import run_workers, work


def run_study(
    task: TuneTask,
    storage: str,
    study_name: str,
    trials: int,
    *,
    workers: int = 1,
    ray: bool = False,
    observer: Observer | None = None,
    listener: Callable[[Sequence[Any]], None] = lambda trials: None,
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
    listener
        Is given the finished trials (Optuna's) of its own workers at the start and when there are more, all at the end.

    Returns
    -------
    dict
        ``best`` and ``default``, ``history``, ``pareto``, ``holdout``, what to ``export`` and why, ``overhead``.

    Raises
    ------
    RoutePackError
        If the stored study was made from other batches, tables or settings, or no trial is feasible.
    """
    observer = observer or Observer()
    study = open_study(task, storage, study_name)
    first = secrets.randbelow(2**32) if is_server(storage) else 0  # no other machine's workers have these numbers
    numbers, job = range(first, first + workers), (task, storage, study_name, trials)
    told = -1

    def look() -> None:
        """Tell what finished since the last look: the observer on any machine, the listener of its own workers."""
        nonlocal told
        finished = finished_trials(study)
        if len(finished) == told:
            return
        best = next(iter(best_trials(task, finished)), None)
        for _ in range(len(finished) - max(0, told)):
            observer.advance("trials", f"best {100 * (1 - best.values[0]):+.2f}% against the defaults" if best else "")
        told = len(finished)
        # Others tell of theirs: several launchers that sent the same trial would double it.
        listener([trial for trial in finished if trial.user_attrs.get("worker") in numbers])

    with explained_storage(storage):
        observer.start("trials", trials)
        look()
        if ray or workers > 1:
            run_workers(job, study, numbers, look, ray=ray)
        else:
            work(job, first, look)
        look()
        listener(finished_trials(study))
        observer.finish("trials")
        return summarise(task, study, observer)


def summarise(task: TuneTask, study: Any, observer: Observer | None = None) -> dict[str, Any]:
    """Try the winner on the held-out batches and return all there is to tell of a study."""
    trials = study.get_trials(deepcopy=False)
    ranked = best_trials(task, trials)
    if not ranked:
        reasons = {trial.user_attrs.get("infeasible", "failed") for trial in trials}
        raise RoutePackError(f"No trial of study {study.study_name!r} is feasible: {'; '.join(sorted(reasons))}")
    default_setting, complete = task.given_settings[0], [t for t in trials if t.state.name == "COMPLETE"]
    default = next((t for t in complete if t.params == default_setting), None)
    better = ranked[: ranked.index(default)] if default in ranked else ranked
    finalists = better[: 1 if task.params.two_objectives else FINALISTS] or [default]
    best = finalists[best_again(task, [trial.params for trial in finalists], observer)]
    holdout = compare_on_holdout(task, best.params, observer)
    export, reason = choose_export(best.number, best.params == default_setting, holdout)
    counts = Counter(map(state_of, trials))
    times = [t.user_attrs["time"] for t in trials if "time" in t.user_attrs]
    front = sorted(study.best_trials, key=lambda trial: trial.values) if task.params.two_objectives else []
    return {
        "study": study.study_name,
        "signature": task.signature,
        "names": {"tuned": [task.names[i] for i in task.tuned], "holdout": [task.names[i] for i in task.held_out]},
        "trials": {state: counts[state] for state in ("complete", "infeasible", "pruned", "failed", "duplicate")},
        "finalists": [trial.number for trial in finalists],
        "best": _told(task, best) | {"scores": best.user_attrs["scores"]},
        "default": _told(task, default) if default else None,
        "history": [
            {
                "number": t.number,
                "value": _value(t),
                "params": t.params,
                "state": state_of(t),
                "batches": len(t.user_attrs.get("scores", ())),
            }
            for t in finished_trials(study)
        ],
        "pareto": [
            {"number": t.number, "step_value": t.values[0], "plan_value": t.values[1], "params": t.params}
            for t in front
        ],
        "importances": _importances(study, complete),
        "holdout": holdout,
        "planning": told_slack(task.params.hidden_planning_s),
        "export": export,
        "export_reason": reason,
        "overhead": {key: sum(time_[key] for time_ in times) for key in ("planning_s", "total_s")},
    }


def _told(task: TuneTask, trial: Any) -> dict[str, Any]:
    params, cap = task.planner_of(trial.params)
    return {"number": trial.number, "value": trial.values[0], "params": asdict(params), CAP: cap}


def _value(trial: Any) -> float | None:
    """Return a complete trial's (first) value, the mean over the batches seen of one stopped early, else nothing."""
    if trial.state.name == "COMPLETE":
        return float(trial.values[0])
    seen = list(trial.intermediate_values.values())
    return math.fsum(seen) / len(seen) if seen and "infeasible" not in trial.user_attrs else None


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

"""What is left to tell when a study has ended: its winner on unseen batches, its course, what mattered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from profiler import Observer, RoutePackError
from search.tuning.claims import finished_trials
from search.tuning.holdout import choose_export, compare_on_holdout
from search.tuning.task import CAP, TuneTask
from search.tuning.trials import best_trial, complete_trials, state_of


def summarise(task: TuneTask, study: Any, observer: Observer | None = None) -> dict[str, Any]:
    """Try the winner on the held-out batches and return all there is to tell of a study.

    Raises
    ------
    RoutePackError
        If no trial is feasible: nothing can be exported.
    """
    trials, complete = study.get_trials(deepcopy=False), complete_trials(study)
    best = best_trial(task, complete)
    if best is None:
        reasons = {trial.user_attrs.get("infeasible", "failed") for trial in trials}
        raise RoutePackError(f"No trial of study {study.study_name!r} is feasible: {'; '.join(sorted(reasons))}")
    default_setting = task.given_settings[0]
    default = next((t for t in complete if t.params == default_setting), None)
    holdout = compare_on_holdout(task, best.params, observer)
    export, reason = choose_export(best.number, best.params == default_setting, holdout)
    times = [t.user_attrs["time"] for t in trials if "time" in t.user_attrs]
    return {
        "study": study.study_name,
        "signature": task.signature,
        "names": {"tuned": [task.names[i] for i in task.tuned], "holdout": [task.names[i] for i in task.held_out]},
        "trials": _count(trials),
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
        "pareto": _pareto(study) if task.params.two_objectives else [],
        "importances": _importances(study, complete),
        "holdout": holdout,
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


def _count(trials: Sequence[Any]) -> dict[str, int]:
    pruned = [t for t in trials if t.state.name == "PRUNED"]
    infeasible = sum("infeasible" in t.user_attrs for t in pruned)
    failed = [t for t in trials if t.state.name == "FAIL"]
    duplicate = sum("duplicate" in t.user_attrs for t in failed)
    return {
        "complete": sum(t.state.name == "COMPLETE" for t in trials),
        "infeasible": infeasible,
        "pruned": len(pruned) - infeasible,
        "failed": len(failed) - duplicate,
        "duplicate": duplicate,
    }


def _pareto(study: Any) -> list[dict[str, Any]]:
    front = sorted(study.best_trials, key=lambda trial: trial.values)
    return [
        {"number": t.number, "step_value": t.values[0], "plan_value": t.values[1], "params": t.params} for t in front
    ]


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

"""Who proposes the next setting and who stops a losing trial: Optuna's samplers and pruner, by name.

Invariants: workers of one study never share a seed; an infeasible trial is known to the sampler by its violation, not
by a number in place of its value.
"""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

from profiler import RoutePackError
from search.tuning.task import CAP, TuneTask

STARTUP_TRIALS = 10
"""Trials, given settings included, before a model of the objective proposes."""
P_THRESHOLD = 0.15
"""A trial that is slower than the best on its first three batches is stopped: that happens by chance to one in eight
that are as good."""
RESUMED = 10_000
"""Step between the seeds of a study's resumptions, above any number of workers."""
NEEDS = {"gp": "torch", "cmaes": "cmaes"}


def make_sampler(task: TuneTask, worker: int, finished: int) -> Any:
    """Return the sampler of a worker, seeded by the study's seed, the worker and the trials finished before it.

    Raises
    ------
    RoutePackError
        If the sampler's package is not installed.
    """
    import optuna

    name, seed = task.params.sampler, (task.seed + worker + RESUMED * finished) % 2**32
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        raise RoutePackError(
            f"Sampler {name} needs the package {NEEDS[name]}, which is not installed. Install it, or use sampler tpe."
        )
    with warnings.catch_warnings():  # Optuna 5 prefers other ways to say the same, which 4 does not know
        warnings.simplefilter("ignore")
        if name == "gp":
            return optuna.samplers.GPSampler(
                seed=seed, n_startup_trials=STARTUP_TRIALS, constraints_func=violations, warn_independent_sampling=False
            )
        if name == "cmaes":
            return optuna.samplers.CmaEsSampler(seed=seed, x0=_numbers(task), warn_independent_sampling=False)
        return optuna.samplers.TPESampler(
            seed=seed, multivariate=True, constant_liar=True, n_startup_trials=STARTUP_TRIALS,
            constraints_func=violations,
        )  # fmt: skip


def make_pruner(task: TuneTask) -> Any:
    """Return what stops a trial that loses to the best one batch by batch; nothing does with two objectives."""
    import optuna

    if task.params.two_objectives:
        return optuna.pruners.NopPruner()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.pruners.WilcoxonPruner(p_threshold=P_THRESHOLD)


def violations(trial: Any) -> tuple[float]:
    """Return how far a finished trial is from feasible: the share of batches it left unplanned, 0 when feasible."""
    return (float(trial.user_attrs.get("violation", 0.0)),)


def distributions(task: TuneTask) -> dict[str, Any]:
    """Return the study's space in Optuna's terms."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    space: dict[str, Any] = {}
    for name, knob in task.space.items():
        if knob.integer:
            space[name] = IntDistribution(int(knob.low), int(knob.high), log=knob.log)
        else:
            space[name] = FloatDistribution(knob.low, knob.high, log=knob.log)
    if len(task.caps) > 1:
        space[CAP] = CategoricalDistribution(task.caps)
    return space


def draw(trial: Any, space: dict[str, Any]) -> dict[str, Any]:
    """Let a trial take a value for every knob; return its setting."""
    from optuna.distributions import CategoricalDistribution, IntDistribution

    for name, known in space.items():
        if isinstance(known, CategoricalDistribution):
            trial.suggest_categorical(name, known.choices)
        elif isinstance(known, IntDistribution):
            trial.suggest_int(name, known.low, known.high, log=known.log)
        else:
            trial.suggest_float(name, known.low, known.high, log=known.log)
    return trial.params


def _numbers(task: TuneTask) -> dict[str, Any]:
    """Return the defaults that CMA-ES starts from; it leaves the cap, a choice, to chance."""
    return {name: value for name, value in task.given_settings[0].items() if name != CAP}

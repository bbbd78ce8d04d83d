"""Who proposes the next setting and who stops a losing trial: Optuna's samplers and pruner, by name.

Invariants: no two workers, studies or resumptions share a stream of random numbers; an infeasible trial is known to the
sampler by its constraint, not by a number in place of its value.
"""

from __future__ import annotations

import importlib.util
import warnings
from functools import partial
from typing import Any

import numpy as np

from profiler import RoutePackError
from search.tuning.task import CAP, TuneTask

STARTUP_TRIALS = 10
"""Trials, given settings included, before a model of the objective proposes."""
P_THRESHOLD = 0.15
"""A trial that is slower than the best on its first three batches is stopped: that happens by chance to one in eight
that are as good."""
NEEDS = {"gp": "torch", "cmaes": "cmaes"}


def make_sampler(task: TuneTask, worker: int, finished: int) -> Any:
    """Return the sampler of a worker, seeded by the study's seed, the worker and the trials finished before it."""
    import optuna

    name = task.params.sampler
    seed = int(np.random.SeedSequence([task.seed % 2**32, worker, finished]).generate_state(1)[0])
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        raise RoutePackError(
            f"Sampler {name} needs the package {NEEDS[name]}, which is not installed. Install it, or use sampler tpe."
        )
    kinds: dict[str, Any] = {
        "tpe": partial(
            optuna.samplers.TPESampler, multivariate=True, constant_liar=True, n_startup_trials=STARTUP_TRIALS
        ),
        "gp": partial(optuna.samplers.GPSampler, n_startup_trials=STARTUP_TRIALS, warn_independent_sampling=False),
        # It leaves the cap, a choice, to chance.
        "cmaes": partial(optuna.samplers.CmaEsSampler, warn_independent_sampling=False),
    }
    with warnings.catch_warnings(action="ignore"):  # what is experimental or deprecated in Optuna is no news to users
        return kinds[name](seed=seed)


def make_pruner(task: TuneTask) -> Any:
    """Return what stops a trial that loses to the best one batch by batch; nothing does with two objectives."""
    import optuna

    with warnings.catch_warnings(action="ignore"):
        wilcoxon = optuna.pruners.WilcoxonPruner(p_threshold=P_THRESHOLD)
    return optuna.pruners.NopPruner() if task.params.two_objectives else wilcoxon


def distributions(task: TuneTask) -> dict[str, Any]:
    """Return the study's space in Optuna's terms."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    kinds: dict[bool, Any] = {True: IntDistribution, False: FloatDistribution}
    space = {name: kinds[knob.integer](knob.low, knob.high, log=knob.log) for name, knob in task.space.items()}
    if len(task.caps) > 1:
        space[CAP] = CategoricalDistribution(task.caps)
    return space

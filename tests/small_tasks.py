"""Small tuning tasks and studies in memory for the tests of the tuner."""

import numpy as np
import optuna
from strategies import TOPOLOGIES, make_batch, make_spec, make_tables

from search import PlannerParams, Range, TrialObserver, TuneParams, TuneTask

FAST = {
    "max_iterations": Range(100, 3000, log=True, integer=True),
    "hot_temperature": Range(1.0, 300.0, log=True),
    "stickiness": Range(0.25, 10.0, log=True),
}
HIDDEN_S = 1e6
"""Hides all planning, so that values do not depend on the machine."""


def make_task(batches=4, cap=64, seed=0, enqueue=(), tables_by_cap=None, **params):
    rng = np.random.default_rng(0)
    spec, topology = make_spec(), TOPOLOGIES[0]
    made = tuple(make_batch(rng, spec, rng.integers(2, 30, 12)) for _ in range(batches))
    base = PlannerParams(max_iterations=1000, starts=1, placement_swaps=50)
    names, tables = tuple(f"step{i}" for i in range(batches)), make_tables(rng, spec, topology, 64)
    given = TuneParams(**{"hidden_planning_s": HIDDEN_S, "holdout_seeds": 2, **params})
    by_cap = dict.fromkeys(given.caps, tables) if tables_by_cap is None else tables_by_cap
    return TuneTask(names, made, tables, spec, topology, cap, base, given, seed, by_cap, tuple(enqueue))


def new_study(task):
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(directions=task.directions)
    for setting in task.given_settings:
        study.enqueue_trial(setting)
    return study


class Recorder(TrialObserver):
    def __init__(self):
        self.trials = []

    def trial_finished(self, number, params, metrics, state, reason):
        self.trials.append((number, state, metrics, reason))

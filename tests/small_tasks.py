"""Small tuning tasks and studies for the tests of the tuner."""

import multiprocessing
import tempfile

import numpy as np
import optuna
from strategies import TOPOLOGIES, make_batch, make_spec, make_tables

from search import PlannerParams, Range, TuneParams, TuneTask
from search.tuning.storage import FileLocks
from search.tuning.trials import finished_trials, run_trials

FAST = {
    "max_iterations": Range(100, 3000, log=True, integer=True),
    "first_share": Range(0.2, 0.9),
    "stickiness": Range(0.25, 10.0, log=True),
}
HIDDEN_S = 1e6
"""Hides all planning, so that values do not depend on the machine."""


def make_task(batches=4, cap=64, seed=0, enqueue=(), **params):
    rng = np.random.default_rng(0)
    spec, topology = make_spec(), TOPOLOGIES[0]
    made = tuple(make_batch(rng, spec, rng.integers(2, 30, 12)) for _ in range(batches))
    base = PlannerParams(max_iterations=1000, starts=1, placement_swaps=50)
    names, tables = tuple(f"step{i}" for i in range(batches)), make_tables(rng, spec, topology, 64)
    given = TuneParams(**{"hidden_planning_s": HIDDEN_S, "holdout_seeds": 2, **params})
    by_cap = dict.fromkeys(given.caps, tables)
    return TuneTask(names, made, tables, spec, topology, cap, base, given, seed, by_cap, tuple(enqueue))


def lasting_settings(count):
    """Settings whose trials take a few tenths of a second each; in the space that processes of their own see."""
    return [{"max_iterations": 100_000 + i, "placement_swaps": 1000} for i in range(count)]


def new_study(task):
    """A study in memory."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(directions=task.directions)
    for setting in task.given_settings:
        study.enqueue_trial(setting)
    return study


def run_here(task, study, target):
    """Run a study in memory with one worker; return its finished trials."""
    with tempfile.TemporaryDirectory() as folder:
        run_trials(task, study, FileLocks(f"{folder}/claim"), target)
    return finished_trials(study)


def warm_processes():
    """The way to processes that have imported the tuner already: forks of one server without threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["optuna", "psycopg", "sqlalchemy", "search"])
    return context

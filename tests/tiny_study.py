"""A tuning task of a few tiny batches; its enqueued trials take a few tenths of a second each."""

import numpy as np
from strategies import TOPOLOGIES, make_batch, make_spec, make_tables

from search import PlannerParams, TrialObserver, TuneParams, TuneTask


def make_task(batches=4, enqueued=0, **params):
    rng = np.random.default_rng(0)
    spec, topology = make_spec(), TOPOLOGIES[0]
    made = tuple(make_batch(rng, spec, rng.integers(2, 30, 12)) for _ in range(batches))
    base = PlannerParams(max_iterations=1000, starts=1, placement_swaps=50)
    names, tables = tuple(f"step{i}" for i in range(batches)), make_tables(rng, spec, topology, 64)
    settings = tuple({"max_iterations": 100_000 + i, "placement_swaps": 1000} for i in range(enqueued))
    return TuneTask(names, made, tables, spec, topology, 64, base, TuneParams(**params), enqueue=settings)


class Recorder(TrialObserver):
    def __init__(self):
        self.numbers = []

    def trial_finished(self, number, params, metrics, state, reason):
        self.numbers.append(number)

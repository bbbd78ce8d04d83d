"""Tune the planner's knobs for one cluster: an Optuna study over ``TUNABLE`` on recorded step batches.

Trials plan the tuning batches one by one, in an order that the seed shuffles once, and minimise the mean value of
``search.tuning.objective``; trial 0 is always the planner's own defaults, which are worth 1. A trial that loses batch
by batch is stopped early. The latest batches are held out: on them the winner must prove itself.
"""

from __future__ import annotations

from typing import Any

from profiler import Observer
from search.tuning.claims import Claims, first_worker
from search.tuning.storage import claim_lock, is_server, open_study
from search.tuning.summary import summarise
from search.tuning.task import TrialListener, TuneTask
from search.tuning.trials import Watch, run_trials
from search.tuning.workers import run_workers


def run_study(
    task: TuneTask,
    storage: str,
    study_name: str,
    trials: int,
    *,
    workers: int = 1,
    ray: bool = False,
    observer: Observer | None = None,
    listener: TrialListener | None = None,
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
        Is told of finished trials (see :data:`search.tuning.task.TrialListener`).

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
    watch = Watch(task, study, trials, observer, listener or (lambda records: None))
    if ray or workers > 1:
        run_workers(task, storage, study, trials, workers, watch, ray=ray)
    else:
        server, lock = is_server(storage), claim_lock(storage, study.study_name)
        run_trials(task, study, Claims(study, lock, trials, first_worker(server), server=server), watch.look)
    watch.finish()
    return summarise(task, study, observer)

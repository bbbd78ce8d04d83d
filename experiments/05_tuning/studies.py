"""Studies of the named regimes: their step batches, times of a GPU, budgets, and what came out of them."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from optuna.trial import FrozenTrial, TrialState

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "02_planner"))  # regimes are declared once, there
from regimes import CACHE, Regime, load_tables  # noqa: E402

from costmodels import CostModel, StepTables, fit_cost_model, freeze_tables, tables_key  # noqa: E402
from profiler import Observer, import_published  # noqa: E402
from search import BatchScore, PlannerParams, StepBatch, TuneParams, TuneTask, run_study  # noqa: E402
from search.tuning.objective import Interval, Scorer, bootstrap_gain  # noqa: E402
from search.tuning.storage import choose_storage, open_study  # noqa: E402

FOLDER = CACHE / "05_tuning"
BATCHES, HELD_OUT = 10, 4
FEWER = {"giant": (5, 2)}
"""Batches and held-out ones where planning takes long."""
SEEDS = 3
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)


def scores_of_json(stored: Sequence[Mapping[str, Any]]) -> list[BatchScore]:
    """Return the scores that a trial's ``scores`` attribute holds."""
    return [BatchScore(**score) for score in stored]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Hold a study's summary and the wall time of its trials and hold-out, seconds."""

    summary: dict[str, Any]
    wall_s: float
    costs: tuple[float, ...]
    """Of each finished trial, infinite where it was stopped early: step time, moves and exposed planning over the step
    time and moves of the defaults. Those are the same in every study of the same batches, tables and seed, unlike the
    trials' values: these are relative to the defaults' planning time too, which each study measures anew."""

    @property
    def overhead_pct(self) -> float:
        """All but planning, percent of the time of the workers."""
        spent = self.summary["overhead"]
        return 100 * (1 - spent["planning_s"] / spent["total_s"])

    @property
    def step_gain(self) -> Interval:
        """Gain in step time and moves alone on the held-out batches."""
        scores, seeds = scores_of_json(self.summary["holdout"]["best"]), len(self.summary["holdout"]["seeds"])
        values = np.array([score.step_value for score in scores]).reshape(seeds, -1)
        return bootstrap_gain(1 - values.T, 0)

    def plan_s(self, whose: str) -> float:
        """Return the mean planning time on held-out batches of ``best`` or ``default_settings``."""
        return fmean(score.plan_s for score in scores_of_json(self.summary["holdout"][whose]))

    @property
    def setting(self) -> dict[str, Any]:
        """The best trial's knobs."""
        number = self.summary["best"]["number"]
        return next(trial["params"] for trial in self.summary["history"] if trial["number"] == number)

    def values(self) -> list[float]:
        """Return the least cost after each finished trial."""
        return list(itertools.accumulate(self.costs, min))


def step_batches(regime: Regime) -> tuple[list[StepBatch], int]:
    """Return consecutive batches of one stream, or all real ones, oldest first; and how many to hold out."""
    if regime.real:
        batches = [regime.batch(number) for number in regime.instances(BATCHES)]
        return batches, 2
    count, held_out = FEWER.get(regime.name, (BATCHES, HELD_OUT))
    return [regime.batch(0, step) for step in range(count)], held_out


def make_task(
    regime: Regime,
    batches: list[StepBatch],
    held_out: int,
    hidden_s: float,
    *,
    tables: StepTables | None = None,
    seed: int = 0,
    enqueue: tuple[Mapping[str, Any], ...] = (),
) -> TuneTask:
    """Return a study of the planner's defaults on a regime."""
    params = TuneParams(
        holdout_share=held_out / len(batches), holdout_seeds=SEEDS, hidden_planning_s=round(hidden_s, 3)
    )
    return TuneTask(
        tuple(f"step{k:02d}" for k in range(len(batches))), tuple(batches), tables or load_tables(regime), regime.spec,
        regime.topology, regime.max_tokens, PlannerParams(), params, seed, enqueue=enqueue,
    )  # fmt: skip


def default_plan_s(task: TuneTask) -> float:
    """Return the mean planning time of the defaults on the tuning batches, seconds."""
    scorer = Scorer(task)
    scorer.warm_up()
    return fmean(scorer.score(task.given_settings[0], index).plan_s for index in task.tuned)


def run(task: TuneTask, name: str, trials: int, workers: int, observer: Observer | None = None) -> Outcome:
    """Run a study from its start in a folder of its own."""
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.iterdir():  # of a run that was stopped: its clock is lost
        left.unlink()
    began = time.perf_counter()
    summary = run_study(task, choose_storage(folder), name, trials, workers=workers, observer=observer)
    wall_s = time.perf_counter() - began
    finished = open_study(task, choose_storage(folder), name).get_trials(states=FINISHED)
    return Outcome(summary, wall_s, tuple(_cost(task, trial) for trial in finished))


def _cost(task: TuneTask, trial: FrozenTrial) -> float:
    if trial.state != TrialState.COMPLETE:
        return float("inf")
    hidden_s = task.params.hidden_planning_s
    return fmean(
        (score.step_time_s + score.move_s + max(0.0, score.plan_s - hidden_s)) / score.reference_step_s
        for score in scores_of_json(trial.user_attrs["scores"])
    )


def tables_on(regime: Regime, gpu: str) -> StepTables:
    """Return a regime's frozen tables on another GPU with published timings; fitted once, then read from the cache."""
    folder = CACHE / f"{gpu}-full"
    path = folder / f"tables-{tables_key(regime.spec, regime.topology, regime.max_tokens)[:16]}.npz"
    if not path.is_file():
        if not (folder / "costmodel" / "costmodel.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            measured = import_published(regime.shared / "gpu-timings" / f"{gpu}_sxm")
            model = fit_cost_model(measured, regime.spec, regime.topology, regime.max_tokens)
            model.save(folder / "costmodel")
        model = CostModel.load(folder / "costmodel")
        freeze_tables(model, regime.spec, regime.topology, regime.max_tokens).save(path)
    return StepTables.load(path)

"""What one setting is worth on one step batch, relative to the planner's defaults on the same batch.

Costs of a batch: predicted step time, predicted time of moving experts away from the step before, and planning time
beyond what the rollout hides. In trials "the step before" is always the defaults' plan of it, so that batches can be
tried in any order and every setting starts from the same placements.

Planning time is the processor time of planning in one thread: it does not depend on what else the machine does, nor on
the number of workers of the study. A host with more cores runs the chains of a portfolio side by side and plans faster.

Is the winner better on batches it has not seen? Winner and defaults plan every held-out batch with the same fresh
seeds. Each goes on from its own plan of the batch before, as in training, unlike in trials: a setting that lives on
placements that only the defaults keep up to date shows it there.

Invariant: the defaults are worth 1 on every batch.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from profiler import Observer, RoutePackError
from profiler.errors import explained
from search.joint import plan_step
from search.plan import Plan, check_plan
from search.tuning.task import TuneParams, TuneTask

RESAMPLES = 10_000
LEVEL = 95


@dataclass(frozen=True, slots=True)
class BatchScore:
    """How one setting did on one batch; seconds."""

    name: str
    seed: int
    step_time_s: float
    move_s: float
    """Moving experts from where the step before left them."""
    plan_s: float
    default_s: float
    """Predicted step time without a planner: first-fit decreasing, experts in place."""
    lower_bound_s: float
    reference_step_s: float
    """Step time and moves of the planner's defaults on the same batch and seed."""
    reference_plan_s: float

    @property
    def step_value(self) -> float:
        """Step time and moves over those of the defaults."""
        return (self.step_time_s + self.move_s) / self.reference_step_s

    @property
    def plan_value(self) -> float:
        """Planning time over that of the defaults."""
        return self.plan_s / self.reference_plan_s

    def value(self, params: TuneParams) -> float:
        """Return (step time + moves + exposed planning) over the same of the defaults; less is better.

        With two objectives it is that of step time and moves.
        """
        if params.two_objectives:
            return self.step_value
        exposed_s = max(0.0, self.plan_s - params.hidden_planning_s)
        reference_s = self.reference_step_s + max(0.0, self.reference_plan_s - params.hidden_planning_s)
        return (self.step_time_s + self.move_s + exposed_s) / reference_s


def study_value(scores: Sequence[BatchScore], params: TuneParams) -> float:
    """Return the mean value over batches."""
    return statistics.fmean(score.value(params) for score in scores)


def objectives_of(scores: Sequence[BatchScore], params: TuneParams) -> list[float]:
    """Return what a study minimises: means over batches, one number or (step time, planning time)."""
    second = [statistics.fmean(s.plan_value for s in scores)] if params.two_objectives else []
    return [study_value(scores, params), *second]


class Scorer:
    """Plan batches of a task with any setting; what the defaults make of them is planned once, when first needed."""

    def __init__(self, task: TuneTask) -> None:
        self.task = task
        self.planning_s = 0.0
        """Wall time spent inside the planner so far."""
        self._chain: list[tuple[Plan, BatchScore]] = []

    def warm_up(self) -> None:
        """Compile the kernels: compiling is not planning."""
        tiny = {"max_iterations": 1, "starts": 1, "alternations": 1, "placement_swaps": 1, "extra_rows": 0}
        with contextlib.suppress(RoutePackError):  # so short a search may break a limit that others keep
            first, _ = self.planned(tiny, self.task.tuned[0], self.task.seed)
            self.planned(tiny, self.task.tuned[0], self.task.seed, first)
        self.planning_s = 0.0

    def score(self, setting: Mapping[str, Any], index: int) -> BatchScore:
        """Plan one batch with a setting after the defaults' plan of the batch before.

        A :class:`RoutePackError` says that the setting is infeasible: no plan, or no finite value.
        """
        previous = self._defaults(index - 1)[0] if index else None
        _, reference = self._defaults(index)
        if self.task.planner_of(setting) == self.task.planner_of({}):
            return reference
        return self.planned(setting, index, self.task.seed, previous, reference)[1]

    def planned(
        self,
        setting: Mapping[str, Any],
        index: int,
        seed: int,
        previous: Plan | None = None,
        reference: BatchScore | None = None,
    ) -> tuple[Plan, BatchScore]:
        """Return the checked plan of a batch and its score; without a ``reference`` it is compared with itself."""
        task, (params, cap) = self.task, self.task.planner_of(setting)
        name, batch, tables = task.names[index], task.batches[index], task.tables_of(cap)
        how: dict[str, Any] = {"seed": seed, "previous": previous, "num_threads": 1}
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        try:
            with explained(f"Batch {name}: "):
                plan = plan_step(batch, tables, task.spec, task.topology, cap, params, **how)
        finally:
            plan_s = time.process_time() - cpu_s
            self.planning_s += time.perf_counter() - wall_s
        check_plan(plan, batch.lengths, task.spec.num_experts)
        step_s, move_s = plan.predicted.step_time_s, plan.moves.seconds
        compared = (reference.reference_step_s, reference.reference_plan_s) if reference else (step_s + move_s, plan_s)
        score = BatchScore(name, seed, step_s, move_s, plan_s, plan.default.step_time_s, plan.lower_bound_s, *compared)
        if not all(math.isfinite(v) and v > 0 for v in (step_s, score.value(task.params))):
            raise RoutePackError(
                f"Batch {name}: the step time is {step_s} s and the objective {score.value(task.params)}."
            )
        return plan, score

    def _defaults(self, index: int) -> tuple[Plan, BatchScore]:
        """Return the defaults' plan and score of a batch; each plan starts from that of the batch before."""
        while len(self._chain) <= index:
            previous = self._chain[-1][0] if self._chain else None
            told = "The planner's own settings, which all are compared with, fail. "
            with explained(told, " Start from others."):
                self._chain.append(self.planned({}, len(self._chain), self.task.seed, previous))
        return self._chain[index]


@dataclass(frozen=True, slots=True)
class Interval:
    """The mean gain over the defaults and its bootstrap interval; percent."""

    gain_pct: float
    low_pct: float
    high_pct: float


def compare_on_holdout(task: TuneTask, setting: Mapping[str, Any], observer: Observer | None = None) -> dict[str, Any]:
    """Plan the held-out batches with a setting and with the defaults; return scores, gain and interval."""
    observer, scorer = observer or Observer(), Scorer(task)
    seeds = tuple(task.seed + 1 + k for k in range(task.params.holdout_seeds))
    same = task.planner_of(setting) == task.planner_of({})
    observer.start("held-out batches", len(seeds) * len(task.held_out) * (1 if same else 2))
    defaults = _in_turn(scorer, {}, seeds, [], observer)
    best = defaults if same else _in_turn(scorer, setting, seeds, defaults, observer)
    observer.finish("held-out batches")
    rests_on = f"{len(task.held_out)} batches x {len(seeds)} seeds"
    if len(task.held_out) < 2:
        rests_on = f"one batch and {len(seeds)} seeds: it says nothing of other batches" if best else "no batch"
    found: dict[str, Any] = {
        "best": [asdict(score) for score in best],
        "default_settings": [asdict(score) for score in defaults],
        **dict.fromkeys(("gain_pct", "low_pct", "high_pct", "best_value", "default_value")),
        "seeds": list(seeds),
        "rests_on": rests_on,
    }
    if best:
        values = np.array([score.value(task.params) for score in best]).reshape(len(seeds), -1)
        found |= asdict(bootstrap_gain(1 - values.T, task.seed))
        found |= {"best_value": study_value(best, task.params), "default_value": study_value(defaults, task.params)}
    return found


def bootstrap_gain(gain_BS: np.ndarray, seed: int) -> Interval:
    """Return the mean of gains [batch, seed] and its 95% percentile interval, in percent.

    Batches are drawn with replacement, then seeds within each drawn batch. With one batch only its seeds are drawn.
    """
    batches, seeds = gain_BS.shape
    rng = np.random.default_rng(seed)
    batch_RB = rng.integers(batches, size=(RESAMPLES, batches))
    seed_RBS = rng.integers(seeds, size=(RESAMPLES, batches, seeds))
    means = gain_BS[batch_RB[:, :, None], seed_RBS].mean(axis=(1, 2))
    low, high = np.percentile(means, [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return Interval(100 * float(gain_BS.mean()), 100 * float(low), 100 * float(high))


def choose_export(best_number: int, is_default: bool, holdout: Mapping[str, Any]) -> tuple[str, str]:
    """Return what to export, ``best`` or ``defaults``, and why: without a proven gain it is the defaults."""
    if is_default:
        return "defaults", "No trial did better than the defaults on the tuning batches."
    if holdout["gain_pct"] is None:
        return "defaults", f"No batch was held out, so that nothing shows whether trial {best_number} generalises."
    told = (
        f"gain of {holdout['gain_pct']:.2f}% on held-out batches, {LEVEL}% interval {holdout['low_pct']:.2f} to "
        f"{holdout['high_pct']:.2f}% ({holdout['rests_on']})"
    )
    if holdout["low_pct"] > 0:
        return "best", f"Trial {best_number}: {told}."
    return "defaults", f"Trial {best_number}: {told}; it does not lie above zero."


def _in_turn(
    scorer: Scorer,
    setting: Mapping[str, Any],
    seeds: Sequence[int],
    references: Sequence[BatchScore],
    observer: Observer,
) -> list[BatchScore]:
    """Plan the held-out batches one after another, once a seed, each from the plan before; the first one from a plan of
    the last tuned batch."""
    held_out, scores = scorer.task.held_out, list[BatchScore]()
    for seed in seeds if held_out else ():
        previous, _ = scorer.planned(setting, held_out[0] - 1, seed)
        for index in held_out:
            reference = references[len(scores)] if references else None
            previous, score = scorer.planned(setting, index, seed, previous, reference)
            scores.append(score)
            observer.advance("held-out batches", score.name)
    return scores

"""What one setting is worth on one step batch, relative to the planner's defaults on the same batch.

Costs of a batch are three numbers, which are never told as one: predicted step time, predicted time of moving experts
away from the step before, and planning time. A study minimises their sum, with planning free up to the slack that the
job has (:func:`exposed_planning_s`). In trials "the step before" is always the defaults' plan of it, so that batches
can be tried in any order and every setting starts from the same placements.

Planning time is the processor time of planning in one thread: it does not depend on what else the machine does, nor on
the number of workers of the study. A host with more cores runs the chains of a portfolio side by side and plans faster.

Is the winner better on batches it has not seen? Winner and defaults plan every held-out batch with the same fresh
seeds. Each goes on from its own plan of the batch before, as in training, unlike in trials: a setting that lives on
placements that only the defaults keep up to date shows it there. What plans slower steps is never exported, however
little it plans.

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
ONE_BATCH_PCT = 0.25
"""What a gain must exceed where one batch alone was held out: by as much gains differ from batch to batch, which its
interval does not know."""
FINALISTS, FINAL_SEEDS, FRESH_SEEDS = 3, 2, 1000
"""Trials that are planned again before one is chosen, with how many seeds, and how far these are from the study's."""
LEVEL = 95
LEAST_SLACK_S = 2.0
"""Planning time that is free where the job's slack is not stated, or what the default settings take where that is more:
a log-probability pass or the tail of a rollout takes longer."""


def exposed_planning_s(plan_s: float, default_plan_s: float, slack_s: float | None) -> float:
    """Return the planning time that the job's slack does not hide, where the default settings plan ``default_plan_s``;
    without a stated slack they expose none."""
    return max(0.0, plan_s - (max(LEAST_SLACK_S, default_plan_s) if slack_s is None else slack_s))


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
        slack_s, default_plan_s = params.hidden_planning_s, self.reference_plan_s
        exposed_s, reference_s = (exposed_planning_s(s, default_plan_s, slack_s) for s in (self.plan_s, default_plan_s))
        return (self.step_time_s + self.move_s + exposed_s) / (self.reference_step_s + reference_s)


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


def best_again(task: TuneTask, settings: Sequence[Mapping[str, Any]], observer: Observer | None = None) -> int:
    """Plan the tuned batches anew with each of some settings that did well in trials; return the index of the best.

    The best of many trials owes part of its value to luck: plans of one setting differ by a third of a percent from
    seed to seed. Here all go through the same fresh seeds, each from its own plans of the batches before.
    """
    if len(settings) < 2:
        return 0
    observer, scorer = observer or Observer(), Scorer(task)
    seeds = [task.seed + FRESH_SEEDS + k for k in range(FINAL_SEEDS)]
    observer.start("finalists", len(seeds) * len(task.tuned) * (1 + len(settings)))
    defaults = _in_turn(scorer, {}, seeds, task.tuned, [], observer)
    values = []
    for setting in settings:
        try:
            values.append(study_value(_in_turn(scorer, setting, seeds, task.tuned, defaults, observer), task.params))
        except RoutePackError:  # one that keeps a limit with the study's seed only
            values.append(math.inf)
    observer.finish("finalists")
    return values.index(min(values))


def compare_on_holdout(task: TuneTask, setting: Mapping[str, Any], observer: Observer | None = None) -> dict[str, Any]:
    """Plan the held-out batches with a setting and with the defaults; return scores, means and gains.

    ``gain`` is that of step time and moves, ``cost_gain`` that of what a study minimises; None where nothing was held
    out. ``means`` holds the three costs and the gap of both settings.
    """
    observer, scorer = observer or Observer(), Scorer(task)
    seeds = tuple(task.seed + 1 + k for k in range(task.params.holdout_seeds))
    same = task.planner_of(setting) == task.planner_of({})
    observer.start("held-out batches", len(seeds) * len(task.held_out) * (1 if same else 2))
    defaults = _in_turn(scorer, {}, seeds, task.held_out, [], observer)
    best = defaults if same else _in_turn(scorer, setting, seeds, task.held_out, defaults, observer)
    observer.finish("held-out batches")
    rests_on = f"{len(task.held_out)} batches x {len(seeds)} seeds"
    if len(task.held_out) < 2:
        rests_on = f"one batch and {len(seeds)} seeds: it says nothing of other batches" if best else "no batch"
    found: dict[str, Any] = {
        "best": [asdict(score) for score in best],
        "default_settings": [asdict(score) for score in defaults],
        "means": {"best": mean_costs(best), "default_settings": mean_costs(defaults)},
        "gain": None,
        "cost_gain": None,
        "seeds": list(seeds),
        "rests_on": rests_on,
    }
    if best:
        for name, values in {
            "gain": [s.step_value for s in best],
            "cost_gain": [s.value(task.params) for s in best],
        }.items():
            gain_BS = 1 - np.array(values).reshape(len(seeds), -1).T
            found[name] = asdict(bootstrap_gain(gain_BS, task.seed))
    return found


def mean_costs(scores: Sequence[BatchScore]) -> dict[str, float]:
    """Return mean step time, moves and planning time, seconds, and the mean gap to the proven bound, a share."""
    if not scores:
        return {}
    costs = {name: statistics.fmean(getattr(s, name) for s in scores) for name in ("step_time_s", "move_s", "plan_s")}
    return costs | {"gap_to_bound": statistics.fmean(s.step_time_s / s.lower_bound_s - 1 for s in scores)}


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
    """Return what to export, ``best`` or ``defaults``, and why: without a proven gain it is the defaults, and with
    slower steps too."""
    if is_default:
        return "defaults", "No trial did better than the default settings on the tuning batches."
    if holdout["gain"] is None:
        return "defaults", f"No batch was held out, so that nothing shows whether trial {best_number} generalises."
    told = f"Trial {best_number}, held-out batches: {told_costs(holdout)}; {holdout['rests_on']}"
    if holdout["gain"]["high_pct"] < 0:
        return "defaults", f"{told}. Its steps are slower: it is not exported."
    asked = ONE_BATCH_PCT if len({score["name"] for score in holdout["best"]}) == 1 else 0.0
    if holdout["cost_gain"]["low_pct"] <= asked:
        low, high = holdout["cost_gain"]["low_pct"], holdout["cost_gain"]["high_pct"]
        return "defaults", (
            f"{told}. Its gain is not proven: with planning beyond the slack it is {low:+.2f} to {high:+.2f}%, wanted "
            f"above {asked:g}%" + (" where one batch is held out. Hold out more." if asked else ".")
        )
    return "best", f"{told}."


def told_costs(holdout: Mapping[str, Any]) -> str:
    """Say how the three costs of held-out batches changed, and how sure that is."""
    after, before, gain = holdout["means"]["best"], holdout["means"]["default_settings"], holdout["gain"]
    costs = {"step": "step_time_s", "moves": "move_s", "planning": "plan_s"}
    told = ", ".join(f"{word} {before[name]:.4g} -> {after[name]:.4g} s" for word, name in costs.items())
    return (
        f"step time and moves gain {gain['gain_pct']:+.2f}%, {LEVEL}% interval {gain['low_pct']:+.2f} to "
        f"{gain['high_pct']:+.2f}% ({told})"
    )


def told_slack(slack_s: float | None) -> str:
    """Say how much planning was free."""
    if slack_s is None:
        return (
            f"planning is free up to {LEAST_SLACK_S:g} s a step, or what the default settings take where that is more "
            "(assumed: tune.hidden_planning_s states the job's slack)"
        )
    return f"planning is free up to {slack_s:g} s a step (tune.hidden_planning_s)"


def _in_turn(
    scorer: Scorer,
    setting: Mapping[str, Any],
    seeds: Sequence[int],
    batches: range,
    references: Sequence[BatchScore],
    observer: Observer,
) -> list[BatchScore]:
    """Plan consecutive batches one after another, once a seed, each from the plan before; the first one from a plan of
    the batch before it, where there is one."""
    scores = list[BatchScore]()
    for seed in seeds if batches else ():
        previous = scorer.planned(setting, batches[0] - 1, seed)[0] if batches[0] else None
        for index in batches:
            reference = references[len(scores)] if references else None
            previous, score = scorer.planned(setting, index, seed, previous, reference)
            scores.append(score)
            observer.advance("held-out batches" if batches[0] else "finalists", score.name)
    return scores

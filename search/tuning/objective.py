"""What one setting is worth on one step batch, relative to the planner's defaults on the same batch.

Costs of a batch: predicted step time, predicted time of moving experts away from the step before, and planning time
beyond what the rollout hides. In trials "the step before" is always the defaults' plan of it, so that batches can be
tried in any order and every setting starts from the same placements.

Planning time is the processor time of planning in one thread: it does not depend on what else the machine does, nor on
the number of workers of the study. A host with more cores runs the chains of a portfolio side by side and plans faster.

Invariant: the defaults are worth 1 on every batch.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from profiler import RoutePackError
from profiler.errors import explained
from search.joint import plan_step
from search.plan import Plan, check_plan
from search.tuning.task import TuneParams, TuneTask


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

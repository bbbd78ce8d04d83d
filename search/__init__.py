"""Find the plan: packing and placement of one optimizer step, and the settings of the search.

Shape suffixes in this package: N samples, R rows, D DP slots, B EP blocks, U units (row x EP block), L MoE layers,
E experts, P EP ranks, C attention classes, K nodes of a table. Where cells are meant, D counts those of all rows.
"""

from search.baselines.catalog import (
    BASELINES,
    DEFAULT_BASELINE,
    SEARCH_BASELINES,
    SHOWN_BASELINES,
    place_baseline,
    price_baseline,
)
from search.bounds import lower_bound_ns
from search.evaluate import Evaluation, balanced_ns, evaluate
from search.joint import plan_step
from search.params import TUNABLE, PlannerParams, Range, StopCriterion
from search.plan import Plan, StepTime, check_plan
from search.problem import Problem, StepBatch, build_problem, check_lengths
from search.stream import StreamingPlanner
from search.tuning.objective import BatchScore
from search.tuning.study import run_study
from search.tuning.task import TuneParams, TuneTask
from search.warm_up import warm_up

__all__ = [
    "BASELINES",
    "BatchScore",
    "DEFAULT_BASELINE",
    "Evaluation",
    "Plan",
    "PlannerParams",
    "Problem",
    "Range",
    "SEARCH_BASELINES",
    "SHOWN_BASELINES",
    "StepBatch",
    "StepTime",
    "StopCriterion",
    "StreamingPlanner",
    "TUNABLE",
    "TuneParams",
    "TuneTask",
    "balanced_ns",
    "build_problem",
    "check_lengths",
    "check_plan",
    "evaluate",
    "lower_bound_ns",
    "place_baseline",
    "plan_step",
    "price_baseline",
    "run_study",
    "warm_up",
]

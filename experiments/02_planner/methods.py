"""Who plans: every published planner that ``search`` offers, found at run time, and ours at several budgets.

One-shot methods are ``search.BASELINES``; those that search for as long as they are given are in ``SEARCH_BASELINES``.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from records import PlanRecord
from regimes import Instance, Regime, all_regimes, load_instance

from search import BASELINES, Plan, PlannerParams, StopCriterion, plan_step
from search.baselines.catalog import PACKINGS, PLACEMENTS, SEARCH_BASELINES, price_packing
from search.baselines.frameworks import largest_cell_tokens

OURS = "RoutePack-Tune"
OUR_BUDGETS_S = (0.5, 2.0)
LONG_BUDGETS_S = {"math-long": (20.0,), "math-long-ep32": (20.0,), "giant": (5.0, 20.0)}
"""Long budgets on every batch of the regimes where they are asked about."""
CURVE_BUDGETS_S = (1.0, 5.0, 20.0)
"""Further points of the picture of step time against planning time."""
SEARCH_BUDGETS_S = (10.0,)
"""What published searches get in the table, on every real batch and the first synthetic ones."""
SEARCH_INSTANCES = 2
SEARCH_CURVE_S = (1.0, 2.0, 5.0)
CURVE_INSTANCES = 1
FIXED_EFFORT = ("ReLibra", "open-instruct")
"""Published searches that stop after their own number of proposals, whatever their budget."""

Packing = tuple[np.ndarray, np.ndarray, int]
"""Row [N], slot [N], number of rows."""


@dataclass(frozen=True, slots=True)
class Method:
    """Name a planner, its budget, and how it is run: batch and seed in, step time in ns and packing out."""

    name: str
    budget_s: float
    run: Callable[[Instance, int], tuple[int, Packing]]


def one_shot(name: str) -> Method:
    """Return a published rule of ``BASELINES``: packing + placement."""
    packing, placement = name.rsplit(" + ", 1)

    def run(instance: Instance, seed: int) -> tuple[int, Packing]:
        packed = PACKINGS[packing](instance.problem)
        placed = PLACEMENTS[placement](instance.problem)
        return price_packing(instance.problem, packed, placed).step_ns, packed

    return Method(name, 0.0, run)


def published_search(name: str, seconds: float) -> Method:
    """Return a search of ``SEARCH_BASELINES`` with its time; 0 for one that makes a fixed number of proposals."""

    def run(instance: Instance, seed: int) -> tuple[int, Packing]:
        packed, placed = SEARCH_BASELINES[name](instance.problem, StopCriterion(max_runtime=seconds or 1.0), seed=seed)
        return price_packing(instance.problem, packed, placed).step_ns, packed

    return Method(name, seconds, run)


def ours(seconds: float, params: PlannerParams | None = None) -> Method:
    """Return our planner under a budget of wall time."""

    def run(instance: Instance, seed: int) -> tuple[int, Packing]:
        plan = our_plan(instance, seconds, seed=seed, params=params)
        return plan_ns(plan, instance), (plan.row_N, plan.slot_N, plan.num_rows)

    return Method(OURS, seconds, run)


def our_plan(
    instance: Instance,
    seconds: float,
    *,
    seed: int = 0,
    params: PlannerParams | None = None,
    previous: Plan | None = None,
) -> Plan:
    """Plan a batch with our planner in so many seconds."""
    regime = instance.regime
    return plan_step(
        instance.batch, instance.tables, regime.spec, regime.topology, regime.max_tokens, params, seed=seed,
        stop=StopCriterion(max_runtime=seconds), previous=previous,
    )  # fmt: skip


def plan_ns(plan: Plan, instance: Instance) -> int:
    """Return the step time that a plan promises, in the problem's nanoseconds (summed over pipeline stages)."""
    return round(plan.predicted.step_time_s * instance.tables.pipeline_stages * 1e9)


def all_methods(regime: Regime, instance: int, *, quick: bool = False) -> list[Method]:
    """Return the methods to run on the batch of that number; the first ones get the budgets of the curves too."""
    curve, searched = instance < CURVE_INSTANCES, regime.real or instance < SEARCH_INSTANCES
    search_budgets = (SEARCH_BUDGETS_S if searched else ()) + (SEARCH_CURVE_S if curve else ())
    our_budgets = {*OUR_BUDGETS_S, *LONG_BUDGETS_S.get(regime.name, ()), *(CURVE_BUDGETS_S if curve else ())}
    if quick:
        search_budgets, our_budgets = (2.0,), {0.5, 2.0}
    fixed = [name for name in SEARCH_BASELINES if any(part in name for part in FIXED_EFFORT)]
    return [
        *map(one_shot, BASELINES),
        *(published_search(name, 0.0) for name in fixed),
        *(published_search(n, s) for n in SEARCH_BASELINES if n not in fixed for s in sorted(search_budgets)),
        *map(ours, sorted(our_budgets)),
    ]


@functools.cache
def _warm_instance(shared: Path) -> Instance:
    return load_instance(all_regimes(shared)["gsm8k-short"], 0)


_warmed: set[str] = set()


def warm_up(method: Method, shared: Path) -> None:
    """Let a method compile its kernels on the smallest regime, once: compiling is not planning."""
    if method.name in _warmed:
        return
    short = method
    if method.budget_s:
        short = ours(0.1) if method.name == OURS else published_search(method.name, 0.1)
    short.run(_warm_instance(shared), 0)
    _warmed.add(method.name)


def measure(method: Method, instance: Instance) -> PlanRecord:
    """Run a method on a batch and return its record; planning time is wall time of everything but loading."""
    start = time.perf_counter()
    step_ns, packing = method.run(instance, instance.number)
    plan_s = time.perf_counter() - start
    largest = largest_cell_tokens(instance.problem, packing)
    return PlanRecord(
        regime=instance.regime.name, instance=instance.number, method=method.name, budget_s=method.budget_s,
        percent=100 * instance.ideal_ns / step_ns, gap_percent=100 * (step_ns / instance.bound_ns - 1),
        over_cap_percent=max(0.0, 100 * (largest / instance.regime.max_tokens - 1)), rows=packing[2], plan_s=plan_s,
        step_s=step_ns * 1e-9 / instance.tables.pipeline_stages,
    )  # fmt: skip

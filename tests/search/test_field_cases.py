"""Field cases of packing and placement that are about what a plan promises."""

from dataclasses import replace

import numpy as np
import pytest
from strategies import TOPOLOGIES, make_batch, make_spec, make_tables

from profiler import RoutePackError, Topology
from search import PlannerParams, StopCriterion, check_plan, plan_step

SMALL = PlannerParams(max_iterations=20_000, placement_swaps=500)


def make_case(seed=0, topology=TOPOLOGIES[1], samples=40, skew=1.0):
    rng = np.random.default_rng(seed)
    spec = make_spec()
    batch = make_batch(rng, spec, rng.integers(5, 30, samples), skew=skew)
    return batch, make_tables(rng, spec, topology, 64), spec, topology, 64


def test_denominators_are_the_steps_whatever_the_packing():
    """Loss tokens 1, 1, 1, 97: sums over global denominators do not depend on the packing, means of cells do."""
    spec, rng = make_spec(), np.random.default_rng(0)
    batch = make_batch(rng, spec, [1, 1, 1, 97])
    tables = make_tables(rng, spec, Topology(), 120)
    for cap in (120, 97):  # one cell, then more
        plan = plan_step(batch, tables, spec, Topology(), cap, replace(SMALL, extra_rows=0))
        assert plan.num_rows == (1 if cap == 120 else 2)
        assert plan.to_dict()["denominators"] == {"num_samples": 4, "num_tokens": 100}


def test_a_map_that_holds_an_expert_twice_is_refused():
    batch, *_ = case = make_case()
    plan = plan_step(*case, SMALL)
    twice = plan.placement_LE.copy()
    twice[1, 3] = twice[1, 2]
    with pytest.raises(RoutePackError, match="Placement of MoE layer 1 is not a bijection"):
        check_plan(replace(plan, placement_LE=twice), batch.lengths, 8)


def test_fewer_samples_than_slots_is_an_early_error():
    batch, tables, spec, topology, cap = make_case(samples=3)
    with pytest.raises(RoutePackError, match="3 samples cannot fill 4 DP slots"):
        plan_step(batch, tables, spec, topology, cap, SMALL)


def test_a_spent_budget_still_gives_a_feasible_plan_and_says_so():
    batch, *_ = case = make_case(samples=200)
    plan = plan_step(*case, replace(SMALL, placement_swaps=100_000), stop=StopCriterion(max_runtime=1e-6))
    check_plan(plan, batch.lengths, 8)
    assert plan.provenance["stopped_by"] == "max_runtime"


@pytest.mark.parametrize(
    ("stop", "name"),
    [
        (StopCriterion(no_improvement=8192), "max_iterations|no_improvement"),
        (StopCriterion(gap_below=10.0), "max_iterations|gap_below"),
        (StopCriterion(max_iterations=4096, gap_below=10.0), "max_iterations|gap_below"),
    ],
)
def test_stop_criteria_end_the_search_with_a_feasible_plan(stop, name):
    batch, *_ = case = make_case()
    plan = plan_step(*case, replace(SMALL, max_iterations=10**9), stop=stop)  # would run for hours without it
    check_plan(plan, batch.lengths, 8)
    assert plan.provenance["stopped_by"] == name


@pytest.mark.parametrize("limit", ["max_iterations", "max_runtime", "no_improvement", "gap_below"])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_nonsense_budgets_are_refused(limit, value):
    with pytest.raises(ValueError, match=f"Expected {limit.replace('_', ' ')} "):
        StopCriterion(**{limit: value})
    if limit != "gap_below":
        with pytest.raises(ValueError, match=f"Expected {limit.replace('_', ' ')} "):
            StopCriterion(**{limit: 0.0})

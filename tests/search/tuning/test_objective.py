"""Defaults are worth 1 on every batch, costs add up, and a batch's score does not depend on what was tried before."""

import json
from dataclasses import asdict, replace

import pytest
from small_tasks import make_task

from profiler import RoutePackError
from search import PlannerParams, plan_step
from search.tuning.objective import BatchScore, Scorer, objectives_of, told_slack
from search.tuning.task import TuneParams

SCORE = BatchScore("b", 0, 8.0, 1.0, 3.0, 20.0, 7.0, 10.0, 4.0)
"""Step 8 s + moves 1 s against 10 s of the defaults; planned in 3 s against 4 s."""


def test_costs_add_up_relative_to_the_defaults():
    assert SCORE.value(TuneParams(hidden_planning_s=0)) == pytest.approx((8 + 1 + 3) / (10 + 4))
    assert SCORE.value(TuneParams(hidden_planning_s=3.5)) == pytest.approx(
        9 / 10.5
    )  # only what exceeds the hidden budget is charged, on both sides
    assert SCORE.value(TuneParams(hidden_planning_s=100)) == SCORE.step_value == pytest.approx(0.9)
    assert SCORE.plan_value == pytest.approx(0.75)
    assert objectives_of([SCORE], TuneParams(two_objectives=True)) == pytest.approx([0.9, 0.75])
    assert objectives_of([SCORE, replace(SCORE, step_time_s=9.0)], TuneParams(hidden_planning_s=5)) == [0.95]


def test_planning_within_the_slack_is_free_and_the_default_slack_covers_the_default_settings():
    plans_less, plans_more = replace(SCORE, plan_s=0.1), replace(SCORE, plan_s=4.5)
    assert (
        plans_less.value(TuneParams()) == SCORE.value(TuneParams()) == pytest.approx(0.9)
    )  # nobody learns to plan less
    assert plans_more.value(TuneParams()) == pytest.approx((9 + 0.5) / 10)  # the defaults take 4 s
    quick = replace(SCORE, reference_plan_s=0.3)
    assert [replace(quick, plan_s=s).value(TuneParams()) for s in (1.9, 2.5)] == pytest.approx([0.9, 0.95])
    assert "2 s a step" in told_slack(None)
    assert "assumed" in told_slack(None)
    assert "assumed" not in told_slack(0.5)


def test_the_defaults_under_another_name_are_planned_anew_and_cost_the_same_steps():
    task = make_task()
    other = replace(task, max_tokens=63, tables_by_cap={63: task.tables, 64: task.tables})  # a cap that never binds
    for index in reversed(task.tuned):
        ours, same = Scorer(task).score({}, index), Scorer(other).score({"max_tokens": 64}, index)
        assert same.step_value == pytest.approx(1.0)
        assert (same.step_time_s, same.reference_step_s) == (ours.step_time_s, ours.reference_step_s)


def test_a_score_does_not_depend_on_the_order_of_batches():
    task, setting = make_task(), {"max_iterations": 200, "stickiness": 0.25}
    forwards, backwards = Scorer(task), Scorer(task)
    there = [forwards.score(setting, index) for index in (0, 1, 2)]
    back = [backwards.score(setting, index) for index in (2, 1, 0)][::-1]
    for a, b in zip(there, back, strict=True):
        assert replace(a, plan_s=0, reference_plan_s=0) == replace(b, plan_s=0, reference_plan_s=0)


def test_moves_are_counted_from_the_defaults_plan_of_the_batch_before():
    task = make_task()
    plans, previous = [], None
    for index in range(3):
        previous = plan_step(task.batches[index], task.tables, task.spec, task.topology, 64, task.base,
                             seed=task.seed, previous=previous)  # fmt: skip
        plans.append(previous)
    params = replace(task.base, max_iterations=300, stickiness=0.0)
    own = plan_step(task.batches[2], task.tables, task.spec, task.topology, 64, params, seed=0, previous=plans[1])
    score = Scorer(task).score({"max_iterations": 300, "stickiness": 0.0}, 2)
    assert own.moves.seconds > 0
    assert (score.step_time_s, score.move_s) == (own.predicted.step_time_s, own.moves.seconds)
    assert score.reference_step_s == plans[2].predicted.step_time_s + plans[2].moves.seconds
    assert Scorer(task).score({"max_iterations": 300}, 0).move_s == 0  # the first batch has none before it


def test_a_cap_below_the_longest_sample_names_the_batch():
    task = make_task(caps=(20,))
    with pytest.raises(RoutePackError, match=r"Batch step\d: .*max_tokens_per_microbatch = 20"):
        Scorer(task).score({"max_tokens": 20}, 0)


def test_scores_survive_json():
    task = make_task()
    scores = [Scorer(task).score({"max_iterations": 200}, index) for index in task.tuned]
    assert [BatchScore(**json.loads(json.dumps(asdict(score)))) for score in scores] == scores


def test_base_parameters_stay_the_planners_own():
    params, cap = make_task().planner_of({"stickiness": 1.0})
    assert params == replace(PlannerParams(max_iterations=1000, starts=1, placement_swaps=50), stickiness=1.0)
    assert cap == 64

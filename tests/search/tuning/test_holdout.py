"""The winner must prove itself on unseen batches, or the defaults are exported."""

from dataclasses import replace
from statistics import mean

import numpy as np
import pytest
from small_tasks import make_task

from search.tuning.objective import BatchScore, best_again, bootstrap_gain, choose_export, compare_on_holdout


def test_interval_of_equal_gains_is_a_point():
    interval = bootstrap_gain(np.full((4, 3), 0.02), seed=0)
    assert (interval.gain_pct, interval.low_pct, interval.high_pct) == pytest.approx((2, 2, 2))


def test_interval_is_seeded_and_holds_the_mean():
    gains = np.random.default_rng(1).normal(0.01, 0.01, (6, 3))
    one, two, other = bootstrap_gain(gains, 0), bootstrap_gain(gains, 0), bootstrap_gain(gains, 1)
    assert one == two != other
    assert one.low_pct < one.gain_pct < one.high_pct


def test_interval_covers_what_differs_between_batches_not_only_seeds():
    between = np.repeat(np.array([[-0.02], [0.0], [0.02], [0.04]]), 50, axis=1)  # all seeds of a batch agree
    assert bootstrap_gain(between, 0).low_pct < 0 < bootstrap_gain(between, 0).gain_pct


def test_coverage_of_normal_gains():
    rng = np.random.default_rng(2)
    covered = 0
    for seed in range(60):
        interval = bootstrap_gain(0.01 + rng.normal(0, 0.01, (10, 1)) + rng.normal(0, 0.002, (10, 3)), seed)
        covered += interval.low_pct <= 1.0 <= interval.high_pct
    assert 48 <= covered <= 60


@pytest.mark.parametrize(
    ("gain", "cost", "export", "word"),
    [
        ((0.1, 0.5), (0.1, 0.5), "best", "+0.30%"),
        ((0.0, 0.5), (0.0, 0.5), "defaults", "not proven"),
        ((-0.2, 0.5), (-0.2, 0.5), "defaults", "not proven"),
        ((-0.2, 0.5), (5.0, 9.0), "best", "+0.30%"),  # less planning than the slack has room for, equal steps
        ((-1.9, -0.1), (10.0, 11.6), "defaults", "slower"),  # less planning never pays for slower steps
    ],
)
def test_only_a_proven_gain_without_slower_steps_is_exported(gain, cost, export, word):
    costs = {"step_time_s": 4.0, "move_s": 0.1, "plan_s": 0.7, "gap_to_bound": 0.03}
    holdout = {
        "gain": {"gain_pct": 0.3, "low_pct": gain[0], "high_pct": gain[1]},
        "cost_gain": {"gain_pct": 0.3, "low_pct": cost[0], "high_pct": cost[1]},
        "means": {"best": costs, "default_settings": costs | {"plan_s": 0.9}},
        "rests_on": "4 batches x 3 seeds",
        "best": [{"name": name} for name in "abcd"],
    }
    chosen, reason = choose_export(7, False, holdout)
    assert chosen == export
    for told in (word, "4 batches", "step 4 -> 4 s, moves 0.1 -> 0.1 s, planning 0.9 -> 0.7 s"):
        assert told in reason
    assert choose_export(0, True, holdout)[0] == "defaults"
    if word == "+0.30%" and cost[0] < 0.25:  # the interval of one batch knows seeds alone
        assert "above 0.25%" in choose_export(7, False, {**holdout, "best": [{"name": "a"}] * 5})[1]


def test_without_held_out_batches_nothing_is_proven():
    task = make_task(holdout_share=0.0)
    found = compare_on_holdout(task, {"max_iterations": 200})
    assert found["gain"] is found["cost_gain"] is None
    assert found["best"] == []
    assert choose_export(3, False, found)[0] == "defaults"


def test_pairs_share_batch_and_seed_and_no_seed_was_used_in_trials():
    task = make_task(batches=5, holdout_share=0.4, holdout_seeds=3, seed=5)
    found = compare_on_holdout(task, {"max_iterations": 200})
    keys = [(score["name"], score["seed"]) for score in found["best"]]
    assert keys == [(score["name"], score["seed"]) for score in found["default_settings"]]
    assert keys == [(name, seed) for seed in found["seeds"] for name in ("step3", "step4")]
    assert task.seed not in found["seeds"]
    assert found["gain"]["gain_pct"] == pytest.approx(
        100 * (1 - mean(BatchScore(**s).step_value for s in found["best"]))
    )
    for name in ("best", "default_settings"):
        assert found["means"][name]["step_time_s"] == pytest.approx(mean(s["step_time_s"] for s in found[name]))


def test_one_held_out_batch_says_what_the_interval_rests_on():
    assert compare_on_holdout(make_task(), {"max_iterations": 200})["rests_on"].startswith("one batch and 2 seeds")


def test_the_defaults_gain_exactly_nothing():
    task = make_task(hidden_planning_s=0.0)
    found = compare_on_holdout(task, task.given_settings[0])
    assert found["gain"] == found["cost_gain"] == {"gain_pct": 0, "low_pct": 0, "high_pct": 0}


def test_the_best_again_is_found_with_fresh_seeds_and_one_that_breaks_a_limit_is_last():
    task = make_task(batches=3, caps=(20, 30))
    task = replace(task, tables_by_cap={20: task.tables, 30: task.tables})
    narrow, wide, broken = ({"max_iterations": 200, "max_tokens": cap} for cap in (30, 64, 20))
    assert best_again(task, [narrow]) == 0
    assert best_again(task, [narrow, wide]) == 1  # a cap of half the tokens needs more rows
    assert best_again(task, [broken, narrow]) == 1  # the longest sample has more than 20 tokens

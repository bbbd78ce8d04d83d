"""The winner must prove itself on unseen batches, or the defaults are exported."""

import numpy as np
import pytest
from small_tasks import make_task

from search.tuning.objective import bootstrap_gain, choose_export, compare_on_holdout


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
    ("low", "high", "export"), [(0.1, 0.5, "best"), (0.0, 0.5, "defaults"), (-0.2, 0.5, "defaults")]
)
def test_an_interval_that_includes_zero_exports_the_defaults(low, high, export):
    holdout = {"gain_pct": 0.3, "low_pct": low, "high_pct": high, "rests_on": "4 batches x 3 seeds"}
    chosen, reason = choose_export(7, False, holdout)
    assert chosen == export
    assert "0.30%" in reason
    assert "4 batches" in reason
    assert choose_export(0, True, holdout)[0] == "defaults"


def test_without_held_out_batches_nothing_is_proven():
    task = make_task(holdout_share=0.0)
    found = compare_on_holdout(task, {"max_iterations": 200})
    assert found["gain_pct"] is None
    assert found["best"] == []
    assert choose_export(3, False, found)[0] == "defaults"


def test_pairs_share_batch_and_seed_and_no_seed_was_used_in_trials():
    task = make_task(batches=5, holdout_share=0.4, holdout_seeds=3, seed=5)
    found = compare_on_holdout(task, {"max_iterations": 200})
    keys = [(score["name"], score["seed"]) for score in found["best"]]
    assert keys == [(score["name"], score["seed"]) for score in found["default_settings"]]
    assert keys == [(name, seed) for seed in found["seeds"] for name in ("step3", "step4")]
    assert task.seed not in found["seeds"]
    assert found["default_value"] == 1
    assert found["gain_pct"] == pytest.approx(100 * (1 - found["best_value"]))


def test_one_held_out_batch_says_what_the_interval_rests_on():
    assert compare_on_holdout(make_task(), {"max_iterations": 200})["rests_on"].startswith("one batch and 2 seeds")


def test_the_defaults_gain_exactly_nothing():
    task = make_task(hidden_planning_s=0.0)
    found = compare_on_holdout(task, task.given_settings[0])
    assert (found["gain_pct"], found["low_pct"], found["high_pct"]) == (0, 0, 0)

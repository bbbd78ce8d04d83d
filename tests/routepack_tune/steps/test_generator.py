"""Synthetic batches: seeded, valid, and as uneven as real ones."""

from __future__ import annotations

import numpy as np
import pytest

from profiler import load_model
from routepack_tune.steps.generator import WorkloadParams, make_step_batch

SHAPE = (24, 32, 4)
PARAMS = WorkloadParams(num_prompts=16, rollouts=8, median_tokens=800, max_tokens=4096)


def rank_imbalance(counts, ranks):
    loads = counts.sum(axis=0).reshape(counts.shape[1], ranks, -1).sum(axis=2)
    return (loads.max(axis=1) / loads.mean(axis=1)).mean()


def test_equal_seeds_equal_batches_and_steps_differ():
    one, two = make_step_batch(SHAPE, PARAMS, seed=3), make_step_batch(SHAPE, PARAMS, seed=3)
    assert one.data_hash == two.data_hash
    assert make_step_batch(SHAPE, PARAMS, seed=3, step=1).data_hash != one.data_hash
    assert make_step_batch(SHAPE, PARAMS, seed=4).data_hash != one.data_hash


def test_counts_are_possible_routes():
    short = WorkloadParams(num_prompts=8, rollouts=4, median_tokens=3, sigma=1.0, max_tokens=50)
    for params in (PARAMS, short):
        batch = make_step_batch(SHAPE, params)
        assert (batch.expert_counts.sum(axis=2) == 4 * batch.lengths[:, None]).all()
        assert (batch.expert_counts <= batch.lengths[:, None, None]).all()
        assert (batch.expert_counts >= 0).all()
        assert batch.lengths.min() >= 1
        assert batch.lengths.max() <= params.max_tokens


def test_imbalance_is_as_in_real_routes_and_persists_between_steps():
    first, second = (make_step_batch(SHAPE, PARAMS, step=step) for step in (0, 1))
    assert 1.3 < rank_imbalance(first.expert_counts, 8) < 4.0
    shares = [batch.expert_counts.sum(axis=0).ravel() for batch in (first, second)]
    assert np.corrcoef(*shares)[0, 1] > 0.7


def test_lengths_of_one_prompt_are_alike():
    params = WorkloadParams(num_prompts=200, rollouts=4, median_tokens=1000, max_tokens=10**6)
    logs = np.log(make_step_batch((1, 4, 2), params).lengths).reshape(200, 4)
    between = logs.mean(axis=1).var() - logs.var(axis=1, ddof=1).mean() / 4
    assert 0.5 < between / (between + logs.var(axis=1, ddof=1).mean()) < 0.8


def test_takes_a_model():
    spec = load_model("gpt-oss-20b")
    batch = make_step_batch(spec, WorkloadParams(num_prompts=1, rollouts=2, median_tokens=50))
    assert batch.expert_counts.shape == (2, 24, 32)


@pytest.mark.parametrize("wrong", [{"num_prompts": 0}, {"drift": 1.5}, {"sigma": float("nan")}, {"median_tokens": 0}])
def test_params_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        WorkloadParams(**wrong)

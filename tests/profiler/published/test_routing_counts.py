import math

import numpy as np
import pytest

from profiler.cases.case import mean_loads
from profiler.published.routing_counts import balanced_counts, hottest_rank_counts, power_law_counts


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 128, 8), (3, 8, 2), (7, 32, 4), (100, 128, 8), (33, 160, 8)]
)
def test_balanced_counts_equal_the_enumeration(tokens, experts, top_k):
    counts, stride = np.zeros(experts, dtype=np.int64), math.ceil(experts / top_k)
    for i in range(tokens):
        for j in range(top_k):
            start = i if tokens >= stride else i * stride / tokens
            counts[int(start + j * stride) % experts] += 1
    np.testing.assert_array_equal(balanced_counts(tokens, experts, top_k), counts)


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 128, 8), (16, 128, 8), (5, 8, 2), (4096, 256, 8)])
@pytest.mark.parametrize("alpha", [1.01, 1.2])
def test_power_law_counts_add_up_and_are_skewed(tokens, experts, top_k, alpha):
    counts = power_law_counts(tokens, experts, top_k, alpha)
    assert (counts >= 0).all()
    assert (counts.sum(axis=1) == tokens * top_k).all()
    assert counts.max() > tokens * top_k / experts


@pytest.mark.parametrize("ep_size", [1, 2, 4, 8])
def test_rank_zero_is_the_hottest_and_no_expert_takes_a_token_twice(ep_size):
    tokens, top_k = 64, 4
    drawn = power_law_counts(tokens, 16, top_k, 1.2)
    local = hottest_rank_counts(drawn, ep_size, tokens)
    assert local.shape == (len(drawn), 16 // ep_size)
    assert local.max() <= tokens
    for before, after in zip(drawn, local, strict=True):
        groups = before.reshape(ep_size, -1)
        hottest = groups[groups.sum(axis=1).argmax()]
        surplus = np.maximum(before - tokens, 0).sum()
        # Rank 0 keeps its own realisable rows and takes the surplus first, as far as it has room.
        own = np.minimum(hottest, tokens).sum()
        assert after.sum() == min(own + surplus, tokens * len(hottest))


def test_with_one_rank_nothing_is_lost():
    drawn = power_law_counts(32, 8, 2, 1.2)
    assert (hottest_rank_counts(drawn, 1, 32).sum(axis=1) == 64).all()


def test_mean_loads_are_means_over_draws():
    assert mean_loads(np.array([0, 3, 129])) == (132, 2, 384, 129)
    assert mean_loads(np.array([[2, 0], [4, 2]])) == (4, 2, 192, 3)

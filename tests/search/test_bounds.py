"""No packing under the cap goes below the bounds on its heaviest cells."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from search.bounds import _weights_bound


def heaviest_cells(weights, lengths, max_tokens, units, per_unit, rng):
    """Return the sum over units of the heaviest cell of a random packing under the cap; None if it found none."""
    tokens, heavy = np.zeros(units * per_unit), np.zeros(units * per_unit)
    for i in np.argsort(-lengths + rng.uniform(0, rng.choice([0.01, max_tokens]), len(lengths))):
        room = np.flatnonzero(tokens + lengths[i] <= max_tokens)
        if len(room) == 0:
            return None
        # Even, crowded or random: the three shapes that make the bound tight in its different parts.
        cell = (room[np.argmin(heavy[room])], room[0], rng.choice(room))[rng.integers(3)]
        tokens[cell] += lengths[i]
        heavy[cell] += weights[i]
    return heavy.reshape(units, per_unit).max(axis=1).sum()


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 24),
    st.integers(1, 80),
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
)
@example(0, 2, 4, 8, 64, 1.0)
@settings(max_examples=300)
def test_no_packing_goes_below_the_bound_on_weights(seed, units, per_unit, samples, max_tokens, power):
    rng = np.random.default_rng(seed)
    longest = rng.integers(1, max_tokens + 1)
    lengths = rng.integers(1, longest + 1, samples)
    weights = lengths**power * rng.uniform(0.5, 1.5, samples)
    bound = _weights_bound(weights, lengths, max_tokens, per_unit)
    for _ in range(20):
        reached = heaviest_cells(weights, lengths, max_tokens, units, per_unit, rng)
        assert reached is None or bound <= reached * (1 + 1e-12)


def test_half_empty_cells_are_no_reason_to_expect_another_unit():
    # Samples above half the cap need two units of four cells. Their 272 tokens fill only five cells of 64, yet eight
    # half empty ones weigh no more than the mean.
    lengths = np.full(8, 34)
    weights = lengths.astype(float)
    assert _weights_bound(weights, lengths, 64, 4) == pytest.approx(weights.sum() / 4)

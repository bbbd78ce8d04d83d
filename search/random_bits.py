"""Random draws for kernels: xorshift on one word of state, integers only, the same on every machine.

State is an array [1] of uint64, never 0 (``seed_state`` makes one); no two threads may share it.
"""

from __future__ import annotations

import numpy as np
from numba import njit


def seed_state(*numbers: int) -> np.ndarray:
    """Return a non-zero xorshift state mixed from integers (splitmix64), [1] uint64."""
    state, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    for number in numbers:
        state = (state ^ (number & mask)) * 0xBF58476D1CE4E5B9 & mask
        state ^= state >> 27
        state = state * 0x94D049BB133111EB + 0x9E3779B97F4A7C15 & mask
        state ^= state >> 31
    return np.array([state or 1], np.uint64)


@njit(cache=True, nogil=True, inline="always")
def next_random(rng):
    """Advance a xorshift64* generator (state [1] uint64, never 0) and return 64 random bits."""
    x = rng[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    rng[0] = x
    return x * np.uint64(0x2545F4914F6CDD1D)


@njit(cache=True, nogil=True, inline="always")
def random_below(rng, n):
    """Return a random integer in [0, n), n < 2**31."""
    return np.int64(((next_random(rng) >> np.uint64(33)) * np.uint64(n)) >> np.uint64(31))


@njit(cache=True, nogil=True, inline="always")
def random_threshold(rng, temperature_ns):
    """Return temperature x an exponential variate, from integer operations so that every machine agrees.

    -log2(u) is read off the leading zeros and a linear mantissa: within 9% of the exponential, which annealing ignores.
    """
    x = next_random(rng) >> np.uint64(1)
    zeros = np.int64(0)
    top = np.uint64(1) << np.uint64(62)
    while zeros < 60 and x < (top >> np.uint64(zeros)):
        zeros += 1
    mantissa = np.float64(x) / np.float64(top >> np.uint64(zeros))
    return np.int64(temperature_ns * 0.6931471805599453 * (zeros + 2.0 - mantissa))

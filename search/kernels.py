"""Numba kernels that packing, placement and baselines share: routed rows, a layer's price by them, random draws.

Draws are xorshift on one word of state, integers only, the same on every machine. State is an array [1] of uint64,
never 0 (``seed_state`` makes one); no two threads may share it.
"""

from __future__ import annotations

import numpy as np

from costmodels import compiled


@compiled
def unit_expert_rows(counts, unit_of, num_units):
    """Return the rows of every logical expert in every unit, [U, L, E] int32, from ``counts`` [N, L, E]."""
    rows = np.zeros((num_units, counts.shape[1], counts.shape[2]), np.int32)
    for i in range(counts.shape[0]):
        target = rows[unit_of[i]]
        for m in range(counts.shape[1]):
            for e in range(counts.shape[2]):
                target[m, e] += counts[i, m, e]
    return rows


@compiled
def sample_rank_rows(counts, order, rank_of, num_ranks):
    """Return the rows on every EP rank of the samples in ``order``, given the rank of each expert, [L, E].

    [N + 1, P, L] int32: the last is no sample, all zeros.
    """
    rows = np.zeros((order.size + 1, num_ranks, counts.shape[1]), np.int32)
    for k in range(order.size):
        for m in range(counts.shape[1]):
            for e in range(counts.shape[2]):
                rows[k, rank_of[m, e], m] += counts[order[k], m, e]
    return rows


@compiled(inline="always")
def over_cap_ns(peak, cap, row_ns):
    """Return what the search charges for rows above the receive cap (:attr:`search.problem.Problem.receive_wall`)."""
    return max(np.int64(0), peak - cap) * row_ns


@compiled(inline="always")
def layer_time_ns(layer_ns, shift, rows, sent, sent_ns):
    """Return the time of one MoE layer whose slowest rank has ``rows``, while some rank sends ``sent``.

    ``layer_ns`` [2 K]: experts and exchange, then experts alone, read below ``sent``; ``sent_ns``: the exchange of
    ``sent``. Without a branch, so that loops over layers or units become vectors.
    """
    node = rows >> shift
    place = np.uint64(node + (layer_ns.size >> 1 if rows < sent else 0))
    low = layer_ns[place]
    partly = ((layer_ns[place + np.uint64(1)] - low) * (rows - (node << shift))) >> shift
    return low + partly + (sent_ns if rows < sent else np.int64(0))


def seed_state(*numbers: int) -> np.ndarray:
    """Return a non-zero xorshift state mixed from integers (splitmix64), [1] uint64."""
    state, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    for number in numbers:
        state = (state ^ (number & mask)) * 0xBF58476D1CE4E5B9 & mask
        state ^= state >> 27
        state = state * 0x94D049BB133111EB + 0x9E3779B97F4A7C15 & mask
        state ^= state >> 31
    return np.array([state or 1], np.uint64)


@compiled(inline="always")
def next_random(rng):
    """Advance a xorshift64* generator (state [1] uint64, never 0) and return 64 random bits."""
    x = rng[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    rng[0] = x
    return x * np.uint64(0x2545F4914F6CDD1D)


@compiled(inline="always")
def random_below(rng, n):
    """Return a random integer in [0, n), n < 2**31."""
    return np.int64(((next_random(rng) >> np.uint64(33)) * np.uint64(n)) >> np.uint64(31))


@compiled(inline="always")
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

"""Factors on a cost model's components. All step times are synthetic: planted factors and noise."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from strategies import TOPOLOGIES, make_spec, make_tables

from costmodels.freezing.rescale import COMPONENTS, fit_rescale, rescaled_tables
from profiler import RoutePackError

PLANTED = np.array([0.9, 1.3, 1.0, 1.0])


def made_steps(rng, steps=24, blocks=3, planted=PLANTED, noise=0.01):
    """Return predicted components [S, B, C] and step times in which ``planted`` factors hide."""
    size = rng.uniform(0.5, 2.0, (steps, 1, 1))
    x = size * rng.uniform([0.2, 0.2, 0.05, 0.004], [1.0, 1.0, 0.3, 0.008], (steps, blocks, len(COMPONENTS)))
    y = (x @ planted).max(axis=1) * np.exp(noise * rng.standard_normal(steps))
    return x, y


@pytest.mark.parametrize("seed", range(5))
def test_planted_factors_are_recovered(seed):
    found = fit_rescale(*made_steps(np.random.default_rng(seed)))
    for name, factor in zip(COMPONENTS[:2], PLANTED[:2], strict=True):
        error = found.standard_errors[name]
        assert 0 < error < 0.03
        assert abs(found.factors[name] - factor) < max(4 * error, 0.02)
    assert found.factors["rest"] == 1.0
    assert found.standard_errors["rest"] is None  # 1 % of the step: nothing can be said
    assert found.error_after_pct < 2.0 < found.error_before_pct
    assert json.loads(json.dumps(asdict(found)))["steps"] == 24


def test_standard_errors_cover_the_planted_factors():
    inside = []
    for seed in range(60):
        found = fit_rescale(*made_steps(np.random.default_rng([1, seed]), noise=0.02))
        inside += [abs(found.factors[n] - f) <= 2 * found.standard_errors[n]
                   for n, f in zip(COMPONENTS[:3], PLANTED[:3], strict=True)]  # fmt: skip
    assert 0.85 < np.mean(inside) < 1.0


def test_slowest_block_follows_the_factors():
    # By the old tables block 0 is the slowest everywhere; with experts 1.5x as slow it is block 1.
    rng = np.random.default_rng(0)
    x = rng.uniform(0.9, 1.1, (12, 2, 4)) * np.array([[[1.3, 0.9, 0.0, 0.0]], [[0.9, 1.2, 0.0, 0.0]]]).reshape(1, 2, 4)
    x *= rng.uniform(0.6, 1.4, (12, 1, 4))
    planted = np.array([1.0, 1.5, 1.0, 1.0])
    assert ((x @ planted).argmax(axis=1) != x.sum(axis=2).argmax(axis=1)).any()
    found = fit_rescale(x, (x @ planted).max(axis=1))
    assert found.factors["attention"] == pytest.approx(1.0, abs=0.01)
    assert found.factors["experts"] == pytest.approx(1.5, abs=0.01)


def test_collinear_components_are_refused():
    rng = np.random.default_rng(0)
    x = rng.uniform(0.5, 2.0, (20, 1, 1)) * np.array([0.5, 0.3, 0.2, 0.0])
    with pytest.raises(RoutePackError, match="rise and fall together"):
        fit_rescale(x, 1.2 * x.sum(axis=(1, 2)))


def test_measured_components_tell_collinear_ones_apart():
    rng = np.random.default_rng(0)
    x = rng.uniform(0.5, 2.0, (20, 1, 1)) * np.array([0.5, 0.3, 0.2, 0.0])
    parts = x[:, 0] * np.array([0.9, 1.3, 1.1, np.nan]) * np.exp(0.01 * rng.standard_normal((20, 4)))
    found = fit_rescale(x, np.nansum(parts, axis=1), parts)
    assert [found.factors[n] for n in COMPONENTS[:3]] == pytest.approx([0.9, 1.3, 1.1], abs=0.02)


def test_alike_components_share_a_factor():
    rng = np.random.default_rng(3)
    x, _ = made_steps(rng, blocks=1)
    x[:, :, 2] = 0.3 * x[:, :, 1]
    found = fit_rescale(x, (x @ np.array([0.9, 1.3, 1.3, 1.0])).max(axis=1))
    assert ("experts", "exchange") in found.groups
    assert found.factors["experts"] == found.factors["exchange"] == pytest.approx(1.3, abs=0.01)


def test_a_few_broken_steps_are_set_aside():
    x, y = made_steps(np.random.default_rng(4))
    y[[3, 17]] *= 6.0
    found = fit_rescale(x, y)
    assert found.set_aside == (3, 17)
    assert found.factors["experts"] == pytest.approx(1.3, abs=0.04)


def test_right_tables_are_kept():
    x, y = made_steps(np.random.default_rng(5), planted=np.ones(4), noise=0.03)
    with pytest.raises(RoutePackError, match="no better"):
        fit_rescale(x, y)


def test_pure_noise_is_never_called_a_correction():
    refused = 0
    for seed in range(30):
        x, y = made_steps(np.random.default_rng([6, seed]), steps=12, planted=np.ones(4), noise=0.1)
        try:
            fit_rescale(x, y)
        except RoutePackError:
            refused += 1
    assert refused >= 29


def test_few_steps_and_wrong_units_are_refused():
    x, y = made_steps(np.random.default_rng(7))
    with pytest.raises(RoutePackError, match=r"7 steps .* at least 8"):
        fit_rescale(x[:7], y[:7])
    with pytest.raises(RoutePackError, match="unit of the measured times"):
        fit_rescale(x, 1000 * y)


def test_rescaled_tables_keep_their_invariants():
    tables = make_tables(np.random.default_rng(0), make_spec(), TOPOLOGIES[0], 256)
    factors = {"attention": 0.913, "experts": 1.307, "exchange": 1.0, "rest": 2.0}
    scaled = rescaled_tables(tables, factors, "times corrected")
    for old, new in zip((*tables.sequence_ns, *tables.cell_ns), (*scaled.sequence_ns, *scaled.cell_ns), strict=True):
        np.testing.assert_allclose(new, 0.913 * old, atol=0.5)
    np.testing.assert_allclose(scaled.expert_rank_ns, 1.307 * tables.expert_rank_ns, atol=0.5)
    np.testing.assert_array_equal(scaled.exchange_ns, tables.exchange_ns)
    assert scaled.row_fixed_ns == 2 * tables.row_fixed_ns
    assert scaled.notes[-1] == "times corrected"
    assert scaled.key == tables.key
    assert scaled.tables_hash != tables.tables_hash

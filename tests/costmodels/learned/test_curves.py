"""Measured curves: found from features alone, interpolated only where a row lies on one."""

import numpy as np
import pytest

from costmodels.learned.curves import fit_curves
from costmodels.operations import OPERATIONS
from profiler.cases.case import causal_pairs

SIZES = np.array([64, 128, 256, 512, 1024, 2048])


def attention_columns(lengths, sequences, share=1.0):
    lengths, sequences = np.broadcast_arrays(np.asarray(lengths, float), np.asarray(sequences, float))
    columns = {
        "tokens": lengths * sequences * share, "pairs": sequences * causal_pairs(lengths.astype(int), 0),
        "num_sequences": sequences, "max_length": lengths,
    }  # fmt: skip
    shape = {"num_heads": 8.0, "num_kv_heads": 2.0, "qk_head_dim": 64.0, "v_head_dim": 64.0, "window": 0.0}
    return columns | {name: np.full(lengths.size, value) for name, value in shape.items()}


def experts_columns(tokens, load, skew):
    tokens, load, skew = np.broadcast_arrays(*(np.asarray(one, float) for one in (tokens, load, skew)))
    rows = tokens * load
    columns = {
        "rows": rows, "active_experts": np.full(rows.size, 8.0), "padded_rows": rows + 512, "max_rows": rows * skew,
        "router_tokens": tokens,
    }  # fmt: skip
    shape = {"local_experts": 8.0, "hidden_size": 1024.0, "inter_size": 512.0, "num_experts": 64.0}
    return columns | {name: np.full(rows.size, value) for name, value in shape.items()}


def test_between_two_sizes_the_residual_is_linear_in_the_log_of_size_and_beyond_them_it_is_held():
    operation, residual = OPERATIONS["attention"], np.linspace(0.1, 0.6, SIZES.size)
    curves = fit_curves(operation, attention_columns(SIZES, 4), residual)
    asked = attention_columns([64 * np.sqrt(2), 2048, 9000, 7], 4)
    assert curves.log_ratio(operation, asked) == pytest.approx([0.15, 0.6, 0.6, 0.1], abs=1e-6)


@pytest.mark.parametrize(("sequences", "share"), [(3, 1.0), (8, 1.0), (4, 0.8)])
def test_other_numbers_of_sequences_and_uneven_ones_lie_on_no_curve(sequences, share):
    operation = OPERATIONS["attention"]
    curves = fit_curves(operation, attention_columns(SIZES, 4), np.zeros(SIZES.size))
    assert np.isnan(curves.log_ratio(operation, attention_columns([256], sequences, share))).all()


def test_another_shape_lies_on_no_curve():
    operation = OPERATIONS["attention"]
    curves = fit_curves(operation, attention_columns(SIZES, 4), np.zeros(SIZES.size))
    asked = attention_columns([256], 4) | {"num_heads": np.array([16.0])}
    assert np.isnan(curves.log_ratio(operation, asked)).all()


def test_routings_are_told_apart_by_load_and_skew_whatever_the_order_of_rows():
    """Three routings of one shape, drawn ones scattering: each keeps its own residual."""
    operation, rng = OPERATIONS["experts"], np.random.default_rng(0)
    settings = {0.2: 0.25, 1.5: 0.4, 6.0: 0.7}
    tokens = np.repeat(SIZES, 3)
    load = np.tile(list(settings), SIZES.size) * np.exp(0.05 * rng.standard_normal(tokens.size))
    skew = np.tile(list(settings.values()), SIZES.size)
    residual = np.tile([0.1, 0.2, 0.3], SIZES.size)
    order = rng.permutation(tokens.size)
    curves = fit_curves(operation, experts_columns(tokens[order], load[order], skew[order]), residual[order])
    assert len(curves.keys) == 3
    asked = experts_columns([200, 700, 3000], list(settings), list(settings.values()))
    assert curves.log_ratio(operation, asked) == pytest.approx([0.1, 0.2, 0.3], abs=1e-6)


def test_rows_without_routing_in_the_timed_region_lie_on_no_curve():
    operation = OPERATIONS["experts"]
    columns = experts_columns(SIZES, 1.0, 0.3)
    curves = fit_curves(operation, columns, np.zeros(SIZES.size))
    assert np.isnan(curves.log_ratio(operation, columns | {"router_tokens": np.zeros(SIZES.size)})).all()
    assert fit_curves(operation, columns | {"router_tokens": np.zeros(SIZES.size)}, np.zeros(SIZES.size)) is None


def test_points_timed_twice_are_one_node():
    operation = OPERATIONS["attention"]
    columns = attention_columns(np.repeat(SIZES, 2), 4)
    curves = fit_curves(operation, columns, np.tile([0.0, 1.0], SIZES.size))
    assert curves.log_size.size == SIZES.size
    assert curves.residual == pytest.approx(np.full(SIZES.size, 0.5))

"""Physics baselines: never falling with size, bounded by what the device can do, near real tables without any trees."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels import FitParams
from costmodels.learned.baseline import fit_baseline
from costmodels.operations import OPERATIONS
from profiler import import_published
from profiler.cases.case import causal_pairs, padded_rows

TABLES = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "gpu-timings"
GPUS = ("h200_sxm", "h100_sxm")

HEADS = st.sampled_from([(64, 64), (128, 128), (192, 128), (256, 256)])


@st.composite
def parameters(draw, name):
    """Defaults of one operation, each off by up to a factor of two."""
    operation = OPERATIONS[name]
    factors = draw(
        st.lists(st.floats(0.5, 2.0), min_size=len(operation.parameters), max_size=len(operation.parameters))
    )
    return {
        key: parameter.default * factor
        for (key, parameter), factor in zip(operation.parameters.items(), factors, strict=True)
    }


def columns(features):
    return {name: np.array([float(value)]) for name, value in features.items()}


def price(name, features, p):
    return float(OPERATIONS[name].baseline(columns(features), p)[0])


def attention(length, count=1, heads=8, kv_heads=8, dims=(128, 128), window=0):
    return {
        "tokens": count * length, "pairs": count * int(causal_pairs(np.array([length]), window)[0]),
        "num_sequences": count, "max_length": length, "num_heads": heads, "num_kv_heads": kv_heads,
        "qk_head_dim": dims[0], "v_head_dim": dims[1], "window": window,
    }  # fmt: skip


def experts(counts, hidden=2048, inter=768, num_experts=64, router_tokens=0):
    counts = np.array(counts)
    return {
        "rows": counts.sum(), "active_experts": (counts > 0).sum(), "padded_rows": padded_rows(counts).sum(),
        "max_rows": counts.max(), "local_experts": counts.size, "hidden_size": hidden, "inter_size": inter,
        "router_tokens": router_tokens, "num_experts": num_experts,
    }  # fmt: skip


@given(
    parameters("attention"), st.integers(1, 20000), st.integers(1, 3000), st.integers(1, 64), st.integers(0, 5), HEADS,
    st.sampled_from([0, 128, 4096]),
)  # fmt: skip
def test_attention_never_falls(p, length, longer, count, more, dims, window):
    small = attention(length, count, dims=dims, window=window)
    for grown in (
        attention(length + longer, count, dims=dims, window=window),
        attention(length, count + more, dims=dims, window=window),
        attention(length, count, heads=8 + 8 * more, dims=dims, window=window),
        attention(length, count, heads=8 + 8 * more, kv_heads=8 + more, dims=dims, window=window),
    ):
        assert price("attention", grown, p) >= price("attention", small, p) * (1 - 1e-12)


@given(parameters("attention"), st.integers(1, 20000), st.integers(1, 20000), HEADS)
def test_a_wider_window_never_costs_less_and_a_wide_one_nothing(p, length, window, dims):
    times = [price("attention", attention(length, dims=dims, window=w), p) for w in (window, 2 * window, 0)]
    assert times[0] <= times[1] * (1 + 1e-9)
    assert times[1] <= times[2] * (1 + 1e-9)
    if window >= length:
        assert times[0] == pytest.approx(times[2])


@given(
    parameters("experts"), st.lists(st.integers(0, 5000), min_size=2, max_size=16).filter(any), st.data(),
    st.integers(1, 600),
)  # fmt: skip
def test_experts_never_fall_with_rows_of_any_expert(p, counts, data, more):
    place = data.draw(st.integers(0, len(counts) - 1))
    grown = [count + more * (i == place) for i, count in enumerate(counts)]
    before, after = experts(counts), experts(grown)
    # Waking an expert costs its weights, unless reading them were faster than computing one tile: no device is so.
    wakes = counts[place] == 0
    if not wakes or p["weight_gbps"] * 128 < p["compute_tflops"] * 1e3:
        assert price("experts", after, p) >= price("experts", before, p) * (1 - 1e-12)
    routed = experts(counts, router_tokens=more, num_experts=256)
    assert price("experts", routed, p) > price("experts", experts(counts, num_experts=256), p)


@given(parameters("alltoall"), st.integers(1, 1 << 30), st.integers(0, 1 << 28), st.integers(2, 64))
def test_exchanges_never_fall_and_respect_the_link(p, size, more, ranks):
    small, large = ({"bytes": b, "inter_bytes": 0, "ranks": ranks} for b in (size, size + more))
    assert price("alltoall", large, p) >= price("alltoall", small, p)
    wire_us = size * (ranks - 1) / ranks / (p["wire_gbps"] * 1e3)
    assert price("alltoall", small, p) > wire_us


@given(parameters("dense"), st.integers(1, 20000), st.integers(1, 8192), st.integers(1, 8192), st.integers(1, 4000))
def test_dense_never_falls(p, tokens, n, k, more):
    small = price("dense", {"tokens": tokens, "n": n, "k": k}, p)
    for grown in ((tokens + more, n, k), (tokens, n + more, k), (tokens, n, k + more)):
        assert price("dense", dict(zip(("tokens", "n", "k"), grown, strict=True)), p) >= small * (1 - 1e-12)


@given(st.sampled_from(sorted(OPERATIONS)), st.data())
def test_no_work_takes_the_floor_and_any_work_more(name, data):
    p = data.draw(parameters(name))
    smallest = {
        "attention": attention(1, heads=1, kv_heads=1), "dense": {"tokens": 1, "n": 1, "k": 1},
        "experts": experts([1], 1, 1, 1), "alltoall": {"bytes": 1, "inter_bytes": 0, "ranks": 2},
        "transfer": {"bytes": 1, "inter_bytes": 0},
        "router": {"tokens": 1, "hidden_size": 1, "num_experts": 1, "top_k": 1},
        "linear_attention": {
            "tokens": 1, "num_sequences": 1, "max_length": 1, "num_heads": 1, "num_kv_heads": 1, "qk_head_dim": 1,
            "v_head_dim": 1,
        },
    }[name]  # fmt: skip
    floor = float(OPERATIONS[name].floor(columns(smallest), p)[0])
    assert 0 <= floor < price(name, smallest, p)


def test_long_attention_runs_at_the_rate_of_the_tensor_cores():
    """2 flop per score and element of both products; the softmax and the power limit take their part."""
    p = {name: parameter.default for name, parameter in OPERATIONS["attention"].parameters.items()}
    features = attention(65536, heads=64)
    rate = 2.0 * features["pairs"] * 64 * 256 / price("attention", features, p) / 1e6
    assert 0.7 * p["compute_tflops"] < rate < p["compute_tflops"]
    doubled = price("attention", attention(65536, heads=128), p) / price("attention", features, p)
    assert doubled == pytest.approx(2.0, rel=0.03)


def test_one_long_sequence_is_slower_than_two_halves_of_the_same_window_work():
    """Beyond 1024 tokens one sequence leaves part of the device idle: what a batch of one measures on Hopper."""
    p = {name: parameter.default for name, parameter in OPERATIONS["attention"].parameters.items()}
    single = price("attention", attention(4096, 1, heads=64, dims=(64, 64), window=128), p)
    halves = price("attention", attention(2048, 2, heads=64, dims=(64, 64), window=128), p)
    assert 1.1 < single / halves < 1.6


def test_latent_heads_pay_by_tiles_of_64_queries():
    p = {name: parameter.default for name, parameter in OPERATIONS["attention"].parameters.items()}
    for dims, tile in (((192, 128), 64), ((64, 64), 64), ((128, 128), 128)):
        step = price("attention", attention(tile + 1, 64, dims=dims), p) - price(
            "attention", attention(tile, 64, dims=dims), p
        )
        smooth = price("attention", attention(tile, 64, dims=dims), p) - price(
            "attention", attention(tile - 1, 64, dims=dims), p
        )
        assert step > 5 * smooth


def test_a_hot_expert_costs_more_than_even_ones():
    p = {name: parameter.default for name, parameter in OPERATIONS["experts"].parameters.items()}
    even, skewed = experts([512] * 8), experts([2304] + [256] * 7)
    assert even["rows"] == skewed["rows"]
    assert even["padded_rows"] == skewed["padded_rows"]
    assert price("experts", skewed, p) > price("experts", even, p)


@pytest.fixture(scope="module", params=GPUS)
def fits(request):
    """Published rows with the baseline fitted to them: (columns, time_us, baseline_us, parameters) per operation."""
    folder = TABLES / request.param
    if not folder.is_dir():
        pytest.skip("shared/data/gpu-timings is not beside the checkout")
    measurements, found = import_published(folder), {}
    for name in ("attention", "experts", "alltoall"):
        operation = OPERATIONS[name]
        rows = measurements.select(op=name, direction="forward", status="ok", flag="").rows
        sizes = {column: np.asarray(rows[column], dtype=np.float64) for column in operation.features}
        time_us = np.asarray(rows["time_us"], dtype=np.float64)
        p = fit_baseline(operation, sizes, time_us, FitParams())
        found[name] = sizes, time_us, operation.baseline(sizes, p), p
    return found


@pytest.mark.parametrize(
    ("name", "median_pct", "mape_pct"), [("attention", 4, 5.5), ("experts", 6, 8), ("alltoall", 5, 8)]
)
def test_formulas_alone_are_near_real_tables(fits, name, median_pct, mape_pct):
    _, time_us, baseline_us, _ = fits[name]
    error = 100.0 * np.abs(baseline_us / time_us - 1.0)
    assert np.median(error) < median_pct
    assert error.mean() < mape_pct


def test_attention_is_unbiased_where_kernels_switch(fits):
    """By kind of head and by regime: tiles of short sequences, one long sequence, windows."""
    sizes, time_us, baseline_us, _ = fits["attention"]
    bias = 100.0 * (baseline_us / time_us - 1.0)
    small, long = sizes["v_head_dim"] == 64, sizes["max_length"] > 1024
    alone, windowed = sizes["num_sequences"] == 1, sizes["window"] > 0
    for regime in (small & ~long, ~small & ~long, small & long & alone, ~small & long & alone, windowed & long & alone):
        assert regime.sum() > 100
        assert abs(np.median(bias[regime])) < 4.0


def test_large_exchanges_follow_the_link(fits):
    sizes, time_us, baseline_us, p = fits["alltoall"]
    large = sizes["bytes"] > 2**24
    assert (100.0 * np.abs(baseline_us / time_us - 1.0))[large].mean() < 3.0
    assert 250 < p["wire_gbps"] < 450


def test_fitted_rates_are_physical(fits):
    """Below the data sheet: 989 dense 16-bit TFLOP/s; a sustained rate under the power limit is no more."""
    assert 500 < fits["attention"][3]["compute_tflops"] < 989
    assert 600 < fits["experts"][3]["sustained_tflops"] < 989

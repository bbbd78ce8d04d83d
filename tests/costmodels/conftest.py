"""Synthetic measurements with known formulas: not a device, only something whose true time a test can compute."""

from __future__ import annotations

import numpy as np
import pytest

from costmodels import FitParams, fit_cost_model
from profiler import DeviceFingerprint, Measurements, ModelSpec, Topology
from profiler.cases.case import case_id, causal_pairs

SYNTHETIC_SHAPES = (
    (8, 1024, 512, 64),
    (16, 1024, 512, 64),
    (8, 2048, 768, 128),
    (16, 2048, 768, 128),
    (4, 512, 256, 32),
)


def synthetic_spec(**changes):
    facts = {
        "name": "synthetic", "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "qk_head_dim": 64,
        "v_head_dim": 64, "attention": "gqa", "q_lora_rank": 0, "kv_lora_rank": 0, "qk_rope_head_dim": 0,
        "num_experts": 64, "top_k": 4, "moe_intermediate_size": 512, "shared_intermediate_size": 256,
        "dense_intermediate_size": 2048, "windows": (0, 0, 128, 0), "moe_layers": (False, True, True, True),
    }  # fmt: skip
    return ModelSpec(**{**facts, **changes})


def attention_us(f):
    """True time: floor, arithmetic at 100 TFLOP/s, tokens, and a bump that no roofline has."""
    work = 2.0 * f["pairs"] * f["num_heads"] * (f["qk_head_dim"] + f["v_head_dim"]) / 1e8
    return (10.0 + work + 0.02 * f["tokens"]) * _bump(f["max_length"])


def dense_us(f):
    return (4.0 + 2.0 * f["tokens"] * f["n"] * f["k"] / 2e8) * _bump(f["tokens"])


def experts_us(f):
    work = 6.0 * f["padded_rows"] * f["hidden_size"] * f["inter_size"] / 2e8
    return (20.0 + work + 0.003 * f["rows"]) * _bump(f["rows"] / f["active_experts"])


def alltoall_us(f):
    return 8.0 + f["ranks"] + f["bytes"] * (f["ranks"] - 1) / f["ranks"] / 2e5


def linear_attention_us(f):
    work = f["tokens"] * f["num_heads"] * (f["qk_head_dim"] + f["v_head_dim"]) / 4e4
    return 30.0 + 0.8 * f["max_length"] / 64 + work


def router_us(f):
    return 25.0 + f["tokens"] * (f["hidden_size"] * f["top_k"] + 4 * f["num_experts"]) / 2e5


def transfer_us(f):
    return 12.0 + f["bytes"] / 1e5 + (8.0 + f["inter_bytes"] / 3e4 if f["inter_bytes"] else 0.0)


def _bump(size):
    return np.exp(0.15 * np.sin(np.log2(size)))


TRUE_US = {
    "attention": attention_us, "dense": dense_us, "experts": experts_us, "alltoall": alltoall_us,
    "linear_attention": linear_attention_us, "router": router_us, "transfer": transfer_us,
}  # fmt: skip


def _attention_features():
    for heads, kv_heads in ((8, 2), (4, 1), (16, 4)):
        for window in (0, 128):
            for length in (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096):
                for count in (1, 2, 4, 16):
                    yield {
                        "tokens": count * length, "pairs": int(count * causal_pairs(length, window)),
                        "num_sequences": count, "max_length": length, "num_heads": heads, "num_kv_heads": kv_heads,
                        "qk_head_dim": 64, "v_head_dim": 64, "window": window,
                    }  # fmt: skip


def _dense_features():
    for tokens in (1, 8, 32, 64, 128, 256, 384, 512, 1024, 2048, 4096):
        for n in (256, 512, 1024, 4096):
            for k in (256, 512, 1024, 2048):
                yield {"tokens": tokens, "n": n, "k": k}


def _experts_features():
    for local, hidden, inter, experts in SYNTHETIC_SHAPES:
        for rows in (8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384, 32768):
            for skew in (1.0, 1.5, 2.5):
                hottest = min(rows, int(np.ceil(rows / local * skew)))
                rest = (rows - hottest) / max(1, local - 1)
                padded = -(-hottest // 128) * 128 + (local - 1) * int(np.ceil(rest / 128)) * 128
                active = min(local, rows)
                yield {
                    "rows": rows, "active_experts": active, "padded_rows": padded, "max_rows": hottest,
                    "local_experts": local, "hidden_size": hidden, "inter_size": inter, "router_tokens": 0,
                    "num_experts": experts,
                }  # fmt: skip


def _alltoall_features():
    for ranks in (2, 4, 8):
        for power in range(10, 28):
            yield {"bytes": 1 << power, "inter_bytes": 0, "ranks": ranks}


def _linear_attention_features():
    for length in (32, 64, 128, 256, 512, 1024, 2048, 4096):
        for count in (1, 2, 4, 16):
            yield {
                "tokens": count * length, "num_sequences": count, "max_length": length, "num_heads": 8,
                "num_kv_heads": 4, "qk_head_dim": 32, "v_head_dim": 64,
            }  # fmt: skip


def _router_features():
    for tokens in np.unique(np.geomspace(1, 4096, 20).astype(int)):
        yield {"tokens": int(tokens), "hidden_size": 1024, "num_experts": 64, "top_k": 4}


def _transfer_features():
    for power in range(16, 26):
        for share in (0, 1):
            yield {"bytes": 1 << power, "inter_bytes": share << power}


FEATURE_ROWS = {
    "attention": _attention_features,
    "dense": _dense_features,
    "experts": _experts_features,
    "alltoall": _alltoall_features,
    "linear_attention": _linear_attention_features,
    "router": _router_features,
    "transfer": _transfer_features,
}


def synthetic_measurements(
    ops=("attention", "dense", "experts", "alltoall"), backward=False, noise=0.01, keep=1.0, seed=0
):
    """Rows with one percent of noise; backward takes exactly three times forward where asked for."""
    rng = np.random.default_rng(seed)
    rows = []
    for op in ops:
        for features in FEATURE_ROWS[op]():
            if rng.random() > keep:
                continue
            time_us = float(TRUE_US[op]({name: float(value) for name, value in features.items()}))
            for direction, factor in (("forward", 1.0), ("backward", 3.0)):
                if direction == "backward" and (not backward or op == "alltoall"):
                    continue
                measured = time_us * factor * float(np.exp(noise * rng.standard_normal()))
                rows.append({
                    **features, "op": op, "direction": direction, "status": "ok", "time_us": measured, "spread_us": 0.0,
                    "case_id": case_id(op, direction, "float16", features), "source": "measured", "dtype": "float16",
                })  # fmt: skip
    fingerprint = DeviceFingerprint("cpu", "synthetic", "none", "synthetic formulas", 1, 1, "", 8, {}, "measured")
    meta = {
        "schema_version": 1, "fingerprint": fingerprint.to_dict(), "model": None, "topology": None, "params": {},
        "provenance": {"note": "synthetic"}, "backward": "measured" if backward else "absent",
    }  # fmt: skip
    return Measurements.from_rows(rows, meta)


FAST = FitParams(num_trees=80, folds=3)


@pytest.fixture(scope="session")
def synthetic():
    """The module above, for tests in files that cannot import a conftest."""
    import types

    return types.SimpleNamespace(
        measurements=synthetic_measurements, spec=synthetic_spec, true_us=TRUE_US, rows=FEATURE_ROWS, fast=FAST
    )


@pytest.fixture(scope="session")
def fitted():
    """A cost model of synthetic measurements, forward only, for 4 data-parallel slots and 4 expert ranks."""
    topology = Topology(data_parallel_size=4, expert_model_parallel_size=4)
    return fit_cost_model(synthetic_measurements(), synthetic_spec(), topology, 4096, FAST)


@pytest.fixture(scope="session")
def saved(fitted, tmp_path_factory):
    folder = tmp_path_factory.mktemp("costmodels") / "costmodel"
    fitted.save(folder)
    return folder

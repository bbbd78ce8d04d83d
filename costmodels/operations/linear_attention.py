"""Gated delta-rule attention core of one microbatch on one rank: the core of a linear attention layer.

Baseline: launch floor + the chain of chunks of the longest sequence, each waiting for the one before + arithmetic,
which grows with tokens alone; the last chunk of a sequence is half empty on average.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from costmodels.features import Columns, Operation, Parameter
from profiler.cases.operations import CHUNK_TOKENS


def _baseline(c: Columns, p: Mapping[str, float]) -> np.ndarray:
    key, value = c["qk_head_dim"], c["v_head_dim"]
    computed = c["tokens"] + c["num_sequences"] * CHUNK_TOKENS / 2.0
    flops = 2.0 * CHUNK_TOKENS * (3.0 * key + 2.0 * value) + 6.0 * key * value
    chain = p["chunk_us"] * c["max_length"] / CHUNK_TOKENS
    return p["floor_us"] + chain + computed * c["num_heads"] * flops / (p["compute_tflops"] * 1e6)


def _derive(c: Columns) -> Columns:
    return {
        "log_tokens": np.log(c["tokens"]),
        "log_length": np.log(c["max_length"]),
        "log_sequences": np.log(c["num_sequences"]),
        "mean_share": c["tokens"] / c["num_sequences"] / c["max_length"],
        "log_heads": np.log(c["num_heads"]),
        "log_head_tokens": np.log(c["tokens"] * c["num_heads"]),
        "group": np.log(c["num_heads"] / c["num_kv_heads"]),
        "head_dims": c["qk_head_dim"] + c["v_head_dim"],
    }


LINEAR_ATTENTION = Operation(
    name="linear_attention",
    features={
        "tokens": "tokens of the microbatch",
        "num_sequences": "sequences packed together",
        "max_length": "tokens of the longest sequence",
        "num_heads": "value heads on this rank",
        "num_kv_heads": "query and key heads on this rank",
        "qk_head_dim": "elements of a query or key head",
        "v_head_dim": "elements of a value head",
    },
    shape=("num_heads", "num_kv_heads", "qk_head_dim", "v_head_dim"),
    family=("num_heads", "num_kv_heads", "qk_head_dim", "v_head_dim"),
    size=("tokens",),
    parameters={
        "floor_us": Parameter(60.0, "us"),
        "chunk_us": Parameter(1.0, "us per chunk of the longest sequence"),
        "compute_tflops": Parameter(150.0, "TFLOP/s", -1),
    },
    baseline=_baseline,
    derive=_derive,
    floor=lambda c, p: np.full_like(c["tokens"], p["floor_us"]),
    dimensionless=("log_tokens", "log_length", "log_sequences", "mean_share", "log_head_tokens", "group"),
)

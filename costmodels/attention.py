"""Causal attention core, softmax(Q K^T) V, of one microbatch on one rank: grouped-query, latent, sliding window.

Baseline: launch floor + smooth maximum of (arithmetic over the score tiles a causal mask touches, the longest chain of
key blocks one thread block walks) + token-proportional work (queries, keys, values and output moved, caches written).
Windows count only where a sequence is longer than they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from costmodels.features import Columns, Operation, Parameter, smooth_max, tiles

QUERY_TILE = 128


def _reach(c: Columns) -> np.ndarray:
    """Keys that the last query of the longest sequence attends to."""
    return np.where(c["window"] > 0, np.minimum(c["window"], c["max_length"]), c["max_length"])


def _baseline(c: Columns, p: Mapping[str, float]) -> np.ndarray:
    heads, kv_heads, dims = c["num_heads"], c["num_kv_heads"], c["qk_head_dim"] + c["v_head_dim"]
    tokens, windowed = c["tokens"], (c["window"] > 0) & (c["window"] < c["max_length"])
    whole_tiles = c["num_sequences"] * tiles(tokens / c["num_sequences"], QUERY_TILE)
    # Tiles on the diagonal are computed whole: half a tile of keys for every query, more with a window's second edge.
    reach = _reach(c)
    edge_keys = np.where(windowed, np.minimum(p["window_keys"], c["max_length"]), p["tile_keys"])
    scores = c["pairs"] + edge_keys * (128.0 / c["v_head_dim"]) ** p["tile_power"] * tokens
    # Small heads leave the tensor cores waiting for the exponentials: cost per score has a part without the head size.
    work = heads * scores * (2.0 * dims + p["softmax_flops"]) / (p["compute_tflops"] * 1e6)
    chain = (reach + p["chain_keys"]) * (2.0 * dims + p["softmax_flops"]) / 512.0 * p["chain_ns"] / 1e3
    moved = 2.0 * (tokens * heads * dims + p["kv_weight"] * tokens * kv_heads * dims) / (p["token_gbps"] * 1e3)
    blocks = heads * whole_tiles / QUERY_TILE * p["block_ns"] * (dims / 256.0) ** p["block_power"] / 1e3
    core = smooth_max(work + blocks, chain, sharpness=1.0 + p["sharpness"])
    # Latent attention is timed without the rotary embedding and cache write that come with the others.
    latent = np.where(c["qk_head_dim"] > c["v_head_dim"], p["latent_share"], 1.0)
    return p["floor_us"] + core + latent * (moved + tokens * p["token_ns"] / 1e3)


def _derive(c: Columns) -> Columns:
    heads, kv_heads, length = c["num_heads"], c["num_kv_heads"], c["max_length"]
    query_tiles = np.ceil(c["tokens"] / c["num_sequences"] / QUERY_TILE)
    blocks = query_tiles * c["num_sequences"] * heads
    return {
        "log_tokens": np.log(c["tokens"]),
        "log_length": np.log(length),
        "log_sequences": np.log(c["num_sequences"]),
        "log_heads": np.log(heads),
        "log_kv_heads": np.log(kv_heads),
        "group": np.log(heads / kv_heads),
        "head_dims": c["qk_head_dim"] + c["v_head_dim"],
        "qk_head_dim": c["qk_head_dim"],
        "window_share": _reach(c) / length,
        "log_blocks": np.log(blocks),
        "log_work": np.log(c["pairs"] * heads * (c["qk_head_dim"] + c["v_head_dim"])),
        "log_reach": np.log(_reach(c)),
        "padding": query_tiles * QUERY_TILE * c["num_sequences"] / c["tokens"],
        "log_head_tokens": np.log(c["tokens"] * heads),
        "log_kv_tokens": np.log(c["tokens"] * kv_heads),
        "mean_share": c["tokens"] / c["num_sequences"] / length,
    }


ATTENTION = Operation(
    name="attention",
    features={
        "tokens": "tokens of the microbatch",
        "pairs": "causal, window-limited (query, key) pairs, summed over sequences",
        "num_sequences": "sequences packed together",
        "max_length": "tokens of the longest sequence",
        "num_heads": "query heads on this rank",
        "num_kv_heads": "key and value heads on this rank",
        "qk_head_dim": "elements of a query or key head",
        "v_head_dim": "elements of a value head",
        "window": "sliding window in tokens, 0 for full attention",
    },
    shape=("num_heads", "num_kv_heads", "qk_head_dim", "v_head_dim", "window"),
    family=("num_heads", "num_kv_heads", "qk_head_dim", "v_head_dim", "window"),
    size=("max_length",),
    parameters={
        "floor_us": Parameter(11.0, "us"),
        "compute_tflops": Parameter(700.0, "TFLOP/s", -1),
        "softmax_flops": Parameter(150.0, "flop-equivalents per score", 0),
        "tile_keys": Parameter(64.0, "keys computed beyond the mask, per query", 0),
        "tile_power": Parameter(0.5, "exponent of the inverse head size in both", 0),
        "window_keys": Parameter(192.0, "the same with a sliding window", 0),
        "chain_keys": Parameter(300.0, "keys' worth of prologue", 0),
        "chain_ns": Parameter(8.0, "ns per key and 512 flop-equivalents"),
        "token_gbps": Parameter(2500.0, "GB/s", -1),
        "kv_weight": Parameter(2.0, "accesses of keys and values per access of queries", 0),
        "block_ns": Parameter(10.0, "ns per query tile and head of 256 elements"),
        "block_power": Parameter(1.0, "exponent of the head size in it", 0),
        "token_ns": Parameter(1.0, "ns per token"),
        "latent_share": Parameter(0.7, "share of the token-proportional work left with latent heads", 0),
        "sharpness": Parameter(1.0, "exponent of the smooth maximum, less 1", 0),
    },
    baseline=_baseline,
    derive=_derive,
    floor=lambda c, p: np.full_like(c["tokens"], p["floor_us"]),
    dimensionless=("log_length", "log_sequences", "group", "head_dims", "window_share", "log_blocks", "log_work",
                   "padding", "log_reach", "log_head_tokens", "mean_share"),
    zero_allowed=frozenset({"window"}),
)  # fmt: skip

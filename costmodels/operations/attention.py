"""Attention cores of one microbatch on one rank: causal softmax(Q K^T) V, and the gated delta rule of linear layers.

Softmax attention (grouped-query, latent, sliding window): launch floor + the longest chain of key blocks one thread
block walks + arithmetic over the scores that are computed (slower where the kernel runs long enough to meet the power
limit) + a fixed cost per tile of queries + token-proportional work (queries, keys, values and output moved, caches
written). Times add up as in Brent's bound: a greedy schedule takes at most its work over the processors plus its
longest chain. What kernels do is visible in the measurements and is built in: heads of 64 and latent heads use query
tiles of 64; wide key tiles make small heads compute more scores than the mask needs, and a window's edges cost like
keys; beyond 1024 tokens of one sequence the token-proportional kernel cannot spread it over the device.

Linear attention: launch floor + the chain of chunks of the longest sequence, each waiting for the one before +
arithmetic, which grows with tokens alone; the last chunk of a sequence is half empty on average.
"""

from __future__ import annotations

import numpy as np

from costmodels.features import Columns, Operation, Parameter, Parameters, smooth_max
from profiler.cases.case import CHUNK_TOKENS

QUERY_TILE = 128
SMALL_HEAD = 64
SMALL_QUERY_TILE = 64
SHORT_LENGTH = 512
"""Small heads walk key blocks slowly up to this length, beyond it with another kernel."""
SPREAD_LENGTH = 1024
"""Longest sequence whose token-proportional work spreads over the whole device."""
HEAD_POWER = 0.25
"""How latencies grow with the width of a head."""


def _reach(c: Columns) -> np.ndarray:
    """Keys that the last query of the longest sequence attends to."""
    return np.where(c["window"] > 0, np.minimum(c["window"], c["max_length"]), c["max_length"])


def _is_latent(c: Columns) -> np.ndarray:
    return c["qk_head_dim"] > c["v_head_dim"]


def _query_tile(c: Columns) -> np.ndarray:
    small = _is_latent(c) | (c["v_head_dim"] <= SMALL_HEAD)
    return np.where(small, SMALL_QUERY_TILE, QUERY_TILE)


def _whole_tiles(c: Columns) -> np.ndarray:
    """Query tiles of one head, all sequences."""
    return c["num_sequences"] * np.ceil(c["tokens"] / c["num_sequences"] / _query_tile(c))


def _mean_keys(length: np.ndarray, reach: np.ndarray) -> np.ndarray:
    """Keys that a query of one sequence attends to on average, where the last one attends to ``reach``."""
    return reach - reach * (reach - 1.0) / (2.0 * length)


def _width(c: Columns) -> np.ndarray:
    return (c["qk_head_dim"] + c["v_head_dim"]) / 256.0


def _floor(c: Columns, p: Parameters) -> np.ndarray:
    return p["floor_us"] * _width(c) ** HEAD_POWER


def _baseline(c: Columns, p: Parameters) -> np.ndarray:
    heads, tokens, length, dims = c["num_heads"], c["tokens"], c["max_length"], c["qk_head_dim"] + c["v_head_dim"]
    small, latent = c["v_head_dim"] <= SMALL_HEAD, _is_latent(c)
    reach = _reach(c)
    walked = np.where(c["window"] > 0, np.minimum(c["window"] + p["window_keys"], length), length)
    scores = c["pairs"] * _mean_keys(length, walked) / _mean_keys(length, reach)
    beyond_first_tile = tokens * np.maximum(1.0 - QUERY_TILE / length, 0.0)
    scores = scores + np.where(small, p["tile_keys"], 0.0) * beyond_first_tile
    # Small heads leave the tensor cores waiting for the exponentials: cost per score has a part without the head size.
    work = heads * scores * (2.0 * dims + p["softmax_flops"]) / (p["compute_tflops"] * 1e6)
    work = work * (1.0 + p["throttle_share"] * work / (work + p["throttle_us"]))
    short = np.where(small, np.clip(walked - QUERY_TILE, 0.0, SHORT_LENGTH - QUERY_TILE), 0.0)
    chain = (walked * _width(c) ** HEAD_POWER * p["chain_ns"] + short * p["short_ns"]) / 1e3
    blocks = heads * _whole_tiles(c) * p["block_ns"] * _width(c) ** p["block_power"] / 1e3
    moved = 2.0 * tokens * dims * (heads + p["kv_weight"] * c["num_kv_heads"]) / (p["token_gbps"] * 1e3)
    single = np.where(length > SPREAD_LENGTH, length * heads * p["single_ns"] / 1e3, 0.0)
    # Latent attention is timed without the rotary embedding and cache write that come with the others.
    around = np.where(latent, p["latent_share"], 1.0) * smooth_max(moved, single, sharpness=3.0)
    return _floor(c, p) + chain + work + blocks + around + np.where(latent, tokens * p["latent_ns"] / 1e3, 0.0)


def _derive(c: Columns) -> Columns:
    heads, kv_heads, length = c["num_heads"], c["num_kv_heads"], c["max_length"]
    query_tiles = _whole_tiles(c)
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
        "log_blocks": np.log(query_tiles * heads),
        "log_work": np.log(c["pairs"] * heads * (c["qk_head_dim"] + c["v_head_dim"])),
        "log_reach": np.log(_reach(c)),
        "padding": query_tiles * _query_tile(c) / c["tokens"],
        "log_head_tokens": np.log(c["tokens"] * heads),
        "log_kv_tokens": np.log(c["tokens"] * kv_heads),
        "mean_share": c["tokens"] / c["num_sequences"] / length,
    }


def _evenness(c: Columns) -> tuple[np.ndarray, ...]:
    # Eight times: sequences may be a twentieth shorter than the longest one on average.
    return (8.0 * np.log(c["tokens"] / c["num_sequences"] / c["max_length"]),)


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
        "floor_us": Parameter(13.0, "us with heads of 128"),
        "compute_tflops": Parameter(700.0, "TFLOP/s", -1),
        "softmax_flops": Parameter(60.0, "flop-equivalents per score", 0),
        "throttle_share": Parameter(0.15, "time added by the power limit, share", 0),
        "throttle_us": Parameter(2000.0, "us of arithmetic at which half of it shows"),
        "tile_keys": Parameter(300.0, "keys computed beyond the mask, per query of a small head", 0),
        "window_keys": Parameter(300.0, "keys walked beyond a sliding window", 0),
        "chain_ns": Parameter(6.0, "ns per key of the longest chain"),
        "short_ns": Parameter(15.0, "the same, on top, for small heads and short sequences"),
        "block_ns": Parameter(14.0, "ns per query tile and head of 128"),
        "block_power": Parameter(1.5, "exponent of the head size in it", 0),
        "token_gbps": Parameter(1250.0, "GB/s", -1),
        "kv_weight": Parameter(0.5, "accesses of keys and values per access of queries", 0),
        "single_ns": Parameter(0.5, "ns per token of the longest sequence and head"),
        "latent_ns": Parameter(1.0, "ns per token with latent heads"),
        "latent_share": Parameter(0.2, "share of the bytes moved with latent heads", 0),
    },
    baseline=_baseline,
    derive=_derive,
    floor=_floor,
    dimensionless=("log_length", "log_sequences", "group", "head_dims", "window_share", "log_blocks", "log_work",
                   "padding", "log_reach", "log_head_tokens", "mean_share"),
    zero_allowed=frozenset({"window"}),
    curve=("num_sequences",),
    settings=_evenness,
)  # fmt: skip


def _linear_baseline(c: Columns, p: Parameters) -> np.ndarray:
    key, value = c["qk_head_dim"], c["v_head_dim"]
    computed = c["tokens"] + c["num_sequences"] * CHUNK_TOKENS / 2.0
    flops = 2.0 * CHUNK_TOKENS * (3.0 * key + 2.0 * value) + 6.0 * key * value
    chain = p["chunk_us"] * c["max_length"] / CHUNK_TOKENS
    return p["floor_us"] + chain + computed * c["num_heads"] * flops / (p["compute_tflops"] * 1e6)


def _linear_derive(c: Columns) -> Columns:
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
    baseline=_linear_baseline,
    derive=_linear_derive,
    dimensionless=("log_tokens", "log_length", "log_sequences", "mean_share", "log_head_tokens", "group"),
    curve=("num_sequences",),
    settings=_evenness,
)

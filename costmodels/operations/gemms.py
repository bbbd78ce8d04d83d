"""Matrix products of a layer: dense ones, the choice of experts, and their grouped GEMMs (gate, up, SwiGLU, down).

Dense (tokens x k times k x n: projections, shared experts, dense feed-forward): launch floor + smooth maximum of
(arithmetic on padded tiles, one tile's serial walk over k, bytes moved).

Experts: launch floor + smooth maximum of (reading the active experts' weights and arithmetic on tiles of rows, one
tile's serial time) + rows gathered, scattered and activated, but never faster than the power limit allows + routing
work over the tokens seen inside the timed region. Reading and arithmetic add up: experts with few rows wait for their
weights while hot ones compute. An expert's first tile costs less where it is not full (kernels choose smaller tiles).

Router (choosing experts, permuting rows into expert order and back): launch floor + arithmetic of the logits + bytes of
gathered and summed rows and of scores. It has few parameters, for a profile holds few rows of it, all of one model.
"""

from __future__ import annotations

import numpy as np

from costmodels.features import Columns, Operation, Parameter, Parameters, smooth_max
from profiler.cases.case import TILE_ROWS

ELEMENT_BYTES = 2.0
FUSED_EXPERTS = 128
ROW_ACCESSES = 4.0
"""Times the router writes or reads a row in expert order: gathered, and summed back."""
SCORE_ACCESSES = 6.0
"""Times it does a score: logits, softmax and top-k, in 32 bits."""


def _dense_baseline(c: Columns, p: Parameters) -> np.ndarray:
    tokens, n, k = c["tokens"], c["n"], c["k"]
    # A share: beyond 1 a fuller tile would be cheaper than an emptier one.
    padded = tokens + np.minimum(p["padding_share"], 1.0) * (np.ceil(tokens / 64.0) * 64.0 - tokens)
    flops = 2.0 * padded * (n + p["narrow_n"]) * (k + p["narrow_k"])
    # A grid of output tiles fills the device in whole waves; on average half a wave of multiprocessors idles.
    idle = 2.0 * 128.0 * 128.0 * p["idle_tiles"] * (k + p["narrow_k"])
    compute = (flops + idle) / (p["compute_tflops"] * 1e6)
    serial = p["serial_us"] * k / 4096.0
    moved = ELEMENT_BYTES * (n * k + tokens * (n + k)) / (p["memory_gbps"] * 1e3)
    return p["floor_us"] + smooth_max(compute, serial, moved, sharpness=1.0 + p["sharpness"])


def _dense_derive(c: Columns) -> Columns:
    tokens, n, k = c["tokens"], c["n"], c["k"]
    blocks = np.ceil(tokens / 128.0) * np.ceil(n / 128.0)
    return {
        "log_tokens": np.log(tokens),
        "log_n": np.log(n),
        "log_k": np.log(k),
        "log_work": np.log(tokens * n * k),
        "log_outputs": np.log(tokens * n),
        "log_weights": np.log(n * k),
        "log_blocks": np.log(blocks),
        "aspect": np.log(n / k),
        "padding": np.ceil(tokens / 64.0) * 64.0 / tokens,
        "log_intensity": np.log(tokens * n * k / (n * k + tokens * (n + k))),
    }


DENSE = Operation(
    name="dense",
    features={"tokens": "rows of the left matrix", "n": "output width", "k": "inner width"},
    family=("n", "k"),
    size=("tokens",),
    parameters={
        "floor_us": Parameter(2.0, "us"),
        "compute_tflops": Parameter(700.0, "TFLOP/s", -1),
        "padding_share": Parameter(0.7, "share of padded rows that cost like real ones", 0),
        "narrow_n": Parameter(30.0, "elements of width lost to tiles", 0),
        "narrow_k": Parameter(100.0, "elements of depth lost to pipelines", 0),
        "idle_tiles": Parameter(30.0, "tiles of idle multiprocessors", 0),
        "serial_us": Parameter(5.0, "us per 4096 elements of depth"),
        "memory_gbps": Parameter(3800.0, "GB/s", -1),
        "sharpness": Parameter(2.0, "exponent of the smooth maximum, less 1", 0),
    },
    baseline=_dense_baseline,
    derive=_dense_derive,
    dimensionless=("padding", "log_blocks", "log_intensity", "log_work", "log_outputs", "log_weights", "aspect",
                   "log_tokens"),
    curve=("n", "k"),
)  # fmt: skip


def _baseline(c: Columns, p: Parameters) -> np.ndarray:
    hidden, inter, rows, active = c["hidden_size"], c["inter_size"], c["rows"], c["active_experts"]
    # An exponent of at most 1: beyond, rows spread over more experts would be computed faster.
    fill = np.minimum(rows / active / TILE_ROWS, 1.0) ** np.minimum(p["fill_power"], 1.0)
    first = active * TILE_ROWS * fill
    computed = first + np.maximum(c["padded_rows"] - active * TILE_ROWS, 0.0) + p["hot_share"] * c["max_rows"]
    compute = 6.0 * computed * hidden * inter / (p["compute_tflops"] * 1e6)
    weights = 3.0 * ELEMENT_BYTES * active * hidden * inter / (p["weight_gbps"] * 1e3)
    serial = p["serial_us"] * (hidden + inter) / 4096.0
    moved = rows * (p["row_ns"] + p["row_hidden_ns"] * hidden / 1024.0 + p["row_inter_ns"] * inter / 1024.0) / 1e3
    burst = smooth_max(compute + weights, serial, sharpness=3.0) + moved
    # Where arithmetic leaves no pauses, the power limit sets the rate, whatever the tensor cores could do for a while.
    sustained = compute * p["compute_tflops"] / p["sustained_tflops"]
    return _floor(c, p) + smooth_max(burst, sustained, sharpness=8.0) + _routing(c, p)


def _routing(c: Columns, p: Parameters) -> np.ndarray:
    """Microseconds of choosing experts, permuting and finalizing, where the timed region holds them."""
    tokens, experts = c["router_tokens"], c["num_experts"]
    # Fused routing kernels end at 128 experts; beyond, separate kernels sort every token over all experts.
    unfused = np.where(experts > FUSED_EXPERTS, 1.0, 0.0)
    per_token = p["token_hidden_ns"] * c["hidden_size"] / 1024.0 + unfused * p["unfused_ns"] * experts / 256.0
    return tokens * per_token / 1e3 + np.where(tokens > 0, unfused * p["unfused_us"], 0.0)


def _floor(c: Columns, p: Parameters) -> np.ndarray:
    return p["floor_us"] + p["hidden_us"] * c["hidden_size"] / 1024.0 + p["expert_us"] * c["local_experts"]


def _derive(c: Columns) -> Columns:
    hidden, inter, rows, local = c["hidden_size"], c["inter_size"], c["rows"], c["local_experts"]
    active = np.minimum(c["active_experts"], local)
    return {
        "log_rows": np.log(rows),
        "rows_per_expert": np.log(rows / active),
        "rows_per_local_expert": np.log(rows / local),
        "padding": c["padded_rows"] / rows,
        "skew": np.log(c["max_rows"] * active / rows),
        "active_share": active / local,
        "log_active": np.log(active),
        "log_max_rows": np.log(c["max_rows"]),
        "log_local_experts": np.log(local),
        "log_num_experts": np.log(c["num_experts"]),
        "ranks": np.log(c["num_experts"] / local),
        "log_hidden": np.log(hidden),
        "log_inter": np.log(inter),
        "log_tiles": np.log(c["padded_rows"] / TILE_ROWS * np.ceil(inter / 64.0)),
        "extra_tiles": np.maximum(c["padded_rows"] / TILE_ROWS - active, 0.0) / active,
        "log_intensity": np.log(rows * hidden * inter / (active * hidden * inter + rows * (hidden + inter))),
        "log_weight_bytes": np.log(active * hidden * inter),
    }


def _settings(c: Columns) -> tuple[np.ndarray, ...]:
    tokens = np.where(c["router_tokens"] > 0, c["router_tokens"], np.nan)
    # Without routing in the timed region no row lies on a curve that was timed with it.
    return np.log(c["rows"] / tokens), np.log(c["max_rows"] / c["rows"])


EXPERTS = Operation(
    name="experts",
    features={
        "rows": "routed (token, expert) pairs on this rank",
        "active_experts": "local experts with at least one row",
        "padded_rows": "rows, each expert's count rounded up to 128",
        "max_rows": "rows of the hottest local expert",
        "local_experts": "experts held by this rank",
        "hidden_size": "elements",
        "inter_size": "elements, after expert tensor parallelism",
        "router_tokens": "tokens routed inside the timed region",
        "num_experts": "experts of the layer",
    },
    shape=("local_experts", "hidden_size", "inter_size", "num_experts"),
    family=("hidden_size", "num_experts"),
    size=("router_tokens", "rows"),
    parameters={
        "floor_us": Parameter(20.0, "us"),
        "hidden_us": Parameter(2.5, "us per 1024 hidden elements"),
        "expert_us": Parameter(0.05, "us per local expert"),
        "compute_tflops": Parameter(1200.0, "TFLOP/s", -1),  # of what reading the weights does not hide
        "sustained_tflops": Parameter(850.0, "TFLOP/s under the power limit", -1),
        "fill_power": Parameter(0.35, "exponent of the filled share of an expert's first tile", 0),
        "hot_share": Parameter(0.1, "share of the hottest expert's rows that run alone", 0),
        "weight_gbps": Parameter(4500.0, "GB/s", -1),
        "serial_us": Parameter(1.0, "us per 4096 elements of depth"),
        "row_ns": Parameter(3.0, "ns per row"),
        "row_hidden_ns": Parameter(2.5, "ns per row and 1024 hidden elements"),
        "row_inter_ns": Parameter(0.5, "ns per row and 1024 inner elements"),
        "token_hidden_ns": Parameter(0.7, "ns per routed token and 1024 hidden elements"),
        "unfused_ns": Parameter(12.0, "ns per routed token with 256 experts, beyond 128 experts"),
        "unfused_us": Parameter(15.0, "us, beyond 128 experts"),
    },
    baseline=_baseline,
    derive=_derive,
    floor=_floor,
    dimensionless=("rows_per_expert", "padding", "skew", "active_share", "log_active", "log_tiles", "log_intensity",
                   "ranks"),
    zero_allowed=frozenset({"router_tokens"}),
    settings=_settings,
)  # fmt: skip


def _router_baseline(c: Columns, p: Parameters) -> np.ndarray:
    tokens, hidden, experts = c["tokens"], c["hidden_size"], c["num_experts"]
    compute = 2.0 * tokens * hidden * experts / (p["compute_tflops"] * 1e6)
    elements = hidden * (2.0 + ROW_ACCESSES * c["top_k"]) + 2.0 * SCORE_ACCESSES * experts
    return p["floor_us"] + compute + ELEMENT_BYTES * tokens * elements / (p["memory_gbps"] * 1e3)


def _router_derive(c: Columns) -> Columns:
    return {
        "log_tokens": np.log(c["tokens"]),
        "log_rows": np.log(c["tokens"] * c["top_k"]),
        "log_scores": np.log(c["tokens"] * c["num_experts"]),
        "log_hidden": np.log(c["hidden_size"]),
    }


ROUTER = Operation(
    name="router",
    features={
        "tokens": "tokens of one rank",
        "hidden_size": "elements",
        "num_experts": "experts of the layer",
        "top_k": "experts of one token",
    },
    shape=("hidden_size", "num_experts", "top_k"),
    family=("hidden_size", "num_experts", "top_k"),
    size=("tokens",),
    parameters={
        "floor_us": Parameter(40.0, "us"),
        "compute_tflops": Parameter(400.0, "TFLOP/s", -1),
        "memory_gbps": Parameter(2000.0, "GB/s", -1),
    },
    baseline=_router_baseline,
    derive=_router_derive,
    dimensionless=("log_tokens", "log_rows", "log_scores"),
)

"""One dense GEMM, tokens x k times k x n: projections, shared experts, dense feed-forward.

Baseline: launch floor + smooth maximum of (arithmetic on padded tiles, one tile's serial walk over k, bytes moved).
"""

from __future__ import annotations

import numpy as np

from costmodels.features import Columns, Operation, Parameter, Parameters, smooth_max

ELEMENT_BYTES = 2.0


def _baseline(c: Columns, p: Parameters) -> np.ndarray:
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


def _derive(c: Columns) -> Columns:
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
    shape=(),
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
    baseline=_baseline,
    derive=_derive,
    dimensionless=("padding", "log_blocks", "log_intensity", "log_work", "log_outputs", "log_weights", "aspect",
                   "log_tokens"),
    curve=("n", "k"),
)  # fmt: skip

"""Choosing experts for the tokens of one rank, with the permutation of their rows into expert order and back.

Baseline: launch floor + arithmetic of the logits + bytes of gathered and summed rows and of scores. It has few
parameters, for a profile holds few rows of it, all of one model.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from costmodels.features import Columns, Operation, Parameter

ELEMENT_BYTES = 2.0
ROW_ACCESSES = 4.0
"""Times a row in expert order is written or read: gathered, and summed back."""
SCORE_ACCESSES = 6.0
"""Times a score is: logits, softmax and top-k, in 32 bits."""


def _baseline(c: Columns, p: Mapping[str, float]) -> np.ndarray:
    tokens, hidden, experts = c["tokens"], c["hidden_size"], c["num_experts"]
    compute = 2.0 * tokens * hidden * experts / (p["compute_tflops"] * 1e6)
    elements = hidden * (2.0 + ROW_ACCESSES * c["top_k"]) + 2.0 * SCORE_ACCESSES * experts
    return p["floor_us"] + compute + ELEMENT_BYTES * tokens * elements / (p["memory_gbps"] * 1e3)


def _derive(c: Columns) -> Columns:
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
    baseline=_baseline,
    derive=_derive,
    floor=lambda c, p: np.full_like(c["tokens"], p["floor_us"]),
    dimensionless=("log_tokens", "log_rows", "log_scores"),
)

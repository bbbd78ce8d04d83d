"""What a case asks of a device: arithmetic, bytes and memory, estimated before it runs.

The estimates bound a sweep (time, memory); they are no prediction anyone plans with.
"""

from __future__ import annotations

from dataclasses import dataclass

from profiler.cases.case import CHUNK_TOKENS, Case

BACKWARD_WORK = 2.5
"""Backward arithmetic over forward arithmetic: 2 for a GEMM, 2.5 for attention that recomputes its scores."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Hold what a device was seen to do before the sweep."""

    gemm_flops_per_s: float
    attention_flops_per_s: float
    bytes_per_s: float
    call_s: float
    """Time of one small operation, launch included."""
    memory_bytes: int
    """Memory that one case may take."""


def forward_flops(case: Case) -> float:
    """Return the floating-point operations of one forward run, as the kernels do them."""
    f = case.features
    if case.op == "attention":
        # A windowed core works on blocks of two windows, of which half is masked away.
        waste = 2 if f["window"] else 1
        return 2.0 * waste * f["pairs"] * f["num_heads"] * 2 * max(f["qk_head_dim"], f["v_head_dim"])
    if case.op == "linear_attention":
        # Products of queries, keys and values inside a chunk, and three with the state.
        inside = 2.0 * CHUNK_TOKENS * (3 * f["qk_head_dim"] + 2 * f["v_head_dim"])
        return f["tokens"] * f["num_heads"] * (inside + 6.0 * f["qk_head_dim"] * f["v_head_dim"])
    if case.op == "dense":
        return 2.0 * f["tokens"] * f["n"] * f["k"]
    if case.op == "router":
        return 2.0 * f["tokens"] * f["hidden_size"] * (f["num_experts"] + f["top_k"])
    return 6.0 * f["rows"] * f["hidden_size"] * f["inter_size"]


def weight_elements(case: Case) -> int:
    """Return the elements of the weights that a case holds."""
    f = case.features
    if case.op == "dense":
        return f["n"] * f["k"]
    if case.op == "router":
        return f["num_experts"] * f["hidden_size"]
    return 3 * f["local_experts"] * f["hidden_size"] * f["inter_size"] if case.op == "experts" else 0


def activation_elements(case: Case) -> int:
    """Return the elements of inputs, kept intermediates and outputs."""
    f = case.features
    if case.op == "attention":
        dim = max(f["qk_head_dim"], f["v_head_dim"])
        # Queries and outputs, keys and values; blocks of a windowed core copy keys and values twice, padded.
        return f["tokens"] * dim * (2 * f["num_heads"] + (6 if f["window"] else 2) * f["num_kv_heads"])
    if case.op == "linear_attention":
        inside = 4 * CHUNK_TOKENS + 3 * f["qk_head_dim"] + 3 * f["v_head_dim"]
        states = f["qk_head_dim"] * f["v_head_dim"] // CHUNK_TOKENS
        # In float32, whatever the type of the inputs.
        return 2 * f["tokens"] * f["num_heads"] * (inside + states)
    if case.op == "dense":
        return f["tokens"] * (f["n"] + f["k"])
    if case.op == "router":
        return f["tokens"] * (2 * f["hidden_size"] * (1 + f["top_k"]) + 3 * f["num_experts"])
    return f["rows"] * (2 * f["hidden_size"] + 4 * f["inter_size"])


def case_bytes(case: Case, item_bytes: int) -> int:
    """Return the memory a case needs at its peak: tensors, their gradients, and as much for temporaries."""
    return 3 * item_bytes * (weight_elements(case) + activation_elements(case))


def case_seconds(case: Case, rates: Rates, item_bytes: int) -> float:
    """Return the estimated time of one forward and one backward run."""
    calls = case.features.get("num_sequences", 0) + case.features.get("local_experts", 0) + 4
    if case.op == "linear_attention":
        calls = 10 * (case.features["max_length"] // CHUNK_TOKENS + 1) + 30
    per_second = rates.attention_flops_per_s if case.op == "attention" else rates.gemm_flops_per_s
    arithmetic = (1 + BACKWARD_WORK) * forward_flops(case) / per_second
    traffic = 3 * item_bytes * (weight_elements(case) + activation_elements(case)) / rates.bytes_per_s
    return arithmetic + traffic + 3 * calls * rates.call_s

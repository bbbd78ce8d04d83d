"""The operations that are timed: the features that describe one run of each, and what it asks of a device.

Legend
------
attention         the core alone, softmax(Q K^T) V over the sequences of one cell on one rank, causal, maybe windowed
linear_attention  the core of a gated delta-rule layer, whose work grows with tokens alone
dense             one GEMM, ``tokens x k @ k x n``
router            choosing experts for the tokens of one cell, sorting them by expert and adding them up again
experts           the grouped GEMMs (gate, up, SwiGLU, down) of one EP rank
alltoall          one exchange among ``ranks``; the busiest rank sends or receives ``bytes`` in all, ``inter_bytes`` of
                  them over the border of its node
transfer          one expert's parameters and optimizer state from rank to rank, inside a node or between two
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

DIRECTIONS = ("forward", "backward")
TILE_ROWS = 128
"""Rows of a grouped GEMM are computed in tiles: each expert's share is rounded up to this number."""
CHUNK_TOKENS = 64
"""Linear attention works on chunks of so many tokens, and from chunk to chunk through a state."""

HEADS = ("num_heads", "num_kv_heads", "qk_head_dim", "v_head_dim")
EXPERT_ROWS = ("rows", "active_experts", "padded_rows", "max_rows")

Estimate = Callable[[Mapping[str, Any]], Any]
"""From features, whole numbers or columns of them, to an amount of the same shape."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One kind of work: its features, and rough amounts of one forward run, which nobody plans with."""

    features: tuple[str, ...]
    """Columns that describe a case, integers, in the order in which models read them."""
    flops: Estimate = lambda f: 0
    """Floating-point operations, as the kernels do them."""
    elements: Estimate = lambda f: 0
    """Numbers that are held: weights, inputs, kept intermediates and outputs."""
    calls: Estimate = lambda f: f.get("num_sequences", 0) + f.get("local_experts", 0) + 4
    """Kernels that are launched."""
    rate: str = "gemm_flops_per_s"
    """Which of a device's rates computes it."""
    exchange: bool = False
    """It is what ranks send one another, no computation."""


def _attention_flops(f: Mapping[str, Any]) -> Any:
    # A windowed core works on blocks of two windows, of which half is masked away.
    waste = 1 + (f["window"] > 0)
    return 4.0 * waste * f["pairs"] * f["num_heads"] * np.maximum(f["qk_head_dim"], f["v_head_dim"])


def _attention_elements(f: Mapping[str, Any]) -> Any:
    # Queries and outputs, keys and values; blocks of a windowed core copy keys and values twice, padded.
    copies = 2 + 4 * (f["window"] > 0)
    dim = np.maximum(f["qk_head_dim"], f["v_head_dim"])
    return f["tokens"] * dim * (2 * f["num_heads"] + copies * f["num_kv_heads"])


def _linear_attention_flops(f: Mapping[str, Any]) -> Any:
    # Products of queries, keys and values inside a chunk, and three with the state.
    inside = 2.0 * CHUNK_TOKENS * (3 * f["qk_head_dim"] + 2 * f["v_head_dim"])
    return f["tokens"] * f["num_heads"] * (inside + 6.0 * f["qk_head_dim"] * f["v_head_dim"])


def _linear_attention_elements(f: Mapping[str, Any]) -> Any:
    inside = 4 * CHUNK_TOKENS + 3 * f["qk_head_dim"] + 3 * f["v_head_dim"]
    states = f["qk_head_dim"] * f["v_head_dim"] // CHUNK_TOKENS
    # In float32, whatever the type of the inputs.
    return 2 * f["tokens"] * f["num_heads"] * (inside + states)


OPERATIONS: dict[str, Operation] = {
    "attention": Operation(
        ("tokens", "pairs", "num_sequences", "max_length", *HEADS, "window"),
        _attention_flops,
        _attention_elements,
        rate="attention_flops_per_s",
    ),
    "linear_attention": Operation(
        ("tokens", "num_sequences", "max_length", *HEADS),
        _linear_attention_flops,
        _linear_attention_elements,
        calls=lambda f: 10 * (f["max_length"] // CHUNK_TOKENS + 1) + 30,
    ),
    "dense": Operation(
        ("tokens", "n", "k"),
        lambda f: 2.0 * f["tokens"] * f["n"] * f["k"],
        lambda f: f["n"] * f["k"] + f["tokens"] * (f["n"] + f["k"]),
    ),
    "router": Operation(
        ("tokens", "hidden_size", "num_experts", "top_k"),
        lambda f: 2.0 * f["tokens"] * f["hidden_size"] * (f["num_experts"] + f["top_k"]),
        lambda f: (
            (f["num_experts"] + 2 * f["tokens"] * (1 + f["top_k"])) * f["hidden_size"]
            + 3 * f["tokens"] * f["num_experts"]
        ),
    ),
    "experts": Operation(
        (*EXPERT_ROWS, "local_experts", "hidden_size", "inter_size", "router_tokens", "num_experts"),
        lambda f: 6.0 * f["rows"] * f["hidden_size"] * f["inter_size"],
        lambda f: (
            3 * f["local_experts"] * f["hidden_size"] * f["inter_size"]
            + f["rows"] * (2 * f["hidden_size"] + 4 * f["inter_size"])
        ),
    ),
    "alltoall": Operation(("bytes", "inter_bytes", "ranks"), exchange=True),
    "transfer": Operation(("bytes", "inter_bytes"), exchange=True),
}

FEATURE_COLUMNS: tuple[str, ...] = tuple(dict.fromkeys(name for one in OPERATIONS.values() for name in one.features))
"""Every feature column once; 0 where it is not of the row's operation."""

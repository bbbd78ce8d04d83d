"""Cases: the unit of timing, one operation at one size, and the features that describe it.

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

Invariant: a case id is a hash of content; equal in every process and on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from profiler.files import content_hash

FEATURES: dict[str, tuple[str, ...]] = {
    "attention": (
        "tokens", "pairs", "num_sequences", "max_length", "num_heads", "num_kv_heads", "qk_head_dim", "v_head_dim",
        "window",
    ),
    "linear_attention": (
        "tokens", "num_sequences", "max_length", "num_heads", "num_kv_heads", "qk_head_dim", "v_head_dim",
    ),
    "dense": ("tokens", "n", "k"),
    "router": ("tokens", "hidden_size", "num_experts", "top_k"),
    "experts": (
        "rows", "active_experts", "padded_rows", "max_rows", "local_experts", "hidden_size", "inter_size",
        "router_tokens", "num_experts",
    ),
    "alltoall": ("bytes", "inter_bytes", "ranks"),
    "transfer": ("bytes", "inter_bytes"),
}  # fmt: skip
"""Feature columns of every operation, integers, in the order in which models read them."""

FEATURE_COLUMNS: tuple[str, ...] = tuple(dict.fromkeys(name for names in FEATURES.values() for name in names))
"""Every feature column once; 0 where it is not of the row's operation."""

DIRECTIONS = ("forward", "backward")
TILE_ROWS = 128
"""Rows of a grouped GEMM are computed in tiles: each expert's share is rounded up to this number."""
CHUNK_TOKENS = 64
"""Linear attention works on chunks of so many tokens, and from chunk to chunk through a state."""


@dataclass(frozen=True, slots=True)
class Case:
    """Describe one operation at one size; it is timed forward and backward."""

    op: str
    pattern: str
    """How the parts were drawn (``single``, ``even``, ``skewed`` ...): information, not a feature."""
    features: Mapping[str, int]
    """One integer per name of ``FEATURES[op]``."""
    parts: tuple[int, ...] = ()
    """Sequence lengths (attention), rows per local expert (experts), or bytes from every rank to every rank, row by row
    (alltoall); empty for the others."""
    dtype: str = ""
    """Number type where it differs from the sweep's (experts in ``float8_e4m3fn``); empty: the sweep's."""

    def case_id(self, direction: str, dtype: str) -> str:
        """Return the stable id of this case timed in one direction, 16 hex digits; ``dtype`` is the sweep's."""
        return case_id(self.op, direction, self.dtype or dtype, self.features)


def case_id(op: str, direction: str, dtype: str, features: Mapping[str, int]) -> str:
    """Return 16 hex digits of the hash over operation, direction, type and features."""
    named: dict[str, Any] = {name: int(features[name]) for name in FEATURES[op]}
    return content_hash({"op": op, "direction": direction, "dtype": dtype, "features": named})[:16]


def causal_pairs(lengths: np.ndarray, window: np.ndarray | int = 0) -> np.ndarray:
    """Return the (query, key) pairs of causal sequences: query i sees itself and at most ``window - 1`` keys before it.

    A window of 0 means no window.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    reach = np.where(np.asarray(window) > 0, np.minimum(window, lengths), lengths)
    return reach * (reach + 1) // 2 + (lengths - reach) * reach


def attention_features(lengths: tuple[int, ...], heads: tuple[int, int, int, int], window: int) -> dict[str, int]:
    """Return the features of an attention core; ``heads`` is (query heads, key-value heads, qk dim, v dim).

    Sequences of length 0 are none: no kernel sees them.
    """
    return {
        "tokens": sum(lengths),
        "pairs": int(causal_pairs(np.asarray(lengths), window).sum()),
        "num_sequences": len(filled(lengths)),
        "max_length": max(lengths),
        "num_heads": heads[0],
        "num_kv_heads": heads[1],
        "qk_head_dim": heads[2],
        "v_head_dim": heads[3],
        "window": window,
    }


def linear_attention_features(lengths: tuple[int, ...], heads: tuple[int, int, int, int]) -> dict[str, int]:
    """Return the features of a linear attention core; ``heads`` is (value heads, key heads, key dim, value dim)."""
    return {
        "tokens": sum(lengths),
        "num_sequences": len(filled(lengths)),
        "max_length": max(lengths),
        "num_heads": heads[0],
        "num_kv_heads": heads[1],
        "qk_head_dim": heads[2],
        "v_head_dim": heads[3],
    }


def filled(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the lengths above 0: variable-length kernels fail on empty sequences.

    Raises
    ------
    ValueError
        If none is.
    """
    some = tuple(length for length in lengths if length > 0)
    if not some:
        raise ValueError(f"Expected at least one sequence with tokens, got lengths {lengths}.")
    return some


def router_features(tokens: int, hidden: int, num_experts: int, top_k: int) -> dict[str, int]:
    """Return the features of choosing ``top_k`` of ``num_experts`` experts for every token of one rank."""
    return {"tokens": tokens, "hidden_size": hidden, "num_experts": num_experts, "top_k": top_k}


def experts_features(rows_per_expert: tuple[int, ...], hidden: int, inter: int, num_experts: int) -> dict[str, int]:
    """Return the features of a grouped expert GEMM whose rank handles only its own rows (``router_tokens`` 0)."""
    counts = np.asarray(rows_per_expert, dtype=np.int64)
    return {
        "rows": int(counts.sum()),
        "active_experts": int((counts > 0).sum()),
        "padded_rows": int(padded_rows(counts).sum()),
        "max_rows": int(counts.max()),
        "local_experts": len(rows_per_expert),
        "hidden_size": hidden,
        "inter_size": inter,
        "router_tokens": 0,
        "num_experts": num_experts,
    }


def padded_rows(rows_per_expert: np.ndarray) -> np.ndarray:
    """Return each expert's rows rounded up to whole tiles."""
    return -(-rows_per_expert // TILE_ROWS) * TILE_ROWS

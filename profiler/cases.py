"""Cases: the unit of timing, one operation at one size, and the features that describe it.

Legend
------
attention  the core alone, softmax(Q K^T) V over the sequences of one cell on one rank, causal, maybe windowed
dense      one GEMM, ``tokens x k @ k x n``
experts    the grouped GEMMs (gate, up, SwiGLU, down) of one EP rank
alltoall   one exchange of ``bytes`` sent by each of ``ranks``

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
    "dense": ("tokens", "n", "k"),
    "experts": (
        "rows", "active_experts", "padded_rows", "max_rows", "local_experts", "hidden_size", "inter_size",
        "router_tokens", "num_experts",
    ),
    "alltoall": ("bytes", "ranks"),
}  # fmt: skip
"""Feature columns of every operation, integers, in the order in which models read them."""

FEATURE_COLUMNS: tuple[str, ...] = tuple(dict.fromkeys(name for names in FEATURES.values() for name in names))
"""Every feature column once; 0 where it is not of the row's operation."""

DIRECTIONS = ("forward", "backward")
TILE_ROWS = 128
"""Rows of a grouped GEMM are computed in tiles: each expert's share is rounded up to this number."""


@dataclass(frozen=True, slots=True)
class Case:
    """Describe one operation at one size; it is timed forward and backward."""

    op: str
    pattern: str
    """How the parts were drawn (``single``, ``even``, ``skewed`` ...): information, not a feature."""
    features: Mapping[str, int]
    """One integer per name of ``FEATURES[op]``."""
    parts: tuple[int, ...] = ()
    """Sequence lengths (attention) or rows per local expert (experts); empty for dense."""

    def case_id(self, direction: str, dtype: str) -> str:
        """Return the stable id of this case timed in one direction and type, 16 hex digits."""
        return case_id(self.op, direction, dtype, self.features)


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
    """Return the features of an attention core; ``heads`` is (query heads, key-value heads, qk dim, v dim)."""
    sizes = np.asarray(lengths, dtype=np.int64)
    return {
        "tokens": int(sizes.sum()),
        "pairs": int(causal_pairs(sizes, window).sum()),
        "num_sequences": len(lengths),
        "max_length": int(sizes.max()),
        "num_heads": heads[0],
        "num_kv_heads": heads[1],
        "qk_head_dim": heads[2],
        "v_head_dim": heads[3],
        "window": window,
    }


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

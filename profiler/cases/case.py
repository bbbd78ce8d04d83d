"""Operations that are timed, and cases, the unit of timing: one operation at one size.

Both say which features describe a run, and what it asks of a device; docs/profiling.md lists the operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from profiler.files import content_hash

DIRECTIONS = ("forward", "backward")
TILE_ROWS = 128
"""Rows of a grouped GEMM are computed in tiles: each expert's share is rounded up to this number."""
CHUNK_TOKENS = 64
"""Linear attention works on chunks of so many tokens, and from chunk to chunk through a state."""
BACKWARD_WORK = 2.5
"""Backward arithmetic over forward arithmetic: 2 for a GEMM, 2.5 for attention that recomputes its scores."""
DOUBT_LIMIT, SLACK_US = 1.25, 20.0
"""A row in doubt is slower by this factor and by more than that: smaller differences are scheduling, not work."""
DOUBT = "slower than a case that asks more in every feature"

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


@dataclass(frozen=True, slots=True)
class Case:
    """One operation at one size; it is timed forward and backward."""

    op: str
    pattern: str
    """How the parts were drawn (``single``, ``even``, ``skewed`` ...): information, not a feature."""
    features: Mapping[str, int]
    """One integer per feature of the operation."""
    parts: tuple[int, ...] = ()
    """Sequence lengths (attention), rows per local expert (experts), or bytes from every rank to every rank, row by row
    (alltoall); empty for the others."""
    dtype: str = ""
    """Number type where it differs from the sweep's (experts in ``float8_e4m3fn``); empty: the sweep's."""

    @property
    def directions(self) -> tuple[str, ...]:
        """An expert moves once; all else has a backward run."""
        return DIRECTIONS[:1] if self.op == "transfer" else DIRECTIONS

    def row(self, direction: str, dtype: str) -> dict[str, Any]:
        """Return what a measured row says of its case; ``dtype`` is the sweep's."""
        named = {"case_id": self.case_id(direction, dtype), "op": self.op, "direction": direction}
        named |= {"source": "measured", "dtype": self.dtype or dtype, "pattern": self.pattern}
        return {**named, **self.features}

    def case_id(self, direction: str, dtype: str) -> str:
        """Return the stable id of this case timed in one direction, 16 hex digits; ``dtype`` is the sweep's."""
        return case_id(self.op, direction, self.dtype or dtype, self.features)


@dataclass(frozen=True, slots=True)
class Seen:
    """A few dozen cells and rank loads of the user's own steps, so that what will be planned is what is timed."""

    cells: tuple[tuple[int, ...], ...] = ()
    """Sequence lengths of every cell."""
    rank_rows: tuple[tuple[int, ...], ...] = ()
    """Rows per local expert of one EP rank in one layer, for every load."""


def case_id(op: str, direction: str, dtype: str, features: Mapping[str, int]) -> str:
    """Return 16 hex digits of the hash over operation, direction, type and features: equal on every machine."""
    named = {name: int(features[name]) for name in OPERATIONS[op].features}
    return content_hash({"op": op, "direction": direction, "dtype": dtype, "features": named})[:16]


def causal_pairs(lengths: np.ndarray, window: np.ndarray | int = 0) -> np.ndarray:
    """Return the (query, key) pairs of causal sequences: queries see themselves and ``window - 1`` keys (0: all)."""
    lengths = np.asarray(lengths, dtype=np.int64)
    reach = np.where(np.asarray(window) > 0, np.minimum(window, lengths), lengths)
    return reach * (reach + 1) // 2 + (lengths - reach) * reach


def cell_case(op: str, pattern: str, lengths: tuple[int, ...], heads: tuple[int, ...], window: int = 0) -> Case:
    """Return the ``attention`` or ``linear_attention`` core of one cell.

    ``heads`` is (query heads, key-value heads, qk dim, v dim), of linear attention (value heads, key heads, key dim,
    value dim). Sequences of length 0 are none: no kernel sees them.
    """
    features = {"tokens": sum(lengths), "num_sequences": len(filled(lengths)), "max_length": max(lengths)}
    features |= dict(zip(HEADS, heads, strict=True))
    if op == "attention":
        features |= {"pairs": int(causal_pairs(np.asarray(lengths), window).sum()), "window": window}
    return Case(op, pattern, features, lengths)


def filled(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the lengths above 0, for variable-length kernels fail on empty sequences; ValueError if none is."""
    some = tuple(length for length in lengths if length > 0)
    if not some:
        raise ValueError(f"Expected at least one sequence with tokens, got lengths {lengths}.")
    return some


def experts_case(pattern: str, rows: ArrayLike, hidden: int, inter: int, num_experts: int, dtype: str = "") -> Case:
    """Return the grouped expert GEMM of a rank that handles only its own rows (``router_tokens`` 0)."""
    counts = np.asarray(rows, dtype=np.int64)
    features = dict(zip(EXPERT_ROWS, mean_loads(counts), strict=True)) | {"local_experts": len(counts)}
    features |= {"hidden_size": hidden, "inter_size": inter, "router_tokens": 0, "num_experts": num_experts}
    return Case("experts", pattern, features, tuple(counts.tolist()), dtype)


def mean_loads(counts: np.ndarray) -> tuple[int, ...]:
    """Return ``EXPERT_ROWS`` of rows per local expert [e], or their rounded means over draws [M, e]."""
    each = (counts.sum(-1), (counts > 0).sum(-1), padded_rows(counts).sum(-1), counts.max(-1))
    return tuple(int(np.rint(values.mean())) for values in each)


def padded_rows(rows_per_expert: np.ndarray) -> np.ndarray:
    """Return each expert's rows rounded up to whole tiles."""
    return -(-rows_per_expert // TILE_ROWS) * TILE_ROWS


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device was seen to do before the sweep."""

    gemm_flops_per_s: float
    attention_flops_per_s: float
    bytes_per_s: float
    call_s: float
    """Time of one small operation, launch included."""
    memory_bytes: int
    """Memory that one case may take."""


def forward_flops(case: Case) -> float:
    """Return the floating-point operations of one forward run."""
    return float(OPERATIONS[case.op].flops(case.features))


def middle_case(cases: Iterable[Case], op: str) -> Case:
    """Return a case of ``op`` in the upper middle by work: long enough to time well, short enough to repeat."""
    found = sorted((case for case in cases if case.op == op), key=forward_flops)
    return found[len(found) * 3 // 4]


def case_bytes(case: Case, item_bytes: int) -> int:
    """Return the memory a case needs at its peak: tensors, their gradients, and as much for temporaries."""
    return 3 * item_bytes * int(OPERATIONS[case.op].elements(case.features))


def moved_elements(op: str, features: Mapping[str, Any]) -> Any:
    """Return the numbers that one forward run must read or write: of experts without rows no weight is read."""
    if op == "experts":
        features = {name: features[name] for name in OPERATIONS[op].features} | {
            "local_experts": features["active_experts"]
        }
    return OPERATIONS[op].elements(features)


def case_seconds(case: Case, rates: Rates, item_bytes: int) -> float:
    """Return the estimated time of one forward and one backward run."""
    asked = OPERATIONS[case.op]
    arithmetic = (1 + BACKWARD_WORK) * forward_flops(case) / getattr(rates, asked.rate)
    traffic = case_bytes(case, item_bytes) / rates.bytes_per_s
    return arithmetic + traffic + 3 * int(asked.calls(case.features)) * rates.call_s


def doubtful_cases(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the ids of measured rows that are slower than a row of the same kind that asks more in every feature."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["status"] == "ok":
            groups.setdefault((row["op"], row["direction"]), []).append(row)
    doubts: set[str] = set()
    for (op, _), listed in groups.items():
        features = np.array([[row[name] for name in OPERATIONS[op].features] for row in listed])
        time = np.array([row["time_us"] for row in listed])
        asks_less = (features[:, None] <= features[None]).all(axis=2)
        slower = time[:, None] > DOUBT_LIMIT * time[None] + SLACK_US
        doubts |= {listed[i]["case_id"] for i in np.flatnonzero((asks_less & slower).any(axis=1))}
    return doubts

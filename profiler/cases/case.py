"""Cases: the unit of timing, one operation at one size, the features that describe it, and what it asks of a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from profiler.cases.operations import DIRECTIONS, EXPERT_ROWS, HEADS, OPERATIONS, TILE_ROWS
from profiler.files import content_hash

BACKWARD_WORK = 2.5
"""Backward arithmetic over forward arithmetic: 2 for a GEMM, 2.5 for attention that recomputes its scores."""
DOUBT_LIMIT, SLACK_US = 1.25, 20.0
"""A row in doubt is slower by this factor and by more than that: smaller differences are scheduling, not work."""
DOUBT = "slower than a case that asks more in every feature"


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
    loads = (counts.sum(), (counts > 0).sum(), padded_rows(counts).sum(), counts.max())
    features = dict(zip(EXPERT_ROWS, map(int, loads), strict=True)) | {"local_experts": len(counts)}
    features |= {"hidden_size": hidden, "inter_size": inter, "router_tokens": 0, "num_experts": num_experts}
    return Case("experts", pattern, features, tuple(counts.tolist()), dtype)


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

"""What a case asks of a device, estimated before it runs: it bounds a sweep's time and memory."""

from __future__ import annotations

from dataclasses import dataclass

from profiler.cases.case import Case
from profiler.cases.operations import OPERATIONS

BACKWARD_WORK = 2.5
"""Backward arithmetic over forward arithmetic: 2 for a GEMM, 2.5 for attention that recomputes its scores."""


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


def case_bytes(case: Case, item_bytes: int) -> int:
    """Return the memory a case needs at its peak: tensors, their gradients, and as much for temporaries."""
    return 3 * item_bytes * int(OPERATIONS[case.op].elements(case.features))


def case_seconds(case: Case, rates: Rates, item_bytes: int) -> float:
    """Return the estimated time of one forward and one backward run."""
    asked = OPERATIONS[case.op]
    arithmetic = (1 + BACKWARD_WORK) * forward_flops(case) / getattr(rates, asked.rate)
    traffic = case_bytes(case, item_bytes) / rates.bytes_per_s
    return arithmetic + traffic + 3 * int(asked.calls(case.features)) * rates.call_s

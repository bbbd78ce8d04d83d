"""The tasks, and the errors to stay below: median / MAPE / 95th percentile in percent, gate and aim.

Only H200 and H100 have gates; other GPUs are measured and shown. A number that a task does not ask for is None.
"""

from __future__ import annotations

from dataclasses import dataclass

Errors = tuple[float | None, float | None, float | None]
QUANTITIES = ("median_pct", "mape_pct", "p95_pct")
GATED = ("H200", "H100")


@dataclass(frozen=True, slots=True)
class Gate:
    """Hold what a task has to reach."""

    task: str
    gate: Errors
    aim: Errors


EXPERTS_SIZES = "experts, unseen token counts"
EXPERTS_ALL = "experts, unseen token counts, flagged rows too"
EXPERTS_SHAPES = "experts, unseen shape"
EXPERTS_LARGEST = "experts, three largest sizes"
ATTENTION_SIZES = "attention, unseen lengths"
ATTENTION_SIZES_FULL = "attention, unseen lengths, full grouped-query rows"
ATTENTION_SHAPES = "attention, unseen shape"
ATTENTION_LARGEST = "attention, three largest lengths"
ALLTOALL_LARGE = "all-to-all above 16 MB, unseen sizes"
ALLTOALL_SMALL = "all-to-all below 1 MB, unseen sizes"
DENSE_SIZES = "dense, unseen rows"
DENSE_LARGEST = "dense, three largest sizes"
ALLTOALL_SIZES = "all-to-all, unseen sizes"
ALLTOALL_LARGEST = "all-to-all, three largest sizes"

GATES = {
    gate.task: gate
    for gate in (
        Gate(EXPERTS_SIZES, (3.0, 4.5, 14.0), (2.2, 3.5, 10.0)),
        Gate(EXPERTS_ALL, (3.2, 5.5, 17.0), (2.7, 4.5, 14.0)),
        Gate(EXPERTS_SHAPES, (5.5, 8.5, 25.0), (4.0, 6.0, 18.0)),
        Gate(EXPERTS_LARGEST, (5.5, 7.5, 25.0), (3.5, 5.0, 16.0)),
        Gate(ATTENTION_SIZES, (2.8, 4.2, 14.5), (1.8, 3.0, 9.0)),
        Gate(ATTENTION_SIZES_FULL, (2.8, 4.2, 14.5), (1.8, 3.0, 9.0)),
        Gate(ATTENTION_SHAPES, (1.3, 1.8, 5.0), (0.9, 1.2, 3.5)),
        Gate(ATTENTION_LARGEST, (2.8, 3.3, 7.5), (1.3, 1.7, 4.5)),
        Gate(ALLTOALL_LARGE, (None, 3.0, None), (None, 1.5, None)),
        Gate(ALLTOALL_SMALL, (None, 10.0, None), (None, 7.0, None)),
    )
}


NOTHING: Errors = (None, None, None)
TRANSFER_GATES = (
    ("experts, unseen shape known on a sibling GPU", None, Gate("", (3.2, 4.7, 13.5), (2.5, 3.5, 9.0))),
    ("experts, new GPU, k-means", 20, Gate("", (4.5, None, None), NOTHING)),
    ("experts, new GPU, k-means", 50, Gate("", NOTHING, (3.2, None, None))),
    ("attention, new GPU, k-means", 20, Gate("", (3.0, None, None), NOTHING)),
    ("attention, new GPU, k-means", 50, Gate("", NOTHING, (1.8, None, None))),
    ("alone, k-means", 50, Gate("", (5.0, None, None), NOTHING)),
    ("alone, k-means", 30, Gate("", NOTHING, (5.0, None, None))),
)
"""How a transfer task's name ends, at how many fresh points, and its limits: what the library itself would do, which
chooses points by k-means."""


def transfer_gate(task: str, points: int) -> Gate | None:
    """Return the limits of a transfer task."""
    for name, at, gate in TRANSFER_GATES:
        if task.endswith(name) and at in (None, points):
            return gate
    return None


@dataclass(frozen=True, slots=True)
class NumberGate:
    """Hold one other number to reach: a range or an upper limit."""

    quantity: str
    """What the recorded quantity starts with."""
    gate: tuple[float, float]
    aim: tuple[float, float]
    unit: str


NUMBER_GATES = (
    NumberGate("look-up", (0.0, 100.0), (0.0, 100.0), "ns"),
    NumberGate("falling table steps", (0.0, 0.0), (0.0, 0.0), ""),
    NumberGate("mean table error", (0.0, 1.0), (0.0, 1.0), "%"),
    NumberGate("fit ", (0.0, 10.0), (0.0, 10.0), "s"),
    NumberGate("model size", (0.0, 1e6), (0.0, 1e6), "bytes"),
    NumberGate("coverage inside", (86.0, 94.0), (88.0, 92.0), "%"),
)


def verdict_of(value: float, gate: tuple[float, float], aim: tuple[float, float]) -> str:
    """Return ``aim``, ``gate`` or ``missed``."""
    for name, (low, high) in (("aim", aim), ("gate", gate)):
        if low <= value <= high:
            return name
    return "missed"


def error_verdict(gpu: str, gate: Gate | None, found: Errors) -> str:
    """Return ``aim``, ``gate``, ``missed: ...`` naming the numbers, or ``-`` where nothing is asked."""
    if gate is None or gpu not in GATED:
        return "-"
    for name, limits in (("aim", gate.aim), ("gate", gate.gate)):
        asked = [(value, limit) for value, limit in zip(found, limits, strict=True) if limit is not None]
        if asked and all(value is not None and value <= limit for value, limit in asked):
            return name
    if all(limit is None for limit in gate.gate):
        return "below the aim"
    names = [
        quantity.removesuffix("_pct")
        for quantity, value, limit in zip(QUANTITIES, found, gate.gate, strict=True)
        if limit is not None and not (value is not None and value <= limit)
    ]
    return f"missed: {', '.join(names)}"

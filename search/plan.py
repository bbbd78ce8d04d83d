"""The result of planning one step: who goes where, what it should cost, and whether it keeps every constraint.

Invariants (``check_plan``): every sample once; every cell at most ``max_tokens`` tokens and never empty; equal rows on
every slot, a multiple of what the pipeline asks; every layer's placement a bijection, the same in every block.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from profiler import RoutePackError, Topology
from profiler.files import content_hash, write_json
from profiler.readers import read_json

PLAN_SCHEMA_VERSION = 1
_AS_THEY_ARE = ("lower_bound_s", "counters", "provenance")


@dataclass(frozen=True, slots=True)
class StepTime:
    """Hold a predicted step time in seconds and its parts on the slowest EP block."""

    step_time_s: float
    attention_s: float
    """Attention, projections, shared experts and dense layers."""
    experts_s: float
    rest_s: float
    """Dispatch, combine and the fixed cost of rows."""


@dataclass(frozen=True, slots=True)
class ExpertMoves:
    """Hold what a plan moves away from the previous placement."""

    experts: tuple[tuple[int, ...], ...] = ()
    """(MoE layer, logical expert, old physical slot, new physical slot), by layer and expert."""
    bytes: int = 0
    """Parameters and optimizer state that change their rank."""
    seconds: float = 0.0
    """Predicted time of the slowest pipeline stage: layer after layer, the busiest receiving rank over its link."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Hold one step's packing and placement with their predicted cost.

    ``row_N`` and ``slot_N`` give each sample's cell; ``placement_LE[l, e]`` is the physical slot of logical expert e
    (its EP rank is ``slot // (E / P)``).
    """

    row_N: np.ndarray
    slot_N: np.ndarray
    placement_LE: np.ndarray
    num_rows: int
    topology: Topology
    max_tokens: int
    sample_ids: tuple[str, ...]
    total_tokens: int
    predicted: StepTime
    default: StepTime
    """First-fit decreasing with experts in place, priced by the same tables."""
    lower_bound_s: float
    """No plan of this batch can be faster by the same tables."""
    counters: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    moves: ExpertMoves = ExpertMoves()
    """Experts to move before the step, where a previous plan was given."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Hashes of batch and tables, parameters, seed, iterations and why the search stopped."""

    @property
    def gap(self) -> float:
        """Predicted time above the lower bound, as a share of the bound."""
        return self.predicted.step_time_s / self.lower_bound_s - 1.0

    @property
    def plan_hash(self) -> str:
        """SHA-256 of all decisions: ranks compare it before the first collective."""
        decided = {"micro_batches": self.micro_batches(), "logical_to_physical": self.placement_LE.tolist()}
        return content_hash({**decided, "sample_ids": self.sample_ids, "topology": self.topology})

    @property
    def placement_id(self) -> str:
        """SHA-256 of the placement alone: weights laid out for another one must be permuted first."""
        return content_hash(self.placement_LE.tolist())

    def micro_batches(self) -> list[list[list[int]]]:
        """Return ``[dp_rank][row] = [sample indices]``, ascending inside a cell."""
        slots = range(self.topology.data_parallel_size)
        cells: list[list[list[int]]] = [[[] for _ in range(self.num_rows)] for _ in slots]
        for sample, (slot, row) in enumerate(zip(self.slot_N.tolist(), self.row_N.tolist(), strict=True)):
            cells[slot][row].append(sample)
        return cells

    def physical_to_logical(self) -> np.ndarray:
        """Return the logical expert in each physical slot, [L, E] (SGLang's ``physical_to_logical_map``)."""
        return np.argsort(self.placement_LE, axis=1)

    def to_dict(self) -> dict[str, Any]:
        """Return what ``plan.json`` holds."""
        order = np.lexsort((self.row_N, self.slot_N))  # of execution: slot by slot, row by row
        return {
            "schema_version": PLAN_SCHEMA_VERSION,
            "plan_hash": self.plan_hash,
            "placement_id": self.placement_id,
            "max_tokens_per_microbatch": self.max_tokens,
            "num_microbatches": self.num_rows,
            "micro_batches": self.micro_batches(),
            "sample_ids": list(self.sample_ids),
            "packed_order": order.tolist(),
            "inverse_order": np.argsort(order).tolist(),
            "logical_to_physical": self.placement_LE.tolist(),
            "physical_to_logical": self.physical_to_logical().tolist(),
            "denominators": {"num_samples": len(self.row_N), "num_tokens": self.total_tokens},
            "gap": self.gap,
            "notes": list(self.notes),
            **{name: asdict(getattr(self, name)) for name in ("topology", "predicted", "default", "moves")},
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """Rebuild a plan; :class:`RoutePackError` if keys are missing, or schema or hash do not match."""
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version != PLAN_SCHEMA_VERSION:
            raise RoutePackError(f"Plan has schema_version {version!r}, this version reads {PLAN_SCHEMA_VERSION}.")
        try:
            row_N, slot_N = np.full((2, data["denominators"]["num_samples"]), -1, np.int64)
            for slot, rows in enumerate(data["micro_batches"]):
                for row, cell in enumerate(rows):
                    row_N[cell], slot_N[cell] = row, slot
            plan = cls(
                row_N=row_N,
                slot_N=slot_N,
                placement_LE=np.array(data["logical_to_physical"], np.int64),
                num_rows=data["num_microbatches"],
                topology=Topology(**data["topology"]),
                max_tokens=data["max_tokens_per_microbatch"],
                sample_ids=tuple(data["sample_ids"]),
                total_tokens=data["denominators"]["num_tokens"],
                predicted=StepTime(**data["predicted"]),
                default=StepTime(**data["default"]),
                notes=tuple(data["notes"]),
                moves=ExpertMoves(**{**data["moves"], "experts": tuple(map(tuple, data["moves"]["experts"]))}),
                **{name: data[name] for name in _AS_THEY_ARE},
            )
            if plan.plan_hash != data["plan_hash"]:
                raise RoutePackError("Plan's content does not match its plan_hash: the file was edited or damaged.")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise RoutePackError(f"Plan is damaged: {type(error).__name__} {error}. Plan the step again.") from None
        return plan

    def save(self, path: Path | str) -> None:
        """Write ``plan.json`` through a temporary name."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: Path | str) -> Plan:
        """Read ``plan.json``; see :meth:`from_dict`."""
        return cls.from_dict(read_json(path, "Plan"))


def check_plan(plan: Plan, lengths: np.ndarray, num_experts: int) -> None:
    """Raise :class:`RoutePackError` naming the first broken hard constraint."""
    slots, rows, multiple = plan.topology.data_parallel_size, plan.num_rows, plan.topology.row_multiple
    if not len(plan.row_N) == len(plan.slot_N) == len(lengths):
        raise RoutePackError(f"Plan holds {len(plan.row_N)} samples, the batch {len(lengths)}.")
    lost = (plan.row_N < 0) | (plan.row_N >= rows) | (plan.slot_N < 0) | (plan.slot_N >= slots)
    if lost.any():
        raise RoutePackError(f"Sample {plan.sample_ids[lost.argmax()]} is in no cell of {rows} rows x {slots} slots.")
    cell = plan.row_N * slots + plan.slot_N
    tokens = np.bincount(cell, weights=lengths, minlength=rows * slots)
    row, slot = divmod(int(tokens.argmax()), slots)
    if tokens.max() > plan.max_tokens:
        raise RoutePackError(f"Cell (row {row}, slot {slot}) holds {int(tokens.max())} tokens, cap {plan.max_tokens}.")
    row, slot = divmod(int(tokens.argmin()), slots)
    if tokens.min() == 0:
        raise RoutePackError(f"Cell (row {row}, slot {slot}) is empty.")
    if rows % multiple:
        raise RoutePackError(f"{rows} rows are not a multiple of {multiple} (virtual pipeline).")
    if plan.placement_LE.shape[1] != num_experts:
        raise RoutePackError(f"Placement holds {plan.placement_LE.shape[1]} experts, the model {num_experts}.")
    wrong = (np.sort(plan.placement_LE, axis=1) != np.arange(num_experts)).any(axis=1)
    if wrong.any():
        raise RoutePackError(f"Placement of MoE layer {wrong.argmax()} is not a bijection of experts and slots.")

"""The result of planning one step: who goes where, what it should cost, and whether it keeps every constraint.

Invariants (``check_plan``): every sample once; every cell at most ``max_tokens`` tokens and never empty; equal rows on
every slot, a multiple of what the pipeline asks; every layer's placement a bijection, the same in every block. A plan
that was read equals, part by part, what the plan that came of it would write, whatever its hash says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from profiler import RoutePackError, Topology
from profiler.errors import explained
from profiler.files import canonical_json, content_hash, write_json
from profiler.readers import build, read_json
from search.checks import check_packing, check_placement
from search.plan_file import (
    PLAN_SCHEMA_VERSION,
    ExpertMoves,
    PlanDocument,
    PlannedModel,
    StepTime,
    packing_of,
    placement_of,
    read_document,
)


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
    model: PlannedModel
    total_tokens: int
    """Tokens of all samples; padding is not counted."""
    predicted: StepTime
    default: StepTime
    """First-fit decreasing with experts in place, priced by the same tables."""
    lower_bound_s: float
    """No plan of this batch can be faster by the same tables."""
    counters: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    moves: ExpertMoves = field(default_factory=ExpertMoves)
    """Experts to move before the step, where a previous plan was given."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Hashes of batch, tables and bundle, parameters, seed, iterations and why the search stopped."""

    @property
    def gap(self) -> float:
        """Predicted time above the lower bound, as a share of the bound; infinite where that is 0."""
        return self.predicted.step_time_s / self.lower_bound_s - 1.0 if self.lower_bound_s > 0 else math.inf

    @property
    def plan_hash(self) -> str:
        """SHA-256 of all decisions: ranks compare it before the first collective."""
        decided = {"micro_batches": self.micro_batches(), "logical_to_physical": self.placement_LE.tolist()}
        about = {"sample_ids": self.sample_ids, "topology": self.topology, "model": self.model}
        return content_hash({**decided, **about, "num_tokens": self.total_tokens, "max_tokens": self.max_tokens})

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
            "model": asdict(self.model),
            "max_tokens_per_microbatch": self.max_tokens,
            "num_microbatches": self.num_rows,
            "micro_batches": self.micro_batches(),
            "sample_ids": list(self.sample_ids),
            "packed_order": order.tolist(),
            "inverse_order": np.argsort(order).tolist(),
            "logical_to_physical": self.placement_LE.tolist(),
            "physical_to_logical": self.physical_to_logical().tolist(),
            "denominators": {"num_samples": len(self.row_N), "num_tokens": self.total_tokens},
            "gap": self.gap if math.isfinite(self.gap) else None,
            "notes": list(self.notes),
            **{name: asdict(getattr(self, name)) for name in ("topology", "predicted", "default", "moves")},
            **{name: getattr(self, name) for name in ("lower_bound_s", "counters", "provenance")},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Rebuild a plan, as sound as one that was just made.

        Raises
        ------
        RoutePackError
            If a part is missing, unknown, of another type or out of range, or two parts contradict one another.
        """
        with explained("Plan cannot be used: ", " Plan the step again."):
            found = read_document(data)
            row_N, slot_N = packing_of(found)
            plan = cls(
                row_N=row_N,
                slot_N=slot_N,
                placement_LE=placement_of(found.logical_to_physical),
                num_rows=found.num_microbatches,
                max_tokens=found.max_tokens_per_microbatch,
                total_tokens=found.denominators.num_tokens,
                **{one.name: getattr(found, one.name) for one in fields(cls) if hasattr(found, one.name)},
            )
            check_form(plan)
            own, given = (json.loads(canonical_json(dict(one))) for one in (plan.to_dict(), data))
            for name in PlanDocument.__slots__:
                if own[name] != given[name]:
                    raise RoutePackError(f"its {name} does not match the other parts: the file was edited or damaged.")
        return plan

    def save(self, path: Path | str) -> None:
        """Write ``plan.json`` through a temporary name."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: Path | str) -> Plan:
        """Read ``plan.json``; see :meth:`from_dict`."""
        return cls.from_dict(read_json(path, "Plan"))


def check_plan(plan: Plan, lengths: np.ndarray, num_experts: int) -> None:
    """Raise :class:`RoutePackError` naming the first broken hard constraint; ``lengths`` [N] include padding."""
    slots, rows = plan.topology.data_parallel_size, plan.num_rows
    if not len(plan.row_N) == len(plan.slot_N) == len(lengths):
        raise RoutePackError(f"Plan holds {len(plan.row_N)} samples, the batch {len(lengths)}.")
    check_form(plan)
    cell = plan.row_N * slots + plan.slot_N
    tokens = np.bincount(cell, weights=lengths, minlength=rows * slots)
    row, slot = divmod(int(tokens.argmax()), slots)
    if tokens.max() > plan.max_tokens:
        raise RoutePackError(f"Cell (row {row}, slot {slot}) holds {int(tokens.max())} tokens, cap {plan.max_tokens}.")
    if plan.placement_LE.shape[1] != num_experts:
        raise RoutePackError(f"Placement holds {plan.placement_LE.shape[1]} experts, the model {num_experts}.")


def check_form(plan: Plan) -> None:
    """Raise :class:`RoutePackError` where the parts of a plan contradict one another; nothing else is looked at."""
    if not isinstance(plan, Plan):
        raise RoutePackError(f"Expected a Plan, got {type(plan).__name__}. Plan.load(path) reads one.")
    _check_types(plan)
    topology, samples = plan.topology, len(plan.sample_ids)
    check_packing(plan.row_N, plan.slot_N, samples, plan.num_rows, topology.data_parallel_size)
    cells = np.zeros((plan.num_rows, topology.data_parallel_size), np.int64)
    np.add.at(cells, (plan.row_N, plan.slot_N), 1)
    row, slot = np.unravel_index(int(cells.argmin()), cells.shape)
    layers, experts = len(plan.model.moe_layers), np.shape(plan.placement_LE)[-1] if np.ndim(plan.placement_LE) else 0
    limits = {"unknown_tokens": plan.total_tokens, "unknown_samples": samples, "extrapolated_lengths": samples}
    most = cells.size * plan.max_tokens - plan.counters.get("padding_tokens", 0)
    for wrong, said in (
        (cells.min() == 0, f"Cell (row {row}, slot {slot}) is empty."),
        (
            plan.num_rows % topology.row_multiple,
            f"{plan.num_rows} rows are not a multiple of {topology.row_multiple} (virtual pipeline).",
        ),
        (len(set(plan.sample_ids)) < samples, "Two samples of the plan have the same id."),
        (
            not samples <= plan.total_tokens <= most,
            f"{plan.total_tokens} tokens are not those of {samples} samples in {cells.size} cells, "
            f"cap {plan.max_tokens}.",
        ),
        (
            experts % topology.expert_model_parallel_size,
            f"{experts} experts do not divide over expert_model_parallel_size = {topology.expert_model_parallel_size}.",
        ),
        *(
            (
                not time.is_sound,
                f"Its step time is {time.step_time_s} s, not the sum of parts that are finite and >= 0.",
            )
            for time in (plan.predicted, plan.default)
        ),
        (
            not 0 <= plan.lower_bound_s <= plan.predicted.step_time_s * (1 + 1e-9),
            f"lower_bound_s = {plan.lower_bound_s} is not between 0 and the predicted {plan.predicted.step_time_s} s.",
        ),
        *(
            (not 0 <= count <= limits.get(name, count), f"counters.{name} = {count} is not 0 to {limits.get(name)}.")
            for name, count in plan.counters.items()
        ),
        (
            plan.moves.experts and not plan.provenance.get("previous_placement_id"),
            "It moves experts, but its provenance names no previous placement.",
        ),
    ):
        if wrong:
            raise RoutePackError(said)
    check_placement(plan.placement_LE, layers, experts)
    _check_moves(plan)


def _check_types(plan: Plan) -> None:
    """Refuse parts of another type: only those that were read from a file have been through its schema."""
    counters, texts = plan.counters, (plan.sample_ids, plan.notes)
    kinds: dict[str, type] = {
        "topology": Topology,
        "model": PlannedModel,
        "predicted": StepTime,
        "default": StepTime,
        "moves": ExpertMoves,
        "num_rows": int,
        "max_tokens": int,
        "total_tokens": int,
        "lower_bound_s": float,
        "sample_ids": tuple,
        "notes": tuple,
        "counters": dict,
        "provenance": dict,
    }
    for name, kind in kinds.items():
        if type(value := getattr(plan, name)) is not kind:
            raise RoutePackError(f"Expected {name} to be of type {kind.__name__}, got {value!r:.80}.")
    for name in ("topology", "model", "predicted", "default"):
        part = getattr(plan, name)
        build(kinds[name], {one.name: getattr(part, one.name) for one in fields(part)}, name)
    if not all(type(text) is str for part in texts for text in part):
        raise RoutePackError("Expected sample_ids and notes to be text.")
    if not all(type(name) is str and type(count) is int for name, count in counters.items()):
        raise RoutePackError("Expected counters to be whole numbers by name.")


def _check_moves(plan: Plan) -> None:
    """Refuse moves that are out of range, not in order, or do not lead to the placement."""
    if not (told := plan.moves.experts):
        return
    try:
        moves = np.array(told)
    except (ValueError, OverflowError):
        moves = np.empty(0)
    if moves.ndim != 2 or moves.shape[1] != 4 or moves.dtype != np.int64:
        raise RoutePackError("Expected moves of experts to be four whole numbers each.")
    layer, expert, old, new = moves.T
    layers, experts = plan.placement_LE.shape
    wrong = (layer < 0) | (layer >= layers) | (expert < 0) | (expert >= experts) | (old < 0) | (old >= experts)
    where = np.where(wrong, 0, layer * experts + expert)
    wrong |= (plan.placement_LE.ravel()[where] != new) | (old == new) | (np.diff(where, prepend=-1) <= 0)
    if wrong.any():
        i = int(wrong.argmax())
        raise RoutePackError(
            f"The move of expert {expert[i]} in MoE layer {layer[i]} from slot {old[i]} to {new[i]} is out of range or "
            "order, or does not lead to the plan's placement."
        )
    per_rank = experts // plan.topology.expert_model_parallel_size
    away = int((old // per_rank != new // per_rank).sum())
    if not (away > 0) == (plan.moves.bytes > 0) == (plan.moves.seconds > 0):
        raise RoutePackError(
            f"{away} experts change their rank, {plan.moves.bytes} bytes, {plan.moves.seconds} s: all or none are 0."
        )

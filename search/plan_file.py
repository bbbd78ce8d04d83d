"""What ``plan.json`` holds: the parts of a plan, and its schema.

Every part checks its own range when it is made, so that what is read passes the checks of what is planned;
``search/plan.py`` checks them against one another.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from profiler import ModelSpec, RoutePackError, Topology
from profiler.files import canonical_json
from profiler.readers import build
from search.params import PlannerParams

PLAN_SCHEMA_VERSION = 2
MOST_PROVENANCE = 2**20
"""Characters that a plan's provenance may have as JSON."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Hold a predicted step time in seconds and its parts on the slowest EP block."""

    step_time_s: float
    attention_s: float
    """Attention, projections, shared experts and dense layers."""
    experts_s: float
    rest_s: float
    """Dispatch, combine and the fixed cost of rows."""

    @property
    def is_sound(self) -> bool:
        """Whether all parts are finite, none is negative, and together they are the step."""
        parts = (self.attention_s, self.experts_s, self.rest_s)
        whole = math.isclose(self.step_time_s, sum(parts), rel_tol=1e-6, abs_tol=1e-9)
        return whole and all(0 <= part < math.inf for part in parts)


@dataclass(frozen=True, slots=True)
class ExpertMoves:
    """Hold what a plan moves away from the previous placement."""

    experts: tuple[tuple[int, ...], ...] = ()
    """(MoE layer, logical expert, old physical slot, new physical slot), by layer and expert; layers count as the
    placement's rows do."""
    bytes: int = 0
    """Parameters and optimizer state that change their rank."""
    seconds: float = 0.0
    """Predicted time of the slowest pipeline stage: layer after layer, the busiest receiving rank over its link."""

    def __post_init__(self) -> None:
        if not (self.bytes >= 0 and 0 <= self.seconds < math.inf):
            raise ValueError(f"Expected moves of >= 0 bytes and seconds, got {self.bytes} and {self.seconds}.")
        if any(len(one) != 4 for one in self.experts):
            raise ValueError("Expected every move to be MoE layer, expert, old slot and new slot.")
        if not self.experts and (self.bytes or self.seconds):
            raise ValueError(f"Expected no move to be 0 bytes and seconds, got {self.bytes} and {self.seconds}.")


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """Say which model a plan is of, and which of its hidden layers the placement's are."""

    name: str
    spec_hash: str
    """:attr:`profiler.ModelSpec.spec_hash`: equal shapes, equal hash, whatever the name."""
    moe_layers: tuple[int, ...]
    """Number of each MoE layer among all hidden layers, from 0, in the order of the placement's rows."""

    def __post_init__(self) -> None:
        layers = (-1, *self.moe_layers)
        if not self.moe_layers or any(not a < b for a, b in itertools.pairwise(layers)):
            raise ValueError("Expected moe_layers to be ascending numbers of hidden layers, at least one.")
        if not re.fullmatch("[0-9a-f]{64}", self.spec_hash):
            raise ValueError(f"Expected spec_hash to be 64 hex digits, got {self.spec_hash!r:.80}.")

    @classmethod
    def of(cls, spec: ModelSpec) -> PlannedModel:
        """Return what a plan says of its model."""
        return cls(spec.name, spec.spec_hash, tuple(np.flatnonzero(spec.moe_layers).tolist()))

    def layer_words(self, layer: int) -> str:
        """Name a row of the placement: by its number among MoE layers, and among all where that is another."""
        hidden = self.moe_layers[layer]
        return f"MoE layer {layer}" + (f" (hidden layer {hidden})" if hidden != layer else "")


@dataclass(frozen=True, slots=True)
class Denominators:
    """Hold what a loss of the whole step is divided by."""

    num_samples: int
    num_tokens: int
    """Tokens of the samples; padding is not counted."""


@dataclass(frozen=True, slots=True)
class RegistryEntry:
    """Name the version of a model registry that a bundle was loaded from."""

    name: str
    version: str
    alias: str
    """Empty where the version was asked for."""


@dataclass(frozen=True, slots=True)
class PlanProvenance:
    """Hold those parts of a plan's provenance that have a meaning here; a plan may have more, for people."""

    batch_hash: str = ""
    tables_hash: str = ""
    bundle_hash: str = ""
    registry: RegistryEntry | None = None
    previous_placement_id: str | None = None
    planner: str = ""
    seed: int = 0
    params: PlannerParams = field(default_factory=PlannerParams)
    stopped_by: str = ""


@dataclass(frozen=True, slots=True)
class PlanDocument:
    """Hold the content of ``plan.json``; docs/training.md says what each part means."""

    schema_version: int
    plan_hash: str
    placement_id: str
    model: PlannedModel
    max_tokens_per_microbatch: int
    num_microbatches: int
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    sample_ids: tuple[str, ...]
    packed_order: tuple[int, ...]
    inverse_order: tuple[int, ...]
    logical_to_physical: tuple[tuple[int, ...], ...]
    physical_to_logical: tuple[tuple[int, ...], ...]
    denominators: Denominators
    gap: float | None
    notes: tuple[str, ...]
    topology: Topology
    predicted: StepTime
    default: StepTime
    moves: ExpertMoves
    lower_bound_s: float
    counters: dict[str, int]
    provenance: dict[str, Any]


def read_document(data: Any) -> PlanDocument:
    """Return the content of ``plan.json`` with every part of its type and in its range."""
    version = data.get("schema_version") if isinstance(data, Mapping) else None
    if version != PLAN_SCHEMA_VERSION or isinstance(version, bool):
        raise RoutePackError(f"it has schema_version {version!r:.80}, this version reads {PLAN_SCHEMA_VERSION}.")
    found = build(PlanDocument, data, "plan")
    _check_provenance(found.provenance)
    return found


def packing_of(found: PlanDocument) -> tuple[np.ndarray, np.ndarray]:
    """Return row and slot of every sample, [N] each: every sample in exactly one cell of an equal number of rows."""
    slots, samples = len(found.micro_batches), len(found.sample_ids)
    if slots != found.topology.data_parallel_size or {*map(len, found.micro_batches)} != {found.num_microbatches}:
        raise RoutePackError(
            f"micro_batches are not {found.topology.data_parallel_size} DP ranks of {found.num_microbatches} rows each."
        )
    placed = [
        (i, row, slot) for slot, rows in enumerate(found.micro_batches) for row, cell in enumerate(rows) for i in cell
    ]
    if sorted(i for i, _, _ in placed) != list(range(samples)):
        raise RoutePackError(f"micro_batches do not hold every one of the {samples} samples once.")
    row_N, slot_N = np.empty((2, samples), np.int64)
    for i, row, slot in placed:
        row_N[i], slot_N[i] = row, slot
    return row_N, slot_N


def placement_of(rows: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """Return the physical slot of every expert, [L, E]."""
    if len({*map(len, rows)}) != 1 or not all(0 <= slot < len(row) for row in rows for slot in row):
        raise RoutePackError("logical_to_physical has no rows, rows of unlike length, or a slot that no row has.")
    return np.array(rows, np.int64)


def _check_provenance(provenance: Mapping[str, Any]) -> None:
    """Refuse a provenance that no JSON file can hold, that is huge, or whose parts are no such."""
    try:
        size = len(canonical_json(provenance))
    except (TypeError, ValueError, RecursionError) as error:
        raise RoutePackError(f"its provenance is not plain: {error}.") from None
    if size > MOST_PROVENANCE:
        raise RoutePackError(f"its provenance has {size} characters, at most {MOST_PROVENANCE} are read.")
    known = {name: value for name, value in provenance.items() if name in PlanProvenance.__slots__}
    build(PlanProvenance, known, "provenance")

"""``planner.yaml``: its schema, and what is checked of it and the times beside it before they plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from costmodels import StepTables, tables_key
from profiler import DeviceFingerprint, ModelSpec, RoutePackError, Topology
from profiler.errors import explained
from profiler.files import canonical_json, content_hash, file_hash
from profiler.params import check_sizes
from profiler.readers import build, read_json
from search import PlannerParams
from search.checks import check_tables
from search.placement.lpt import check_nodes
from search.problem import check_padding

BUNDLE_SCHEMA_VERSION = 2
PLANNER_FILE = "planner.yaml"
TABLES_FILE = "tables.npz"
MOST_PROVENANCE = 2**22
"""Characters that a bundle's provenance may have as JSON: hashes of ten thousands of step batches fit."""


@dataclass(frozen=True, slots=True)
class CostModelFacts:
    """Hold what a bundle says of the cost model its times are from."""

    sha256: str = ""
    data_hash: str | None = None
    half_log: dict[str, float] = field(default_factory=dict)
    """90 % half-widths of the log of time, by component."""
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Hold those parts of a bundle's provenance that code reads; a bundle may have more, for people."""

    study: str = ""
    export: str = ""
    export_reason: str = ""
    trial: int | None = None
    data_hashes: dict[str, str] = field(default_factory=dict)
    cost_model: CostModelFacts = field(default_factory=CostModelFacts)
    tables_hash: str = ""
    default_params: PlannerParams = field(default_factory=PlannerParams)
    hidden_planning_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= (self.hidden_planning_s or 0) < math.inf:
            raise ValueError(f"Expected hidden_planning_s >= 0 and finite, got {self.hidden_planning_s}.")


@dataclass(frozen=True, slots=True)
class BundleDocument:
    """Hold the content of ``planner.yaml``."""

    schema_version: int
    fingerprint: DeviceFingerprint
    model: ModelSpec
    topology: Topology
    max_tokens_per_microbatch: int
    dtype: str
    """Number type of the times; empty where nobody said it."""
    params: PlannerParams
    provenance: dict[str, Any]
    notes: tuple[str, ...]
    tables_key: str
    files: dict[str, str]
    """SHA-256 of the one file beside it, by name."""
    content_hash: str


def read_bundle(folder: Path) -> tuple[BundleDocument, StepTables]:
    """Read a bundle and check it whole.

    Raises
    ------
    RoutePackError
        If a file is missing or was edited, a value is of another type or out of range, or two parts contradict one
        another, whatever the hashes say.
    """
    path, tables_path = folder / PLANNER_FILE, folder / TABLES_FILE
    if not path.is_file():
        raise RoutePackError(
            f"{folder} is no bundle: it has no {PLANNER_FILE}. Give the folder that `routepack deploy` wrote."
        )
    data = read_json(path, "Bundle file")
    version = data.get("schema_version") if isinstance(data, Mapping) else None
    with explained(f"Bundle {folder}: ", " Run `routepack deploy` again."):
        if version != BUNDLE_SCHEMA_VERSION or isinstance(version, bool):
            raise RoutePackError(f"it has schema_version {version!r:.80}, this version reads {BUNDLE_SCHEMA_VERSION}.")
        stated = {name: value for name, value in data.items() if name != "content_hash"}
        with explained(of=ValueError):
            own_hash = content_hash(stated)
        if own_hash != data.get("content_hash"):
            raise RoutePackError(
                f"{PLANNER_FILE} does not match its content_hash: it was edited. Change routepack.yaml instead."
            )
        document = build(BundleDocument, data, PLANNER_FILE)
        if not tables_path.is_file() or document.files != {TABLES_FILE: file_hash(tables_path)}:
            raise RoutePackError(
                f"{TABLES_FILE} is missing, or does not match its hash in {PLANNER_FILE}: no other file is read."
            )
        tables = StepTables.load(tables_path)
        check_parts(document, tables)
    return document, tables


def check_parts(document: BundleDocument, tables: StepTables) -> None:
    """Refuse parts of a bundle that contradict one another."""
    job = document.model, document.topology, document.max_tokens_per_microbatch
    check_job_parts(*job, document.params)
    if not tables.key == document.tables_key == tables_key(*job):
        raise RoutePackError("its tables are for another model, topology or cap. Run `routepack fit` and `tune` again.")
    check_tables(tables, *job)
    if tables.max_tokens != job[2]:
        raise RoutePackError(f"its tables are for cells of {tables.max_tokens} tokens, it states a cap of {job[2]}.")
    if document.notes != tables.notes:
        raise RoutePackError(f"its notes are not those of its {TABLES_FILE}.")
    known = used_provenance(document.provenance)
    if known.tables_hash not in ("", tables.tables_hash):
        raise RoutePackError(f"its provenance names tables {known.tables_hash[:16]}, {TABLES_FILE} holds others.")


def check_job_parts(spec: ModelSpec, topology: Topology, max_tokens: int, params: PlannerParams) -> None:
    """Refuse a model, sizes, cap and settings that do not go together."""
    with explained(of=ValueError):
        check_sizes(spec, topology)
    check_padding(params, spec)
    check_nodes(params.ranks_per_node, topology.expert_model_parallel_size)
    if not 1 <= params.sequence_alignment <= max_tokens:
        raise RoutePackError(
            f"sequence_alignment = {params.sequence_alignment} pads every sample beyond the cap of {max_tokens} tokens."
        )


def used_provenance(provenance: Mapping[str, Any]) -> Provenance:
    """Return those parts of a provenance that code reads; refuse one whose parts are no such, or that is huge."""
    if (size := len(canonical_json(provenance))) > MOST_PROVENANCE:
        raise RoutePackError(f"its provenance has {size} characters, at most {MOST_PROVENANCE} are read.")
    names = {one.name for one in fields(Provenance)}
    known = {name: value for name, value in provenance.items() if name in names}
    if isinstance(model := known.get("cost_model"), Mapping):
        known["cost_model"] = {name: value for name, value in model.items() if name in CostModelFacts.__slots__}
    return build(Provenance, known, "provenance")

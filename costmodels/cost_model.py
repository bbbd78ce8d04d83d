"""The cost model as an artifact: a folder of text trees, JSON and arrays, and the prices asked of it.

Folder: ``costmodel.json`` (what was fitted, from what, how wrong), ``residuals/*.npz`` (per operation and direction:
LightGBM's text format as bytes, which shrink to a third there, and everything else as plain arrays, no pickle; a prior
lies whole inside), ``tables.npz`` (all that planning loads). What is read back predicts the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from costmodels.learned.files import Entry, load_model, save_model
from costmodels.learned.predictor import OperationModel
from costmodels.learned.validation import HeldOut
from costmodels.operations import DIRECTIONS
from costmodels.operations.backward import BACKWARD
from costmodels.params import FitParams
from costmodels.tables import StepTables
from profiler import DeviceFingerprint, ModelSpec, RoutePackError, Topology
from profiler.errors import explained
from profiler.files import content_hash, write_json
from profiler.params import MOST_TOKENS, check_number, check_sizes
from profiler.places import new_folder, read_folder
from profiler.readers import build, read_json

SCHEMA_VERSION = 4
COST_MODEL_FILE, TABLES_FILE = "costmodel.json", "tables.npz"
PLAIN = ("topology", "max_tokens", "data_hash", "provenance", "table_errors", "doubts")
"""Fields of a cost model that its header holds as they are."""
SYMMETRIC = ("alltoall", "transfer")
"""Operations that cost the same in both directions."""


def tables_key(spec: ModelSpec, topology: Topology, max_tokens: int) -> str:
    """Return the hash of what frozen tables are for: model shape, topology and token cap."""
    return content_hash({"model": spec.spec_hash, "topology": asdict(topology), "max_tokens": int(max_tokens)})


def cost_model_folder(folder: Path | str) -> Path:
    """Return the folder of a cost model as a path; RoutePackError where there is none."""
    if not (Path(folder) / COST_MODEL_FILE).is_file():
        raise RoutePackError(f"Cost model not found: {folder} holds no {COST_MODEL_FILE}. Run `routepack fit` first.")
    return Path(folder)


@dataclass(frozen=True)
class Header:
    """What ``costmodel.json`` says."""

    schema_version: int
    fingerprint: DeviceFingerprint
    model: ModelSpec
    topology: Topology
    params: FitParams
    max_tokens: int
    data_hash: str
    provenance: list[Any]
    table_errors: dict[str, dict[str, float]]
    doubts: tuple[str, ...]
    notes: tuple[str, ...]
    tables_hash: str
    operations: dict[str, Entry]

    def __post_init__(self) -> None:
        check_sizes(self.model, self.topology)
        check_number("max_tokens", self.max_tokens, 1, MOST_TOKENS, whole=True)
        for name, entry in self.operations.items():
            if name != f"{entry.operation}-{entry.direction}":
                raise ValueError(f"entry {name!r:.60} is of {entry.operation!r:.60} {entry.direction}")


def read_header(folder: Path | str) -> Header:
    """Return what a cost model's ``costmodel.json`` says; RoutePackError where it is missing, damaged or of another
    schema."""
    folder = cost_model_folder(folder)
    found = read_json(folder / COST_MODEL_FILE, "Cost model")
    version = found.get("schema_version") if isinstance(found, dict) else None
    if version != SCHEMA_VERSION:
        raise RoutePackError(
            f"Cost model {folder} has schema_version {version!r:.40}, this version reads {SCHEMA_VERSION}. "
            "Run `routepack fit` again, or update routepack-tune."
        )
    with explained(after=" Run `routepack fit` again."):
        return build(Header, found, f"Cost model {folder} is damaged")


def tables_for(folder: Path | str, spec: ModelSpec, topology: Topology, max_tokens: int) -> StepTables:
    """Return the frozen tables of a cost model's folder; needs no library that fitting does.

    Raises
    ------
    RoutePackError
        If they are missing, damaged, or were frozen for another model, topology or token cap.
    """
    header, path = read_header(folder), Path(folder) / TABLES_FILE
    tables = StepTables.load(path)
    if tables.tables_hash != header.tables_hash:
        raise RoutePackError(f"{path} is of another fit than its {COST_MODEL_FILE}. Run `routepack fit` again.")
    if tables.key != tables_key(spec, topology, max_tokens):
        fitted = _summary(header.model.name, asdict(header.topology), header.max_tokens)
        asked = _summary(spec.name, asdict(topology), max_tokens)
        raise RoutePackError(
            f"Cost model {folder} was fitted for {fitted}; the configuration asks {asked}. Run `routepack fit` again."
        )
    return tables


def _summary(model: str, topology: Mapping[str, int], max_tokens: int) -> str:
    sizes = ", ".join(f"{name} {value}" for name, value in topology.items() if value != 1)
    return f"{model} with {sizes or 'all parallel sizes 1'}, cap {max_tokens} tokens"


@dataclass
class CostModel:
    """Hold one fitted model per operation and direction, and the tables frozen from them."""

    models: dict[tuple[str, str], OperationModel]
    params: FitParams
    fingerprint: DeviceFingerprint
    spec: ModelSpec
    topology: Topology
    max_tokens: int
    data_hash: str
    provenance: list[Any]
    parity: dict[str, HeldOut] = field(default_factory=dict)
    """What the validation predicted, of a model that was just fitted: it is not saved."""
    tables: StepTables | None = None
    table_errors: dict[str, Any] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()
    """Why the measurements themselves are not to be trusted, one sentence each."""

    @property
    def validation(self) -> dict[str, Any]:
        """Errors of every operation and direction on held-out rows, and of the frozen tables: ready for JSON."""
        found = {f"{name}/{direction}": model.validation for (name, direction), model in self.models.items()}
        return {**found, "tables": self.table_errors}

    def backward_ratio(self, op: str, features: Mapping[str, Any]) -> Any:
        """Return the assumed backward over forward time of every row, for operations of which backward was not timed.

        The settings' own number, else by length, head width and kind for attention cores.
        """
        if op in SYMMETRIC:
            return 1.0
        if op not in BACKWARD:
            return self.params.gemm_backward_factor
        return self.params.attention_backward_factor or BACKWARD[op](features)

    def predict_us(self, op: str, direction: str, features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return microseconds and a mark per row: whether it lies outside what was timed."""
        model = self._model_of(op, direction)
        time_us, extrapolated = model.predict_us(features)
        return time_us * (1.0 if model.direction == direction else self.backward_ratio(op, features)), extrapolated

    def floor_us(self, op: str, direction: str, features: Mapping[str, Any]) -> float:
        """Return the time of one call with nothing to do, microseconds."""
        model = self._model_of(op, direction)
        shortest = {**features, **dict.fromkeys(("tokens", "pairs", "num_sequences", "max_length"), 1)}
        ratio = 1.0 if model.direction == direction else self.backward_ratio(op, shortest)
        return float(model.floor_us(features) * ratio)

    def _model_of(self, op: str, direction: str) -> OperationModel:
        """Return the model that prices an operation in a direction; forward's where backward was not measured."""
        if direction not in DIRECTIONS:
            raise RoutePackError(f"Unknown direction {direction!r}: give 'forward' or 'backward'.")
        found = self.models.get((op, direction)) or self.models.get((op, "forward"))
        if found is None:
            known = ", ".join(sorted({name for name, _ in self.models}))
            raise RoutePackError(f"This cost model has no times of {op!r} (it has {known}). Measure it and fit again.")
        return found

    def save(self, folder: Path | str) -> None:
        """Write the folder whole, in place of an older one."""
        if (tables := self.tables) is None:
            raise ValueError("Expected a cost model with frozen tables; set `tables` to what `freeze_tables` returns.")
        with new_folder(folder) as new:
            header = {
                "schema_version": SCHEMA_VERSION,
                "fingerprint": self.fingerprint.to_dict(),
                "model": self.spec,
                **{name: getattr(self, name) for name in ("params", *PLAIN)},
                "notes": tables.notes,
                "tables_hash": tables.tables_hash,
                "operations": {
                    f"{name}-{direction}": save_model(new, m) for (name, direction), m in self.models.items()
                },
            }
            tables.save(new / TABLES_FILE)
            write_json(new / COST_MODEL_FILE, header)

    @classmethod
    def load(cls, folder: Path | str) -> CostModel:
        """Read what :meth:`save` wrote.

        Raises
        ------
        RoutePackError
            If a file is missing, damaged, changed since it was written, or of a newer schema.
        """
        return read_folder(folder, lambda: cls._load(Path(folder)))

    @classmethod
    def _load(cls, folder: Path) -> CostModel:
        header = read_header(folder)
        with explained(f"Cost model {folder} is damaged: ", ". Run `routepack fit` again.", of=ValueError):
            models = [load_model(folder, entry) for entry in header.operations.values()]
            if not models:
                raise ValueError("it holds no operation")
        tables = tables_for(folder, header.model, header.topology, header.max_tokens)
        return cls(
            models={(model.operation.name, model.direction): model for model in models},
            spec=header.model,
            tables=tables,
            **{name: getattr(header, name) for name in ("fingerprint", "params", *PLAIN)},
        )

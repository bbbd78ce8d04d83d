"""The cost model as an artifact: a folder of text trees, JSON and arrays, and the prices asked of it.

Folder: ``costmodel.json`` (what was fitted, from what, how wrong), ``residuals/*.npz`` (per operation and direction:
LightGBM's text format as bytes, curves as plain arrays, no pickle), ``tables.npz`` (all that
planning loads), ``parity.npz`` (true and predicted times of held-out rows, for pictures).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from costmodels.learned.files import load_model, save_model
from costmodels.learned.predictor import OperationModel
from costmodels.learned.validation import HeldOut
from costmodels.params import FitParams
from costmodels.tables import StepTables, npz_bytes
from profiler import DeviceFingerprint, ModelSpec, RoutePackError, Topology
from profiler.files import content_hash, new_folder, read_json, write_bytes, write_json

SCHEMA_VERSION = 2
COST_MODEL_FILE, TABLES_FILE = "costmodel.json", "tables.npz"
SYMMETRIC = ("alltoall", "transfer")
"""Operations that cost the same in both directions."""


def tables_key(spec: ModelSpec, topology: Topology, max_tokens: int) -> str:
    """Return the hash of what frozen tables are for: model shape, topology and token cap."""
    return content_hash({"model": spec.spec_hash, "topology": asdict(topology), "max_tokens": int(max_tokens)})


def tables_for(folder: Path | str, spec: ModelSpec, topology: Topology, max_tokens: int) -> StepTables:
    """Return the frozen tables of a cost model's folder; needs numpy and numba alone.

    Raises
    ------
    RoutePackError
        If they are missing, damaged, or were frozen for another model, topology or token cap.
    """
    tables = StepTables.load(Path(folder) / TABLES_FILE)
    if tables.key != tables_key(spec, topology, max_tokens):
        fitted = "another model, topology or token cap"
        path = Path(folder) / COST_MODEL_FILE
        if path.is_file():
            header = read_json(path, "Cost model")
            fitted = _summary(header["model"]["name"], header["topology"], header["max_tokens"])
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
    tables: StepTables | None = None
    table_errors: dict[str, Any] = field(default_factory=dict)

    @property
    def validation(self) -> dict[str, Any]:
        """Errors of every operation and direction on held-out rows, and of the frozen tables: ready for JSON."""
        found: dict[str, Any] = {
            f"{name}/{direction}": {
                "kind": model.kind,
                "rows": model.rows,
                "flagged_rows": model.flagged_rows,
                "reasons": list(model.reasons),
                "mixes": {regime: list(mix) for regime, mix in model.mixes.items()},
                **model.validation,
            }
            for (name, direction), model in self.models.items()
        }
        return {**found, "tables": self.table_errors}

    def backward_factor(self, op: str) -> float | None:
        """Return the assumed backward over forward factor, None where backward was measured."""
        if (op, "backward") in self.models:
            return None
        if op in SYMMETRIC:
            return 1.0
        return self.params.attention_backward_factor if op.endswith("attention") else self.params.gemm_backward_factor

    def predict_us(self, op: str, direction: str, features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return microseconds and a mark per row: whether it lies outside what was timed.

        Raises
        ------
        RoutePackError
            If the operation was not measured, or a feature is missing, unknown, not finite or not positive.
        """
        model, factor = self.model_of(op, direction)
        time_us, extrapolated = model.predict_us(features)
        return time_us * factor, extrapolated

    def floor_us(self, op: str, direction: str, features: Mapping[str, Any]) -> float:
        """Return the time of one call with nothing to do, microseconds."""
        model, factor = self.model_of(op, direction)
        return model.floor_us(features) * factor

    def model_of(self, op: str, direction: str) -> tuple[OperationModel, float]:
        """Return the model that prices an operation in a direction, and the factor on its times."""
        if direction not in ("forward", "backward"):
            raise RoutePackError(f"Unknown direction {direction!r}: give 'forward' or 'backward'.")
        model = self.models.get((op, direction))
        if model is not None:
            return model, 1.0
        forward = self.models.get((op, "forward"))
        if forward is None:
            known = ", ".join(sorted({name for name, _ in self.models}))
            raise RoutePackError(f"This cost model has no times of {op!r} (it has {known}). Measure it and fit again.")
        return forward, self.backward_factor(op) or 1.0

    def save(self, folder: Path | str) -> None:
        """Write the folder whole, in place of an older one.

        Raises
        ------
        ValueError
            If no tables were frozen for it.
        """
        if (tables := self.tables) is None:
            raise ValueError("Expected a cost model with frozen tables; set `tables` to what `freeze_tables` returns.")
        with new_folder(folder) as new:
            entries = {f"{name}-{direction}": save_model(new, m) for (name, direction), m in self.models.items()}
            tables.save(new / TABLES_FILE)
            write_bytes(new / "parity.npz", npz_bytes(_parity_arrays(self.parity)))
            header = {
                "schema_version": SCHEMA_VERSION,
                "fingerprint": self.fingerprint.to_dict(),
                "model": asdict(self.spec),
                "topology": asdict(self.topology),
                "max_tokens": self.max_tokens,
                "params": asdict(self.params),
                "data_hash": self.data_hash,
                "provenance": self.provenance,
                "backward": {op: _backward_note(self, op) for op in sorted({name for name, _ in self.models})},
                "notes": list(tables.notes),
                "table_errors": self.table_errors,
                "tables_hash": tables.tables_hash,
                "operations": entries,
            }
            write_json(new / COST_MODEL_FILE, header)

    @classmethod
    def load(cls, folder: Path | str) -> CostModel:
        """Read what :meth:`save` wrote.

        Raises
        ------
        RoutePackError
            If a file is missing, damaged, changed since it was written, or of a newer schema.
        """
        folder = Path(folder)
        header = read_json(folder / COST_MODEL_FILE, "Cost model")
        version = header.get("schema_version") if isinstance(header, dict) else None
        if version != SCHEMA_VERSION:
            raise RoutePackError(
                f"Cost model {folder} has schema_version {version}, this version reads {SCHEMA_VERSION}. "
                "Run `routepack fit` again, or update routepack-tune."
            )
        try:
            models = [load_model(folder, entry) for entry in header["operations"].values()]
            return cls(
                models={(model.operation.name, model.direction): model for model in models},
                params=FitParams(**header["params"]),
                fingerprint=DeviceFingerprint.from_dict(header["fingerprint"]),
                spec=ModelSpec(**header["model"]),
                topology=Topology(**header["topology"]),
                max_tokens=header["max_tokens"],
                data_hash=header["data_hash"],
                provenance=header["provenance"],
                tables=StepTables.load(folder / TABLES_FILE),
                table_errors=header["table_errors"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RoutePackError(f"Cost model {folder} is damaged: {error}. Run `routepack fit` again.") from None


def _backward_note(model: CostModel, op: str) -> str:
    factor = model.backward_factor(op)
    if factor is None:
        return "measured"
    return "as forward (symmetry)" if op in SYMMETRIC else f"assumed: forward times {factor:g}"


def _parity_arrays(parity: Mapping[str, HeldOut]) -> dict[str, np.ndarray]:
    arrays = {}
    for name, held_out in parity.items():
        arrays[f"{name}_true_us"] = held_out.true_us
        arrays[f"{name}_predicted_us"] = held_out.model_us
        arrays[f"{name}_baseline_us"] = held_out.baseline_us
    return arrays

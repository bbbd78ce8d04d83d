"""The cost model as an artifact: a folder of text trees, JSON and arrays, and the prices asked of it.

Folder: ``costmodel.json`` (what was fitted, from what, how wrong), ``residuals/*.npz`` (per operation and direction:
LightGBM's text format as bytes, which shrink to a third there, and everything else as plain arrays, no pickle; a prior
lies whole inside), ``tables.npz`` (all that planning loads). What is read back predicts the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from costmodels.learned.curves import Curves
from costmodels.learned.predictor import OperationModel, Prior
from costmodels.learned.residual import Residual
from costmodels.learned.smooth import Kernel
from costmodels.learned.trees import Trees
from costmodels.learned.validation import HeldOut, Intervals
from costmodels.operations import DIRECTIONS, OPERATIONS
from costmodels.operations.backward import BACKWARD
from costmodels.params import FitParams
from costmodels.tables import StepTables, npz_bytes
from profiler import DeviceFingerprint, ModelSpec, RoutePackError, Topology
from profiler.files import content_hash, file_hash, new_folder, write_bytes, write_json
from profiler.params import check_sizes
from profiler.readers import read_json, read_npz

SCHEMA_VERSION = 3
COST_MODEL_FILE, TABLES_FILE = "costmodel.json", "tables.npz"
PLAIN = ("max_tokens", "data_hash", "provenance", "table_errors", "doubts")
PLAIN_MODEL = ("direction", "empty_us", "rows", "flagged_rows", "reasons", "validation", "mixes")
PLAIN_PRIOR = ("name", "data_hash", "parameters", "seen_share", "unseen_share")
"""Fields of a cost model, an operation's model and a prior that are JSON as they are."""
MEMBERS: dict[str, type[Any]] = {"smooth": Kernel, "trees": Trees, "curve": Curves}
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


def tables_for(folder: Path | str, spec: ModelSpec, topology: Topology, max_tokens: int) -> StepTables:
    """Return the frozen tables of a cost model's folder; needs numpy and numba alone.

    Raises
    ------
    RoutePackError
        If they are missing, damaged, or were frozen for another model, topology or token cap.
    """
    tables = StepTables.load(cost_model_folder(folder) / TABLES_FILE)
    if tables.key != tables_key(spec, topology, max_tokens):
        header = read_json(Path(folder) / COST_MODEL_FILE, "Cost model")
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
                **{name: getattr(self, name) for name in ("topology", "params", *PLAIN)},
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
        folder = cost_model_folder(folder)
        header = read_json(folder / COST_MODEL_FILE, "Cost model")
        version = header.get("schema_version") if isinstance(header, dict) else None
        if version != SCHEMA_VERSION:
            raise RoutePackError(
                f"Cost model {folder} has schema_version {version}, this version reads {SCHEMA_VERSION}. "
                "Run `routepack fit` again, or update routepack-tune."
            )
        try:
            models = [load_model(folder, entry) for entry in header["operations"].values()]
            check_sizes(ModelSpec(**header["model"]), Topology(**header["topology"]))
            return cls(
                models={(model.operation.name, model.direction): model for model in models},
                params=FitParams(**header["params"]),
                fingerprint=DeviceFingerprint.from_dict(header["fingerprint"]),
                spec=ModelSpec(**header["model"]),
                topology=Topology(**header["topology"]),
                tables=StepTables.load(folder / TABLES_FILE),
                **{name: header[name] for name in PLAIN} | {"doubts": tuple(header["doubts"])},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RoutePackError(f"Cost model {folder} is damaged: {error}. Run `routepack fit` again.") from None


def save_model(folder: Path, model: OperationModel) -> dict[str, Any]:
    """Write the arrays of one operation's model, and return its entry, ready for JSON."""
    arrays: dict[str, np.ndarray] = {}
    entry = _model_entry(model, "", arrays)
    if arrays:
        name = f"residuals/{model.operation.name}-{model.direction}.npz"
        write_bytes(folder / name, npz_bytes(arrays))
        entry |= {"file": name, "sha256": file_hash(folder / name)}
    return entry


def load_model(folder: Path, entry: Mapping[str, Any]) -> OperationModel:
    """Read what :func:`save_model` wrote; ValueError where the entry is of an operation unlike this version's."""
    if "file" not in entry:
        return _model(entry, "", {})
    path = folder / entry["file"]
    if not path.is_file():
        raise RoutePackError(f"Cost model {folder} lacks {entry['file']}. Run `routepack fit` again.")
    if file_hash(path) != entry["sha256"]:
        raise RoutePackError(f"{path} was changed after it was written. Run `routepack fit` again.")
    return _model(entry, "", read_npz(path, "Residual"))


def _model_entry(model: OperationModel, where: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    operation, prior = model.operation, model.prior
    units = {name: parameter.unit for name, parameter in operation.parameters.items()}
    entry: dict[str, Any] = {
        "operation": operation.name,
        "kind": model.kind,
        "features": dict(operation.features),
        "shape": list(operation.shape),
        "shapes": [{"shape": shape, "ranges": ranges} for shape, ranges in model.shapes.items()],
        "baseline": {name: {"value": model.parameters[name], "unit": unit} for name, unit in units.items()},
        **{name: getattr(model, name) for name in PLAIN_MODEL},
        "intervals": None if model.intervals is None else asdict(model.intervals),
        "known": _residual_entry(model.known, f"{where}known.", arrays),
        "unseen": _residual_entry(model.unseen, f"{where}unseen.", arrays),
    }
    if prior is not None:
        entry["prior"] = {
            **{name: getattr(prior, name) for name in PLAIN_PRIOR},
            "discrepancy": _residual_entry(prior.discrepancy, f"{where}discrepancy.", arrays),
            "source": _model_entry(prior.source, f"{where}prior.", arrays),
        }
    return entry


def _model(entry: Mapping[str, Any], where: str, arrays: Mapping[str, np.ndarray]) -> OperationModel:
    operation = OPERATIONS.get(entry["operation"])
    if operation is None:
        raise ValueError(f"operation {entry['operation']!r} is unknown to this version")
    ours = {"features": operation.features, "shape": operation.shape, "baseline": operation.parameters}
    for what, names in ours.items():
        if list(entry[what]) != list(names):
            raise ValueError(f"{what} of {operation.name} are {list(entry[what])}, this version has {list(names)}")
    prior = None
    if item := entry.get("prior"):
        source = _model(item["source"], f"{where}prior.", arrays)
        if source.operation is not operation:
            raise ValueError(f"the prior of {operation.name} is a model of {source.operation.name}")
        discrepancy = _residual(item["discrepancy"], f"{where}discrepancy.", arrays)
        prior = Prior(source, discrepancy=discrepancy, **{name: item[name] for name in PLAIN_PRIOR})
    plain = {name: entry[name] for name in PLAIN_MODEL}
    plain |= {"reasons": tuple(entry["reasons"]), "mixes": {name: tuple(mix) for name, mix in entry["mixes"].items()}}
    return OperationModel(
        operation=operation,
        parameters={name: item["value"] for name, item in entry["baseline"].items()},
        shapes={tuple(item["shape"]): item["ranges"] for item in entry["shapes"]},
        known=_residual(entry["known"], f"{where}known.", arrays),
        unseen=_residual(entry["unseen"], f"{where}unseen.", arrays),
        prior=prior,
        intervals=entry["intervals"] and Intervals(**{name: tuple(v) for name, v in entry["intervals"].items()}),
        **plain,
    )


def _residual_entry(residual: Residual, where: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Add the arrays and texts of a residual's members to ``arrays``, and return everything else."""
    entry: dict[str, Any] = {"scale": residual.scale}
    for role in MEMBERS:
        if (member := getattr(residual, role)) is not None:
            entry[role] = {}
            for name in (one.name for one in fields(member)):
                value = getattr(member, name)
                if isinstance(value, str):
                    value = np.frombuffer(value.encode(), dtype=np.uint8)
                if isinstance(value, np.ndarray):
                    arrays[f"{where}{role}.{name}"] = value
                else:
                    entry[role][name] = value
    return entry


def _residual(entry: Mapping[str, Any], where: str, arrays: Mapping[str, np.ndarray]) -> Residual:
    found: dict[str, Any] = {"scale": entry["scale"]}
    for role, kind in MEMBERS.items():
        if role in entry:
            values = {name: tuple(v) if isinstance(v, list) else v for name, v in entry[role].items()}
            for name in (one.name for one in fields(kind) if one.name not in values):
                array = arrays[f"{where}{role}.{name}"]
                values[name] = array.tobytes().decode() if array.dtype == np.uint8 else array
            found[role] = kind(**values)
    return Residual(**found)

"""One operation's model as files: an entry of ``costmodel.json`` and an ``.npz`` of plain arrays beside it.

LightGBM's text lies in the ``.npz`` as bytes: it shrinks to a third there. What is read back predicts the same bits.
The model of a sibling GPU that a model rests on lies whole inside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from costmodels.learned.curves import Curves
from costmodels.learned.intervals import Intervals
from costmodels.learned.predictor import OperationModel, Prior
from costmodels.learned.residual import Residual
from costmodels.learned.smooth import Kernel
from costmodels.learned.trees import Trees
from costmodels.operations.catalog import OPERATIONS
from costmodels.tables import npz_bytes, read_npz
from profiler import RoutePackError
from profiler.files import file_hash, write_bytes

MEMBERS: dict[str, type[Any]] = {"smooth": Kernel, "trees": Trees, "curve": Curves}
PLAIN = ("direction", "empty_us", "rows", "flagged_rows", "reasons", "validation", "mixes")
"""Fields of a model that are JSON as they are."""
PLAIN_PRIOR = ("name", "data_hash", "parameters", "seen_share", "unseen_share")


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
    """Read what :func:`save_model` wrote.

    Raises
    ------
    RoutePackError
        If a file is missing or was changed.
    ValueError
        If the entry, or its prior's, is of another operation or of features that this version does not have.
    """
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
        **{name: getattr(model, name) for name in PLAIN},
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
    plain = {name: entry[name] for name in PLAIN}
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

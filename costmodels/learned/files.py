"""One operation's model as files: an entry of ``costmodel.json`` and an ``.npz`` of plain arrays beside it.

LightGBM's text lies in the ``.npz`` as bytes: it shrinks to a third there. What is read back predicts the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from costmodels.features import Operation
from costmodels.learned.curves import Curves
from costmodels.learned.intervals import Intervals
from costmodels.learned.predictor import OperationModel, Overrides
from costmodels.learned.smooth import Kernel
from costmodels.learned.trees import Trees
from costmodels.operations.catalog import OPERATIONS
from costmodels.tables import npz_bytes, read_npz
from profiler import RoutePackError
from profiler.files import file_hash, write_bytes

Arrays = dict[str, np.ndarray]


def save_model(folder: Path, model: OperationModel) -> dict[str, Any]:
    """Write the arrays of one operation's model below ``folder`` and return its entry, ready for JSON."""
    operation = model.operation
    entry: dict[str, Any] = {
        "operation": operation.name,
        "direction": model.direction,
        "kind": model.kind,
        "rows": model.rows,
        "flagged_rows": model.flagged_rows,
        "reasons": list(model.reasons),
        "features": dict(operation.features),
        "shape": list(operation.shape),
        "shapes": [{"shape": list(shape), "ranges": dict(ranges)} for shape, ranges in model.shapes.items()],
        "baseline": {
            name: {"value": model.parameters[name], "unit": parameter.unit}
            for name, parameter in operation.parameters.items()
        },
        "empty_us": model.empty_us,
        "mixes": {regime: list(mix) for regime, mix in model.mixes.items()},
        "intervals": None if model.intervals is None else model.intervals.to_json(),
        "validation": model.validation,
        "members": {},
    }
    arrays: Arrays = {}
    for role, trees in (("seen", model.seen), ("unseen", model.unseen)):
        if trees is not None:
            arrays[f"{role}_text"] = _bytes(trees.text)
            arrays[f"{role}_linear_text"] = _bytes(trees.linear_text)
            arrays[f"{role}_limits"] = np.array(trees.limits)
            entry["members"][role] = {"inputs": list(trees.names)}
    for role, kernel in (("smooth", model.smooth), ("unseen_smooth", model.unseen_smooth)):
        if kernel is not None:
            arrays |= {f"{role}_{name}": getattr(kernel, name) for name in KERNEL_ARRAYS}
            arrays[f"{role}_limits"] = np.array(kernel.limits)
            entry["members"][role] = {
                "inputs": list(kernel.names), "radial": kernel.radial, "length": kernel.length, "offset": kernel.offset,
            }  # fmt: skip
    for role, held in (("curves", model.curves), ("overrides", model.overrides)):
        if held is not None:
            arrays |= {f"{role}_{one.name}": getattr(held, one.name) for one in fields(held)}
            entry["members"][role] = {}
    if arrays:
        name = f"residuals/{operation.name}-{model.direction}.npz"
        write_bytes(folder / name, npz_bytes(arrays))
        entry |= {"file": name, "sha256": file_hash(folder / name)}
    return entry


KERNEL_ARRAYS = ("centre", "scale", "points", "weights", "slope")


def load_model(folder: Path, entry: Mapping[str, Any]) -> OperationModel:
    """Read what :func:`save_model` wrote.

    Raises
    ------
    RoutePackError
        If a file is missing or was changed.
    ValueError
        If the entry is of an operation, or of features, that this version does not have.
    """
    operation = OPERATIONS.get(entry["operation"])
    if operation is None:
        raise ValueError(f"operation {entry['operation']!r} is unknown to this version")
    _check_names(operation, entry)
    arrays = _arrays(folder, entry) if "file" in entry else {}
    members = entry["members"]
    trees = {role: _trees(arrays, role, members[role]) for role in ("seen", "unseen") if role in members}
    kernels = {role: _kernel(arrays, role, members[role]) for role in ("smooth", "unseen_smooth") if role in members}
    return OperationModel(
        operation=operation,
        direction=entry["direction"],
        parameters={name: item["value"] for name, item in entry["baseline"].items()},
        seen=trees.get("seen"),
        unseen=trees.get("unseen"),
        shapes={
            tuple(item["shape"]): {name: (low, high) for name, (low, high) in item["ranges"].items()}
            for item in entry["shapes"]
        },
        empty_us=entry["empty_us"],
        rows=entry["rows"],
        flagged_rows=entry["flagged_rows"],
        reasons=tuple(entry["reasons"]),
        validation=entry["validation"],
        smooth=kernels.get("smooth"),
        unseen_smooth=kernels.get("unseen_smooth"),
        curves=_held(Curves, arrays, "curves") if "curves" in members else None,
        mixes={regime: tuple(mix) for regime, mix in entry["mixes"].items()},
        intervals=None if entry["intervals"] is None else Intervals.from_json(entry["intervals"]),
        overrides=_held(Overrides, arrays, "overrides") if "overrides" in members else None,
    )


def _check_names(operation: Operation, entry: Mapping[str, Any]) -> None:
    for what, stored, expected in (
        ("features", list(entry["features"]), list(operation.features)),
        ("shape", entry["shape"], list(operation.shape)),
        ("baseline", list(entry["baseline"]), list(operation.parameters)),
    ):
        if stored != expected:
            raise ValueError(f"{what} of {operation.name} are {stored}, this version has {expected}")


def _arrays(folder: Path, entry: Mapping[str, Any]) -> Arrays:
    path = folder / entry["file"]
    if not path.is_file():
        raise RoutePackError(f"Cost model {folder} lacks {entry['file']}. Run `routepack fit` again.")
    if file_hash(path) != entry["sha256"]:
        raise RoutePackError(f"{path} was changed after it was written. Run `routepack fit` again.")
    return read_npz(path, "Residual")


def _trees(arrays: Arrays, role: str, item: Mapping[str, Any]) -> Trees:
    low, high = arrays[f"{role}_limits"].tolist()
    text, linear_text = (arrays[f"{role}_{name}"].tobytes().decode("utf-8") for name in ("text", "linear_text"))
    return Trees(tuple(item["inputs"]), text, linear_text, (low, high))


def _kernel(arrays: Arrays, role: str, item: Mapping[str, Any]) -> Kernel:
    low, high = arrays[f"{role}_limits"].tolist()
    plain = {name: arrays[f"{role}_{name}"] for name in KERNEL_ARRAYS}
    return Kernel(
        names=tuple(item["inputs"]), radial=item["radial"], length=item["length"], offset=item["offset"],
        limits=(low, high), **plain,
    )  # fmt: skip


def _held(kind: type[Any], arrays: Arrays, role: str) -> Any:
    return kind(**{one.name: arrays[f"{role}_{one.name}"] for one in fields(kind)})


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

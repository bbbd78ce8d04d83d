"""One operation's model as files: an entry of ``costmodel.json`` and an ``.npz`` of plain arrays beside it.

LightGBM's text lies in the ``.npz`` as bytes: it shrinks to a third there. What is read back predicts the same bits.
The model of a sibling GPU that a model rests on is saved whole, in a folder below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from costmodels.features import Operation
from costmodels.learned.curves import Curves
from costmodels.learned.intervals import Intervals
from costmodels.learned.predictor import OperationModel, Predictor
from costmodels.learned.prior import Prior, TransferredModel
from costmodels.learned.residual import Residual
from costmodels.learned.smooth import Kernel
from costmodels.learned.trees import Trees
from costmodels.operations.catalog import OPERATIONS
from costmodels.tables import npz_bytes, read_npz
from profiler import RoutePackError
from profiler.files import file_hash, write_bytes

Arrays = dict[str, np.ndarray]
PRIOR_FOLDER = "prior"
TEXTS = ("text", "linear_text")
"""Fields of trees that lie among the arrays."""
KINDS: dict[str, type[Any]] = {
    "seen": Trees,
    "unseen": Trees,
    "smooth": Kernel,
    "unseen_smooth": Kernel,
    "curves": Curves,
    "discrepancy_smooth": Kernel,
    "discrepancy_trees": Trees,
}
"""Members by their role."""


def save_model(folder: Path, model: Predictor) -> dict[str, Any]:
    """Write the arrays of one operation's model, and of a prior it rests on, and return its entry, ready for JSON."""
    own, operation = model.own, model.own.operation
    arrays: Arrays = {}
    members = {
        role: _put(arrays, role, getattr(own, role))
        for role in ("seen", "unseen", "smooth", "unseen_smooth", "curves")
        if getattr(own, role) is not None
    }
    entry: dict[str, Any] = {
        "operation": operation.name,
        "direction": own.direction,
        "kind": model.kind,
        "rows": own.rows,
        "flagged_rows": own.flagged_rows,
        "reasons": list(model.reasons),
        "features": dict(operation.features),
        "shape": list(operation.shape),
        "shapes": [{"shape": list(shape), "ranges": dict(ranges)} for shape, ranges in own.shapes.items()],
        "baseline": {
            name: {"value": own.parameters[name], "unit": parameter.unit}
            for name, parameter in operation.parameters.items()
        },
        "empty_us": own.empty_us,
        "mixes": {regime: list(mix) for regime, mix in own.mixes.items()},
        "intervals": None if model.intervals is None else asdict(model.intervals),
        "validation": model.validation,
        "members": members,
    }
    if isinstance(model, TransferredModel):
        entry["prior"] = _save_prior(folder, model.prior, arrays)
    if arrays:
        name = f"residuals/{operation.name}-{own.direction}.npz"
        write_bytes(folder / name, npz_bytes(arrays))
        entry |= {"file": name, "sha256": file_hash(folder / name)}
    return entry


def _save_prior(folder: Path, prior: Prior, arrays: Arrays) -> dict[str, Any]:
    found = prior.discrepancy
    parts = {"discrepancy_smooth": found.smooth, "discrepancy_trees": found.trees}
    return {
        "name": prior.name,
        "data_hash": prior.data_hash,
        "parameters": dict(prior.parameters),
        "seen_share": prior.seen_share,
        "unseen_share": prior.unseen_share,
        "source": save_model(folder / PRIOR_FOLDER, prior.source),
        "scale": found.scale,
        "members": {role: _put(arrays, role, part) for role, part in parts.items() if part is not None},
    }


def load_model(folder: Path, entry: Mapping[str, Any]) -> Predictor:
    """Read what :func:`save_model` wrote.

    Raises
    ------
    RoutePackError
        If a file is missing or was changed.
    ValueError
        If the entry, or its prior's, is of another operation or of features that this version does not have.
    """
    operation = OPERATIONS.get(entry["operation"])
    if operation is None:
        raise ValueError(f"operation {entry['operation']!r} is unknown to this version")
    _check_names(operation, entry)
    arrays = _arrays(folder, entry) if "file" in entry else {}
    own = OperationModel(
        operation=operation,
        direction=entry["direction"],
        parameters={name: item["value"] for name, item in entry["baseline"].items()},
        shapes={
            tuple(item["shape"]): {name: (low, high) for name, (low, high) in item["ranges"].items()}
            for item in entry["shapes"]
        },
        empty_us=entry["empty_us"],
        rows=entry["rows"],
        flagged_rows=entry["flagged_rows"],
        reasons=tuple(entry["reasons"]),
        validation=entry["validation"],
        mixes={regime: tuple(mix) for regime, mix in entry["mixes"].items()},
        intervals=_intervals(entry["intervals"]),
        **_get_all(arrays, entry["members"]),
    )
    if "prior" not in entry:
        return own
    prior = _load_prior(folder, entry["prior"], arrays)
    if prior.source.own.operation is not operation:
        raise ValueError(f"the prior of {operation.name} is a model of {prior.source.own.operation.name}")
    return TransferredModel(own, prior, own.reasons, own.validation, own.intervals)


def _load_prior(folder: Path, item: Mapping[str, Any], arrays: Arrays) -> Prior:
    parts = _get_all(arrays, item["members"])
    return Prior(
        source=load_model(folder / PRIOR_FOLDER, item["source"]),
        name=item["name"],
        data_hash=item["data_hash"],
        parameters={name: float(value) for name, value in item["parameters"].items()},
        discrepancy=Residual(item["scale"], parts.get("discrepancy_smooth"), parts.get("discrepancy_trees")),
        seen_share=item["seen_share"],
        unseen_share=item["unseen_share"],
    )


def _put(arrays: Arrays, role: str, member: Any) -> dict[str, Any]:
    """Add a member's arrays and texts under the name of its role, and return its plain fields."""
    plain = {}
    for name, value in ((one.name, getattr(member, one.name)) for one in fields(member)):
        if isinstance(value, np.ndarray):
            arrays[f"{role}_{name}"] = value
        elif name in TEXTS:
            arrays[f"{role}_{name}"] = np.frombuffer(value.encode("utf-8"), dtype=np.uint8)
        else:
            plain[name] = list(value) if isinstance(value, tuple) else value
    return plain


def _get_all(arrays: Arrays, members: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return every member that :func:`_put` took apart, by role."""
    found = {}
    for role, plain in members.items():
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in plain.items()}
        for one in fields(KINDS[role]):
            if one.name in TEXTS:
                values[one.name] = arrays[f"{role}_{one.name}"].tobytes().decode("utf-8")
            elif one.name not in values:
                values[one.name] = arrays[f"{role}_{one.name}"]
        found[role] = KINDS[role](**values)
    return found


def _intervals(item: Mapping[str, Any] | None) -> Intervals | None:
    return None if item is None else Intervals(tuple(item["edges"]), tuple(item["half_log"]))


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

"""The files of learned models: what ``costmodel.json`` says of one operation, and its arrays in ``residuals/*.npz``.

What is read passes the checks of what is made (``__post_init__`` of every part), and what only a file can get wrong:
another version's operation, arrays too many or too few, inputs that this version does not derive.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from costmodels.features import Names, Operation
from costmodels.learned.curves import Curves
from costmodels.learned.predictor import PRIOR_RESIDUAL, OperationModel, Prior
from costmodels.learned.residual import Residual
from costmodels.learned.smooth import Kernel
from costmodels.learned.trees import Trees
from costmodels.learned.validation import Intervals
from costmodels.operations import OPERATIONS
from costmodels.tables import npz_bytes
from profiler import RoutePackError
from profiler.files import file_hash, write_bytes
from profiler.readers import read_npz

MEMBERS: dict[str, type[Any]] = {"smooth": Kernel, "trees": Trees, "curve": Curves}
PLAIN_MODEL = ("direction", "empty_us", "rows", "flagged_rows", "reasons", "validation", "mixes", "intervals")
PLAIN_PRIOR = ("name", "data_hash", "parameters", "seen_share", "unseen_share")
"""Fields of an operation's model and of a prior that are JSON as they are."""
Errors = dict[str, int | float | dict[str, int | float]]
Member = Literal["scale", "smooth", "trees", "curve"]


@dataclass(frozen=True)
class TimedShape:
    """A shape and the timed range of every size feature."""

    shape: tuple[int, ...]
    ranges: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Value:
    """A parameter of the baseline."""

    value: float
    unit: str


@dataclass(frozen=True)
class KernelEntry:
    """A smooth residual without its arrays."""

    names: tuple[str, ...]
    radial: bool
    length: float
    offset: float
    limits: tuple[float, float]


@dataclass(frozen=True)
class TreesEntry:
    """Trees without their texts."""

    names: tuple[str, ...]
    limits: tuple[float, float]


@dataclass(frozen=True)
class CurveEntry:
    """Curves are arrays alone."""


@dataclass(frozen=True)
class ResidualEntry:
    """Members without their arrays."""

    scale: float | None
    smooth: KernelEntry | None = None
    trees: TreesEntry | None = None
    curve: CurveEntry | None = None


@dataclass(frozen=True)
class PriorEntry:
    """A prior; its source lies whole inside."""

    name: str
    data_hash: str
    parameters: dict[str, float]
    seen_share: float
    unseen_share: float
    discrepancy: ResidualEntry
    source: Entry


@dataclass(frozen=True)
class Entry:
    """One operation in one direction."""

    operation: str
    kind: str
    features: dict[str, str]
    shape: list[str]
    shapes: list[TimedShape]
    baseline: dict[str, Value]
    direction: Literal["forward", "backward"]
    empty_us: float | None
    rows: int
    flagged_rows: int
    reasons: tuple[str, ...]
    validation: dict[str, Errors]
    mixes: dict[Literal["measured", "between", "larger", "beyond", "unseen"], tuple[Member, ...]]
    intervals: Intervals | None
    known: ResidualEntry
    unseen: ResidualEntry
    prior: PriorEntry | None = None
    sha256: str = ""
    """Of the file of arrays; empty where there are none."""

    @property
    def file(self) -> str:
        """Name of the file of arrays."""
        return f"residuals/{self.operation}-{self.direction}.npz"


def save_model(folder: Path, model: OperationModel) -> dict[str, Any]:
    """Write the arrays of one operation's model, and return its entry, ready for JSON."""
    arrays: dict[str, np.ndarray] = {}
    entry = _model_entry(model, "", arrays)
    if arrays:
        path = folder / f"residuals/{model.operation.name}-{model.direction}.npz"
        write_bytes(path, npz_bytes(arrays))
        entry["sha256"] = file_hash(path)
    return entry


def load_model(folder: Path, entry: Entry) -> OperationModel:
    """Read what :func:`save_model` wrote; ValueError where something in it cannot be."""
    arrays: dict[str, np.ndarray] = {}
    path = folder / entry.file
    if entry.sha256:
        if not path.is_file():
            raise RoutePackError(f"Cost model {folder} lacks {entry.file}. Run `routepack fit` again.")
        if file_hash(path) != entry.sha256:
            raise RoutePackError(f"{path} was changed after it was written. Run `routepack fit` again.")
        arrays = read_npz(path, "Residual")
    model = _model(entry, "", arrays)
    if arrays:
        raise ValueError(f"{entry.file} holds {min(arrays)!r:.60}, which its entry does not name")
    return model


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


def _model(entry: Entry, where: str, arrays: dict[str, np.ndarray]) -> OperationModel:
    """Build a model of an entry, and take its arrays out of ``arrays``."""
    operation = OPERATIONS.get(entry.operation)
    if operation is None:
        raise ValueError(f"operation {entry.operation!r:.60} is unknown to this version")
    for what in ("features", "shape"):
        said, ours = list(getattr(entry, what)), list(getattr(operation, what))
        if said != ours:
            raise ValueError(f"{what} of {operation.name} are {said!r:.80}, this version has {ours}")
    derived = tuple(operation.derive({name: np.ones(1) for name in operation.features}))
    prior = None
    if (item := entry.prior) is not None:
        source = _model(item.source, f"{where}prior.", arrays)
        discrepancy = _residual(operation, (*derived, PRIOR_RESIDUAL), item.discrepancy, f"{where}discrepancy.", arrays)
        prior = Prior(source, discrepancy=discrepancy, **{name: getattr(item, name) for name in PLAIN_PRIOR})
    model = OperationModel(
        operation=operation,
        parameters={name: item.value for name, item in entry.baseline.items()},
        shapes={item.shape: item.ranges for item in entry.shapes},
        known=_residual(operation, derived, entry.known, f"{where}known.", arrays),
        unseen=_residual(operation, operation.dimensionless, entry.unseen, f"{where}unseen.", arrays),
        prior=prior,
        **{name: getattr(entry, name) for name in PLAIN_MODEL},
    )
    if model.kind != entry.kind:
        raise ValueError(f"{operation.name} says it is of kind {entry.kind!r:.40}, its parts make {model.kind!r}")
    return model


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


def _residual(
    operation: Operation, inputs: Names, entry: ResidualEntry, where: str, arrays: dict[str, np.ndarray]
) -> Residual:
    """Build a residual whose members may ask for some of ``inputs``."""
    found: dict[str, Any] = {"scale": entry.scale}
    for role, kind in MEMBERS.items():
        if (item := getattr(entry, role)) is None:
            continue
        values = {one.name: getattr(item, one.name) for one in fields(item)}
        if unknown := set(values.get("names", ())) - set(inputs):
            raise ValueError(f"{where}{role} asks for {min(unknown)!r:.60}, which is no input of {operation.name}")
        for name, text in ((one.name, one.type == "str") for one in fields(kind) if one.name not in values):
            if (array := arrays.pop(f"{where}{role}.{name}", None)) is None or text != (array.dtype == np.uint8):
                raise ValueError(f"the array {where}{role}.{name} is missing or of another kind")
            values[name] = array.tobytes().decode("ascii") if text else array
        found[role] = kind(**values)
    if isinstance(curves := found.get("curve"), Curves):
        curves.check_for(operation)
    return Residual(**found)

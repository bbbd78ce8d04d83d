"""Price a GPU with the cost model of a sibling: the prior's learned residual, this GPU's physics, and what is left.

    time = baseline(parameters fitted here) x residual of the prior x exp(discrepancy learned here)

What a formula misses (kernel choices, tile effects) is mostly the same on two GPUs of one architecture; what differs
(bandwidth, clocks, power) is in the formula's parameters, which few points settle. The prior is asked as it is,
whatever it is made of, and is saved whole beside the model that rests on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from costmodels.features import Columns, Operation, checked_columns
from costmodels.learned.files import KERNEL_ARRAYS, load_model, save_model
from costmodels.learned.intervals import Intervals
from costmodels.learned.predictor import OperationModel
from costmodels.learned.ranges import known_families
from costmodels.learned.smooth import Kernel, fit_kernel
from costmodels.learned.trees import Trees, grow_trees
from costmodels.params import FitParams
from costmodels.tables import npz_bytes, read_npz
from profiler import RoutePackError
from profiler.files import file_hash, write_bytes

PRIOR_RESIDUAL = "prior_log_residual"
"""Input of the discrepancy: log of the prior's time over the prior's baseline."""
PRIOR_FOLDER = "prior"
SCALE, GAUSSIAN, TREES = "scale", "gaussian", "trees"


@dataclass(frozen=True)
class Discrepancy:
    """Hold log(time here / (refitted baseline x prior's residual)): the mean of its parts, 0 without any."""

    names: tuple[str, ...]
    """Inputs, in order."""
    scale: float | None
    """One factor for everything."""
    gaussian: Kernel | None
    trees: Trees | None

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts averaged."""
        named = {SCALE: self.scale, GAUSSIAN: self.gaussian, TREES: self.trees}
        return tuple(name for name, part in named.items() if part is not None)

    def log_ratio(self, inputs: Columns) -> np.ndarray:
        """Return the log discrepancy of every row."""
        rows = next(iter(inputs.values())).size
        found = []
        if self.scale is not None:
            found.append(np.full(rows, self.scale))
        if self.gaussian is not None:
            found.append(self.gaussian.log_ratio(inputs))
        if self.trees is not None:
            found.append(self.trees.log_ratio(inputs))
        return np.mean(found, axis=0) if found else np.zeros(rows)


@dataclass(frozen=True)
class Prior:
    """Hold what is taken from a sibling GPU for one operation in one direction."""

    source: OperationModel
    name: str
    """Device of the prior."""
    data_hash: str
    """Of the measurements that the prior was fitted to."""
    parameters: Mapping[str, float]
    """The baseline's parameters on this GPU, pulled to the prior's."""
    discrepancy: Discrepancy
    seen_share: float
    """Weight of the prior's route in shapes timed here; the rest is the own model's, averaged in log space."""
    unseen_share: float
    """The same in shapes not timed here."""
    intervals: Intervals | None = None
    """Calibrated on held-out rows of this GPU, the prior in use."""

    def predict_us(self, operation: Operation, columns: Columns) -> np.ndarray:
        """Return microseconds by the prior's route alone."""
        residual = prior_residual(self.source, columns)
        log_us = np.log(operation.baseline(columns, self.parameters)) + residual
        inputs = {**operation.derive(columns), PRIOR_RESIDUAL: residual}
        return np.asarray(np.exp(log_us + self.discrepancy.log_ratio(inputs)))


@dataclass(frozen=True)
class TransferredModel(OperationModel):
    """Price one operation by this GPU's own model and by a prior's route, in shares chosen on held-out rows.

    The fields of the base class are the own model's, but ``shapes`` also names what the prior's GPU was timed on.
    """

    own: OperationModel | None = None
    prior: Prior | None = None

    @classmethod
    def of(cls, own: OperationModel, prior: Prior, **changes: Any) -> TransferredModel:
        """Build the model from its two halves; ``changes`` replace fields of the own model."""
        values = {field.name: getattr(own, field.name) for field in fields(OperationModel) if field.init}
        values |= {"shapes": _joined(own.shapes, prior.source.shapes), "intervals": prior.intervals}
        return cls(**{**values, **changes}, own=own, prior=prior)

    @property
    def kind(self) -> str:
        """``prior``: the residual of another GPU is in use."""
        return "prior"

    def predict_us(self, features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return microseconds and, per row, whether it lies outside what was timed here and on the prior's GPU."""
        assert self.own is not None
        assert self.prior is not None
        columns = checked_columns(self.operation, features)
        share = np.where(self._known_family(columns), self.prior.seen_share, self.prior.unseen_share)
        own_us, _ = self.own.predict_us(columns)
        prior_us = self.prior.predict_us(self.operation, columns)
        return blend(own_us, prior_us, share), self._outside(columns)

    def _known_family(self, columns: Columns) -> np.ndarray:
        assert self.own is not None
        return known_families(self.operation, self.own.shapes, columns)


def blend(own_us: np.ndarray, prior_us: np.ndarray, share: np.ndarray | float) -> np.ndarray:
    """Return the mean of two predictions in log space, ``share`` of it the prior's."""
    return np.asarray(np.exp((1.0 - share) * np.log(own_us) + share * np.log(prior_us)))


def prior_residual(source: OperationModel, columns: Columns) -> np.ndarray:
    """Return the log of a model's time over its own baseline: what it learned beyond the formula."""
    time_us, _ = source.predict_us(columns)
    return np.asarray(np.log(time_us / source.operation.baseline(columns, source.parameters)))


def _joined(here: Mapping[Any, Mapping[str, Any]], there: Mapping[Any, Mapping[str, Any]]) -> dict[Any, Any]:
    joined: dict[Any, Any] = {shape: dict(ranges) for shape, ranges in there.items()}
    for shape, ranges in here.items():
        known = joined.setdefault(shape, {})
        for name, (low, high) in ranges.items():
            least, most = known.get(name, (low, high))
            known[name] = (min(low, least), max(high, most))
    return joined


def fit_discrepancy(parts: tuple[str, ...], inputs: Columns, target: np.ndarray, params: FitParams) -> Discrepancy:
    """Fit the mean of some of ``scale``, ``gaussian`` and ``trees`` to ``target``, a log ratio per row; none is 0."""
    names = tuple(inputs)
    return Discrepancy(
        names=names,
        scale=float(np.median(target)) if SCALE in parts else None,
        gaussian=fit_kernel(inputs, names, target, params) if GAUSSIAN in parts else None,
        trees=grow_trees(inputs, names, target, params, unseen=target.size >= params.small_rows)
        if TREES in parts
        else None,
    )


def save_operation(folder: Path, model: OperationModel) -> dict[str, Any]:
    """Write a model below ``folder``, a prior it rests on with it, and return its entry, ready for JSON."""
    if not isinstance(model, TransferredModel):
        return save_model(folder, model)
    assert model.own is not None
    assert model.prior is not None
    prior, found = model.prior, model.prior.discrepancy
    entry: dict[str, Any] = {
        "name": prior.name,
        "data_hash": prior.data_hash,
        "parameters": dict(prior.parameters),
        "seen_share": prior.seen_share,
        "unseen_share": prior.unseen_share,
        "intervals": None if prior.intervals is None else prior.intervals.to_json(),
        "source": save_operation(folder / PRIOR_FOLDER, prior.source),
        "inputs": list(found.names),
        "scale": found.scale,
        "gaussian": None if found.gaussian is None else _plain(found.gaussian),
        "trees": found.trees is not None,
    }
    arrays: dict[str, np.ndarray] = {}
    if found.gaussian is not None:
        arrays |= {name: getattr(found.gaussian, name) for name in KERNEL_ARRAYS}
    if found.trees is not None:
        arrays["text"] = np.frombuffer(found.trees.text.encode("utf-8"), dtype=np.uint8)
    if arrays:
        name = f"residuals/{model.operation.name}-{model.direction}-discrepancy.npz"
        write_bytes(folder / name, npz_bytes(arrays))
        entry |= {"file": name, "sha256": file_hash(folder / name)}
    said = {"kind": model.kind, "reasons": list(model.reasons), "validation": model.validation}
    return {**save_model(folder, model.own), **said, "prior": entry}


def load_operation(folder: Path, entry: Mapping[str, Any]) -> OperationModel:
    """Read what :func:`save_operation` wrote.

    Raises
    ------
    RoutePackError
        If a file is missing or was changed.
    ValueError
        If the entry, or the prior's, is of another operation or of features that this version does not have.
    """
    own = load_model(folder, entry)
    if "prior" not in entry:
        return own
    item = entry["prior"]
    source = load_operation(folder / PRIOR_FOLDER, item["source"])
    if source.operation is not own.operation:
        raise ValueError(f"the prior of {own.operation.name} is a model of {source.operation.name}")
    names = tuple(item["inputs"])
    arrays = _arrays(folder, item) if "file" in item else {}
    gaussian = None if item["gaussian"] is None else _kernel(item["gaussian"], arrays, names)
    trees = Trees(names, arrays["text"].tobytes().decode("utf-8")) if item["trees"] else None
    prior = Prior(
        source=source,
        name=item["name"],
        data_hash=item["data_hash"],
        parameters={name: float(value) for name, value in item["parameters"].items()},
        discrepancy=Discrepancy(names, item["scale"], gaussian, trees),
        seen_share=item["seen_share"],
        unseen_share=item["unseen_share"],
        intervals=None if item["intervals"] is None else Intervals.from_json(item["intervals"]),
    )
    return TransferredModel.of(own, prior)


def _arrays(folder: Path, item: Mapping[str, Any]) -> dict[str, np.ndarray]:
    path = folder / item["file"]
    if not path.is_file() or file_hash(path) != item["sha256"]:
        raise RoutePackError(f"{path} is missing or was changed after it was written. Run `routepack fit` again.")
    return read_npz(path, "Discrepancy")


def _plain(kernel: Kernel) -> dict[str, Any]:
    """Return what of a kernel is no array."""
    return {
        "radial": kernel.radial, "length": kernel.length, "offset": kernel.offset, "limits": list(kernel.limits),
    }  # fmt: skip


def _kernel(item: Mapping[str, Any], arrays: Mapping[str, np.ndarray], names: tuple[str, ...]) -> Kernel:
    low, high = item["limits"]
    return Kernel(
        names=names, radial=item["radial"], length=item["length"], offset=item["offset"], limits=(low, high),
        **{name: arrays[name] for name in KERNEL_ARRAYS},
    )  # fmt: skip

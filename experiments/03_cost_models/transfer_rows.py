"""Measure transfer to a sibling GPU, and one model without a prior, on published tables.

``rows(shared, quick)`` yields one mapping a measured row: task, gpu, points (fresh rows used for fitting) and the
median, mean (``mape``) and 95th percentile of the absolute relative error in percent, on all other rows that pass the
flags. Where several designs (seeds) were drawn, the errors are their means.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from costmodels import CostModel, FitParams
from costmodels.choose import choose_points
from costmodels.features import Columns, Operation
from costmodels.fit import fit_operation
from costmodels.learned.predictor import OperationModel
from costmodels.learned.validation import family_groups
from costmodels.operations import OPERATIONS
from profiler import DeviceFingerprint, Measurements, Topology, import_published, load_model

PAIRS = (("h200_sxm", "h100_sxm"), ("h100_sxm", "h200_sxm"))
"""Target and source."""
OPS = ("experts", "attention")
DESIGNS = 3
ONE_MODEL = {
    "experts, Qwen3-30B-A3B alone": ("experts", {"hidden_size": (2048,), "num_experts": (128,)}),
    "experts, DeepSeek-V3 alone": ("experts", {"hidden_size": (7168,), "num_experts": (256,)}),
    "attention, Qwen3-30B-A3B alone": ("attention", {"group": (8,), "qk_head_dim": (128,), "num_kv_heads": (1, 2, 4)}),
}
"""Rows of one model: its sizes, all its parallel sizes and routings mixed."""

KNOWN_SHAPE = "experts, unseen shape known on a sibling GPU"

Rows = dict[str, Any]
Key = tuple[str, str, int]
"""Task, GPU's folder and points of a row."""


@dataclass(frozen=True)
class Table:
    """Hold the rows of one operation on one GPU that pass the flags, full causal attention only."""

    op: str
    fingerprint: DeviceFingerprint
    columns: Columns
    """Raw features and ``time_us``."""
    quiet: np.ndarray
    """Rows whose features are exact: all of attention, balanced routing of experts."""

    @property
    def features(self) -> Columns:
        """Raw features alone."""
        return {name: self.columns[name] for name in OPERATIONS[self.op].features}

    def take(self, index: np.ndarray) -> Columns:
        """Return raw features and ``time_us`` of some rows."""
        return {name: column[index] for name, column in self.columns.items()}


def rows(shared: Path, quick: bool, done: Collection[Key] = ()) -> Iterator[Rows]:
    """Yield every row that is not ``done``, lazily; ``quick`` keeps one direction, one design and two shapes."""
    folder = shared / "data" / "gpu-timings"
    params = FitParams()
    pairs, designs = (PAIRS[:1], 1) if quick else (PAIRS, DESIGNS)
    measured = {gpu: import_published(folder / gpu) for gpu in sorted({gpu for pair in pairs for gpu in pair})}
    tables = {(gpu, op): _table(found, op) for gpu, found in measured.items() for op in OPS}
    prior = functools.cache(lambda gpu, op: prior_of(tables[gpu, op], params))
    for target, _ in pairs:
        yield from one_model(measured[target], target, designs, params, done)
    for first in (True, False):
        for op in OPS:
            for target, source in pairs:
                known = functools.partial(prior, source, op)
                yield from new_gpu(tables[target, op], known, target, designs, params, done, first)
        for target, source in pairs if first else ():
            if (KNOWN_SHAPE, target) not in {key[:2] for key in done}:
                table = tables[target, "experts"]
                yield unseen_shape(table, prior(source, "experts"), target, params, 2 if quick else None)


def new_gpu(
    table: Table, prior: Callable[[], CostModel], gpu: str, designs: int, params: FitParams, done: Collection[Key],
    by_design: bool,
) -> Iterator[Rows]:  # fmt: skip
    """Yield the errors on ``table`` of the prior as it is, and with 20 and 50 fresh points of several designs.

    ``by_design``: of points by k-means; else those of points drawn in other ways, for comparison.
    """
    operation = OPERATIONS[table.op]
    everything = np.arange(table.quiet.size)

    def drawn(pool: np.ndarray, choose: Callable[..., np.ndarray]) -> Callable[[int, int], np.ndarray]:
        candidates = {name: column[pool] for name, column in table.features.items()}
        return lambda count, seed: pool[choose(operation, candidates, count, seed)]

    contests = {"random": drawn(everything, random_points)}
    if not table.quiet.all():
        contests["k-means, drawn routings too"] = drawn(everything, choose_points)
    if by_design:
        task = f"{table.op}, new GPU, prior alone"
        if (task, gpu, 0) not in done:
            yield _row(task, gpu, 0, [_errors(prior().models[table.op, "forward"], table, everything)])
        contests = {"k-means": drawn(np.flatnonzero(table.quiet), choose_points)}
    for name, choose in contests.items():
        for count in (20, 50):
            task = f"{table.op}, new GPU, {name}"
            if (task, gpu, count) in done:
                continue
            found = []
            for seed in range(designs):
                fresh = choose(count, seed)
                arch = table.fingerprint.arch
                model, _ = fit_operation(operation, "forward", table.take(fresh), params, [prior()], arch)
                found.append(_errors(model, table, np.setdiff1d(everything, fresh)))
            yield _row(task, gpu, count, found)


def random_points(operation: Operation, candidates: Columns, count: int, seed: int = 0) -> np.ndarray:
    """Return ``count`` positions drawn evenly: what a design must beat."""
    total = candidates[operation.size[0]].size
    return np.sort(np.random.default_rng(seed).choice(total, min(count, total), replace=False))


def unseen_shape(table: Table, prior: CostModel, gpu: str, params: FitParams, shapes: int | None = None) -> Rows:
    """Return the errors on every model's shape, each priced without its rows here, but with the prior's."""
    family = family_groups(OPERATIONS[table.op], table.features)
    predicted, true, points = [], [], []
    for k in np.unique(family)[:shapes]:
        kept, asked = table.take(family != k), table.take(family == k)
        model, _ = fit_operation(OPERATIONS[table.op], "forward", kept, params, [prior], table.fingerprint.arch)
        predicted.append(model.predict_us({name: asked[name] for name in OPERATIONS[table.op].features})[0])
        true.append(asked["time_us"])
        points.append(kept["time_us"].size)
    errors = 100.0 * np.abs(np.concatenate(predicted) / np.concatenate(true) - 1.0)
    return _row(KNOWN_SHAPE, gpu, int(np.mean(points)), [errors])


def one_model(
    measured: Measurements, gpu: str, designs: int, params: FitParams, done: Collection[Key]
) -> Iterator[Rows]:
    """Yield the errors of a fit on 30 and 50 points of one model alone, no prior, drawn by k-means and at random."""
    for task, (op, wanted) in ONE_MODEL.items():
        table = _only(_table(measured, op), wanted)
        everything = np.arange(table.quiet.size)
        for name, choose in (("k-means", choose_points), ("random", random_points)):
            for count in (30, 50):
                if (f"{task}, {name}", gpu, count) in done:
                    continue
                found = []
                for seed in range(designs):
                    fresh = choose(OPERATIONS[op], table.features, count, seed)
                    model, _ = fit_operation(OPERATIONS[op], "forward", table.take(fresh), params)
                    found.append(_errors(model, table, np.setdiff1d(everything, fresh)))
                yield _row(f"{task}, {name}", gpu, count, found)


def prior_of(table: Table, params: FitParams) -> CostModel:
    """Return a cost model that prices one operation of the source GPU from all its rows."""
    model, _ = fit_operation(OPERATIONS[table.op], "forward", table.columns, params)
    return CostModel(
        models={(table.op, "forward"): model}, params=params, fingerprint=table.fingerprint,
        spec=load_model("Qwen3-30B-A3B"), topology=Topology(), max_tokens=1, data_hash="", provenance=[],
    )  # fmt: skip


def _table(measured: Measurements, op: str) -> Table:
    kept = measured.select(op=op, direction="forward", status="ok", flag="").rows
    full = np.ones(len(kept["op"]), dtype=bool)
    if op == "attention":
        full = (kept["window"] == 0) & (kept["qk_head_dim"] == kept["v_head_dim"])
    columns = {n: np.asarray(kept[n], dtype=np.float64)[full] for n in (*OPERATIONS[op].features, "time_us")}
    quiet = np.isin(kept["pattern"][full], ("balanced",)) if op == "experts" else np.ones(int(full.sum()), dtype=bool)
    return Table(op, DeviceFingerprint.from_dict(measured.meta["fingerprint"]), columns, quiet)


def _only(table: Table, wanted: dict[str, tuple[int, ...]]) -> Table:
    """Return the rows whose sizes, or ratios of sizes, are among the wanted."""
    values = dict(table.columns)
    if table.op == "attention":
        values["group"] = values["num_heads"] / values["num_kv_heads"]
    kept = np.ones(table.quiet.size, dtype=bool)
    for name, among in wanted.items():
        if name in values:
            kept &= np.isin(values[name], among)
    return Table(table.op, table.fingerprint, table.take(kept), table.quiet[kept])


def _errors(model: OperationModel, table: Table, index: np.ndarray) -> np.ndarray:
    asked = table.take(index)
    predicted, _ = model.predict_us({name: asked[name] for name in OPERATIONS[table.op].features})
    return np.asarray(100.0 * np.abs(predicted / asked["time_us"] - 1.0))


def _row(task: str, gpu: str, points: int, errors: list[np.ndarray]) -> Rows:
    means = [float(np.mean([f(e) for e in errors])) for f in (np.median, np.mean, lambda e: np.percentile(e, 95))]
    return {"task": task, "gpu": gpu, "points": points, **dict(zip(("median", "mape", "p95"), means, strict=True))}

"""A published table as the device: every row of one model is a case that could be timed, and its time is known.

``rows(folder, done)`` yields one mapping a measured row: gpu, task, how points were chosen, seed, points; the error
that held-out points claim (``held_out_pct``) and the median error on all other rows of the table (``median_pct``).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from costmodels import CostModel, FitParams
from costmodels.choose import FIRST_POINTS, MORE_POINTS, batches, choose_points
from costmodels.features import Columns
from costmodels.fit import fit_operation
from costmodels.learned.smooth import fit_kernel
from costmodels.operations import OPERATIONS
from profiler import DeviceFingerprint, Measurements, Topology, import_published, load_model
from profiler.cases.case import Case

GPUS = {"h200_sxm": "h100_sxm", "h100_sxm": "h200_sxm"}
"""Each GPU and the sibling whose cost model is its prior."""
MOST, SEEDS = 50, 3
MODELS = {
    "experts, Qwen3-30B-A3B": ("experts", {"hidden_size": (2048,), "num_experts": (128,)}),
    "experts, DeepSeek-V3": ("experts", {"hidden_size": (7168,), "num_experts": (256,)}),
    "attention, Qwen3-30B-A3B": ("attention", {"group": (8,), "qk_head_dim": (128,), "num_kv_heads": (1, 2, 4)}),
}
"""Rows of one model: its sizes, all its parallel sizes and routings mixed."""
ROUNDS, ONE_SHOT, RANDOM, DISAGREEMENT, PRIOR = "rounds", "one shot", "random", "disagreement", "rounds, prior"

Key = tuple[str, str, str, int]


class Table:
    """Hold good forward rows of one operation; full causal attention only."""

    def __init__(self, measured: Measurements, op: str, wanted: dict[str, tuple[int, ...]] | None = None) -> None:
        rows = measured.select(op=op, direction="forward", status="ok", flag="").rows
        kept = np.ones(len(rows["op"]), dtype=bool)
        if op == "attention":
            kept = (rows["window"] == 0) & (rows["qk_head_dim"] == rows["v_head_dim"])
        for name, among in (wanted or {}).items():
            ratio = name == "group"
            kept &= np.isin(rows["num_heads"] / np.maximum(rows["num_kv_heads"], 1) if ratio else rows[name], among)
        self.operation = OPERATIONS[op]
        self.fingerprint = DeviceFingerprint.from_dict(measured.meta["fingerprint"])
        self.columns = {
            name: rows[name][kept].astype(np.float64) for name in (*self.operation.features, "time_us")
        }  # fmt: skip
        self.features = {name: self.columns[name] for name in self.operation.features}
        names, pattern = list(self.features), rows["pattern"][kept].tolist()
        whole = np.stack([self.features[name] for name in names], axis=1).astype(int).tolist()
        # The number of a row stands for its parts: that is how it is found again.
        self.cases = [
            Case(op, pattern[i], dict(zip(names, row, strict=True)), (i,)) for i, row in enumerate(whole)
        ]  # fmt: skip

    def take(self, index: Sequence[int] | np.ndarray) -> Columns:
        """Return features and ``time_us`` of some rows."""
        return {name: column[np.asarray(index)] for name, column in self.columns.items()}


def rows(folder: Path, done: Collection[Key] = ()) -> Iterator[dict[str, Any]]:
    """Yield every row that is not ``done``."""
    params = FitParams()
    measured = {gpu: import_published(folder / gpu) for gpu in GPUS}

    @functools.cache
    def prior(gpu: str, op: str) -> CostModel:
        table = Table(measured[gpu], op)
        model, _ = fit_operation(table.operation, "forward", table.columns, params)
        return CostModel(
            models={(op, "forward"): model}, params=params, fingerprint=table.fingerprint,
            spec=load_model("Qwen3-30B-A3B"), topology=Topology(), max_tokens=1, data_hash="", provenance=[],
        )  # fmt: skip

    for task, (op, wanted) in MODELS.items():
        for gpu, sibling in GPUS.items():
            table = Table(measured[gpu], op, wanted)
            for how in (ROUNDS, ONE_SHOT, RANDOM, DISAGREEMENT, PRIOR):
                for seed in range(SEEDS):
                    if (gpu, task, how, seed) in done:
                        continue
                    siblings = [prior(sibling, op)] if how == PRIOR else []
                    found = [_judged(table, points, siblings, params) for points in chosen(table, how, seed, params)]
                    for one in found:
                        yield {"gpu": gpu, "task": task, "how": how, "seed": seed, **one}


def chosen(table: Table, how: str, seed: int, params: FitParams) -> Iterator[list[int]]:
    """Yield the growing choice: after the first points and after every round, or once."""
    if how in (ONE_SHOT, RANDOM):
        if how == ONE_SHOT:
            yield choose_points(table.operation, table.features, MOST, seed).tolist()
        else:
            drawn = np.random.default_rng(seed).choice(len(table.cases), min(MOST, len(table.cases)), replace=False)
            yield np.sort(drawn).tolist()
        return
    points: list[int] = []
    for batch in batches(table.operation, table.cases, FIRST_POINTS if how == PRIOR else MOST, seed):
        points += [case.parts[0] for case in batch]
        yield list(points)
        if how == DISAGREEMENT:
            break
    while how == DISAGREEMENT and len(points) < MOST:
        points += least_certain(table, points, MORE_POINTS, params)
        yield list(points)


def least_certain(table: Table, points: list[int], count: int, params: FitParams) -> list[int]:
    """Return the rows where a Gaussian process over the timed ones is least certain, one after another."""
    own = table.operation.derive({name: column[points] for name, column in table.features.items()})
    derived, names = table.operation.derive(table.features), tuple(own)
    kernel = fit_kernel(own, names, np.log(table.columns["time_us"][points]), params)
    place = (np.stack([derived[name] for name in names], axis=1) - kernel.centre) / kernel.scale

    def bells(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.asarray(np.exp(-0.5 * ((a[:, None] - b[None]) ** 2).sum(axis=2) / kernel.length**2))

    added: list[int] = []
    for _ in range(count):
        timed = [*points, *added]
        cross, between = bells(place, place[timed]), bells(place[timed], place[timed])
        # What is known of a row: the variance that the timed ones explain; their times do not enter it.
        known = (cross * np.linalg.solve(between + 1e-4 * np.eye(len(timed)), cross.T).T).sum(axis=1)
        known[timed] = np.inf
        added.append(int(np.argmin(known)))
    return added


def _judged(table: Table, points: list[int], priors: list[CostModel], params: FitParams) -> dict[str, Any]:
    fresh = table.take(points)
    model, held_out = fit_operation(table.operation, "forward", fresh, params, priors, table.fingerprint.arch)
    rest = np.setdiff1d(np.arange(len(table.cases)), points)
    asked = table.take(rest)
    predicted, _ = model.predict_us({name: asked[name] for name in table.operation.features})
    claimed = np.nan if held_out is None else float(np.median(np.abs(held_out.model_us / held_out.true_us - 1)))
    return {
        "points": len(points), "held_out_pct": 100.0 * claimed,
        "median_pct": 100.0 * float(np.median(np.abs(predicted / asked["time_us"] - 1))),
    }  # fmt: skip

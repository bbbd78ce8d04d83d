"""Freeze a cost model into integer-nanosecond tables for one model, topology and token cap.

What every table means is said once, in :class:`costmodels.tables.StepTables`. Each is evaluated at all its nodes in one
batch, the tile steps of the baseline included, then made non-decreasing: trees have steps, and a planner must never
gain by adding work. Where times fall, they are pooled (isotonic regression of their logs): a running maximum would
carry every upward error of the trees to all larger sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from costmodels.operations import DIRECTIONS
from costmodels.tables import StepTables, lookup_many_ns, node_shift, table_nodes
from profiler import ModelSpec, Topology
from profiler.cases import causal_pairs, padded_rows

if TYPE_CHECKING:
    from costmodels.cost_model import CostModel

TYPICAL_SKEW = 0.5
"""Standard deviation of the log of an expert's load inside one rank.

On real routes its median is 0.5 (fine-grained experts) to 1.1 (four experts a rank). One number stands for a rank's
routing: against the model asked with the true counts of every expert, table look-ups of real ranks were 0.4 to 2.5 %
off on average (95th percentile 1 to 7 %, where the trees of a shape that was never timed have steps), and the slowest
ranks summed over the layers of a micro-step 0.2 to 0.8 %.
"""


@dataclass(frozen=True)
class LayerClass:
    """Name one kind of layer work in one direction."""

    window: int
    moe: bool
    direction: str
    layers: int

    @property
    def name(self) -> str:
        """``full/moe/forward`` and the like."""
        attention = f"window{self.window}" if self.window else "full"
        return f"{attention}/{'moe' if self.moe else 'dense'}/{self.direction}"


class Pricer:
    """Price the parts of a step in nanoseconds, unrounded, straight from the models: what tables approximate."""

    def __init__(self, model: CostModel, spec: ModelSpec, topology: Topology, max_tokens: int) -> None:
        self.model, self.spec, self.topology, self.max_tokens = model, spec, topology, max_tokens
        self.has = {op for op, _ in model.models}

    def classes(self) -> list[LayerClass]:
        """Return every (window, MoE or dense, direction) of the model, in order of appearance."""
        kinds = list(zip(self.spec.windows, self.spec.moe_layers, strict=True))
        distinct = dict.fromkeys(kinds)
        return [
            LayerClass(*kind, direction, kinds.count(kind) * self.passes(direction))
            for kind in distinct
            for direction in DIRECTIONS
        ]

    def passes(self, direction: str) -> int:
        """Return how often a layer runs in a direction per microbatch: forward twice where it is recomputed."""
        return 2 if direction == "forward" and self.model.params.recompute_activations else 1

    def attention_shape(self, window: int) -> dict[str, int]:
        """Return the shape features of the attention core on one tensor-parallel rank."""
        spec, tensor = self.spec, self.topology.tensor_model_parallel_size
        return {
            "num_heads": max(1, spec.num_attention_heads // tensor),
            "num_kv_heads": max(1, spec.num_key_value_heads // tensor),
            "qk_head_dim": spec.qk_head_dim,
            "v_head_dim": spec.v_head_dim,
            "window": window,
        }

    def full_cell(self, length: np.ndarray, window: int) -> dict[str, np.ndarray]:
        """Return the attention features of cells filled with equal sequences of each length."""
        count = np.maximum(1, self.max_tokens // length)
        sizes = {
            "tokens": count * length,
            "pairs": count * causal_pairs(length, window),
            "num_sequences": count,
            "max_length": length,
        }
        return sizes | {name: np.full_like(length, value) for name, value in self.attention_shape(window).items()}

    def sequence_ns(self, length: np.ndarray, kind: LayerClass) -> np.ndarray:
        """Return the time one sequence adds to its full cell, floor taken off; 0 at length 0."""
        result = np.zeros(length.size)
        some = length > 0
        features = self.full_cell(length[some], kind.window)
        time_us, _ = self.model.predict_us("attention", kind.direction, features)
        floor_us = self._attention_floor_us(kind)
        share = features["num_sequences"] * self.topology.context_parallel_size
        result[some] = np.maximum(time_us - floor_us, 0.0) / share * 1e3
        return result

    def _attention_floor_us(self, kind: LayerClass) -> float:
        shape = {**self.attention_shape(kind.window), "tokens": 1}
        return self.model.floor_us("attention", kind.direction, _vectors(shape))

    def gemms(self, moe: bool) -> tuple[tuple[int, int], ...]:
        """Return the (n, k) of the dense GEMMs of one layer on one tensor-parallel rank."""
        spec, tensor = self.spec, self.topology.tensor_model_parallel_size
        width = spec.shared_intermediate_size if moe else spec.dense_intermediate_size
        return (*spec.attention_projections(tensor), *spec.feed_forward(width, tensor))

    def cell_ns(self, tokens: np.ndarray, kind: LayerClass) -> np.ndarray:
        """Return floors and dense GEMMs of one layer for cells of so many tokens."""
        total_us = np.full(tokens.size, self._attention_floor_us(kind))
        if "dense" not in self.has:
            return total_us * 1e3
        local = np.maximum(tokens / self.topology.context_parallel_size, 1.0)
        for n, k in self.gemms(kind.moe):
            features = {"tokens": local, "n": np.full(local.size, n), "k": np.full(local.size, k)}
            time_us, _ = self.model.predict_us("dense", kind.direction, features)
            floor_us = self.model.floor_us("dense", kind.direction, _vectors({"tokens": 1, "n": n, "k": k}))
            total_us += np.where(tokens > 0, np.maximum(time_us, floor_us), floor_us)
        return total_us * 1e3

    def experts_shape(self) -> dict[str, int]:
        """Return the shape features of one rank's experts."""
        spec, topology = self.spec, self.topology
        return {
            "local_experts": max(1, spec.num_experts // topology.expert_model_parallel_size),
            "hidden_size": spec.hidden_size,
            "inter_size": max(1, spec.moe_intermediate_size // topology.expert_tensor_parallel_size),
            "num_experts": spec.num_experts,
        }

    def experts_features(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return features of so many rows on one rank, spread over its experts with a typical skew."""
        shape = self.experts_shape()
        counts = skewed_counts(rows, shape["local_experts"])
        sizes = {
            "rows": rows,
            "active_experts": (counts > 0).sum(axis=1),
            "padded_rows": padded_rows(counts).sum(axis=1),
            "max_rows": counts.max(axis=1),
            "router_tokens": np.zeros_like(rows),
        }
        return sizes | {name: np.full_like(rows, value) for name, value in shape.items()}

    def expert_rank_ns(self, rows: np.ndarray) -> np.ndarray:
        """Return forward + backward of one layer's experts on a rank; rows are of all blocks a slot spreads over."""
        local = -(-rows // self.topology.blocks_per_slot)
        floors = {direction: self._experts_floor_us(direction) for direction in DIRECTIONS}
        total_us = np.full(rows.size, sum(self.passes(direction) * floor for direction, floor in floors.items()))
        some = local > 0
        features = self.experts_features(local[some])
        for direction in DIRECTIONS:
            time_us, _ = self.model.predict_us("experts", direction, features)
            total_us[some] += self.passes(direction) * np.maximum(time_us - floors[direction], 0.0)
        return total_us * 1e3

    def _experts_floor_us(self, direction: str) -> float:
        """Return the time of a rank without rows: never more than that of one row."""
        one, _ = self.model.predict_us("experts", direction, self.experts_features(np.array([1])))
        return min(self.model.floor_us("experts", direction, _vectors(self.experts_shape())), float(one[0]))

    def exchange_ns(self, rows: np.ndarray) -> np.ndarray:
        """Return dispatch + combine, forward + backward, of one layer; zeros where nothing is exchanged or known."""
        ranks = self.topology.expert_model_parallel_size
        total_us = np.zeros(rows.size)
        if ranks == 1 or "alltoall" not in self.has:
            return total_us
        sent = rows / self.topology.blocks_per_slot * self.spec.hidden_size * 2.0
        features = {"bytes": np.maximum(sent, 1.0), "ranks": np.full(rows.size, ranks)}
        for direction in DIRECTIONS:
            total_us += 2.0 * self.passes(direction) * self.model.predict_us("alltoall", direction, features)[0]
        return total_us * 1e3


def skewed_counts(rows: np.ndarray, experts: int) -> np.ndarray:
    """Split rows over experts in proportion to quantiles of a log-normal, whole rows, [rows, experts] int64."""
    from scipy.special import ndtri

    weight = np.exp(TYPICAL_SKEW * ndtri((np.arange(experts) + 0.5) / experts))[::-1]
    # Differences of the rounded running total: whole, never negative, and they add up.
    edges = np.rint(rows[:, None] * (np.cumsum(weight) / weight.sum())).astype(np.int64)
    edges[:, -1] = rows
    return np.diff(edges, axis=1, prepend=0)


def _vectors(features: dict[str, int]) -> dict[str, np.ndarray]:
    return {name: np.array([value]) for name, value in features.items()}


def never_falling(time_ns: np.ndarray) -> np.ndarray:
    """Return the nearest non-decreasing times: stretches that fall are pooled to their geometric mean (of 1 + time)."""
    from scipy.optimize import isotonic_regression

    pooled = isotonic_regression(np.log1p(time_ns))
    starts = pooled.blocks[:-1]
    alike = np.minimum.reduceat(time_ns, starts) == np.maximum.reduceat(time_ns, starts)
    # Times that were not pooled with others keep their exact value.
    return np.where(np.repeat(alike, np.diff(pooled.blocks)), time_ns, np.expm1(pooled.x))


def _integer_table(time_ns: np.ndarray) -> np.ndarray:
    # The last rounding of a logarithm must not make a pooled block fall short of the time before it.
    return np.maximum.accumulate(np.rint(never_falling(time_ns)).astype(np.int64))


def freeze_tables(model: CostModel, spec: ModelSpec, topology: Topology, max_tokens: int, key: str) -> StepTables:
    """Evaluate every table at its nodes; they cover every cell up to the cap and every routing of a full block."""
    pricer = Pricer(model, spec, topology, max_tokens)
    classes = pricer.classes()
    max_rows = max_tokens * topology.slots_per_block * spec.top_k
    tokens_shift, rows_shift = node_shift(max_tokens), node_shift(max_rows)
    tokens, rows = table_nodes(max_tokens, tokens_shift), table_nodes(max_rows, rows_shift)
    return StepTables(
        sequence_ns=tuple(_integer_table(pricer.sequence_ns(tokens, kind)) for kind in classes),
        cell_ns=tuple(_integer_table(pricer.cell_ns(tokens, kind)) for kind in classes),
        class_layers=np.array([kind.layers for kind in classes], dtype=np.int64),
        class_names=tuple(kind.name for kind in classes),
        expert_rank_ns=_integer_table(pricer.expert_rank_ns(rows)),
        exchange_ns=_integer_table(pricer.exchange_ns(rows)),
        row_fixed_ns=0,
        length_shift=tokens_shift,
        tokens_shift=tokens_shift,
        rows_shift=rows_shift,
        max_tokens=max_tokens,
        num_moe_layers=spec.num_moe_layers,
        top_k=spec.top_k,
        slots_per_block=topology.slots_per_block,
        pipeline_stages=topology.pipeline_model_parallel_size,
        measured_length_max=_measured_length_max(pricer),
        measured_rows_max=_measured_rows_max(pricer),
        notes=tuple(_notes(pricer)),
        key=key,
    )


def _measured_length_max(pricer: Pricer) -> int:
    model, _ = pricer.model.model_of("attention", "forward")
    found = [model.knows(pricer.attention_shape(window)) for window in sorted(set(pricer.spec.windows))]
    return 0 if None in found else min(int(ranges["max_length"][1]) for ranges in found if ranges)


def _measured_rows_max(pricer: Pricer) -> int:
    ranges = pricer.model.model_of("experts", "forward")[0].knows(pricer.experts_shape())
    return int(ranges["rows"][1]) * pricer.topology.blocks_per_slot if ranges else 0


def _notes(pricer: Pricer) -> list[str]:
    """Say in one sentence each what is assumed, extrapolated or not priced."""
    recomputed = ["every layer's forward is priced twice: activations are recomputed"] * (pricer.passes("forward") - 1)
    return [
        *recomputed,
        *_backward_notes(pricer),
        *_shape_notes(pricer),
        *_size_notes(pricer),
        *_exchange_notes(pricer),
    ]


def _backward_notes(pricer: Pricer) -> list[str]:
    notes = []
    for op in ("attention", "dense", "experts"):
        factor = pricer.model.backward_factor(op) if op in pricer.has else None
        if factor is not None:
            notes.append(f"backward of {op} is assumed {factor:g}x forward: only forward times were measured")
    return notes


def _shape_notes(pricer: Pricer) -> list[str]:
    notes = []
    asked = [("attention", pricer.attention_shape(window)) for window in sorted(set(pricer.spec.windows))]
    for op, shape in [*asked, ("experts", pricer.experts_shape())]:
        model = pricer.model.model_of(op, "forward")[0]
        if model.knows(shape) is None:
            named = ", ".join(f"{name} {value}" for name, value in shape.items())
            how = "the physics baseline alone" if model.unseen is None else "the learned model of other shapes"
            notes.append(f"{op}: shape ({named}) has no measured rows: extrapolated by {how}")
    for (op, direction), fitted in sorted(pricer.model.models.items()):
        if fitted.kind == "baseline":
            notes.append(f"{op} {direction}: priced by the physics baseline alone ({fitted.reasons[0]})")
    return notes


def _size_notes(pricer: Pricer) -> list[str]:
    notes = []
    length, rows = _measured_length_max(pricer), _measured_rows_max(pricer)
    if 0 < length < pricer.max_tokens:
        notes.append(f"attention: sequences of more than {length} tokens are extrapolated")
    most = pricer.max_tokens * pricer.topology.slots_per_block * pricer.spec.top_k
    if 0 < rows < most:
        notes.append(f"experts: more than {rows} rows on one rank are extrapolated")
    if "dense" not in pricer.has:
        return [*notes, "projections are not priced: no dense GEMM was measured"]
    ranges = pricer.model.model_of("dense", "forward")[0].knows({})
    tokens = int(ranges["tokens"][1]) * pricer.topology.context_parallel_size if ranges else 0
    if tokens < pricer.max_tokens:
        notes.append(f"dense: cells of more than {tokens} tokens are extrapolated")
    return notes


def _exchange_notes(pricer: Pricer) -> list[str]:
    ranks = pricer.topology.expert_model_parallel_size
    if ranks == 1:
        return []
    if "alltoall" not in pricer.has:
        return ["dispatch and combine are not priced: no all-to-all was measured"]
    ranges = pricer.model.model_of("alltoall", "forward")[0].knows({})
    most = int(ranges["ranks"][1]) if ranges else 0
    if ranks <= most:
        return []
    return [
        f"dispatch and combine among {ranks} ranks are extrapolated from at most {most} ranks of one node: "
        "links between nodes are slower than priced"
    ]


def table_errors(
    model: CostModel, tables: StepTables, spec: ModelSpec, topology: Topology, seed: int, samples: int = 500
) -> dict[str, Any]:
    """Return how far look-ups lie from the model on random sizes, percent, per table."""
    pricer = Pricer(model, spec, topology, tables.max_tokens)
    rng = np.random.default_rng(seed)
    lengths = np.unique(rng.integers(1, tables.max_tokens, samples, endpoint=True))
    rows = np.unique(rng.integers(1, tables.max_rows, samples, endpoint=True))
    errors = {}
    for name, table, price in (
        ("expert_rank_ns", tables.expert_rank_ns, pricer.expert_rank_ns),
        ("exchange_ns", tables.exchange_ns, pricer.exchange_ns),
    ):
        errors[name] = _difference(lookup_many_ns(table, tables.rows_shift, rows), price(rows))
    for c, kind in enumerate(pricer.classes()):
        found = lookup_many_ns(tables.sequence_ns[c], tables.length_shift, lengths)
        errors[f"sequence_ns/{kind.name}"] = _difference(found, pricer.sequence_ns(lengths, kind))
        found = lookup_many_ns(tables.cell_ns[c], tables.tokens_shift, lengths)
        errors[f"cell_ns/{kind.name}"] = _difference(found, pricer.cell_ns(lengths, kind))
    return errors


def _difference(found_ns: np.ndarray, exact_ns: np.ndarray) -> dict[str, float]:
    error = 100.0 * np.abs(found_ns - exact_ns) / np.maximum(exact_ns, 1.0)
    return {
        "mean_pct": round(float(error.mean()), 3),
        "p95_pct": round(float(np.percentile(error, 95)), 3),
        "worst_pct": round(float(error.max()), 3),
    }

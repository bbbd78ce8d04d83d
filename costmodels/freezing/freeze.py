"""Freeze a cost model into integer-nanosecond tables for one model, topology and token cap.

What every table means is said once, in :class:`costmodels.tables.StepTables`. Each is evaluated at all its nodes in one
batch, the tile steps of the baseline included, then made non-decreasing: trees have steps, and a planner must never
gain by adding work. Where times fall, they are pooled (isotonic regression of their logs): a running maximum would
carry every upward error of the trees to all larger sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodels.cost_model import CostModel, tables_key
from costmodels.operations import DIRECTIONS
from costmodels.tables import StepTables, lookup_many_ns, node_shift, table_nodes
from profiler import ModelSpec, Topology
from profiler.cases.case import causal_pairs, padded_rows

TYPICAL_SKEW = 0.5
"""Standard deviation of the log of an expert's load inside one rank.

On real routes its median is 0.5 (fine-grained experts) to 1.1 (four experts a rank). What one number for every rank
costs in accuracy is in ``docs/cost-models.md``.
"""


@dataclass(frozen=True)
class LayerClass:
    """Name one kind of layer work in one direction."""

    window: int
    moe: bool
    linear: bool
    """Its attention is a gated delta rule."""
    direction: str
    layers: int

    @property
    def name(self) -> str:
        """``full/moe/forward`` and the like."""
        attention = "linear" if self.linear else f"window{self.window}" if self.window else "full"
        return f"{attention}/{'moe' if self.moe else 'dense'}/{self.direction}"

    @property
    def core(self) -> str:
        """The operation of its attention core."""
        return "linear_attention" if self.linear else "attention"


@dataclass(frozen=True)
class Pricer:
    """Price the parts of a step in nanoseconds, unrounded; every feature is that of one rank."""

    model: CostModel
    spec: ModelSpec
    topology: Topology
    max_tokens: int

    def has(self, op: str) -> bool:
        """Return whether an operation was measured."""
        return (op, "forward") in self.model.models

    def timed(self, op: str, shape: Mapping[str, Any] | None = None) -> Mapping[str, tuple[float, float]] | None:
        """Return the timed range of every size feature of a shape, None if neither it nor the operation was timed."""
        if (model := self.model.models.get((op, "forward"))) is None:
            return None
        return model.timed.get(tuple((shape or {})[name] for name in model.operation.shape))

    def classes(self) -> list[LayerClass]:
        """Return every (window or linear, MoE or dense, direction) of the model, in order of appearance."""
        spec = self.spec
        kinds = list(zip(spec.windows, spec.moe_layers, spec.linear_layers or [False] * spec.num_layers, strict=True))
        return [
            LayerClass(*kind, direction, kinds.count(kind) * self.passes(direction))
            for kind in dict.fromkeys(kinds)
            for direction in DIRECTIONS
        ]

    def passes(self, direction: str) -> int:
        """Return how often a layer runs in a direction per microbatch: forward twice where it is recomputed."""
        return 2 if direction == "forward" and self.model.params.recompute_activations else 1

    def core_shape(self, window: int, linear: bool = False) -> dict[str, int]:
        """Return the shape features of an attention core."""
        heads = self.spec.attention_heads(self.topology.tensor_model_parallel_size, linear)
        names = ("num_heads", "num_kv_heads", "qk_head_dim", "v_head_dim")
        return dict(zip(names, heads, strict=True)) | ({} if linear else {"window": window})

    @property
    def router_shape(self) -> dict[str, int]:
        """The shape features of the router."""
        return {"hidden_size": self.spec.hidden_size, "num_experts": self.spec.num_experts, "top_k": self.spec.top_k}

    @property
    def experts_shape(self) -> dict[str, int]:
        """The shape features of the experts."""
        spec, topology = self.spec, self.topology
        return {
            "local_experts": max(1, spec.num_experts // topology.expert_model_parallel_size),
            "hidden_size": spec.hidden_size,
            "inter_size": max(1, spec.moe_intermediate_size // topology.expert_tensor_parallel_size),
            "num_experts": spec.num_experts,
        }

    def full_cell(self, length: np.ndarray, kind: LayerClass) -> dict[str, Any]:
        """Return the attention features of cells filled with equal sequences of each length."""
        count = np.maximum(1, self.max_tokens // length)
        sizes = {"tokens": count * length, "num_sequences": count, "max_length": length}
        if not kind.linear:
            sizes["pairs"] = count * causal_pairs(length, kind.window)
        return sizes | self.core_shape(kind.window, kind.linear)

    def sequence_ns(self, length: np.ndarray, kind: LayerClass) -> np.ndarray:
        """Return the time one sequence adds to its full cell, floor taken off; 0 at length 0."""
        features = self.full_cell(np.maximum(length, 1), kind)
        added_us = np.maximum(self._us(kind.core, kind.direction, features) - self._core_floor_us(kind), 0.0)
        share = features["num_sequences"] * self.topology.context_parallel_size
        return np.where(length > 0, added_us / share * 1e3, 0.0)

    def cell_ns(self, tokens: np.ndarray, kind: LayerClass) -> np.ndarray:
        """Return floors, dense GEMMs and router of one layer for cells of so many tokens."""
        spec, topology = self.spec, self.topology
        tensor, context = topology.tensor_model_parallel_size, topology.context_parallel_size
        width = spec.shared_intermediate_size if kind.moe else spec.dense_intermediate_size
        gemms = (*spec.attention_projections(tensor, kind.linear), *spec.feed_forward(width, tensor))
        parts: list[tuple[str, int, dict[str, int]]] = [("dense", context, {"n": n, "k": k}) for n, k in gemms]
        if kind.moe:
            # Tensor-parallel ranks share a slot's tokens by sequence parallelism, context-parallel ones by position.
            parts.insert(0, ("router", topology.ranks_per_slot, self.router_shape))
        total_us = np.full(tokens.size, self._core_floor_us(kind))
        for op, ranks, shape in parts:
            if self.has(op):
                floor_us = self.model.floor_us(op, kind.direction, shape)
                features = {"tokens": np.maximum(tokens / ranks, 1.0), **shape}
                time_us = np.maximum(self._us(op, kind.direction, features), floor_us)
                total_us += np.where(tokens > 0, time_us, floor_us)
        return total_us * 1e3

    def experts_features(self, rows: np.ndarray) -> dict[str, Any]:
        """Return features of so many rows on one rank, spread over its experts with a typical skew."""
        counts = skewed_counts(rows, self.experts_shape["local_experts"])
        sizes = {
            "rows": rows,
            "active_experts": (counts > 0).sum(axis=1),
            "padded_rows": padded_rows(counts).sum(axis=1),
            "max_rows": counts.max(axis=1),
            "router_tokens": 0,
        }
        return sizes | self.experts_shape

    def expert_rank_ns(self, rows: np.ndarray) -> np.ndarray:
        """Return forward + backward of one layer's experts on a rank; rows are of all blocks a slot spreads over."""
        local = -(-rows // self.topology.blocks_per_slot)
        features, one_row = self.experts_features(np.maximum(local, 1)), self.experts_features(np.array([1]))
        total_us = np.zeros(rows.size)
        for direction in DIRECTIONS:
            # A rank without rows never takes more than one of a single row.
            one_us = float(self._us("experts", direction, one_row)[0])
            floor_us = min(self.model.floor_us("experts", direction, self.experts_shape), one_us)
            time_us = np.maximum(self._us("experts", direction, features), floor_us)
            total_us += self.passes(direction) * np.where(local > 0, time_us, floor_us)
        return total_us * 1e3

    def exchange_ns(self, rows: np.ndarray) -> np.ndarray:
        """Return dispatch + combine, forward + backward, of one layer; zeros where nothing is exchanged or known."""
        ranks = self.topology.expert_model_parallel_size
        total_us = np.zeros(rows.size)
        if ranks == 1 or not self.has("alltoall"):
            return total_us
        sent = rows / self.topology.blocks_per_slot * self.spec.hidden_size * 2.0
        outside = self.outside_share() if self.knows_network("alltoall") else 0.0
        features = {"bytes": np.maximum(sent, 1.0), "inter_bytes": outside * sent, "ranks": ranks}
        for direction in DIRECTIONS:
            total_us += 2.0 * self.passes(direction) * self._us("alltoall", direction, features)
        return total_us * 1e3

    def expert_move_ns(self) -> float:
        """Return the mean time of moving one expert to another rank of its block; 0 where none was measured."""
        ranks = self.topology.expert_model_parallel_size
        if ranks == 1 or not self.has("transfer"):
            return 0.0
        size = float(self.spec.expert_bytes(self.topology.expert_tensor_parallel_size))
        inside_us, between_us = self._us("transfer", "forward", {"bytes": size, "inter_bytes": np.array([0.0, size])})
        # Of the other ranks: itself is none of them.
        between = self.outside_share() * ranks / (ranks - 1) if self.knows_network("transfer") else 0.0
        return float((1.0 - between) * inside_us + between * between_us) * 1e3

    def outside_share(self) -> float:
        """Return the share of an EP rank's peers, itself included, that are on other nodes; 0 if unknown.

        Ranks of a block are consecutive. One rank a node is what a profile of a single process says: it tells nothing,
        unless exchanges between nodes were timed.
        """
        topology, per_node = self.topology, self.model.fingerprint.ranks_per_node
        if per_node < 1 or (per_node == 1 and not self.knows_network("alltoall", "transfer")):
            return 0.0
        inside = max(1, per_node // topology.expert_tensor_parallel_size)
        return max(0.0, 1.0 - inside / topology.expert_model_parallel_size)

    def knows_network(self, *ops: str) -> bool:
        """Return whether times between nodes were measured for any of these operations."""
        return any("inter_bytes" in (self.timed(op) or {}) for op in ops)

    def _us(self, op: str, direction: str, features: Mapping[str, Any]) -> np.ndarray:
        return self.model.predict_us(op, direction, features)[0]

    def _core_floor_us(self, kind: LayerClass) -> float:
        return self.model.floor_us(kind.core, kind.direction, self.core_shape(kind.window, kind.linear))


def skewed_counts(rows: np.ndarray, experts: int) -> np.ndarray:
    """Split rows over experts in proportion to quantiles of a log-normal, whole rows, [rows, experts] int64."""
    from scipy.special import ndtri

    weight = np.exp(TYPICAL_SKEW * ndtri((np.arange(experts) + 0.5) / experts))[::-1]
    # Differences of the rounded running total: whole, never negative, and they add up.
    edges = np.rint(rows[:, None] * (np.cumsum(weight) / weight.sum())).astype(np.int64)
    edges[:, -1] = rows
    return np.diff(edges, axis=1, prepend=0)


def never_falling(time_ns: np.ndarray) -> np.ndarray:
    """Return the nearest non-decreasing whole times: stretches that fall get their geometric mean (of 1 + time)."""
    from scipy.optimize import isotonic_regression

    pooled = np.rint(np.expm1(isotonic_regression(np.log1p(time_ns)).x)).astype(np.int64)
    # The last rounding of a logarithm must not make a pooled block fall short of the time before it.
    return np.maximum.accumulate(pooled)


def freeze_tables(model: CostModel, spec: ModelSpec, topology: Topology, max_tokens: int) -> StepTables:
    """Evaluate every table at its nodes; they cover every cell up to the cap and every routing of a full block."""
    pricer = Pricer(model, spec, topology, max_tokens)
    classes = pricer.classes()
    max_rows = max_tokens * topology.slots_per_block * spec.top_k
    tokens_shift, rows_shift = node_shift(max_tokens), node_shift(max_rows)
    tokens, rows = table_nodes(max_tokens, tokens_shift), table_nodes(max_rows, rows_shift)
    lengths = [ranges["max_length"][1] if (ranges := pricer.timed(op, shape)) else 0 for op, shape in _cores(pricer)]
    experts, length_max = pricer.timed("experts", pricer.experts_shape), int(min(lengths))
    rows_max = int(experts["rows"][1]) * topology.blocks_per_slot if experts else 0
    return StepTables(
        sequence_ns=np.stack([never_falling(pricer.sequence_ns(tokens, kind)) for kind in classes]),
        cell_ns=np.stack([never_falling(pricer.cell_ns(tokens, kind)) for kind in classes]),
        class_layers=np.array([kind.layers for kind in classes], dtype=np.int64),
        class_names=tuple(kind.name for kind in classes),
        expert_rank_ns=never_falling(pricer.expert_rank_ns(rows)),
        exchange_ns=never_falling(pricer.exchange_ns(rows)),
        row_fixed_ns=0,
        length_shift=tokens_shift,
        tokens_shift=tokens_shift,
        rows_shift=rows_shift,
        max_tokens=max_tokens,
        num_moe_layers=spec.num_moe_layers,
        top_k=spec.top_k,
        slots_per_block=topology.slots_per_block,
        pipeline_stages=topology.pipeline_model_parallel_size,
        measured_length_max=length_max,
        measured_rows_max=rows_max,
        notes=(*_assumed(pricer), *_extrapolated(pricer, length_max, rows_max, max_rows), *_exchanges(pricer)),
        key=tables_key(spec, topology, max_tokens),
        expert_move_ns=round(pricer.expert_move_ns()),
    )


def table_errors(model: CostModel, tables: StepTables, samples: int = 500) -> dict[str, Any]:
    """Return how far look-ups in the model's own tables lie from it on random sizes, percent, per table."""
    pricer = Pricer(model, model.spec, model.topology, tables.max_tokens)
    rng, largest = np.random.default_rng(model.params.seed), (tables.max_tokens, tables.max_rows)
    tokens, rows = (np.unique(rng.integers(1, most, samples, endpoint=True)) for most in largest)

    def errors(table: np.ndarray, shift: int, x: np.ndarray, exact_ns: np.ndarray) -> dict[str, float]:
        error = 100.0 * np.abs(lookup_many_ns(table, shift, x) - exact_ns) / np.maximum(exact_ns, 1.0)
        found = {"mean_pct": error.mean(), "p95_pct": np.percentile(error, 95), "worst_pct": error.max()}
        return {name: round(float(value), 3) for name, value in found.items()}

    found = {}
    for name in ("expert_rank_ns", "exchange_ns"):
        found[name] = errors(getattr(tables, name), tables.rows_shift, rows, getattr(pricer, name)(rows))
    for c, kind in enumerate(pricer.classes()):
        for name in ("sequence_ns", "cell_ns"):
            exact_ns = getattr(pricer, name)(tokens, kind)
            found[f"{name}/{kind.name}"] = errors(getattr(tables, name)[c], tables.tokens_shift, tokens, exact_ns)
    return found


def _cores(pricer: Pricer) -> list[tuple[str, dict[str, int]]]:
    """Return the operation and shape of every attention core of the model."""
    cores = [("attention", pricer.core_shape(window)) for window in pricer.spec.attention_windows]
    return cores + ([("linear_attention", pricer.core_shape(0, linear=True))] if pricer.spec.linear_layers else [])


def _assumed(pricer: Pricer) -> Iterator[str]:
    """Say what stands for times that were not measured."""
    if pricer.passes("forward") > 1:
        yield "every layer's forward is priced twice: activations are recomputed"
    for op in ("attention", "linear_attention", "dense", "router", "experts"):
        factor = pricer.model.backward_factor(op)
        if pricer.has(op) and factor is not None:
            yield f"backward of {op} is assumed {factor:g}x forward: only forward times were measured"
    for op, shape in [*_cores(pricer), ("experts", pricer.experts_shape), ("router", pricer.router_shape)]:
        if pricer.has(op) and pricer.timed(op, shape) is None:
            named = ", ".join(f"{name} {value}" for name, value in shape.items())
            learned = pricer.model.models[op, "forward"].unseen.trees is not None
            how = "the learned model of other shapes" if learned else "the physics baseline alone"
            yield f"{op}: shape ({named}) has no measured rows: extrapolated by {how}"
    for (op, direction), fitted in sorted(pricer.model.models.items()):
        if fitted.kind == "baseline":
            yield f"{op} {direction}: priced by the physics baseline alone ({fitted.reasons[0]})"


def _extrapolated(pricer: Pricer, length_max: int, rows_max: int, most_rows: int) -> Iterator[str]:
    """Say what lies beyond the timed sizes, or is not priced."""
    if 0 < length_max < pricer.max_tokens:
        yield f"attention: sequences of more than {length_max} tokens are extrapolated"
    if 0 < rows_max < most_rows:
        yield f"experts: more than {rows_max} rows on one rank are extrapolated"
    if not pricer.has("router"):
        yield "routers are not priced: none was measured"
    if pricer.spec.linear_conv_kernel_dim:
        yield "short convolutions of linear attention layers are not priced"
    if not pricer.has("dense"):
        yield "projections are not priced: no dense GEMM was measured"
    elif ranges := pricer.timed("dense"):
        tokens = int(ranges["tokens"][1]) * pricer.topology.context_parallel_size
        if tokens < pricer.max_tokens:
            yield f"dense: cells of more than {tokens} tokens are extrapolated"


def _exchanges(pricer: Pricer) -> Iterator[str]:
    """Say how far exchanges lie from those that were timed."""
    ranks = pricer.topology.expert_model_parallel_size
    if ranks == 1:
        return
    if (ranges := pricer.timed("alltoall")) is None:
        yield "dispatch and combine are not priced: no all-to-all was measured"
        return
    most, among = int(ranges["ranks"][1]), f"dispatch and combine among {ranks} ranks are extrapolated from"
    slower = "links between nodes are slower than priced"
    if ranks > most:
        one_node = "" if pricer.knows_network("alltoall") else f" of one node: {slower}"
        yield f"{among} at most {most} ranks{one_node}"
    elif pricer.outside_share() > 0 and not pricer.knows_network("alltoall"):
        yield f"{among} exchanges of one node: {slower}"

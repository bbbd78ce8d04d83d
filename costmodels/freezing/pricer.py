"""Price the parts of one job's step by a cost model, before anything is frozen or rounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodels.cost_model import CostModel
from costmodels.operations import DIRECTIONS
from profiler import ModelSpec, Topology
from profiler.cases.case import causal_pairs, padded_rows
from profiler.device.fingerprint import link_rates

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

    def stated_link_gbytes_per_s(self) -> float:
        """Return what the device's facts state of one rank's links inside a block, 1e9 bytes/s; 0 if nothing.

        Those inside a node where the whole block fits into one, else its share of the network. One rank a node is what
        a profile of a single process says: it tells nothing.
        """
        device, (inside, network) = self.model.fingerprint, link_rates(self.model.fingerprint)
        if device.ranks_per_node <= 1:
            return 0.0
        fits = self.topology.ranks_per_block <= device.ranks_per_node
        return (inside if fits else network / device.ranks_per_node) / 1e9

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

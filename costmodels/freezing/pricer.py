"""Prices of the parts of a step, straight from a cost model: what frozen tables approximate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodels.cost_model import CostModel
from costmodels.operations.catalog import DIRECTIONS
from profiler import ModelSpec, Topology
from profiler.cases.case import causal_pairs, padded_rows

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
    linear: bool = False
    """Its attention is a gated delta rule."""

    @property
    def name(self) -> str:
        """``full/moe/forward`` and the like."""
        attention = "linear" if self.linear else f"window{self.window}" if self.window else "full"
        return f"{attention}/{'moe' if self.moe else 'dense'}/{self.direction}"


class Pricer:
    """Price the parts of a step in nanoseconds, unrounded, straight from the models: what tables approximate."""

    def __init__(self, model: CostModel, spec: ModelSpec, topology: Topology, max_tokens: int) -> None:
        self.model, self.spec, self.topology, self.max_tokens = model, spec, topology, max_tokens
        self.has = {op for op, _ in model.models}

    def classes(self) -> list[LayerClass]:
        """Return every (window or linear, MoE or dense, direction) of the model, in order of appearance."""
        spec = self.spec
        linear = spec.linear_layers or (False,) * spec.num_layers
        kinds = list(zip(spec.windows, spec.moe_layers, linear, strict=True))
        return [
            LayerClass(window, moe, direction, kinds.count((window, moe, mark)) * self.passes(direction), mark)
            for window, moe, mark in dict.fromkeys(kinds)
            for direction in DIRECTIONS
        ]

    def passes(self, direction: str) -> int:
        """Return how often a layer runs in a direction per microbatch: forward twice where it is recomputed."""
        return 2 if direction == "forward" and self.model.params.recompute_activations else 1

    def attention_shape(self, window: int, linear: bool = False) -> dict[str, int]:
        """Return the shape features of the attention core on one tensor-parallel rank."""
        heads = self.spec.attention_heads(self.topology.tensor_model_parallel_size, linear)
        names = ("num_heads", "num_kv_heads", "qk_head_dim", "v_head_dim")
        return dict(zip(names, heads, strict=True)) | ({} if linear else {"window": window})

    def full_cell(self, length: np.ndarray, window: int, linear: bool = False) -> dict[str, np.ndarray]:
        """Return the attention features of cells filled with equal sequences of each length."""
        count = np.maximum(1, self.max_tokens // length)
        sizes = {"tokens": count * length, "num_sequences": count, "max_length": length}
        if not linear:
            sizes["pairs"] = count * causal_pairs(length, window)
        shape = self.attention_shape(window, linear)
        return sizes | {name: np.full_like(length, value) for name, value in shape.items()}

    def sequence_ns(self, length: np.ndarray, kind: LayerClass) -> np.ndarray:
        """Return the time one sequence adds to its full cell, floor taken off; 0 at length 0."""
        result = np.zeros(length.size)
        some = length > 0
        features = self.full_cell(length[some], kind.window, kind.linear)
        time_us, _ = self.model.predict_us(_core_of(kind), kind.direction, features)
        floor_us = self._attention_floor_us(kind)
        share = features["num_sequences"] * self.topology.context_parallel_size
        result[some] = np.maximum(time_us - floor_us, 0.0) / share * 1e3
        return result

    def _attention_floor_us(self, kind: LayerClass) -> float:
        shape = {**self.attention_shape(kind.window, kind.linear), "tokens": 1}
        return self.model.floor_us(_core_of(kind), kind.direction, _vectors(shape))

    def gemms(self, moe: bool, linear: bool = False) -> tuple[tuple[int, int], ...]:
        """Return the (n, k) of the dense GEMMs of one layer on one tensor-parallel rank."""
        spec, tensor = self.spec, self.topology.tensor_model_parallel_size
        width = spec.shared_intermediate_size if moe else spec.dense_intermediate_size
        return (*spec.attention_projections(tensor, linear), *spec.feed_forward(width, tensor))

    def cell_ns(self, tokens: np.ndarray, kind: LayerClass) -> np.ndarray:
        """Return floors, dense GEMMs and router of one layer for cells of so many tokens."""
        total_us = np.full(tokens.size, self._attention_floor_us(kind))
        if kind.moe and "router" in self.has:
            # Tensor-parallel ranks share a slot's tokens by sequence parallelism, context-parallel ones by position.
            total_us += self._floored_us("router", kind.direction, tokens, self.topology.ranks_per_slot,
                                         self.router_shape())  # fmt: skip
        if "dense" not in self.has:
            return total_us * 1e3
        for n, k in self.gemms(kind.moe, kind.linear):
            share = self.topology.context_parallel_size
            total_us += self._floored_us("dense", kind.direction, tokens, share, {"n": n, "k": k})
        return total_us * 1e3

    def router_shape(self) -> dict[str, int]:
        """Return the shape features of the router."""
        return {"hidden_size": self.spec.hidden_size, "num_experts": self.spec.num_experts, "top_k": self.spec.top_k}

    def _floored_us(
        self, op: str, direction: str, tokens: np.ndarray, ranks: int, shape: dict[str, int]
    ) -> np.ndarray:  # fmt: skip
        """Return the time of a rank's share of the tokens, never below that of a call with nothing to do."""
        local = np.maximum(tokens / ranks, 1.0)
        features = {"tokens": local, **{name: np.full(local.size, value) for name, value in shape.items()}}
        floor_us = self.model.floor_us(op, direction, _vectors({"tokens": 1, **shape}))
        time_us, _ = self.model.predict_us(op, direction, features)
        return np.where(tokens > 0, np.maximum(time_us, floor_us), floor_us)

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
        outside = self.outside_share() if self.knows_network("alltoall") else 0.0
        features = {"bytes": np.maximum(sent, 1.0), "inter_bytes": outside * sent, "ranks": np.full(rows.size, ranks)}
        for direction in DIRECTIONS:
            total_us += 2.0 * self.passes(direction) * self.model.predict_us("alltoall", direction, features)[0]
        return total_us * 1e3

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
        models = [self.model.models[op, "forward"] for op in ops if (op, "forward") in self.model.models]
        return any("inter_bytes" in ranges for model in models for ranges in model.shapes.values())

    def expert_move_ns(self) -> float:
        """Return the mean time of moving one expert to another rank of its block; 0 where none was measured."""
        ranks = self.topology.expert_model_parallel_size
        if ranks == 1 or "transfer" not in self.has:
            return 0.0
        size = float(self.spec.expert_bytes(self.topology.expert_tensor_parallel_size))
        features = {"bytes": np.array([size, size]), "inter_bytes": np.array([0.0, size])}
        inside_us, between_us = self.model.predict_us("transfer", "forward", features)[0]
        # Of the other ranks: itself is none of them.
        between = self.outside_share() * ranks / (ranks - 1) if self.knows_network("transfer") else 0.0
        return float((1.0 - between) * inside_us + between * between_us) * 1e3


def _core_of(kind: LayerClass) -> str:
    return "linear_attention" if kind.linear else "attention"


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

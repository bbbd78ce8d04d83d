"""Where experts lie, what moving them costs, and which to move.

A moved expert takes its weights and optimizer state along. The price of a move is spread over the steps until experts
are placed anew (the horizon), so that a layer changes only as far as each swap pays.

Shape suffixes: L MoE layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodels import StepTables
from profiler import ModelSpec, RoutePackError, Topology
from search.params import PlannerParams
from search.placement.lpt import ranks_of_slots, slots_of_ranks
from search.plan import ExpertMoves, Plan
from search.problem import Problem

ASSUMED_GBYTES_PER_S = 25.0
"""Bandwidth of one rank where neither the settings nor measurements say it."""


@dataclass(frozen=True, slots=True)
class Residence:
    """Hold where experts' weights lie now and what moving one costs."""

    rank_LE: np.ndarray
    """EP rank of every expert."""
    move_ns: int
    """Price of one expert away from home, in the objective's nanoseconds a step."""

    def price_ns(self, rank_LE: np.ndarray) -> int:
        """Return the price of a placement's moves, summed over EP blocks."""
        return self.move_ns * int((rank_LE != self.rank_LE).sum())


def residence_of(previous: Plan, problem: Problem, spec: ModelSpec, params: PlannerParams) -> Residence:
    """Return where experts lie and the price of moving one, spread over the horizon; prices add up over blocks.

    The objective adds up the layers of all pipeline stages, which move at the same time: in it an expert costs its own
    move, whatever the number of stages.
    """
    move_ns = expert_move_ns(spec, problem.topology, problem.tables, params)
    price = params.stickiness * move_ns * problem.num_blocks / max(1.0, params.horizon_steps)
    return Residence(_old_ranks(previous, problem), round(price))


def _old_ranks(previous: Plan, problem: Problem) -> np.ndarray:
    if previous.placement_LE.shape != (problem.num_layers, problem.num_experts):
        raise RoutePackError(
            f"Previous plan places {previous.placement_LE.shape} (layers, experts), this model has "
            f"{(problem.num_layers, problem.num_experts)}. Give the previous plan of the same job."
        )
    if previous.topology.expert_model_parallel_size != problem.num_ranks:
        raise RoutePackError(
            f"Previous plan has expert_model_parallel_size {previous.topology.expert_model_parallel_size}, this job "
            f"{problem.num_ranks}. Give the previous plan of the same job."
        )
    return ranks_of_slots(previous.placement_LE, problem.num_ranks)


def expert_bytes(spec: ModelSpec, topology: Topology) -> int:
    """Return the bytes of one expert's weights and optimizer state on one rank."""
    return spec.expert_bytes(topology.expert_tensor_parallel_size)


def expert_move_ns(spec: ModelSpec, topology: Topology, tables: StepTables, params: PlannerParams) -> float:
    """Return the time of moving one expert: by the stated bandwidth, else as measured, else by an assumed one."""
    if params.link_gbytes_per_s == 0 and tables.expert_move_ns:
        return float(tables.expert_move_ns)
    return expert_bytes(spec, topology) / (params.link_gbytes_per_s or ASSUMED_GBYTES_PER_S)


def is_assumed(tables: StepTables, params: PlannerParams) -> bool:
    """Tell whether the time of a move is neither stated nor measured."""
    return params.link_gbytes_per_s == 0 and not tables.expert_move_ns


def stage_of_layers(spec: ModelSpec, topology: Topology) -> np.ndarray:
    """Return the pipeline stage of every MoE layer, [L]: chunks of layers dealt evenly to the stages in turn."""
    stages = topology.pipeline_model_parallel_size
    chunks = stages * topology.virtual_pipeline_model_parallel_size
    return np.flatnonzero(spec.moe_layers) * chunks // spec.num_layers % stages


def list_moves(
    old_LE: np.ndarray, new_LE: np.ndarray, per_rank: int, bytes_each: int, seconds_each: float, stage_L: np.ndarray
) -> ExpertMoves:
    """List what changes its slot; layers of a pipeline stage move one after another, each as long as its busiest
    receiving rank, stages at the same time."""
    layers, experts = np.nonzero(old_LE != new_LE)
    pairs = [layers, experts, old_LE[layers, experts], new_LE[layers, experts]]
    received = np.zeros((len(new_LE), new_LE.shape[1]), np.int64)
    away = old_LE[layers, experts] // per_rank != new_LE[layers, experts] // per_rank
    np.add.at(received, (layers[away], new_LE[layers, experts][away] // per_rank), 1)
    seconds = float(np.bincount(stage_L, weights=received.max(axis=1)).max()) * seconds_each
    return ExpertMoves(tuple(map(tuple, np.stack(pairs, 1).tolist())), int(away.sum()) * bytes_each, seconds)


def relabelled(rank_LE: np.ndarray, home_LE: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return the same groups of experts under rank numbers that keep most of them at home, [L, E].

    Largest overlaps are matched first, then pairs of ranks change numbers while that helps.
    """
    result = np.empty_like(rank_LE)
    for layer, (ranks, home) in enumerate(zip(rank_LE, home_LE, strict=True)):
        overlap = np.zeros((num_ranks, num_ranks), np.int64)
        np.add.at(overlap, (ranks, home), 1)
        name = np.full(num_ranks, -1)
        free = np.ones(num_ranks, bool)
        for place in np.argsort(-overlap, axis=None, kind="stable"):
            old, new = divmod(int(place), num_ranks)
            if name[old] < 0 and free[new]:
                name[old], free[new] = new, False
        improved = True
        while improved:
            kept = overlap[np.arange(num_ranks)[:, None], name[None, :]]  # [a, b]: a under b's number
            gain = kept + kept.T - np.diag(kept)[:, None] - np.diag(kept)[None, :]
            a, b = np.unravel_index(int(np.argmax(gain)), gain.shape)
            improved = gain[a, b] > 0
            if improved:
                name[a], name[b] = name[b], name[a]
        result[layer] = name[ranks]
    return result


def nearer_home(rank_LE: np.ndarray, home_LE: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return a placement [L, E] with the ranks of a layer renamed where that keeps more of its experts at home."""
    renamed = relabelled(rank_LE, home_LE, num_ranks)
    fewer = (renamed != home_LE).sum(axis=1) < (rank_LE != home_LE).sum(axis=1)
    return np.where(fewer[:, None], renamed, rank_LE)


def placement_of_ranks(rank_LE: np.ndarray, num_ranks: int, previous_LE: np.ndarray | None = None) -> np.ndarray:
    """Return physical slots [L, E]; experts that stay on their rank keep the slot of ``previous_LE``."""
    if previous_LE is None:
        return np.stack([slots_of_ranks(ranks, num_ranks) for ranks in rank_LE])
    per_rank = rank_LE.shape[1] // num_ranks
    placement = np.where(previous_LE // per_rank == rank_LE, previous_LE, -1)
    for layer in range(len(rank_LE)):
        for rank in range(num_ranks):
            arrivals = np.flatnonzero((rank_LE[layer] == rank) & (placement[layer] < 0))
            if arrivals.size:
                free = np.setdiff1d(np.arange(rank * per_rank, (rank + 1) * per_rank), placement[layer])
                placement[layer, arrivals] = free
    return placement

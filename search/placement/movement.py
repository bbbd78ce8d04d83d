"""Where experts lie, what moving them costs, and which to move.

A moved expert takes its weights and optimizer state along. The price of a move is spread over the steps until experts
are placed anew (the horizon), so that a layer changes only as far as each swap pays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from costmodels import StepTables
from profiler import ModelSpec, RoutePackError, Topology
from search.params import PlannerParams
from search.placement.lpt import ranks_of_slots
from search.plan import ExpertMoves, Plan
from search.problem import Problem

ASSUMED_GBYTES_PER_S = 25.0
"""Bandwidth of one rank where neither the settings nor measurements say it."""


class Residence(NamedTuple):
    """Hold where experts' weights lie now and what moving one costs."""

    rank_LE: np.ndarray
    """EP rank of every expert."""
    move_ns: int
    """Price of one expert away from home, in the objective's nanoseconds a step."""


def residence_of(previous: Plan, problem: Problem, spec: ModelSpec) -> Residence:
    """Return where experts lie and the price of moving one, spread over the horizon; prices add up over blocks.

    The objective adds up the layers of all pipeline stages, which move at the same time: in it an expert costs its own
    move, whatever the number of stages.
    """
    old = (*previous.placement_LE.shape, previous.topology.expert_model_parallel_size)
    new = (problem.num_layers, problem.num_experts, problem.num_ranks)
    if old != new:
        names = ("MoE layers", "experts", "expert_model_parallel_size")
        name, had, has = next(odd for odd in zip(names, old, new, strict=True) if odd[1] != odd[2])
        raise RoutePackError(f"Previous plan has {name} {had}, this job {has}. Give the previous plan of the same job.")
    params = problem.params
    move_ns = expert_move_ns(spec, problem.topology, problem.tables, params)
    price = params.stickiness * move_ns * problem.num_blocks / max(1.0, params.horizon_steps)
    return Residence(ranks_of_slots(previous.placement_LE, problem.num_ranks), round(price))


def expert_move_ns(spec: ModelSpec, topology: Topology, tables: StepTables, params: PlannerParams) -> float:
    """Return the time of moving one expert: by the stated bandwidth, else as measured, else by an assumed one."""
    if params.link_gbytes_per_s == 0 and tables.expert_move_ns:
        return float(tables.expert_move_ns)
    moved_bytes = spec.expert_bytes(topology.expert_tensor_parallel_size)
    return moved_bytes / (params.link_gbytes_per_s or ASSUMED_GBYTES_PER_S)


def stage_of_layers(spec: ModelSpec, topology: Topology) -> np.ndarray:
    """Return the pipeline stage of every MoE layer, [L]: chunks of layers dealt evenly to the stages in turn."""
    stages = topology.pipeline_model_parallel_size
    chunks = stages * topology.virtual_pipeline_model_parallel_size
    return np.flatnonzero(spec.moe_layers) * chunks // spec.num_layers % stages


def list_moves(
    old_LE: np.ndarray | None, new_LE: np.ndarray, problem: Problem, spec: ModelSpec
) -> tuple[ExpertMoves, list[str]]:
    """Return what changes its slot and what a reader must know of its price.

    Layers of a pipeline stage move one after another, each as long as its busiest receiving rank; stages at the same
    time.
    """
    if old_LE is None:
        return ExpertMoves(), []
    topology, params = problem.topology, problem.params
    places = np.nonzero(old_LE != new_LE)
    listed = np.stack([*places, old_LE[places], new_LE[places]], axis=1)
    ranks_LE = ranks_of_slots(new_LE, problem.num_ranks)
    away = np.nonzero(ranks_of_slots(old_LE, problem.num_ranks) != ranks_LE)
    received = np.zeros((len(new_LE), problem.num_ranks), np.int64)
    np.add.at(received, (away[0], ranks_LE[away]), 1)
    busiest = np.bincount(stage_of_layers(spec, topology), weights=received.max(axis=1)).max()
    seconds = float(busiest) * (expert_move_ns(spec, topology, problem.tables, params) * 1e-9)
    moved_bytes = len(away[0]) * spec.expert_bytes(topology.expert_tensor_parallel_size)
    assumed = f"Moves of experts are priced at an assumed {ASSUMED_GBYTES_PER_S:g} GB/s; link_gbytes_per_s states it."
    measured = params.link_gbytes_per_s or problem.tables.expert_move_ns
    return ExpertMoves(tuple(map(tuple, listed.tolist())), moved_bytes, seconds), [] if measured else [assumed]


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

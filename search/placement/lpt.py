"""Longest processing time first, and the two ways to write a placement: ranks and physical slots."""

from __future__ import annotations

import numpy as np

from costmodels import compiled
from profiler import RoutePackError
from search.problem import Problem


@compiled
def lpt_layer(totals, num_ranks):
    """Return the rank of each expert, [E], of one layer by its step totals [E] (RoutePack; EPLB without replicas).

    The heaviest expert goes first, to the lightest rank with a free place; ties by id.
    """
    experts, rank_of = totals.size, np.zeros(totals.size, np.int64)
    load, count = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    for e in np.argsort(-totals, kind="mergesort"):
        lightest = -1
        for p in range(num_ranks):
            if count[p] < experts // num_ranks and (lightest < 0 or load[p] < load[lightest]):
                lightest = p
        rank_of[e] = lightest
        load[lightest] += totals[e]
        count[lightest] += 1
    return rank_of


def first_ranks(problem: Problem, ranks_per_node: int = 0) -> np.ndarray:
    """Return the rank of every expert by LPT on step totals, [L, E]; nodes first, then ranks, where nodes are given."""
    totals, per_node = problem.counts.sum(axis=0, dtype=np.int64), ranks_per_node or problem.num_ranks
    check_nodes(per_node, problem.num_ranks)
    nodes = problem.num_ranks // per_node
    rank_LE = np.empty(totals.shape, np.int64)
    for ranks, loads in zip(rank_LE, totals, strict=True):
        node_of = lpt_layer(loads, nodes)
        for node in range(nodes):
            experts = np.flatnonzero(node_of == node)
            ranks[experts] = node * per_node + lpt_layer(loads[experts], per_node)
    return rank_LE


def check_nodes(ranks_per_node: int, num_ranks: int) -> None:
    """Refuse nodes that do not hold equally many EP ranks; 0 is no node."""
    if ranks_per_node and num_ranks % ranks_per_node:
        raise RoutePackError(
            f"ranks_per_node = {ranks_per_node} does not divide the {num_ranks} EP ranks of a block. Give a divisor."
        )


def lpt_placement(problem: Problem) -> np.ndarray:
    """Place every layer by the step's totals, heaviest first (RoutePack's placement; EPLB without replicas), [L, E]."""
    return placement_of_ranks(first_ranks(problem), problem.num_ranks)


def identity_placement(problem: Problem) -> np.ndarray:
    """Return experts in place: expert e in physical slot e, [L, E]."""
    return np.tile(np.arange(problem.num_experts), (problem.num_layers, 1))


def ranks_of_slots(placement_LE: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return the EP rank of each expert, [L, E], from its physical slot."""
    return placement_LE // (placement_LE.shape[1] // num_ranks)


def placement_of_ranks(rank_LE: np.ndarray, num_ranks: int, previous_LE: np.ndarray | None = None) -> np.ndarray:
    """Return physical slots [L, E]: experts that stay on their rank keep their old one, others go by id."""
    slots = np.arange(rank_LE.shape[1])
    if previous_LE is None:
        placement = np.full(rank_LE.shape, -1)
    else:
        placement = np.where(ranks_of_slots(previous_LE, num_ranks) == rank_LE, previous_LE, -1)
    for placed, ranks in zip(placement, rank_LE, strict=True):
        arrivals = np.flatnonzero(placed < 0)
        placed[arrivals[np.argsort(ranks[arrivals], kind="stable")]] = np.setdiff1d(slots, placed)
    return placement

"""Which exchanges are timed: all-to-alls with uneven splits, and the move of one expert between two ranks.

Sizes are what the busiest rank sends or receives, even in log from a KiB to the fullest microbatch. ``bytes_GG[s, r]``
is what rank ``s`` of a group of G sends to rank ``r``; the backward pass sends the transposed matrix.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from profiler.cases.case import Case
from profiler.cases.design import LOAD_FACTOR, Design, log_sizes
from profiler.topology import Topology

SMALLEST_BYTES = 1024
UNIT_BYTES = 16
"""Splits are whole multiples of this, as rows of a model are: links are slow at odd addresses."""
PATTERNS = ("even", "skewed", "hot", "sparse")
SKEW = 0.8
"""Spread of the receivers' log-normal shares in ``skewed``."""
HOT_SHARE = 0.5
"""Share of every rank's bytes that one receiver gets in ``hot``."""
ITEM_BYTES = 2
"""Rows travel in 16 bits."""
TRANSFER_SCALES = (1 / 16, 1 / 4, 1, 4)
"""Sizes of a transfer over those of one expert: a shard of it to a few at once."""


def group_sizes(topology: Topology, size: int, per_node: int) -> list[int]:
    """Return how many consecutive ranks exchange: an EP block, a node, all; those that the job can form."""
    wanted = {topology.ranks_per_block, per_node, size}
    fits = (g for g in wanted if 1 < g <= size and size % g == 0)
    return sorted(g for g in fits if per_node % g == 0 or g % per_node == 0)


def pair_kinds(size: int, per_node: int) -> list[str]:
    """Return between which pairs one expert moves: ``inside`` a node, ``between`` two."""
    return (["inside"] if per_node > 1 else []) + (["between"] if size > per_node else [])


def design_exchanges(
    design: Design, sizes: list[int], per_node: int, sharing: int, links: Mapping[str, float]
) -> list[Case]:
    """Return the cases in a seeded order; the design notes what is left out.

    ``sharing`` ranks share one memory; ``links`` are bytes per second, by group size in digits and by kind of pair.
    """
    rng, params = np.random.default_rng(design.params.seed), design.params
    memory = design.rates.memory_bytes // (2 * sharing)
    cases: list[Case] = []

    def cut(op: str, what: str, wanted: int) -> int:
        allowed = max(SMALLEST_BYTES, min(memory, int(links[what] * design.longest_s)))
        if wanted > allowed:
            about = {"op": op, "what": f"bytes, {what}", "wanted": wanted, "designed": allowed}
            reason = "memory or time of one case (max_memory_gib, max_case_seconds)"
            design.limits.append(about | {"reason": reason})
        return min(wanted, allowed)

    for group in sizes:
        largest = cut("alltoall", str(group), max(SMALLEST_BYTES, largest_exchange(design)))
        steps = log_sizes(SMALLEST_BYTES, largest, max(6, params.max_points // 2))
        cases.append(alltoall_case("empty", np.zeros((group, group), dtype=np.int64), per_node))
        for i, size in enumerate(steps):
            # Both ends are even: what the other patterns are compared with.
            pattern = PATTERNS[0] if size in (steps[0], steps[-1]) else PATTERNS[i % len(PATTERNS)]
            cases.append(alltoall_case(pattern, split_bytes(pattern, group, size, rng), per_node))
    expert = design.spec.expert_bytes(design.topology.expert_tensor_parallel_size)
    for kind in pair_kinds(max(sizes, default=1), per_node):
        largest = cut("transfer", kind, round(expert * TRANSFER_SCALES[-1]))
        cases += [transfer_case(kind, min(largest, max(1, round(expert * scale)))) for scale in TRANSFER_SCALES]
    distinct = list({case.case_id("forward", ""): case for case in cases}.values())
    return [distinct[i] for i in rng.permutation(len(distinct))]


def largest_exchange(design: Design) -> int:
    """Return the bytes of the busiest rank at a full cell: its mean share times ``LOAD_FACTOR``."""
    spec, topology = design.spec, design.topology
    tokens = design.max_tokens * topology.slots_per_block / topology.blocks_per_slot
    mean_rows = tokens * spec.top_k / topology.ranks_per_block
    return round(mean_rows * LOAD_FACTOR) * spec.hidden_size * ITEM_BYTES


def split_bytes(pattern: str, group: int, busiest: int, rng: np.random.Generator) -> np.ndarray:
    """Return a G x G matrix whose busiest rank sends or receives at most ``busiest`` bytes."""
    weight_GG = np.ones((group, group))
    if pattern == "skewed":
        weight_GG *= np.exp(SKEW * rng.standard_normal(group))
    elif pattern == "hot":
        weight_GG[:, rng.integers(group)] = HOT_SHARE / (1 - HOT_SHARE) * (group - 1)
    elif pattern == "sparse":
        # Ranks without tokens, and ranks whose experts nobody chose.
        half = max(1, group // 2)
        weight_GG *= (rng.permutation(group) < half)[:, None] * (rng.permutation(group) < half)[None, :]
    scale = busiest / max(weight_GG.sum(axis=0).max(), weight_GG.sum(axis=1).max())
    return (weight_GG * scale / UNIT_BYTES).astype(np.int64) * UNIT_BYTES


def alltoall_case(pattern: str, bytes_GG: np.ndarray, per_node: int) -> Case:
    """Return the case of one exchange; features are those of its busiest rank, and a group begins with a node."""
    node = np.arange(len(bytes_GG)) // per_node
    inter_GG = bytes_GG * (node[:, None] != node[None, :])
    features = {"bytes": _busiest(bytes_GG), "inter_bytes": _busiest(inter_GG), "ranks": len(bytes_GG)}
    return Case("alltoall", pattern, features, tuple(bytes_GG.ravel().tolist()))


def transfer_case(kind: str, size: int) -> Case:
    """Return the case of one expert's move ``inside`` a node or ``between`` two."""
    return Case("transfer", kind, {"bytes": size, "inter_bytes": size if kind == "between" else 0})


def _busiest(bytes_GG: np.ndarray) -> int:
    return int(max(bytes_GG.sum(axis=0).max(), bytes_GG.sum(axis=1).max()))

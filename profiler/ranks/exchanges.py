"""Exchanges between ranks: which are timed, all-to-alls with uneven splits and the move of one expert, and how.

Sizes are what the busiest rank sends or receives, even in log from a KiB to the fullest microbatch. ``bytes_GG[s, r]``
is what rank ``s`` of a group of G sends to rank ``r``; the backward pass sends the transposed matrix.

All groups of a size exchange at once, and the slowest rank counts. One round: wait for one another, displace the
caches, run, then share when each rank began and how long it took. Rounds that ranks began too far apart are dropped,
and repeated a few times.

Invariants: every choice is made from numbers that all ranks have; buffers are made, and that is agreed, before anyone
enters an exchange; a rank that fails inside one tells the others, which wait ``EXCHANGE_PATIENCE`` at most.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from profiler.cases.case import DIRECTIONS, Case, doubtful_cases
from profiler.cases.design import LOAD_FACTOR, Design, log_sizes
from profiler.device.fingerprint import link_rates
from profiler.errors import RoutePackError
from profiler.journal import Journal
from profiler.observer import Observer
from profiler.params import Topology
from profiler.ranks.ranks import Stage, first_line
from profiler.timer import MAX_LOOKS, STEADY, both_looks, message_of, times_of

WHAT = "profile exchanges"
DTYPE = "uint8"
"""A wire carries bytes."""
SKEW_US = {"cpu": 2000.0, "cuda": 200.0}
SKEW_SHARE = 0.10
"""Ranks may begin a round this far apart, or this share of its time if that is more; else it is dropped."""
MAX_ROUNDS = 4
"""A case gets this many times its repeats in rounds, dropped ones included."""
MAX_WARM_UP = 4
LINK_SLACK = 1.05
"""A clock or a stated rate may be off by this much; what is faster was not measured."""
PROBE_BYTES, PROBES = 1 << 20, 3
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


@dataclass(frozen=True)
class Move:
    """What one rank does in a round, and who takes part."""

    run: Callable[[], Any]
    is_right: Callable[[], bool]
    """Whether this rank received what was sent to it."""
    active: tuple[int, ...]
    kernel: str


@dataclass(frozen=True)
class Round:
    """One round as all ranks saw it."""

    time_us: float
    """The slowest rank's."""
    slowest: int
    skew_us: float
    limit_us: float
    """How far apart ranks may begin."""
    latest: int
    """Rank that began last."""
    spent_s: float
    """Time since the case began, by rank 0's clock."""


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


def measure_links(stage: Stage, sizes: list[int]) -> dict[str, float]:
    """Return a first look at bytes per second of the busiest rank, by group size in digits and by kind of pair."""
    ranks, found = stage.ranks, {}
    splits = {size: split_bytes("even", size, PROBE_BYTES, np.random.default_rng(0)) for size in sizes}
    probes = {str(size): alltoall_case("even", split, ranks.per_node) for size, split in splits.items()}
    probes |= {kind: transfer_case(kind, PROBE_BYTES) for kind in pair_kinds(ranks.size, ranks.per_node)}
    for name, case in probes.items():
        move, failure = _agreed_move(stage, case, "forward")
        if move is None:
            raise RoutePackError(f"No exchange can be timed: {failure['message']}.")
        offsets, began = ranks.clock_offsets(), time.perf_counter()
        best = min(time_round(stage, move, offsets, began).time_us for _ in range(PROBES))
        found[name] = PROBE_BYTES / max(best * 1e-6, 1e-9)
    return found


def run_exchanges(stage: Stage, cases: list[Case], journal: Journal, observer: Observer) -> None:
    """Time every case that the journal lacks, then look again at those that contradict larger ones."""
    journal.rows = stage.ranks.agree(journal.rows)
    observer.start(WHAT, len(cases))
    try:
        for case in cases:
            if journal.is_done(case, DTYPE, stage.params):
                observer.advance(WHAT, "done before")
                continue
            rows = [time_exchange(stage, case, way) for way in case.directions]
            with stage.ranks.together():
                journal.add(rows=rows)
            observer.advance(WHAT, message_of(case, rows))
    finally:
        observer.finish(WHAT)
    for look in range(2, MAX_LOOKS + 1):
        doubts = doubtful_cases(journal.rows.values())
        for case in cases:
            first = journal.known(case, DTYPE)
            if any(row["case_id"] in doubts and row.get("looks", 1) < look for row in first):
                rows = [time_exchange(stage, case, way) for way in case.directions]
                both = [both_looks(*looks, stage.backend.kind) for looks in zip(first, rows, strict=True)]
                with stage.ranks.together():
                    journal.add(rows=[row | {"looks": look} for row in both])


def time_exchange(stage: Stage, case: Case, direction: str) -> dict[str, Any]:
    """Return one row, the same on every rank: warm up until two rounds agree, then time enough fair ones."""
    row = case.row(direction, DTYPE)
    move, failure = _agreed_move(stage, case, direction)
    if move is None:
        return row | failure
    offsets, began = stage.ranks.clock_offsets(), time.perf_counter()
    params, budget_s = stage.params, stage.params.max_case_seconds / len(DIRECTIONS)
    previous = float("inf")
    for _ in range(MAX_WARM_UP):
        warm = time_round(stage, move, offsets, began)
        if abs(warm.time_us - previous) <= STEADY * previous or warm.spent_s > budget_s:
            break
        previous = warm.time_us
    rounds: list[Round] = []
    fair = 0
    while len(rounds) < MAX_ROUNDS * params.repeats and fair < params.repeats:
        if fair >= params.min_repeats and rounds[-1].spent_s > budget_s:
            break
        rounds.append(time_round(stage, move, offsets, began))
        fair += rounds[-1].skew_us <= rounds[-1].limit_us
    right = False
    with stage.ranks.together():
        right = move.is_right()
    found = {"status": "failed", "message": "The bytes that came are not those that were sent."}
    if all(stage.ranks.gather(right)):
        found = summary(stage, case, rounds)
    torch.cuda.empty_cache()
    return row | {"kernel": move.kernel} | found


def _agreed_move(stage: Stage, case: Case, direction: str) -> tuple[Move | None, dict[str, str]]:
    """Return what this rank does, or None on all ranks and why, where one cannot make its buffers."""
    move, own = None, {}
    group = stage.ranks.group(case.features.get("ranks", stage.ranks.size))
    try:
        move = _move(stage, case, direction, group)
    except Exception as error:
        status = "oom" if isinstance(error, MemoryError) or "memory" in str(error) else "unsupported"
        own = {"status": status, "message": f"rank {stage.ranks.rank}: {first_line(error)}"[:200]}
    failure = next(filter(None, stage.ranks.gather(own)), None)
    return (move, {}) if failure is None else (None, failure)


def _move(stage: Stage, case: Case, direction: str, group: Any) -> Move:
    size = case.features.get("ranks", stage.ranks.size)
    own, device = stage.ranks.rank % size, stage.backend.device
    active, kernel = tuple(range(stage.ranks.size)), "all_to_all_single"
    if case.op == "transfer":
        active, kernel = (0, stage.ranks.per_node if case.features["inter_bytes"] else 1), "send + recv"
        bytes_GG = np.zeros((size, size), dtype=np.int64)
        bytes_GG[active] = case.features["bytes"]
    else:
        bytes_GG = np.array(case.parts, dtype=np.int64).reshape(size, size)
        bytes_GG = bytes_GG.T if direction == "backward" else bytes_GG
    to_each, from_each = bytes_GG[own].tolist(), bytes_GG[:, own].tolist()
    sent = torch.full((sum(to_each),), own % 256, dtype=torch.uint8, device=device)
    received = torch.full((sum(from_each),), 255, dtype=torch.uint8, device=device)

    def run() -> None:
        if case.op == "alltoall":
            dist.all_to_all_single(received, sent, from_each, to_each, group=group)
        elif own == active[0]:
            dist.send(sent, dst=active[1], group=group)
        else:
            dist.recv(received, src=active[0], group=group)

    def is_right() -> bool:
        """Look at the first and the last byte from every sender."""
        ends = np.cumsum(from_each)
        edges = [(sender, end) for sender, end in enumerate(ends.tolist()) if from_each[sender]]
        picked = [position for sender, end in edges for position in (end - from_each[sender], end - 1)]
        return bool(received[picked].tolist() == [sender % 256 for sender, _ in edges for _ in range(2)])

    transport = "nccl" if stage.backend.kind == "cuda" else "gloo"
    return Move(run, is_right, active, f"{transport} {kernel}")


def time_round(stage: Stage, move: Move, offsets: list[float], began: float) -> Round:
    """Run a case once on all ranks together; ``began`` is when this rank's first round of it did."""
    ranks, backend = stage.ranks, stage.backend
    on_gpu = backend.kind == "cuda"
    if not on_gpu:
        backend.flush()
    ranks.barrier()
    started, elapsed_us = 0.0, 0.0
    with ranks.together():
        try:
            if on_gpu:
                # Nothing waits between this flush and the run, so that the run's launches hide behind it.
                backend.flush()
                # In the device's own order: what the hosts' barrier leaves of a skew is over before the first event.
                dist.all_reduce(torch.zeros(1, device=backend.device), group=ranks.group(ranks.size))
            started = time.perf_counter()
            if ranks.rank in move.active:
                elapsed_us = backend.timed(move.run)[0]
        except Exception as error:
            reason = f"An exchange broke off on rank {ranks.rank}: {first_line(error)}."
            raise RoutePackError(f"{reason} Run the same command again: it continues.") from error
    seen = ranks.gather([started, elapsed_us, time.perf_counter() - began])
    starts = {rank: seen[rank][0] - offsets[rank] for rank in move.active}
    latest = max(starts, key=lambda rank: starts[rank])
    skew_us = (starts[latest] - min(starts.values())) * 1e6
    slowest = max(move.active, key=lambda rank: seen[rank][1])
    limit_us = max(SKEW_US[backend.kind], SKEW_SHARE * seen[slowest][1])
    return Round(seen[slowest][1], slowest, skew_us, limit_us, latest, seen[0][2])


def summary(stage: Stage, case: Case, rounds: list[Round]) -> dict[str, Any]:
    """Return status, times and skew of one case from its rounds."""
    kept = [one for one in rounds if one.skew_us <= one.limit_us]
    worst = max(rounds, key=lambda one: one.skew_us)
    late = (
        f"{len(rounds) - len(kept)} of {len(rounds)} rounds dropped: rank {worst.latest} began up to "
        f"{worst.skew_us:.0f} us late (limit {worst.limit_us:.0f})"
    )
    if len(kept) < stage.params.min_repeats:
        skew_us = statistics.median(one.skew_us for one in rounds)
        return {"status": "failed", "message": late, "skew_us": skew_us, "rank": worst.latest}
    times, skew_us = times_of([one.time_us for one in kept]), statistics.median(one.skew_us for one in kept)
    found = {"skew_us": skew_us, "rank": statistics.mode(one.slowest for one in kept)}
    if impossible := above_link(stage, case, times["time_us"]):
        return found | {"status": "failed", "message": impossible}
    return found | {"status": "ok", "message": late if len(kept) < len(rounds) else "", **times}


def above_link(stage: Stage, case: Case, time_us: float) -> str:
    """Return why a time cannot be true, where the rate of the links is known; else nothing."""
    features, seconds = case.features, time_us * 1e-6
    crossing, ranks = features["inter_bytes"], features.get("ranks", 2)
    # The busiest rank keeps its own share, at most 1 / ranks of an even split: what surely left it.
    share = 1.0 if case.op == "transfer" else (ranks - 1) / ranks if case.pattern == "even" else 0.0
    moved = (share * features["bytes"] - crossing, crossing)
    for rate, seen, what in zip(link_rates(stage.fingerprint), moved, ("inside a node", "between nodes"), strict=True):
        if rate and seen > LINK_SLACK * rate * seconds:
            return f"{seen / seconds / 1e9:.0f} GB/s {what} cannot be: the links carry {rate / 1e9:.0f}."
    return ""

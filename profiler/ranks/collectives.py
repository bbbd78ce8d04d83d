"""Time exchanges between ranks: all groups of a size at once, and the slowest rank counts.

One round: wait for one another, displace the caches, run, then share when each rank began and how long it took. Rounds
that ranks began too far apart are dropped, and repeated a few times.

Invariants: all ranks run one sequence of cases and rounds, for every choice is made from numbers that all of them have;
buffers are made, and that is agreed, before anyone enters an exchange; a rank that fails inside one tells the others
before any enters the next. Those wait inside the broken exchange, for ``EXCHANGE_PATIENCE`` at most.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from profiler.cases.case import Case
from profiler.cases.doubt import doubtful_cases, faster
from profiler.cases.operations import DIRECTIONS
from profiler.device.backend import TorchBackend
from profiler.device.fingerprint import DeviceFingerprint
from profiler.errors import RoutePackError
from profiler.journal import Journal
from profiler.observer import Observer
from profiler.params import ProfileParams
from profiler.ranks.exchange_cases import alltoall_case, pair_kinds, split_bytes, transfer_case
from profiler.ranks.ranks import Ranks, first_line

WHAT = "profile exchanges"
"""Name under which progress is reported."""
DTYPE = "uint8"
"""A wire carries bytes."""
SKEW_US = {"cpu": 2000.0, "cuda": 200.0}
SKEW_SHARE = 0.10
"""Ranks may begin a round this far apart, or this share of its time if that is more; else it is dropped."""
MAX_ROUNDS = 4
"""A case gets this many times its repeats in rounds, dropped ones included."""
STEADY, MAX_WARM_UP = 0.10, 4
MAX_LOOKS = 3
"""A case that stays slower than a larger one is timed this often in all."""
LINK_SLACK = 1.05
"""A clock or a stated rate may be off by this much; what is faster was not measured."""
PROBE_BYTES, PROBES = 1 << 20, 3
MESSAGE_LENGTH = 200


@dataclass(frozen=True)
class Stage:
    """What every exchange needs."""

    ranks: Ranks
    backend: TorchBackend
    params: ProfileParams
    fingerprint: DeviceFingerprint

    @property
    def library(self) -> str:
        """Name of torch's transport."""
        return "nccl" if self.backend.kind == "cuda" else "gloo"


@dataclass(frozen=True)
class Move:
    """What one rank does in a round, whether the content that came is right, and who takes part."""

    run: Callable[[], Any]
    is_right: Callable[[], bool]
    active: tuple[int, ...]
    kernel: str


@dataclass(frozen=True)
class Round:
    """One round as all ranks saw it."""

    times_us: tuple[float, ...]
    """Of the ranks that took part, in order."""
    skew_us: float
    latest: int
    """Rank that began last."""
    spent_s: float
    """Time since the case began, by rank 0's clock."""

    @property
    def time_us(self) -> float:
        """The slowest rank's."""
        return max(self.times_us)

    def is_fair(self, kind: str) -> bool:
        """Whether all began close enough together."""
        return self.skew_us <= self.limit_us(kind)

    def limit_us(self, kind: str) -> float:
        """Return how far apart ranks may begin."""
        return max(SKEW_US[kind], SKEW_SHARE * self.time_us)


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
    """Time every case that some rank's journal lacks, then look again at those that contradict larger ones."""
    done = [_is_done(case, stage.params, journal) for case in cases]
    everywhere = [all(marks) for marks in zip(*stage.ranks.gather(done), strict=True)]
    observer.start(WHAT, len(cases))
    try:
        for case, known in zip(cases, everywhere, strict=True):
            if not known:
                _keep(journal, stage.ranks, [time_exchange(stage, case, way) for way in _ways(case)])
            observer.advance(WHAT, "done before" if known else _message(case, journal))
    finally:
        observer.finish(WHAT)
    for look in range(2, MAX_LOOKS + 1):
        for case in _doubtful(stage.ranks, cases, journal, look):
            rows = [time_exchange(stage, case, way) for way in _ways(case)]
            best = [faster(journal.rows[row["case_id"]], row) | {"looks": look} for row in rows]
            _keep(journal, stage.ranks, best)


def time_exchange(stage: Stage, case: Case, direction: str) -> dict[str, Any]:
    """Return one row, the same on every rank but for the samples of its own under ``own_us``."""
    row: dict[str, Any] = {"case_id": case.case_id(direction, DTYPE), "op": case.op, "direction": direction}
    row |= {"source": "measured", "dtype": DTYPE, "pattern": case.pattern, **case.features}
    move, failure = _agreed_move(stage, case, direction)
    if move is None:
        return row | failure
    row["kernel"] = move.kernel
    rounds = _rounds(stage, move)
    right = False
    with stage.ranks.together():
        right = move.is_right()
    if not all(stage.ranks.gather(right)):
        return row | {"status": "failed", "message": "The bytes that came are not those that were sent."}
    stage.backend.release()
    return row | summary(stage, case, rounds, move)


def _agreed_move(stage: Stage, case: Case, direction: str) -> tuple[Move | None, dict[str, str]]:
    """Return what this rank does, or None on all ranks and why, where one cannot make its buffers."""
    move, status, message = None, "", ""
    group = stage.ranks.group(case.features.get("ranks", stage.ranks.size))
    try:
        move = _transfer(stage, case, group) if case.op == "transfer" else _alltoall(stage, case, direction, group)
    except Exception as error:
        status = "oom" if isinstance(error, MemoryError) or "memory" in str(error) else "unsupported"
        message = f"rank {stage.ranks.rank}: {first_line(error)}"[:MESSAGE_LENGTH]
    failed = [found for found in stage.ranks.gather([status, message]) if found[0]]
    if not failed:
        return move, {}
    del move
    stage.backend.release()
    return None, {"status": failed[0][0], "message": failed[0][1]}


def _alltoall(stage: Stage, case: Case, direction: str, group: Any) -> Move:
    import torch
    import torch.distributed as dist

    size = case.features["ranks"]
    bytes_GG = np.array(case.parts, dtype=np.int64).reshape(size, size)
    bytes_GG = bytes_GG.T if direction == "backward" else bytes_GG
    own = stage.ranks.rank % size
    to_each, from_each = bytes_GG[own].tolist(), bytes_GG[:, own].tolist()
    sent = torch.full((sum(to_each),), own, dtype=torch.uint8, device=stage.backend.device)
    received = torch.full((sum(from_each),), 255, dtype=torch.uint8, device=stage.backend.device)
    ends = np.cumsum(from_each).tolist()

    def run() -> None:
        dist.all_to_all_single(received, sent, from_each, to_each, group=group)

    def is_right() -> bool:
        edges = [(sender, end) for sender, end in enumerate(ends) if from_each[sender]]
        picked = [position for sender, end in edges for position in (end - from_each[sender], end - 1)]
        return bool(received[picked].tolist() == [sender % 256 for sender, _ in edges for _ in range(2)])

    return Move(run, is_right, tuple(range(stage.ranks.size)), f"{stage.library} all_to_all_single")


def _transfer(stage: Stage, case: Case, group: Any) -> Move:
    import torch
    import torch.distributed as dist

    sender, receiver = 0, (stage.ranks.per_node if case.features["inter_bytes"] else 1)
    own = stage.ranks.rank
    size = case.features["bytes"] if own in (sender, receiver) else 0
    buffer = torch.full((size,), 1 if own == sender else 0, dtype=torch.uint8, device=stage.backend.device)

    def run() -> None:
        if own == sender:
            dist.send(buffer, dst=receiver, group=group)
        else:
            dist.recv(buffer, src=sender, group=group)

    def is_right() -> bool:
        return own != receiver or bool((buffer == 1).all())

    return Move(run, is_right, (sender, receiver), f"{stage.library} send + recv")


def _rounds(stage: Stage, move: Move) -> list[Round]:
    """Return the timed rounds, dropped ones included, after warming up until two agree."""
    offsets, began = stage.ranks.clock_offsets(), time.perf_counter()
    budget_s = stage.params.max_case_seconds / len(DIRECTIONS)
    previous = float("inf")
    for _ in range(MAX_WARM_UP):
        warm = time_round(stage, move, offsets, began)
        if abs(warm.time_us - previous) <= STEADY * previous or warm.spent_s > budget_s:
            break
        previous = warm.time_us
    rounds: list[Round] = []
    fair = 0
    while len(rounds) < MAX_ROUNDS * stage.params.repeats and fair < stage.params.repeats:
        if fair >= stage.params.min_repeats and rounds[-1].spent_s > budget_s:
            break
        rounds.append(time_round(stage, move, offsets, began))
        fair += rounds[-1].is_fair(stage.backend.kind)
    return rounds


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
                _device_barrier(stage)
            started = time.perf_counter()
            if ranks.rank in move.active:
                elapsed_us = backend.elapsed_us(move.run)
        except Exception as error:
            reason = f"An exchange broke off on rank {ranks.rank}: {first_line(error)}."
            raise RoutePackError(f"{reason} Run the same command again: it continues.") from error
    seen = ranks.gather_numbers([started, elapsed_us, time.perf_counter() - began])
    starts = {rank: seen[rank][0] - offsets[rank] for rank in move.active}
    latest = max(starts, key=lambda rank: starts[rank])
    skew_us = (starts[latest] - min(starts.values())) * 1e6
    return Round(tuple(seen[rank][1] for rank in move.active), skew_us, latest, seen[0][2])


def _device_barrier(stage: Stage) -> None:
    # In the device's own order: what the hosts' barrier leaves of a skew is over before the first event.
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1, device=stage.backend.device), group=stage.ranks.group(stage.ranks.size))


def summary(stage: Stage, case: Case, rounds: list[Round], move: Move) -> dict[str, Any]:
    """Return status, times and skew of one case from its rounds."""
    kind = stage.backend.kind
    kept = [one for one in rounds if one.is_fair(kind)]
    worst = max(rounds, key=lambda one: one.skew_us)
    late = (
        f"{len(rounds) - len(kept)} of {len(rounds)} rounds dropped: rank {worst.latest} began up to "
        f"{worst.skew_us:.0f} us late (limit {worst.limit_us(kind):.0f})"
    )
    if len(kept) < stage.params.min_repeats:
        skew = statistics.median(one.skew_us for one in rounds)
        return {"status": "failed", "message": late, "skew_us": skew, "rank": worst.latest}
    samples = [one.time_us for one in kept]
    low, middle, high = np.percentile(samples, (25, 50, 75))
    slowest = statistics.mode(move.active[int(np.argmax(one.times_us))] for one in kept)
    skew = statistics.median(one.skew_us for one in kept)
    impossible = above_link(stage, case, float(middle))
    if impossible:
        return {"status": "failed", "message": impossible, "skew_us": skew, "rank": slowest}
    own = move.active.index(stage.ranks.rank) if stage.ranks.rank in move.active else None
    times = {"time_us": float(middle), "spread_us": float(high - low), "skew_us": skew, "repeats_us": samples}
    own_us = [] if own is None else [one.times_us[own] for one in kept]
    message = late if len(kept) < len(rounds) else ""
    return {"status": "ok", "message": message, **times, "rank": slowest, "own_us": own_us}


def above_link(stage: Stage, case: Case, time_us: float) -> str:
    """Return why a time cannot be true, where the rate of the links is known; else nothing."""
    inside, between = link_rates(stage.fingerprint)
    crossing, ranks = case.features["inter_bytes"], case.features.get("ranks", 2)
    # The busiest rank keeps its own share, at most 1 / ranks of an even split: what surely left it.
    leaving = case.features["bytes"] * (ranks - 1) / ranks if case.pattern == "even" else 0
    leaving = case.features["bytes"] if case.op == "transfer" else leaving
    for moved, rate, what in ((leaving - crossing, inside, "inside a node"), (crossing, between, "between nodes")):
        seen = moved / (time_us * 1e-6)
        if rate and seen > LINK_SLACK * rate:
            return f"{seen / 1e9:.0f} GB/s {what} cannot be: the links carry {rate / 1e9:.0f}."
    return ""


def link_rates(fingerprint: DeviceFingerprint) -> tuple[float, float]:
    """Return bytes per second and direction of one rank's links and of all its node's network cards; 0 if unknown."""
    inside = re.search(r"([\d.]+) GB/s", fingerprint.interconnect)
    cards = re.findall(r"(\d+) x ([\d.]+) Gb/s", fingerprint.network)
    return (float(inside[1]) * 1e9 if inside else 0.0, sum(int(count) * float(rate) for count, rate in cards) * 1e9 / 8)


def _ways(case: Case) -> tuple[str, ...]:
    # An expert moves once; an exchange has its reverse in the backward pass.
    return DIRECTIONS[:1] if case.op == "transfer" else DIRECTIONS


def _is_done(case: Case, params: ProfileParams, journal: Journal) -> bool:
    known = [journal.rows.get(case.case_id(way, DTYPE)) for way in _ways(case)]
    return all(row is not None and (row["status"] == "ok" or not params.retry_failed) for row in known)


def _keep(journal: Journal, ranks: Ranks, rows: list[dict[str, Any]]) -> None:
    """Write the rows: rank 0 what counts, the slowest rank's times; every other rank its own."""
    kept = []
    for row in rows:
        own = row.get("own_us", [])
        whole = {name: value for name, value in row.items() if name != "own_us"}
        kept.append(whole if ranks.rank == 0 else whole | {"rank": ranks.rank, "repeats_us": own})
    with ranks.together():
        journal.add_case(kept)


def _doubtful(ranks: Ranks, cases: list[Case], journal: Journal, look: int) -> list[Case]:
    """Return the cases to time again, by rank 0's journal."""
    listed = {case.case_id(way, DTYPE): case for case in cases for way in _ways(case)}
    rows = [journal.rows[row_id] for row_id in listed if row_id in journal.rows]
    found = [row["case_id"] for row in rows if row.get("looks", 1) < look]
    chosen = ranks.agree(sorted(doubtful_cases(rows) & set(found)))
    return list({id(listed[row_id]): listed[row_id] for row_id in chosen}.values())


def _message(case: Case, journal: Journal) -> str:
    row = journal.rows[case.case_id("forward", DTYPE)]
    told = f"{row['time_us'] / 1e3:.2f} ms" if row["status"] == "ok" else row["status"]
    return f"{case.op} {case.features['bytes']} bytes: {told}"

"""The processes of one profile, a group of one or the ranks that torchrun started, and whether they are alike.

Values travel between ranks as JSON bytes in tensors over gloo, so that control never waits behind device work. Every
method is called by all ranks in one order; a rank that fails inside :meth:`Ranks.together`, or dies, stops the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from profiler.cases.case import Case, middle_case
from profiler.device.backend import TorchBackend
from profiler.device.fingerprint import DeviceFingerprint, compare_fingerprints
from profiler.errors import RoutePackError
from profiler.files import canonical_json
from profiler.params import ProfileParams
from profiler.timer import time_case

PATIENCE = timedelta(hours=6)
"""Ranks wait this long for one that times alone; a rank that dies is noticed at once."""
EXCHANGE_PATIENCE = timedelta(minutes=3)
"""Longest wait inside an exchange, for one that another rank did not enter: its process group's timeout."""
PING_PONGS = 8
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SPEED_OPS = ("attention", "dense", "experts")
LAPS = 3
"""Every rank times every case this often, and its faster result counts: what disturbs a run only adds time."""
SLOW_LIMIT = {"cpu": 0.25, "cuda": 0.10}
"""A rank that takes this share longer than the others is named; ranks on one CPU disturb one another."""


class Ranks:
    """Join the processes of this job for the time of a ``with`` block."""

    def __init__(self, device: str | None = None) -> None:
        given = {name: os.environ[name] for name in RANK_VARIABLES if name in os.environ}
        missing = ", ".join(name for name in RANK_VARIABLES if name not in given)
        if missing and {"RANK", "WORLD_SIZE"} <= given.keys():
            raise RoutePackError(f"RANK and WORLD_SIZE are set, but not {missing}. Start the ranks through torchrun.")
        try:
            numbers = [0, 1, 0, 1] if missing else [int(given[name]) for name in RANK_VARIABLES]
        except ValueError:
            raise RoutePackError(f"Expected whole numbers in the environment, got {given}.") from None
        self.rank, self.size, self.local_rank, self.per_node = numbers
        self.host = socket.gethostname()
        self._wanted = device
        self._control: Any = None
        self._groups: dict[int, Any] = {}

    def __enter__(self) -> Ranks:
        if self.size == 1:
            return self
        if dist.is_initialized():
            raise RoutePackError(
                "This process belongs to a torch.distributed job already. Profile in a process of its own: "
                "torchrun ... -m routepack_tune profile."
            )
        on_gpu = self._wanted != "cpu" and torch.cuda.is_available()
        if on_gpu:
            visible = torch.cuda.device_count()
            if self.local_rank >= visible > 1:
                raise RoutePackError(
                    f"Rank {self.local_rank} of this node has no GPU: {visible} are visible. Start --nproc-per-node "
                    f"{visible}."
                )
            # A launcher that shows every rank its own GPU alone shows it as number 0.
            torch.cuda.set_device(self.local_rank if visible > 1 else 0)
        try:
            dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(minutes=10))
            self._control = dist.new_group(backend="gloo", timeout=PATIENCE)
            for rank, (per_node, local) in enumerate(self.gather([self.per_node, self.local_rank])):
                if per_node != self.per_node or local != rank % per_node or self.size % per_node:
                    raise RoutePackError(
                        f"Rank {rank} of {self.size} is number {local} of {per_node} on its node: nodes must run as "
                        "many each, numbered node by node. Start torchrun with the same --nproc-per-node on every node."
                    )
        except BaseException as error:
            self._leave()
            if not isinstance(error, RuntimeError | ValueError):
                raise
            where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
            raise RoutePackError(
                f"Rank {self.rank} cannot join the {self.size} ranks at {where}: {first_line(error)}. Check that "
                "every node was started and that this address is reachable from all of them."
            ) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.barrier()
        self._leave()

    def _leave(self) -> None:
        # Closes the connections too, so that a rank that waits for this one stops waiting.
        if self.size > 1 and dist.is_initialized():
            self._control, self._groups = None, {}
            dist.destroy_process_group()

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            self._all_gather(torch.zeros(1))

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON-ready values of all ranks, in order of rank, on every rank."""
        if self.size == 1:
            return [value]
        data = canonical_json(value).encode()
        longest = int(max(self._all_gather(torch.tensor([len(data)]))))
        # JSON does not mind blanks behind it.
        padded = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
        return [json.loads(part.numpy().tobytes()) for part in self._all_gather(padded)]

    def agree(self, value: Any) -> Any:
        """Return rank 0's JSON-ready value on every rank; the others' is ignored."""
        if self.size == 1:
            return value
        data = bytearray(canonical_json(value).encode() if self.rank == 0 else b"")
        size = int(self._all_gather(torch.tensor([len(data)]))[0])
        sent = torch.frombuffer(data or bytearray(size), dtype=torch.uint8)
        with self._lost():
            dist.broadcast(sent, src=0, group=self._control)
        return json.loads(sent.numpy().tobytes())

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        received = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._lost():
            dist.all_gather(received, tensor, group=self._control)
        return received

    @contextlib.contextmanager
    def _lost(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RoutePackError(
                f"Rank {self.rank} lost another rank ({first_line(error)}). The output of the one that stopped says "
                "why; run the same command again: it continues."
            ) from None

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run a block; where it fails on one rank, stop on all.

        The block talks to no other rank, or only inside an exchange whose process group bounds the wait. Ranks whose
        own block went well raise RoutePackError, which names the other.
        """
        try:
            yield
        except Exception as error:
            kind = "" if isinstance(error, RoutePackError) else f"{type(error).__name__}: "
            # A rank that is gone needs no telling.
            with contextlib.suppress(RoutePackError):
                self.gather(kind + first_line(error))
            raise
        for rank, text in enumerate(self.gather("")):
            if text:
                raise RoutePackError(f"Rank {rank} stopped: {text}")

    def group(self, size: int) -> Any:
        """Return the process group of this rank among ``size`` consecutive ranks, made at first use."""
        if size not in self._groups:
            for first in range(0, self.size, size):
                # Every rank takes part in making every group, its own or not.
                with self._lost():
                    made = dist.new_group(list(range(first, first + size)), timeout=EXCHANGE_PATIENCE)
                if first <= self.rank < first + size:
                    self._groups[size] = made
        return self._groups[size]

    def clock_offsets(self) -> list[float]:
        """Return by how many seconds each rank's performance counter is ahead of rank 0's.

        Ranks of one node share a clock; between nodes the quickest of a few ping-pongs tells.
        """
        stamp, trips = torch.zeros(1, dtype=torch.float64), []
        for asked in range(self.per_node, self.size, self.per_node):
            for _ in range(PING_PONGS if self.rank in (0, asked) else 0):
                with self._lost():
                    if self.rank == 0:
                        dist.recv(stamp, src=asked, group=self._control)
                        stamp[0] = time.perf_counter()
                        dist.send(stamp, dst=asked, group=self._control)
                        continue
                    sent = time.perf_counter()
                    dist.send(stamp, dst=0, group=self._control)
                    dist.recv(stamp, src=0, group=self._control)
                    received = time.perf_counter()
                trips.append((received - sent, (sent + received) / 2 - float(stamp[0])))
        offsets = self.gather(min(trips, default=(0.0, 0.0))[1])
        return [offsets[rank - rank % self.per_node] for rank in range(self.size)]


def first_line(error: BaseException) -> str:
    """Return what an error says, as far as a line of a report holds it."""
    return (str(error).splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True)
class Stage:
    """What every exchange needs."""

    ranks: Ranks
    backend: TorchBackend
    params: ProfileParams
    fingerprint: DeviceFingerprint
    """Rank 0's, on every rank."""


def time_speeds(stage: Stage, pool: Sequence[Case]) -> list[dict[str, float]]:
    """Return every rank's times of a case of each of ``SPEED_OPS``; GPUs run at the same time, CPUs in turn."""
    cases = [middle_case(pool, op) for op in SPEED_OPS]
    ranks, on_gpu = stage.ranks, stage.backend.kind == "cuda"
    best: dict[str, float] = {}
    for turn in range(LAPS if on_gpu else LAPS * ranks.size):
        with ranks.together():
            if on_gpu or turn % ranks.size == ranks.rank:
                for row in (row for case in cases for row in time_case(case, stage.backend, stage.params)):
                    if row["status"] == "ok":
                        best[row["case_id"]] = min(row["time_us"], best.get(row["case_id"], float("inf")))
    return ranks.gather(best)


def relative_times(times: Sequence[dict[str, float]]) -> list[float]:
    """Return each rank's time over the ranks' median, the median over the cases that all of them timed."""
    shared = sorted(set.intersection(*(set(one) for one in times)))
    # The lower of two middles, so that of two ranks the slower one is the odd one.
    middle = {row_id: statistics.median_low(one[row_id] for one in times) for row_id in shared}
    return [statistics.median(one[row_id] / middle[row_id] for row_id in shared) if shared else 1.0 for one in times]


def warn_of_slow_ranks(described: Sequence[dict[str, Any]]) -> None:
    """Name every rank whose ``speed`` says that it takes longer than the others by more than the limit."""
    for one in described:
        if one["speed"] > 1 + SLOW_LIMIT["cuda" if "gpu" in one else "cpu"]:
            gpu = f", GPU {one['gpu']} {one['pci']}".rstrip() if "gpu" in one else ""
            warnings.warn(
                f"Rank {one['rank']} (host {one['host']}{gpu}) is {one['speed'] - 1:.0%} slower than the others. A "
                "step waits for its slowest rank: check its cooling, power and neighbours, or leave it out.",
                stacklevel=3,
            )


def check_alike(ranks: Ranks, fingerprint: DeviceFingerprint, question: str) -> list[dict[str, Any]]:
    """Return who the ranks are, each with its ``fingerprint``, after seeing that all ask the same of like devices."""
    own: dict[str, Any] = {"rank": ranks.rank, "host": ranks.host, "node": ranks.rank // ranks.per_node, "speed": 1.0}
    own |= {"device": fingerprint.name, "fingerprint": fingerprint.to_dict(), "question": question}
    if fingerprint.kind == "cuda":
        index = torch.cuda.current_device()
        card = torch.cuda.get_device_properties(index)
        # Not every build of torch tells the address.
        parts = [getattr(card, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
        known = "{:04x}:{:02x}:{:02x}".format(*parts) if min(parts) >= 0 else ""
        own |= {"gpu": index, "uuid": str(card.uuid), "pci": known}
    listed = ranks.gather(own)
    first, wanted = listed[0], DeviceFingerprint.from_dict(listed[0]["fingerprint"])
    cards: dict[tuple[str, str], int] = {}
    for one in listed:
        who = f"Rank {one['rank']} (host {one['host']})"
        match = compare_fingerprints(wanted, DeviceFingerprint.from_dict(one["fingerprint"]))
        other = f"rank 0 (host {first['host']}): {'; '.join(match.reasons)}."
        if match.level == "different":
            raise RoutePackError(f"{who} has another device than {other} Profile each kind of node by itself.")
        if match.level == "near" and ranks.rank == 0:
            warnings.warn(f"{who} differs from {other}", stacklevel=3)
        if one.pop("question") != question:
            raise RoutePackError(f"{who} has another configuration than rank {ranks.rank}. Start all alike.")
        if "uuid" in one and cards.setdefault((one["host"], one["uuid"]), one["rank"]) != one["rank"]:
            raise RoutePackError(
                f"{who} runs on the GPU of rank {cards[one['host'], one['uuid']]}. Give every rank one of its own."
            )
    return listed

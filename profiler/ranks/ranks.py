"""The processes of one profile: a group of one, or the ranks that torchrun started.

Values travel between ranks as JSON bytes in tensors over gloo, so that control never waits behind device work.

Invariants: every method is called by all ranks in one order; an error inside :meth:`Ranks.together`
stops all of them with a line that names the rank, and a rank that dies stops the others too; leaving the context
leaves nothing running.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler.errors import RoutePackError
from profiler.files import canonical_json

if TYPE_CHECKING:
    import torch

PATIENCE = timedelta(hours=6)
"""Ranks wait this long for one that times alone; a rank that dies is noticed at once."""
EXCHANGE_PATIENCE = timedelta(minutes=3)
"""Longest wait inside an exchange, for one that another rank did not enter: its process group's timeout."""
JOIN_PATIENCE = timedelta(minutes=10)
PING_PONGS = 8
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class Ranks:
    """Join the processes of this job for the time of a ``with`` block."""

    def __init__(self, device: str | None = None) -> None:
        known = {name: _integer(name) for name in RANK_VARIABLES if name in os.environ}
        if "RANK" in known and "WORLD_SIZE" in known and len(known) < len(RANK_VARIABLES):
            missing = ", ".join(name for name in RANK_VARIABLES if name not in known)
            raise RoutePackError(f"RANK and WORLD_SIZE are set, but not {missing}. Start the ranks through torchrun.")
        launched = len(known) == len(RANK_VARIABLES)
        self.rank, self.size, self.local_rank, self.per_node = (
            (known[name] for name in RANK_VARIABLES) if launched else (0, 1, 0, 1)
        )
        self.host = socket.gethostname()
        self._wanted = device
        self._control: Any = None
        self._groups: dict[int, Any] = {}

    def __enter__(self) -> Ranks:
        if self.size == 1:
            return self
        import torch
        import torch.distributed as dist

        if dist.is_initialized():
            raise RoutePackError(
                "This process belongs to a torch.distributed job already. Profile in a process of its own: "
                "torchrun ... -m routepack_tune profile."
            )
        on_gpu = self._wanted != "cpu" and torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(_device_index(self.local_rank, torch.cuda.device_count()))
        try:
            backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
            dist.init_process_group(backend, timeout=JOIN_PATIENCE)
            self._control = dist.new_group(backend="gloo", timeout=PATIENCE)
        except (RuntimeError, ValueError) as error:
            self._leave()
            where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
            raise RoutePackError(
                f"Rank {self.rank} cannot join the {self.size} ranks at {where}: {first_line(error)}. Check that "
                "every node was started and that this address is reachable from all of them."
            ) from None
        try:
            self._check_nodes()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.barrier()
        self._leave()

    def _leave(self) -> None:
        import torch.distributed as dist

        # Closes the connections too, so that a rank that waits for this one stops waiting.
        if self.size > 1 and dist.is_initialized():
            self._control, self._groups = None, {}
            dist.destroy_process_group()

    def _check_nodes(self) -> None:
        listed = self.gather([self.per_node, self.local_rank, self.host])
        sizes = sorted({per_node for per_node, _, _ in listed})
        if len(sizes) > 1 or self.size % sizes[0]:
            raise RoutePackError(
                f"Nodes run different numbers of ranks ({', '.join(map(str, sizes))} of {self.size} in all). Start the "
                "same --nproc-per-node on every node."
            )
        wrong = [rank for rank, (per_node, local, _) in enumerate(listed) if local != rank % per_node]
        if wrong:
            raise RoutePackError(
                f"Rank {wrong[0]} is number {listed[wrong[0]][1]} on its node, expected {wrong[0] % sizes[0]}: ranks "
                "must be numbered node by node, as torchrun does."
            )

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.gather_numbers([])

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON-ready values of all ranks, in order of rank, on every rank."""
        if self.size == 1:
            return [value]
        import torch

        data = np.frombuffer(canonical_json(value).encode(), dtype=np.uint8)
        sizes = [int(size) for (size,) in self.gather_numbers([data.size])]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: data.size] = torch.from_numpy(data.copy())
        received = self._all_gather(padded)
        return [json.loads(part[:size].numpy().tobytes()) for part, size in zip(received, sizes, strict=True)]

    def agree(self, value: Any) -> Any:
        """Return rank 0's JSON-ready value on every rank; the others' is ignored."""
        if self.size == 1:
            return value
        import torch
        import torch.distributed as dist

        text = canonical_json(value) if self.rank == 0 else ""
        sizes = self.gather_numbers([len(text.encode())])
        sent = torch.empty(int(sizes[0][0]), dtype=torch.uint8)
        if self.rank == 0:
            sent.numpy()[:] = np.frombuffer(text.encode(), dtype=np.uint8)
        with self._lost():
            dist.broadcast(sent, src=0, group=self._control)
        return json.loads(sent.numpy().tobytes())

    def gather_numbers(self, numbers: list[float]) -> list[list[float]]:
        """Return each rank's list of floats; all lists have one length."""
        if self.size == 1:
            return [numbers]
        import torch

        # One number more, for a tensor of nothing is no message and holds nobody.
        return [part[1:].tolist() for part in self._all_gather(torch.tensor([0.0, *numbers], dtype=torch.float64))]

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        import torch
        import torch.distributed as dist

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

        The block talks to no other rank, or only inside an exchange whose process group bounds the wait.

        Raises
        ------
        RoutePackError
            On ranks whose own block went well, when another's failed: the message names it.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        texts: list[str] = []
        try:
            texts = self.gather("" if failure is None else f"{_prefix(failure)}{first_line(failure)}")
        except RoutePackError:
            if failure is None:
                raise
        if failure is not None:
            raise failure
        for rank, text in enumerate(texts):
            if text:
                raise RoutePackError(f"Rank {rank} stopped: {text}")

    def group(self, size: int) -> Any:
        """Return the process group of this rank among ``size`` consecutive ranks, made at first use."""
        import torch.distributed as dist

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
        own = 0.0
        for asked in range(self.per_node, self.size, self.per_node):
            if self.rank in (0, asked):
                own = self._ping_pong(asked)
        offsets = [offset for (offset,) in self.gather_numbers([own])]
        return [offsets[rank - rank % self.per_node] for rank in range(self.size)]

    def _ping_pong(self, asked: int) -> float:
        """Return by how much the rank that asks is ahead of rank 0, which answers: the middle of the quickest trip."""
        import torch
        import torch.distributed as dist

        stamp = torch.zeros(1, dtype=torch.float64)
        trips: list[tuple[float, float]] = []
        with self._lost():
            for _ in range(PING_PONGS):
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
        return min(trips)[1] if trips else 0.0


def _integer(name: str) -> int:
    text = os.environ[name]
    try:
        return int(text)
    except ValueError:
        raise RoutePackError(f"The environment sets {name}={text!r}, expected a whole number.") from None


def _device_index(local_rank: int, visible: int) -> int:
    # A launcher that shows every rank its own GPU alone shows it as number 0.
    if visible == 1:
        return 0
    if local_rank >= visible:
        raise RoutePackError(
            f"Rank {local_rank} of this node has no GPU: {visible} are visible. Start --nproc-per-node {visible}."
        )
    return local_rank


def _prefix(error: Exception) -> str:
    return "" if isinstance(error, RoutePackError) else f"{type(error).__name__}: "


def first_line(error: BaseException) -> str:
    """Return what an error says, as far as a line of a report holds it."""
    return (str(error).splitlines() or [type(error).__name__])[0]

"""Workers that may hang, die or swallow memory: forked children, each with one case at a time and a limit for it.

A worker lives for a batch of cases and is then replaced. The parent sees which case a worker is in, so that a death or
a time limit belongs to a case; each case's peak of memory is read from the kernel, which is asked to forget the last.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Case = tuple[str, int]
"""Door and seed."""
BATCH = 60
LIMIT_S, WAIT_S = 5.0, 60.0
"""Processor time of a case, and wall time (others may use this machine), beyond which it hangs."""
MOST_BYTES = 8 << 30
"""Address space that a worker may take on top of its own: nobody's machine suffers."""


@dataclass(frozen=True)
class Result:
    """What became of one case."""

    door: str
    seed: int
    outcome: str
    said: str
    """What was changed."""
    detail: str
    """The message, or where the traceback ended."""
    seconds: float = 0.0
    """Processor time."""
    peak_mb: float = 0.0
    """Memory on top of what the worker held before."""


def run_cases(
    cases: Sequence[Case], run: Callable[[str, int, Path], tuple[str, str, str]], workers: int
) -> Iterator[Result]:
    """Run cases in forked workers; yield results as they come.

    ``run`` gets door, seed and an empty folder and returns outcome, what was changed and a detail.
    """
    batches = [list(cases[i : i + BATCH]) for i in range(0, len(cases), BATCH)]
    live: dict[int, _Worker] = {}
    scratch = Path(tempfile.mkdtemp(prefix="attack-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        while batches or live:
            while batches and len(live) < workers:
                worker = _Worker(batches.pop(0), run, scratch)
                live[worker.reader] = worker
            ready, _, _ = select.select(list(live), [], [], 0.2)
            for reader in list(live):
                worker = live[reader]
                yield from worker.take() if reader in ready else ()
                if (lost := worker.overdue()) is not None:
                    yield lost
                if worker.ended:
                    del live[reader]
                    worker.close()
                    if worker.left:
                        batches.insert(0, worker.left)
    finally:
        for worker in live.values():
            worker.kill()
            worker.close()
        shutil.rmtree(scratch, ignore_errors=True)


class _Worker:
    """The parent's side of one child."""

    def __init__(self, batch: list[Case], run: Callable[[str, int, Path], tuple[str, str, str]], scratch: Path) -> None:
        self.left, self.ended, self._data, self._began_s, self._cpu_s = list(batch), False, b"", time.monotonic(), 0.0
        self.reader, writer = os.pipe()
        self._scratch = scratch
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self.reader)
            _work(batch, run, scratch, writer)
        self._child = self._pid
        os.close(writer)

    def take(self) -> Iterator[Result]:
        """Yield what the child has told; of one that died, the case it died in."""
        chunk = os.read(self.reader, 1 << 16)
        self._data += chunk
        while len(self._data) >= 4 and len(self._data) >= 4 + (size := struct.unpack("<I", self._data[:4])[0]):
            fields = self._data[4 : 4 + size].decode("utf-8", "replace").split("\x1e")
            self._data = self._data[4 + size :]
            door, seed = self.left.pop(0)
            yield Result(door, seed, fields[0], fields[1], fields[2], float(fields[3]), float(fields[4]))
            self._mark()
        if not chunk:
            self.ended = True
            _, status = os.waitpid(self._pid, 0)
            self._pid = 0
            if self.left:
                how = signal.Signals(status & 0x7F).name if status & 0x7F else f"exit {status >> 8}"
                yield self._lost("died", how)

    def overdue(self) -> Result | None:
        """Kill a child that is too long in a case; return that case."""
        if not self._pid or self.ended or not self.left:
            return None
        used, waited = _cpu_s(self._pid) - self._cpu_s, time.monotonic() - self._began_s
        if used <= LIMIT_S and waited <= WAIT_S:
            return None
        where = f"{used:.0f} s of processor time, {waited:.0f} s in all"
        self.kill()
        self.ended = True
        return self._lost("hung", where)

    def kill(self) -> None:
        """End the child."""
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0

    def close(self) -> None:
        os.close(self.reader)

    def _mark(self) -> None:
        self._began_s, self._cpu_s = time.monotonic(), _cpu_s(self._pid) if self._pid else 0.0

    def _lost(self, outcome: str, detail: str) -> Result:
        door, seed = self.left.pop(0)
        told = self._scratch / f"said-{self._child}"
        said = told.read_text(errors="replace") if told.exists() else ""
        return Result(door, seed, outcome, said, detail)


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _work(batch: list[Case], run: Callable[[str, int, Path], tuple[str, str, str]], scratch: Path, writer: int) -> None:
    """Run a batch in the child and leave without cleaning up after the parent."""
    code = 1
    try:
        size = _memory_kb("VmSize") * 1024 + MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            os.dup2(null, stream)
        home = os.getcwd()
        for door, seed in batch:
            folder = scratch / f"{door}-{seed}"
            folder.mkdir()
            gc.collect()
            held = _forget_peak()
            began = time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    outcome, said, detail = run(door, seed, folder)
                except BaseException:
                    outcome, said, detail = "attack failed", "", traceback.format_exc()[-600:]
            used = time.process_time() - began
            peak = max(0, _memory_kb("VmHWM") - held) / 1024
            os.chdir(home)
            shutil.rmtree(folder, ignore_errors=True)
            fields = (outcome, said[:400], detail[:1200], f"{used:.4f}", f"{peak:.1f}")
            data = "\x1e".join(field.replace("\x1e", " ") for field in fields).encode("utf-8", "replace")
            os.write(writer, struct.pack("<I", len(data)) + data)
        code = 0
    finally:
        sys.stdout = sys.stderr = None
        os._exit(code)


def _memory_kb(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what + ":"):
            return int(line.split()[1])
    return 0


def _forget_peak() -> int:
    """Let the kernel count the peak anew; return what is held now, KiB."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _memory_kb("VmRSS")

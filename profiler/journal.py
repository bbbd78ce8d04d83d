"""The journal of a sweep: finished cases, one line each, flushed to disk before the next begins.

A folder belongs to one device, model, type and thread count: its header says which, and a later run that differs is
refused. Only rank 0 writes, under an exclusive lock. A last line cut short by a kill is
dropped; another that is damaged is left out with a warning, and its cases are timed again.

Lines are JSON objects with one key: ``header``, ``rows`` (of one case), ``anchor``, ``session`` (how one run went) or
``round`` (what one round of cases gained).
"""

from __future__ import annotations

import errno
import math
import os
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, Literal

from filelock import FileLock, Timeout

from profiler.cases.case import Case, Rates
from profiler.device.fingerprint import DeviceFingerprint, compare_fingerprints
from profiler.errors import RoutePackError
from profiler.files import canonical_json
from profiler.measurements import FILE_NAME, check_row
from profiler.params import ProfileParams
from profiler.places import writing
from profiler.readers import build, parse_json, read_bytes

JOURNAL_NAME, LOCK_NAME = "cases.jsonl", ".lock"
MAX_BYTES = 256 << 20


class Journal:
    """Hold what a folder's journal says, lock it and append to it; without a folder only hold."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.header: dict[str, Any] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        """Finished rows by case id."""
        self.anchors: list[dict[str, Any]] = []
        self.sessions: list[dict[str, Any]] = []
        self.rounds: list[dict[str, Any]] = []
        self._stream: IO[bytes] | None = None
        if folder:
            self._lock = FileLock(folder / LOCK_NAME)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._lock.acquire(blocking=False)
            except Timeout:
                raise RoutePackError(f"Another profile is writing to {folder}. Choose another --out.") from None
            except OSError as error:
                raise RoutePackError(f"Cannot write to {folder}: {error.strerror}. Choose another --out.") from None
            try:
                self._read(folder / JOURNAL_NAME)
            except BaseException:
                self._lock.release()
                raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream:
            self._stream.close()
        if self.folder:
            self._lock.release()

    def begin(self, header: dict[str, Any]) -> None:
        """Check that this run may share the folder (devices, software, model, type and threads), and note it."""
        first, reasons = self.header or header, []
        if not self.header and self.folder and (self.folder / FILE_NAME).exists():
            raise RoutePackError(f"{self.folder} holds measurements of other origin. Choose another --out.")
        for rank, devices in enumerate(zip(first["fingerprints"], header["fingerprints"], strict=False)):
            match = compare_fingerprints(*(DeviceFingerprint.from_dict(device) for device in devices))
            reasons += [f"rank {rank}: {reason}" if rank else reason for reason in match.reasons]
        for name in ("model", "dtype", "threads"):
            if first[name] != header[name]:
                reasons.append(f"{name} is {header[name]}, expected {first[name]}")
        if first["spec_hash"] != header["spec_hash"]:
            reasons.append("the shape of the model differs")
        if reasons:
            raise RoutePackError(
                f"{self.folder} holds cases of another profile: {'; '.join(reasons)}. Times must not mix: choose "
                "another --out."
            )
        self.add(header=header)

    def known(self, case: Case, dtype: str) -> list[dict[str, Any]]:
        """Return the rows of a case, forward first; empty ones where it was not timed yet."""
        return [self.rows.get(case.case_id(way, dtype), {}) for way in case.directions]

    def is_done(self, case: Case, dtype: str, params: ProfileParams) -> bool:
        """Return whether a case was timed, and need not be tried again."""
        return all(row and (row["status"] == "ok" or not params.retry_failed) for row in self.known(case, dtype))

    def add(self, **line: Any) -> None:
        """Write one line, as ``add(rows=[...])``, and hold what it says."""
        if self.folder:
            with writing(path := self.folder / JOURNAL_NAME):
                # Not buffered: what a full disk refuses is not tried again when the file is closed.
                self._stream = self._stream or open(path, "ab", buffering=0)  # noqa: SIM115 (closed at the end)
                text = canonical_json(line).encode() + b"\n"
                if self._stream.write(text) != len(text):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self._stream.fileno())
        self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        ((kind, value),) = line.items()
        if kind == "rows":
            self.rows |= {row["case_id"]: row for row in value}
        elif kind == "header":
            self.header = value
        else:
            getattr(self, f"{kind}s").append(value)

    def _read(self, path: Path) -> None:
        data = read_bytes(path, "Journal", MAX_BYTES) if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            # A kill in the middle of a write: cut, or the next line would continue it.
            os.truncate(path, len(whole))
        damaged = []
        for number, text in enumerate(whole.splitlines(), 1):
            try:
                line = build(dict[str, Any], parse_json(text, f"line {number}"), f"line {number}")
                _check_line(line, f"line {number}")
                self._take(line)
            except RoutePackError as error:
                damaged.append(str(error))
        if damaged and not self.header:
            raise RoutePackError(
                f"Journal {path} no longer says which device and model its cases are of ({damaged[0]}). Restore the "
                "file, or choose another --out."
            )
        if damaged:
            more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
            warnings.warn(f"Journal {path}: {damaged[0]}{more}: left out; cases in it are timed again.", stacklevel=5)


@dataclass(frozen=True)
class Header:
    """What a folder's cases belong to."""

    model: str
    spec_hash: str
    dtype: str
    threads: int
    fingerprints: list[DeviceFingerprint]
    rates: dict[str, float]
    """By the names of :class:`Rates`."""
    links: dict[str, float]

    def __post_init__(self) -> None:
        if not self.fingerprints or {field.name for field in fields(Rates)} != set(self.rates):
            raise ValueError("expected fingerprints and all rates of the device")
        if not all(0 < rate < math.inf for rate in (*self.rates.values(), *self.links.values())):
            raise ValueError(f"expected positive rates, got {self.rates!r:.80} and {self.links!r:.80}")


@dataclass(frozen=True)
class Anchor:
    """One look at the case that tells whether a device is steady."""

    case_id: str
    time_us: float
    readings: dict[str, int | float]


@dataclass(frozen=True)
class Session:
    """How one run went."""

    kind: Literal["cpu", "cuda"]
    wall_s: float
    busy_s: float
    foreign_cpu_share: float | None
    throttled: int


@dataclass(frozen=True)
class Round:
    """What one round of cases gained."""

    cases: int
    minutes: float
    stopped_by: str
    errors_pct: dict[str, float]


LINES: dict[str, Any] = {"header": Header, "anchor": Anchor, "session": Session, "round": Round}


def _check_line(line: dict[str, Any], where: str) -> None:
    """Raise RoutePackError unless a line of the journal is one that :meth:`Journal.add` writes."""
    ((kind, value),) = line.items() if len(line) == 1 else [("", None)]
    if kind in LINES:
        build(LINES[kind], value, f"{where}, {kind}")
    elif kind == "rows":
        for row in build(list[dict[str, Any]], value, where):
            check_row(row, where)
    else:
        raise RoutePackError(f"{where}: expected one of rows, {', '.join(LINES)}, got {list(line)!r:.60}.")

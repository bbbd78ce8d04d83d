"""The journal of a sweep: finished cases, one line each, flushed to disk before the next begins.

A folder belongs to one device, model, type and thread count: its header says which, and a later run that differs is
refused. Only rank 0 writes, under an exclusive lock. A last line cut short by a kill is dropped.

Lines are JSON objects with one key: ``header``, ``rows`` (of one case), ``anchor``, ``session`` (how one run went) or
``round`` (what one round of cases gained).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from profiler.cases.case import Case
from profiler.device.fingerprint import DeviceFingerprint, compare_fingerprints
from profiler.errors import RoutePackError
from profiler.files import canonical_json
from profiler.measurements import FILE_NAME
from profiler.params import ProfileParams

JOURNAL_NAME, LOCK_NAME = "cases.jsonl", ".lock"


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
            self._stream = self._stream or open(self.folder / JOURNAL_NAME, "ab")  # noqa: SIM115 (closed at the end)
            self._stream.write(canonical_json(line).encode() + b"\n")
            self._stream.flush()
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
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            # A kill in the middle of a write: cut, or the next line would continue it.
            os.truncate(path, len(whole))
        for number, text in enumerate(whole.splitlines(), 1):
            try:
                self._take(json.loads(text))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise RoutePackError(
                    f"Journal {path} is damaged in line {number}. Remove that line, or choose another --out."
                ) from None

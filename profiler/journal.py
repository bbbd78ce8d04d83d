"""The journal of a sweep: finished cases, one line each, flushed to disk before the next begins.

Each rank writes a file of its own; rank 0's holds what becomes the measurements. A folder belongs to one device,
model, type and thread count: the first line says which, and a later run that differs is refused. A run holds an
exclusive lock on its file. A last line cut short by a kill is dropped.

Lines are JSON objects with one key: ``header``, ``rows`` (of one case), ``anchor``, ``session`` (how one run went),
``round`` (what one round of cases gained) or ``speeds`` (of the cases by which ranks are compared).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

from profiler.device.fingerprint import DeviceFingerprint, compare_fingerprints
from profiler.errors import RoutePackError
from profiler.files import canonical_json
from profiler.measurements import FILE_NAME

JOURNAL_NAME = "cases.jsonl"
LOCK_NAME = ".lock"
FORMAT = 1


class Journal:
    """Hold one rank's locked file, what it already holds, and append to it."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder, self.rank = folder, rank
        self.path = folder / journal_name(rank)
        self.header: dict[str, Any] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        """Finished rows by case id."""
        self.anchors: list[dict[str, Any]] = []
        self.sessions: list[dict[str, Any]] = []
        self.rounds: list[dict[str, Any]] = []
        self.speeds: dict[str, float] = {}
        """Times of this rank, by id, in the cases by which ranks are compared."""
        self._stream: IO[bytes] | None = None
        self._lock = _locked(folder, rank)
        try:
            self._read()
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()
        self._lock.close()

    def begin(self, header: dict[str, Any]) -> None:
        """Check that this run may share the folder, and note it.

        Raises
        ------
        RoutePackError
            If the folder's device, software, model, type or threads differ; the message says how.
        """
        if self.header:
            _check_same(self.folder, self.header, header)
        elif self.rank == 0 and (self.folder / FILE_NAME).exists():
            raise RoutePackError(
                f"{self.folder} holds measurements that this profile did not write. Choose another --out."
            )
        self.header = header
        self._append({"header": header})

    def add_case(self, rows: list[dict[str, Any]]) -> None:
        """Write the rows of one finished case."""
        self._append({"rows": rows})
        self.rows |= {row["case_id"]: row for row in rows}

    def add_anchor(self, reading: dict[str, Any]) -> None:
        """Write one more timing of the anchor case."""
        self._append({"anchor": reading})
        self.anchors.append(reading)

    def add_session(self, session: dict[str, Any]) -> None:
        """Write how this run of the sweep went."""
        self._append({"session": session})
        self.sessions.append(session)

    def add_round(self, gained: dict[str, Any]) -> None:
        """Write what one round of cases gained."""
        self._append({"round": gained})
        self.rounds.append(gained)

    def add_speeds(self, speeds: dict[str, float]) -> None:
        """Write this rank's times of the cases by which ranks are compared."""
        self._append({"speeds": speeds})
        self.speeds |= speeds

    def _append(self, line: dict[str, Any]) -> None:
        if self._stream is None:
            self._stream = open(self.path, "ab")  # noqa: SIM115 (closed with the journal)
        self._stream.write(canonical_json(line).encode() + b"\n")
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def _read(self) -> None:
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            # A kill in the middle of a write: cut, or the next line would continue it.
            os.truncate(self.path, len(whole))
        for number, text in enumerate(whole.splitlines(), 1):
            try:
                self._take(json.loads(text))
            except (ValueError, KeyError, TypeError):
                raise RoutePackError(
                    f"Journal {self.path} is damaged in line {number}. Remove that line, or choose another --out."
                ) from None

    def _take(self, line: dict[str, Any]) -> None:
        if "header" in line:
            # What the first run saw of the device stays; a later run may have seen more.
            self.header = line["header"] | self.header
        elif "rows" in line:
            self.rows |= {row["case_id"]: row for row in line["rows"]}
        elif "session" in line:
            self.sessions.append(line["session"])
        elif "round" in line:
            self.rounds.append(line["round"])
        elif "speeds" in line:
            self.speeds |= line["speeds"]
        else:
            self.anchors.append(line["anchor"])


def _check_same(folder: Path, first: dict[str, Any], now: dict[str, Any]) -> None:
    if first.get("format") != FORMAT:
        raise RoutePackError(f"{folder} was written by another version of routepack-tune. Choose another --out.")
    before, present = (DeviceFingerprint.from_dict(header["fingerprint"]) for header in (first, now))
    reasons = list(compare_fingerprints(before, present).reasons)
    reasons += [
        f"{name} is {now[name]}, expected {first[name]}"
        for name in ("model", "dtype", "threads")
        if first[name] != now[name]
    ]
    if first["spec_hash"] != now["spec_hash"]:
        reasons.append("the shape of the model differs")
    if reasons:
        raise RoutePackError(
            f"{folder} holds cases of another profile: {'; '.join(reasons)}. Times must not mix: choose another --out."
        )


def journal_name(rank: int) -> str:
    """Return the name of one rank's file."""
    return JOURNAL_NAME if rank == 0 else f"cases-rank{rank:05d}.jsonl"


def _locked(folder: Path, rank: int) -> IO[str]:
    """Return an open file that holds the exclusive lock of one rank's file until it is closed or its process dies."""
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        name = LOCK_NAME if rank == 0 else f"{LOCK_NAME}-rank{rank:05d}"
        lock = open(folder / name, "a+", encoding="utf-8")  # noqa: SIM115 (held open: it is the lock)
    except OSError as error:
        raise RoutePackError(f"Cannot write to {folder}: {error.strerror}. Choose another --out.") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise RoutePackError(
            f"Another profile (process {owner}) is writing to {folder}. Wait for it, or choose another --out."
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock

"""Locks of the system, by number: they go with the process or connection that holds them, whatever ends it.

A study's lock is number 0; a trial's worker holds one of 1, 2 ... for as long as it works.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any


class FileLocks:
    """Locks of one machine: files ``PATH-NUMBER.lock``."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._held: dict[int, Any] = {}

    def take(self, number: int, *, wait: bool = False) -> bool:
        """Take a lock, at once or never unless told to wait; return whether it is held now."""
        import filelock

        lock = filelock.FileLock(f"{self._path}-{number}.lock", poll_interval=0.01)
        try:
            lock.acquire(blocking=wait)
        except filelock.Timeout:
            return False
        self._held[number] = lock
        return True

    def free(self, number: int) -> None:
        """Let go of one that is held."""
        self._held.pop(number).release()

    def close(self) -> None:
        """Let go of all."""
        for number in list(self._held):
            self.free(number)


class ServerLocks:
    """Advisory locks of a PostgreSQL server, held by one connection."""

    NOTICE = "-c tcp_keepalives_idle=15 -c tcp_keepalives_interval=15 -c tcp_keepalives_count=3"
    """The server takes a machine that is silent for a minute for dead."""

    def __init__(self, url: str, name: str) -> None:
        from sqlalchemy import create_engine
        from sqlalchemy.pool import NullPool

        self._engine = create_engine(
            url, poolclass=NullPool, isolation_level="AUTOCOMMIT", connect_args={"options": self.NOTICE}
        )
        self._key = zlib.crc32(name.encode()) - 2**31
        self._connection: Any = None

    def take(self, number: int, *, wait: bool = False) -> bool:
        """Take a lock, at once or never unless told to wait; return whether it is held now."""
        self._connection = self._connection or self._engine.connect()
        return self._call("pg_advisory_lock" if wait else "pg_try_advisory_lock", number) is not False

    def free(self, number: int) -> None:
        """Let go of one that is held."""
        self._call("pg_advisory_unlock", number)

    def close(self) -> None:
        """Let go of all."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _call(self, function: str, number: int) -> Any:
        from sqlalchemy import text

        return self._connection.scalar(text(f"SELECT {function}(:key, :number)"), {"key": self._key, "number": number})


Locks = FileLocks | ServerLocks
"""One holder's way to the locks of a study."""


@contextlib.contextmanager
def alone(locks: Locks) -> Iterator[None]:
    """Hold a study's lock."""
    locks.take(0, wait=True)
    try:
        yield
    finally:
        locks.free(0)

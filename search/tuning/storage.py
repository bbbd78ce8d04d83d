"""Where a study is kept, and how processes open it at once.

A storage is ``journal:FILE``, a log that the processes of one machine append to (:func:`choose_storage`), or the URL of
a PostgreSQL server, which several machines need and the user names.

Its locks are the system's, by number: they go with the process or connection that holds them, whatever ends it. A
study's lock is number 0; a trial's worker holds one of 1, 2 ... for as long as it works.

Invariants: the process that creates a study also enqueues its first settings and writes its signature last, so a
study with a signature is whole. Who finds one with another signature is refused, with the difference. No message
shows the password of a URL.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from profiler import RoutePackError
from profiler.redact import redacted
from search.tuning.journal_file import check_journal
from search.tuning.task import TuneTask

JOURNAL = "journal:"
JOURNAL_FILE = "study.journal"
SIGNATURE = "signature"
METRICS = {
    1: ["cost / default settings"],
    2: ["step time / default settings", "planning time / default settings"],
}
"""What the objectives are called where studies are looked at, by their number."""


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


def choose_storage(folder: Path | str) -> str:
    """Return the storage of the study in a folder: a journal, for one worker or several."""
    return f"{JOURNAL}{Path(folder).resolve() / JOURNAL_FILE}"


def is_server(storage: str) -> bool:
    """Tell whether a storage can be shared by machines."""
    return not storage.startswith(JOURNAL)


def open_study(task: TuneTask, storage: str, study_name: str, *, new_study: bool = False) -> Any:
    """Create or resume a study and return it.

    A ``new_study`` is begun afresh: where the name is taken it gets the first free one of ``name-2``, ``name-3`` ...
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)  # what fails, we say
    # tables and studies are made by one process at a time
    with explained_storage(storage, opening=True), alone(study_locks(storage, "")):
        if not is_server(storage):
            check_journal(storage.removeprefix(JOURNAL))
        store, name = _connect(storage), study_name
        taken = set(optuna.get_all_study_names(store)) if new_study else ()
        for number in itertools.count(2):
            if name not in taken:
                break
            name = f"{study_name}-{number}"
        study = optuna.create_study(storage=store, study_name=name, directions=task.directions, load_if_exists=True)
        if SIGNATURE not in study.user_attrs:  # new, or its creator was killed before it had signed it
            with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
                study.set_metric_names(METRICS[len(task.directions)])
            for fact, told in task_facts(task).items():
                study.set_user_attr(fact, told)
            for setting in task.given_settings:
                study.enqueue_trial(setting, skip_if_exists=True)
            study.set_user_attr(SIGNATURE, task.signature)
        task.check_same(study.user_attrs[SIGNATURE], f"Study {name!r}")
    return study


def task_facts(task: TuneTask) -> dict[str, str]:
    """Return what readers of the storage, such as Optuna Dashboard, see of a study: the signature is for us."""
    sizes = {name: size for name, size in asdict(task.topology).items() if size != 1}
    return {
        "model": task.spec.name,
        "topology": ", ".join(f"{name} {size}" for name, size in sizes.items()) or "one rank",
        "microbatch caps": ", ".join(f"{cap} tokens" for cap in task.caps),
        "tuned on": ", ".join(task.names[i] for i in task.tuned),
        "held out": ", ".join(task.names[i] for i in task.held_out) or "nothing",
        "cost": (
            "mean over batches of (predicted step time + predicted moves of experts + measured planning time that the "
            "job's slack does not hide), over the same of the default settings; less is better"
        ),
    }


def study_locks(storage: str, study_name: str) -> Locks:
    """Return the locks under which workers of a study begin and run their trials (see :mod:`search.tuning.trials`)."""
    if is_server(storage):
        return ServerLocks(_server_url(storage), study_name)
    return FileLocks(f"{storage.removeprefix(JOURNAL)}.claim")


def _connect(storage: str) -> Any:
    """Return an Optuna storage."""
    import optuna
    from optuna.storages import journal

    if is_server(storage):  # the ping: a server restarted between two trials goes unnoticed
        return optuna.storages.RDBStorage(_server_url(storage), engine_kwargs={"pool_pre_ping": True})
    path = storage.removeprefix(JOURNAL)
    return optuna.storages.JournalStorage(journal.JournalFileBackend(path, lock_obj=_JournalLock(path)))  # type: ignore[arg-type]


def _server_url(storage: str) -> str:
    """Return a server's URL with the driver of our extra, whatever SQLAlchemy's default is."""
    from sqlalchemy.engine import make_url

    url = make_url(storage)
    if url.get_backend_name() not in ("postgresql", "postgres"):
        raise RoutePackError(
            f"Storage {redacted(storage)} is of a kind that is not known. Give postgresql://USER@HOST/DATABASE, or "
            "leave --storage out on a single machine."
        )
    return url.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)


class _JournalLock:
    """The lock of a journal, which the system releases when a process is killed; cuts off a line a kill left half.

    Optuna's own lock is a file that stays behind: after a kill all wait 30 s, then several may break it at once.
    """

    def __init__(self, path: str) -> None:
        import filelock

        self._path, self._lock = path, filelock.FileLock(f"{path}.lock", poll_interval=0.005)
        self.release = self._lock.release

    def acquire(self) -> bool:
        self._lock.acquire()
        with open(self._path, "rb+") as journal:
            size = journal.seek(0, os.SEEK_END)
            if size and (journal.seek(-1, os.SEEK_END), journal.read())[1] != b"\n":
                journal.seek(0)
                journal.truncate(journal.read().rfind(b"\n") + 1)
        return True


@contextlib.contextmanager
def explained_storage(storage: str, *, opening: bool = False) -> Iterator[None]:
    """Turn what a database says, while it is opened or later, into one line without secrets."""
    try:
        yield
    except RoutePackError:
        raise
    except _errors(storage, opening) as error:
        cause = error.__cause__ or error  # Optuna wraps what the server said into advice of its own
        said = redacted(next(iter(str(cause).strip().splitlines()), "").rstrip(". "), storage)
        problem, way_out = "cannot be opened", "Check the URL and that its server runs."
        if not opening:
            problem, way_out = "failed", "Finished trials are kept: once it is back, the same command runs the rest."
        elif isinstance(error, ImportError):
            way_out = "For PostgreSQL: pip install 'routepack-tune[postgresql]'."
        elif "no longer compatible" in str(error):
            way_out = "Upgrade it with `optuna storage upgrade`, or give another --storage."
        where, kind = redacted(storage), type(cause).__name__
        raise RoutePackError(f"Storage {where} {problem}: {kind}: {said}. {way_out}") from None


def _errors(storage: str, opening: bool) -> tuple[type[Exception], ...]:
    """Return what libraries raise when a storage is away, refuses us, or is of another version."""
    if not is_server(storage):
        return (Exception,) if opening else ()
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    # Wrong ports are values, another version of Optuna's tables is a RuntimeError.
    return (StorageInternalError, SQLAlchemyError, *((ImportError, RuntimeError, ValueError) if opening else ()))

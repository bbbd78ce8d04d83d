"""Where a study is kept, and how processes open it at once.

A storage is a string: an Optuna URL (``sqlite:///file``, ``postgresql://user@host/db``) or ``journal:FILE``, a log file
that many processes of one machine append to. One machine writes a journal (:func:`choose_storage`); several need a
server, which the user names.

Invariants: the process that creates a study also enqueues its first settings and writes its signature last, so a
study with a signature is whole. Who finds one with another signature is refused, with the difference. No message
shows the password of a URL.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from profiler import RoutePackError
from profiler.files import canonical_json
from search.tuning.claims import Lock, retry
from search.tuning.task import TuneTask

JOURNAL = "journal:"
SIGNATURE = "signature"
JOURNAL_FILE = "study.journal"
HEARTBEAT_S = 15
GRACE_S = 60
"""Time without a heartbeat after which a trial's worker on another machine is taken for dead."""
PATIENCE_S = 60.0
"""Longest wait while other processes create the same study, or while a server that was reachable starts."""
_SHOWN = 4
"""Names shown of a list of differences."""


def choose_storage(folder: Path | str) -> str:
    """Return the storage of the study in a folder: a journal, for one worker or several.

    Optuna's SQLite storage takes five times as long for a trial, and several workers may not write it at once.
    """
    return f"{JOURNAL}{(Path(folder).resolve() / JOURNAL_FILE).as_posix()}"


def is_server(storage: str) -> bool:
    """Tell whether a storage can be shared by machines."""
    return not storage.startswith((JOURNAL, "sqlite"))


def shown(storage: str) -> str:
    """Return a storage fit for messages and files: without its password."""
    from sqlalchemy.engine import make_url

    if storage.startswith(JOURNAL):
        return storage
    try:
        url = make_url(storage)
    except Exception:  # not a URL: hide what might be one's password
        return re.sub(r":[^/@]*@", ":***@", storage)
    secret = {key: "***" for key in url.query if "pass" in key.lower()}
    return url.update_query_dict(secret).render_as_string(hide_password=True)


def open_study(
    task: TuneTask,
    storage: str,
    study_name: str,
    *,
    new_study: bool = False,
    read_only: bool = False,
) -> Any:
    """Create or resume a study and return it.

    Parameters
    ----------
    new_study
        Begin a fresh study; where the name is taken it gets the first free one of ``name-2``, ``name-3`` ...
    read_only
        Only load what is there; create, enqueue and clean up nothing. Workers do this.

    Raises
    ------
    RoutePackError
        If the storage cannot be opened, or holds a study of other inputs; the message shows the difference.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)  # what fails, we say
    with _explained(storage):
        store = _patiently(lambda: _connect(storage), storage)
        if not read_only:
            study_name = _create(task, store, study_name, new_study)
        study = _patiently(lambda: optuna.load_study(study_name=study_name, storage=store), storage)
        if read_only and SIGNATURE not in study.user_attrs:
            raise RoutePackError(f"Study {study_name!r} in {shown(storage)} is not whole yet. Run `routepack tune`.")
        check_same(task, study)
    return study


def claim_lock(storage: str, study_name: str) -> Lock:
    """Return the lock under which workers of a study begin their trials (see :mod:`search.tuning.claims`)."""
    import filelock
    from sqlalchemy.engine import make_url

    if is_server(storage):
        return _ServerLock(_server_url(storage), study_name)
    path = storage.removeprefix(JOURNAL) if storage.startswith(JOURNAL) else make_url(storage).database
    return filelock.FileLock(f"{path}.claim.lock", poll_interval=0.01)


class _ServerLock:
    """A lock of the database, which lets go when the connection ends, as it does when its process is killed."""

    def __init__(self, url: str, name: str) -> None:
        from sqlalchemy import create_engine
        from sqlalchemy.pool import NullPool

        self._engine, self._key = create_engine(url, poolclass=NullPool), zlib.crc32(name.encode())
        self._connection: Any = None

    def acquire(self) -> None:
        from sqlalchemy import text

        self._connection = self._engine.connect()
        self._connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": self._key})

    def release(self) -> None:
        self._connection.close()


def signature_of(task: TuneTask) -> dict[str, Any]:
    """Return what must not change when a study is resumed, the space and the defaults in words, as JSON reads it."""
    space: dict[str, Any] = {name: asdict(knob) for name, knob in task.space.items()}
    if len(task.caps) > 1:
        space["max_tokens"] = {str(cap): task.tables_of(cap).tables_hash for cap in task.caps}
    return json.loads(canonical_json({**task.signature, "space": space, "base": asdict(task.base)}))


def check_same(task: TuneTask, study: Any) -> None:
    """Refuse a study that was made from other inputs.

    Raises
    ------
    RoutePackError
        With what was added, removed and changed.
    """
    stored, wanted = study.user_attrs[SIGNATURE], signature_of(task)
    changed = [key for key in wanted if stored.get(key) != wanted[key]]
    if not changed and [d.name.lower() for d in study.directions] == task.directions:
        return
    details = "; ".join(describe_difference(key, stored.get(key), wanted[key]) for key in changed)
    raise RoutePackError(
        f"Study {study.study_name!r} was made with other {', '.join(changed) or 'directions'} ({details}): its trials "
        "cannot be compared with new ones. Go back to the earlier inputs, give another --out, or begin afresh with "
        "--new-study."
    )


def describe_difference(name: str, old: Any, new: Any) -> str:
    """Say in one line how a value of a signature changed: entries added, removed, and from what to what."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return f"{name} {_brief(old)} -> {_brief(new)}"
    parts = []
    for word, keys in (("added", new.keys() - old.keys()), ("removed", old.keys() - new.keys())):
        if keys:
            parts.append(f"{word} {_listed(sorted(keys))}")
    if both := [key for key in new if key in old and old[key] != new[key]]:
        parts.append("changed " + _listed([f"{key} {_brief(old[key])} -> {_brief(new[key])}" for key in both]))
    return f"{name}: {', '.join(parts)}"


def _brief(value: Any) -> str:
    if isinstance(value, Mapping) and {"low", "high"} <= value.keys():
        kind = [word for word in ("log", "integer") if value.get(word)]
        return f"{value['low']:g}..{value['high']:g}{' ' if kind else ''}{' '.join(kind)}"
    text = str(value)
    return text[:8] if re.fullmatch(r"[0-9a-f]{64}", text) else text


def _listed(items: list[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


def _create(task: TuneTask, store: Any, name: str, fresh: bool) -> str:
    """Make sure that a whole study exists; return its name."""
    import optuna

    made, number = False, 1
    while not made:
        candidate = name if number == 1 else f"{name}-{number}"
        try:
            optuna.create_study(storage=store, study_name=candidate, directions=task.directions)
            made = True
        except optuna.exceptions.DuplicatedStudyError:
            if not fresh:
                break
            number += 1
    study = optuna.load_study(study_name=candidate, storage=store)
    waited_until = time.monotonic() + (0 if made else PATIENCE_S / 6)
    while SIGNATURE not in study.user_attrs and time.monotonic() < waited_until:
        time.sleep(0.05)  # its creator is between creating and signing; after a while it must have been killed there
    if SIGNATURE not in study.user_attrs:
        for setting in task.given_settings:
            study.enqueue_trial(setting, skip_if_exists=True)
        study.set_user_attr(SIGNATURE, signature_of(task))
    return candidate


def _connect(storage: str) -> Any:
    """Return an Optuna storage."""
    import optuna
    from optuna.storages import journal

    if storage.startswith(JOURNAL):
        path = storage.removeprefix(JOURNAL)
        backend = journal.JournalFileBackend(path, lock_obj=_JournalLock(path))  # type: ignore[arg-type]
        return optuna.storages.JournalStorage(backend)
    if not is_server(storage):
        return optuna.storages.RDBStorage(storage, engine_kwargs={"connect_args": {"timeout": PATIENCE_S}})
    warnings.filterwarnings("ignore", message=".*heartbeat_interval")  # experimental, says Optuna
    return optuna.storages.RDBStorage(
        _server_url(storage),
        engine_kwargs={"pool_pre_ping": True},  # a server restarted between two trials goes unnoticed
        heartbeat_interval=HEARTBEAT_S,
        grace_period=GRACE_S,
        heartbeat_stale_trial_callback=retry,
    )


def _server_url(storage: str) -> str:
    """Return a server's URL with the driver of our extra, whatever SQLAlchemy's default is."""
    from sqlalchemy.engine import make_url

    url = make_url(storage)
    if url.get_backend_name() not in ("postgresql", "postgres"):
        raise RoutePackError(
            f"Storage {shown(storage)} is of a kind that is not known. Give postgresql://USER@HOST/DATABASE, or leave "
            "--storage out on a single machine."
        )
    return url.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)


class _JournalLock:
    """The lock of a journal, which the system releases when a process is killed; cuts off a line a kill left half.

    Optuna's own lock is a file that stays behind: after a kill all wait 30 s, then several may break it at once.
    """

    def __init__(self, path: str) -> None:
        import filelock

        self._path, self._lock = path, filelock.FileLock(f"{path}.lock", poll_interval=0.005)

    def acquire(self) -> bool:
        self._lock.acquire()
        with open(self._path, "rb+") as journal:
            size = journal.seek(0, os.SEEK_END)
            if size and (journal.seek(-1, os.SEEK_END), journal.read())[1] != b"\n":
                journal.seek(0)
                journal.truncate(journal.read().rfind(b"\n") + 1)
        return True

    def release(self) -> None:
        self._lock.release()


def _patiently(attempt: Any, storage: str) -> Any:
    """Call until it works: with growing pauses while other processes set the same storage up, or a server starts."""
    pause, end, jitter = 0.05, time.monotonic() + PATIENCE_S, random.Random(os.getpid())
    while True:
        try:
            return attempt()
        except Exception as error:
            if not _passes(error, storage) or time.monotonic() > end:
                raise
        time.sleep(pause * jitter.uniform(0.5, 1.5))
        pause = min(2 * pause, 2.0)


def _passes(error: Exception, storage: str) -> bool:
    """Tell whether an error is one of those that go away by waiting."""
    from sqlalchemy.exc import IntegrityError

    text = f"{error} {error.__cause__ or ''}".lower()
    race = ("already exists", "database is locked", "duplicate", "deadlock", "no such table", "does not exist yet")
    starting = ("starting up", "too many clients", "remaining connection slots")
    return isinstance(error, IntegrityError) or any(
        word in text for word in (*race, *(starting if is_server(storage) else ()))
    )


@contextlib.contextmanager
def _explained(storage: str) -> Iterator[None]:
    """Turn what a database says into one line without the password."""
    from sqlalchemy.exc import NoSuchModuleError

    try:
        yield
    except RoutePackError:
        raise
    except (ImportError, NoSuchModuleError) as error:
        raise RoutePackError(
            f"Storage {shown(storage)} needs a database driver that is not installed ({_first_line(error, storage)}). "
            "For PostgreSQL: pip install 'routepack-tune[postgresql]'."
        ) from None
    except KeyError:
        raise RoutePackError(f"Storage {shown(storage)} holds no such study. Run `routepack tune` first.") from None
    except Exception as error:
        way_out = "Check the URL and that its server runs."
        if "no longer compatible" in str(error):
            way_out = "Upgrade it with `optuna storage upgrade`, or give another --storage."
        raise RoutePackError(
            f"Optuna storage {shown(storage)} cannot be opened: {type(error).__name__}: {_first_line(error, storage)}. "
            f"{way_out}"
        ) from None


def _first_line(error: BaseException, storage: str) -> str:
    line = next(iter(str(error).strip().splitlines()), "").rstrip(".")
    password = re.search(r"://[^/@:]*:([^@]*)@", storage)
    return line.replace(storage, shown(storage)).replace(password[1], "***") if password and password[1] else line

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
import itertools
import os
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from profiler import RoutePackError
from search.tuning.claims import Lock, retry
from search.tuning.task import TuneTask

JOURNAL = "journal:"
SIGNATURE = "signature"
JOURNAL_FILE = "study.journal"
HEARTBEAT_S = 15
GRACE_S = 60
"""Time without a heartbeat after which a trial's worker on another machine is taken for dead."""
PATIENCE_S = 60.0
"""Longest wait of SQLite for another process."""
_SHOWN = 4
"""Names shown of a list of differences."""
_WORDS = {
    "batches": "step batches",
    "tables": "times (cost model, model, topology or cap)",
    "base": "planner settings",
    "space": "tunable ranges or caps",
    "objective": "tune settings",
}


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
        if read_only:
            study = optuna.load_study(study_name=study_name, storage=_connect(storage))
            if SIGNATURE not in study.user_attrs:
                raise RoutePackError(
                    f"Study {study_name!r} in {shown(storage)} is not whole yet. Run `routepack tune`."
                )
        else:
            lock = claim_lock(storage, "")  # tables and studies are made by one process at a time
            lock.acquire()
            try:
                study = _create(task, _connect(storage), study_name, new_study)
            finally:
                lock.release()
        check_same(task, study.user_attrs[SIGNATURE], f"Study {study.study_name!r}")
    return study


def claim_lock(storage: str, study_name: str) -> Lock:
    """Return the lock under which workers of a study begin their trials (see :mod:`search.tuning.claims`)."""
    import filelock
    from sqlalchemy.engine import make_url

    if is_server(storage):
        return _ServerLock(_server_url(storage), study_name)
    path = storage.removeprefix(JOURNAL) if storage.startswith(JOURNAL) else make_url(storage).database
    if not Path(f"{path}").parent.is_dir():  # filelock would make it
        raise FileNotFoundError(f"There is no folder {Path(f'{path}').parent}")
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


def check_same(task: TuneTask, stored: Mapping[str, Any], where: str) -> None:
    """Refuse a study that was made from other inputs, by its signature.

    Raises
    ------
    RoutePackError
        With what was added, removed and changed.
    """
    wanted = task.signature
    if not (changed := [key for key in wanted if stored.get(key) != wanted[key]]):
        return
    words = ", ".join(_WORDS.get(key, key) for key in changed)
    details = "; ".join(describe_difference(key, stored.get(key), wanted[key]) for key in changed)
    raise RoutePackError(
        f"{where} was made with other {words} ({details}): its trials cannot be compared with new ones. Go back to the "
        "earlier inputs, give another --out, or begin afresh with --new-study."
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


def _create(task: TuneTask, store: Any, name: str, fresh: bool) -> Any:
    """Return a study, made whole if it is not."""
    import optuna

    if fresh:
        taken = set(optuna.get_all_study_names(store))
        name = next(n for k in itertools.count(1) if (n := name if k == 1 else f"{name}-{k}") not in taken)
    study = optuna.create_study(storage=store, study_name=name, directions=task.directions, load_if_exists=True)
    if SIGNATURE not in study.user_attrs:  # new, or its creator was killed before it had signed it
        for setting in task.given_settings:
            study.enqueue_trial(setting, skip_if_exists=True)
        study.set_user_attr(SIGNATURE, task.signature)
    return study


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

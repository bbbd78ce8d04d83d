"""MLflow's SQLite database: made whole or not at all.

MLflow makes one in place, by some sixty migrations that take seconds, and cannot go on with one that a kill left
between two of them. So it is made here under a hidden name beside its own, and renamed when it is complete.

MLflow writes its Default experiment after the last migration: a database of its tables in which no row was written was
never finished, and holds nothing. It is made anew.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import time
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from profiler.errors import RoutePackError

ARTIFACTS = "artifacts"
"""Folder beside the database in which its experiments keep their files."""
ADDRESSES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
"""Where MLflow keeps addresses of files, by table and column."""
OWNERS = ("study.json", "costmodel.json")
"""Files beside which a database is a study's or a cost model's own."""
QUIET_S = 5.0
"""A database without an experiment that was written to this recently is being made by others, such as ``mlflow ui``."""
PATIENCE_S = 20.0
"""Time for which a lock of SQLite is waited for, as MLflow does."""
_HALF = "_alembic_tmp_"
"""How the tables begin that a migration fills and then gives their name."""
_WAY_OUT = "Put a backup in its place, or move it away: then it is made anew, and `routepack tune` sends its study."


def database_path(uri: str) -> Path | None:
    """Return the file of an SQLite URI, None for any other store."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    with contextlib.suppress(ArgumentError):
        url = make_url(uri)
        if url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:"):
            return Path(str(url.database)).absolute()
    return None


def make_database(path: Path) -> None:
    """Make MLflow's database at ``path`` where there is none that was finished; safe for processes at once.

    Raises
    ------
    RoutePackError
        If a file is there that holds something and that MLflow cannot go on with.
    """
    if _is_whole(path):
        return
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        while not (whole := _is_whole(path)) and path.exists() and abs(time.time() - path.stat().st_mtime) < QUIET_S:
            time.sleep(0.1)
        if whole:
            return
        part = path.with_name(f".{path.name}.part")
        for left in (part, path):
            _remove(left)
        _initialise(part)
        os.replace(part, path)


def beside_database(database: Path, place: Path) -> Path | None:
    """Return where beside the database a file of its artifacts lies by now; None where it does not."""
    parts = place.parts
    begins = [k for k, part in enumerate(parts) if part == ARTIFACTS]  # a model has a folder of that name too
    found = [database.parent.joinpath(*parts[begin:]) for begin in begins]
    return next((path for path in found if path.exists()), None)


def adopt_artifacts(database: Path) -> None:
    """Let a database that was moved or copied keep its files beside it: MLflow writes down absolute places.

    Those that are not in a folder ``artifacts`` were chosen by others and stay; so do folders that exist, unless the
    database is a study's or a cost model's own.
    """
    here = (database.resolve().parent / ARTIFACTS).as_uri()
    own = any((database.parent / name).is_file() for name in OWNERS)
    with contextlib.closing(sqlite3.connect(f"{database.as_uri()}?mode=rw", PATIENCE_S, uri=True)) as opened:
        found = [old for (old,) in opened.execute("SELECT DISTINCT artifact_location FROM experiments") if old]
        ours = [old for old in found if re.fullmatch(rf"file:/.*/{ARTIFACTS}", old) and old != here]
        for old in ours:
            if not own and Path(url2pathname(urlsplit(old).path)).is_dir():
                continue
            for table, column in ADDRESSES:
                opened.execute(
                    f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column} || '/', 1, ?) = ?",
                    (here, len(old) + 1, len(old) + 1, f"{old}/"),
                )
        opened.commit()


def _initialise(path: Path) -> None:
    """Have MLflow make its tables and its Default experiment in a new file."""
    from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    SqlAlchemyStore(f"sqlite:///{path}", DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH).engine.dispose()


def _is_whole(path: Path) -> bool:
    """Tell whether a database is to be used as it is; refuse one that holds something and was left half upgraded."""
    if not path.exists():
        return False
    try:
        # Opened for writing: what a killed process left in its journal is taken back first.
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", PATIENCE_S, uri=True)) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            filled = {name for name in tables if database.execute(f'SELECT 1 FROM "{name}" LIMIT 1').fetchone()}
    except sqlite3.OperationalError:
        raise  # locked, or a disk in trouble: nothing is known of what it holds
    except sqlite3.DatabaseError as error:
        raise RoutePackError(f"{path} is no SQLite database ({error}). {_WAY_OUT}") from None
    if not tables & {"experiments", f"{_HALF}experiments"}:
        return bool(tables)  # somebody else's, to which MLflow adds its own
    if not filled - {"alembic_version", "workspaces"}:
        return False
    half = sorted(name for name in tables if name.startswith(_HALF))
    if half or "alembic_version" not in filled:
        what = f"table {half[0]} is left" if half else "its version is missing"
        raise RoutePackError(f"An upgrade of {path} by MLflow was cut short ({what}). {_WAY_OUT}")
    return True


def _remove(path: Path) -> None:
    """Remove a database and its journals, these first: they would be played into a new one."""
    for end in ("-journal", "-wal", "-shm", ""):
        Path(f"{path}{end}").unlink(missing_ok=True)

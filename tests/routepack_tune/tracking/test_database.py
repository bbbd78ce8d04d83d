"""MLflow's database, whatever ends the process that makes it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from profiler import RoutePackError
from routepack_tune.tracking import database
from routepack_tune.tracking.database import database_path, make_database
from routepack_tune.tracking.store import Store

IMPORTED = "from pathlib import Path; from routepack_tune.tracking.database import make_database"
MAKERS = {
    "ours": IMPORTED + "; make_database(Path({path!r}))",
    "mlflow": "import mlflow; mlflow.MlflowClient(tracking_uri='sqlite:///' + {path!r}).search_experiments()",
}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Who wrote to a database in these tests is dead."""
    monkeypatch.setattr(database, "QUIET_S", 0.0)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A database that was made, once."""
    path = tmp_path_factory.mktemp("made") / "mlflow.db"
    make_database(path)
    return path


def rows(path, table):
    with contextlib.closing(sqlite3.connect(path)) as opened:
        return opened.execute(f"SELECT * FROM {table}").fetchall()


def execute(path, *statements):
    with contextlib.closing(sqlite3.connect(path)) as opened:
        for statement in statements:
            opened.execute(statement)
        opened.commit()


def works(path):
    """Tell whether MLflow takes a database: a run can be written."""
    store = Store(f"sqlite:///{path}", "an experiment")
    return store.find("") == [] and bool(store.create_run("a run", {}))


def kill_while_making(path, maker):
    """Kill a process in the middle of the migrations; return what it leaves."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MLFLOW_DISABLE_TELEMETRY": "true"}
    command = [sys.executable, "-c", MAKERS[maker].format(path=str(path))]
    process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    begun = False
    while not begun and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
        for file in path.parent.glob("*mlflow.db*"):
            with contextlib.suppress(sqlite3.Error):
                begun = begun or bool(rows(file, "alembic_version"))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert begun, "the process ended before its first migration"
    return sorted(file.name for file in path.parent.iterdir())


@pytest.mark.parametrize("maker", MAKERS)
def test_a_kill_in_the_middle_costs_nothing_but_the_time(tmp_path, maker):
    path = tmp_path / "mlflow.db"
    assert (path.name in kill_while_making(path, maker)) == (maker == "mlflow")
    make_database(path)
    assert works(path)
    assert not [file.name for file in tmp_path.iterdir() if ".part" in file.name or "-journal" in file.name]


@pytest.mark.parametrize(
    "statements",
    [
        (),
        ("CREATE TABLE experiments (experiment_id INTEGER)",),
        (
            "CREATE TABLE _alembic_tmp_experiments (experiment_id INTEGER)",
            "CREATE TABLE metrics (key TEXT)",
            "CREATE TABLE alembic_version (version_num TEXT)",
            "INSERT INTO alembic_version VALUES ('451aebb31d03')",
        ),
    ],
    ids=["empty file", "no version", "between two migrations"],
)
def test_a_half_made_database_is_made_anew(tmp_path, monkeypatch, made, statements):
    monkeypatch.setattr(database, "_initialise", lambda path: shutil.copy(made, path))
    path, left = tmp_path / "mlflow.db", tmp_path / ".mlflow.db.part"
    path.touch()
    left.write_bytes(b"what a killed attempt left")
    left.with_name(f"{left.name}-journal").write_bytes(b"and its journal")
    execute(path, *statements)
    make_database(path)
    assert path.read_bytes() == made.read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == [".mlflow.db.lock", "mlflow.db"]


def test_a_whole_database_and_those_of_others_are_left_alone(tmp_path, made):
    path, others = tmp_path / "mlflow.db", tmp_path / "app.db"
    shutil.copy(made, path)
    execute(others, "CREATE TABLE customers (name TEXT)")
    for file in (path, others):
        before = file.read_bytes()
        make_database(file)
        assert file.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2  # not even a lock


def test_what_holds_something_is_never_thrown_away(tmp_path, made):
    path = tmp_path / "mlflow.db"
    shutil.copy(made, path)
    for broken, said in (
        ("CREATE TABLE _alembic_tmp_metrics (key TEXT)", "table _alembic_tmp_metrics is left"),
        ("DELETE FROM alembic_version", "its version is missing"),
    ):
        shutil.copy(made, path)
        execute(path, broken)
        before = path.read_bytes()
        with pytest.raises(RoutePackError, match=rf"cut short \({said}\).*move it away") as caught:
            Store(f"sqlite:///{path}", "any").find("")
        assert "\n" not in str(caught.value)
        assert path.read_bytes() == before
    path.write_text("notes of somebody, longer than the header of a database" * 9)
    with pytest.raises(RoutePackError, match=r"is no SQLite database.*move it away"):
        make_database(path)
    assert path.read_text().startswith("notes")


def test_processes_at_once_make_one(tmp_path, monkeypatch, made):
    begun = []

    def slowly(path):
        begun.append(path)
        time.sleep(0.3)
        shutil.copy(made, path)

    monkeypatch.setattr(database, "_initialise", slowly)
    threads = [threading.Thread(target=make_database, args=(tmp_path / "deep" / "mlflow.db",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(begun) == 1
    assert rows(tmp_path / "deep" / "mlflow.db", "experiments")


def test_one_that_others_are_making_is_waited_for(tmp_path, monkeypatch, made):
    monkeypatch.setattr(database, "QUIET_S", 60.0)
    path = tmp_path / "mlflow.db"
    execute(path, "CREATE TABLE experiments (experiment_id INTEGER)")
    waiting = threading.Thread(target=make_database, args=(path,))
    waiting.start()
    time.sleep(0.3)
    assert waiting.is_alive()
    execute(path, "CREATE TABLE alembic_version (v)", "INSERT INTO alembic_version VALUES (1)")
    execute(path, "INSERT INTO experiments VALUES (0)")
    waiting.join(10)
    assert not waiting.is_alive()
    assert rows(path, "experiments") == [(0,)]


def test_only_a_file_of_sqlite_is_made(tmp_path):
    assert database_path(f"sqlite:///{tmp_path}/a b.db") == tmp_path / "a b.db"
    assert database_path(f"sqlite+pysqlite:///{tmp_path}/x.db?timeout=9") == tmp_path / "x.db"
    for uri in ("", "sqlite://", "sqlite:///:memory:", "http://127.0.0.1:5000", "postgresql://a@b/c", "databricks"):
        assert database_path(uri) is None

"""A real PostgreSQL server for the tests that need one; skipped where its programs are not installed."""

import contextlib
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
from patience import PATIENCE_S

PASSWORD = "s3cret"


class Server:
    """A real server; tests may stop it if they start it again."""

    def __init__(self, url, run):
        self.url, self.run, self.running = url, run, False

    def start(self):
        self.run("start")
        self.running = True

    def stop(self):
        self.running = False
        self.run("stop", "-m", "fast")


@pytest.fixture(scope="session")
def postgresql_server():
    """Yield a fresh server on a free port; data and logs live in a temporary folder."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install -e '.[postgresql]'")
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    search = os.pathsep.join([*map(str, debian), os.environ.get("PATH", "")])
    if not (initdb := shutil.which("initdb", path=search)) or not (pg_ctl := shutil.which("pg_ctl", path=search)):
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    account = _account()
    folder = Path(tempfile.mkdtemp(prefix="routepack-pg-"))
    if account:
        os.chown(folder, account.pw_uid, account.pw_gid)
    as_user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []} if account else {}

    def call(*command):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, **as_user)
        assert done.returncode == 0, done.stdout + done.stderr

    (folder / "password").write_text(PASSWORD)
    call(initdb, "-D", str(folder / "data"), "-U", "tuner", "--auth=scram-sha-256", f"--pwfile={folder}/password",
         "--no-sync", "--encoding=UTF8", "--locale=C")  # fmt: skip
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    # The log goes to a file: a server that inherits the pipe would keep `call` waiting.

    def run(*what):
        call(pg_ctl, "-D", str(folder / "data"), "-l", str(folder / "log"), "-w", "-o", options, *what)

    server = Server(f"postgresql://tuner:{PASSWORD}@127.0.0.1:{port}", run)
    server.start()
    try:
        yield server
    finally:
        with contextlib.suppress(AssertionError):
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgresql(postgresql_server):
    """Return the URL of an empty database."""
    import psycopg

    name = f"study_{secrets.token_hex(4)}"
    with psycopg.connect(f"{postgresql_server.url}/postgres", autocommit=True) as connection:
        connection.execute(f"create database {name}")
    return f"{postgresql_server.url}/{name}"


def _account():
    """Return who runs the server: nobody in particular, but never root, which PostgreSQL refuses."""
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    pytest.skip("PostgreSQL does not run as root and there is no other account")

"""MLflow's tracking store: where it is, how it is reached, how a run is written.

The default is an explicit SQLite file inside the run's own folder with its artifacts beside it; folder stores are
refused before any work. No non-finite number is ever logged as a metric: a tag holds it instead.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import math
import os
import re
import sqlite3
import time
import warnings
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from profiler.errors import RoutePackError
from profiler.redact import redacted
from routepack_tune.config import check_tracking_uri
from routepack_tune.tracking.database import ARTIFACTS, adopt_artifacts, database_path, make_database
from routepack_tune.tracking.describe import ABOUT_EXPERIMENT

DATABASE = "mlflow.db"
SQLITE = "sqlite:///"
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""Defaults for this process, where the user set nothing: quiet, and bounded in time when a server is away.

No blind retries: one after a lost answer would make a second run. Who sends looks first what arrived."""
MOST_METRICS = 900
"""A request holds at most 1000 entities."""
KIND, STUDY, TRIAL, STATE, REASON = (f"routepack.{name}" for name in ("kind", "study", "trial", "state", "reason"))
"""Tags by which runs are found again."""
NOTE = "mlflow.note.content"
"""Tag that MLflow shows as a description."""


def quiet_mlflow() -> Any:
    """Import MLflow without its banners and return the module."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import mlflow

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return mlflow


def mlflow_errors() -> tuple[type[Exception], ...]:
    """Return what MLflow, its database, its server and its files raise."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, SQLAlchemyError, sqlite3.Error, OSError  # of which the client's errors of HTTP are


def what_mlflow_said(error: Exception, *urls: str) -> str:
    """Return an error of MLflow or its store as one short line without secrets; what we say ourselves as it is."""
    if isinstance(error, RoutePackError):
        return str(error)
    return " ".join(redacted(error, *urls).split())[:300]


def is_cured_by_waiting(error: Exception) -> bool:
    """Tell a store that is away, overloaded or locked from one that refuses what it is asked."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import OperationalError

    if _RACED.search(str(error)):
        return True
    if isinstance(error, RoutePackError) or _REFUSED.search(str(error)):
        return False
    if isinstance(error, MlflowException):
        status = error.get_http_status_code()
        return status >= 500 or status in (408, 429)
    if isinstance(error, OSError) and error.errno in _LASTING:
        return False
    return isinstance(error, OSError | OperationalError | sqlite3.OperationalError)


_RACED = re.compile(r"unique constraint|duplicate key|concurrently", re.IGNORECASE)
"""What databases say where somebody else wrote the same at the same time: it is there the next time."""
_LASTING = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.ENOENT, errno.ENOTDIR)
_REFUSED = re.compile(
    r"read-?\s?only|permission denied|access denied|not allowed|no such (table|column|module)|malformed|not a database|"
    r"unable to open database|database or disk is full|authentication failed|no password supplied|does not exist|"
    r"out-of-date|certificate",
    re.IGNORECASE,
)
"""What stores and drivers say, under kinds of error that also mean an outage, of what only a change of ours cures."""


def tracking_uri(configured: str, folder: Path | str) -> str:
    """Return where to track: what is configured, else ``MLFLOW_TRACKING_URI``, else SQLite inside ``folder``."""
    if configured:
        return configured
    wanted = os.environ.get("MLFLOW_TRACKING_URI", "").strip()
    check_tracking_uri(wanted, "MLFLOW_TRACKING_URI")
    return wanted or own_uri(folder)


def own_uri(folder: Path | str) -> str:
    """Return the SQLite store inside a study's folder."""
    return f"{SQLITE}{(Path(folder).resolve() / DATABASE).as_posix()}"


class Store:
    """One experiment of a tracking store; it is opened when first used."""

    def __init__(self, uri: str, experiment: str) -> None:
        self.uri, self.experiment = uri, experiment

    @cached_property
    def client(self) -> Any:
        """MLflow's client; an SQLite database is made first."""
        quiet_mlflow()
        if path := database_path(self.uri):
            make_database(path)
            adopt_artifacts(path)
        return quiet_mlflow().MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    @cached_property
    def experiment_id(self) -> str:
        """The experiment's id; it is made if need be. A SQLite store gets an artifact folder beside its file."""
        found = self.client.get_experiment_by_name(self.experiment)
        if found is None:
            path = database_path(self.uri)
            location = (path.resolve().parent / ARTIFACTS).as_uri() if path else None
            try:
                return str(self.client.create_experiment(self.experiment, location, {NOTE: ABOUT_EXPERIMENT}))
            except Exception:  # another process made it between the two calls
                found = self.client.get_experiment_by_name(self.experiment)
                if found is None:
                    raise
        return str(found.experiment_id)

    def create_run(self, name: str, tags: Mapping[str, str]) -> str:
        """Begin a run and return its id; its source is the verb that it is of."""
        tags = {"mlflow.source.name": f"routepack {name.split()[0]}", "mlflow.source.type": "LOCAL", **tags}
        texts = {tag: _short(text) for tag, text in tags.items()}
        return str(self.client.create_run(self.experiment_id, run_name=_short(name, 200), tags=texts).info.run_id)

    def end(self, run: Any, status: str) -> None:
        """End a run that is still RUNNING."""
        if run.info.status == "RUNNING":
            self.client.set_terminated(run.info.run_id, status=status)

    @property
    def runs_page(self) -> str:
        """Address of the experiment's table of runs on a server; empty for any other store."""
        if not self.uri.startswith(("http://", "https://")):
            return ""
        page = f"#/experiments/{self.experiment_id}/runs?workflowType=machine_learning"
        return f"{redacted(self.uri).rstrip('/')}/{page}"

    def find(self, condition: str) -> list[Any]:
        """Return all runs of the experiment under a condition, oldest first."""
        found: list[Any] = []
        token: str | None = ""
        while token is not None:
            page = self.client.search_runs([self.experiment_id], condition, max_results=1000, page_token=token or None)
            found += page
            token = page.token or None
        return sorted(found, key=lambda run: (run.info.start_time, run.info.run_id))

    def log(
        self,
        run_id: str,
        params: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float | list[tuple[int, float]]] | None = None,
        tags: Mapping[str, str] | None = None,
        time_ms: int | None = None,
    ) -> None:
        """Write parameters, metrics (numbers, or points of step and value) and tags of a run.

        A number that is not finite becomes a tag. A call with the same ``time_ms`` adds nothing.
        """
        from mlflow.entities import Metric, Param, RunTag

        stamp = int(time.time() * 1000) if time_ms is None else time_ms
        series = {name: told if isinstance(told, list) else [(0, told)] for name, told in (metrics or {}).items()}
        given = [(name, step, value) for name, points in series.items() for step, value in points]
        points = [Metric(_key(name), float(v), stamp, step) for name, step, v in given if math.isfinite(v)]
        broken = {f"not_a_metric.{name}": repr(float(v)) for name, _, v in given if not math.isfinite(v)}
        texts = {name: text for name, text in {**(tags or {}), **broken}.items() if text}
        for begin in range(MOST_METRICS, len(points), MOST_METRICS):
            self.client.log_batch(run_id, metrics=points[begin : begin + MOST_METRICS])
        self.client.log_batch(
            run_id,
            metrics=points[:MOST_METRICS],
            params=[Param(_key(name), _short(value)) for name, value in (params or {}).items()],
            tags=[RunTag(_key(name), _short(text)) for name, text in texts.items()],
        )


@contextlib.contextmanager
def tracking_at(mlflow: Any, uri: str) -> Iterator[None]:
    """Point MLflow's process-wide URIs at ``uri`` and put them back: callers have their own.

    MLflow also writes them into the environment, where later verbs of this process (and children) would read them.
    """
    names = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")
    before = {name: os.environ.get(name) for name in names}
    own = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    try:
        yield
    finally:
        # What the environment says needs no second place that would outlive a change of it.
        mlflow.set_tracking_uri(None if own == before[names[0]] else own)
        mlflow.set_registry_uri(None)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def _resumed(mlflow: Any, store: Store, run_id: str) -> Iterator[None]:
    """Make a run the active one; one that had ended keeps its end, whatever happens."""
    status = store.client.get_run(run_id).info.status
    try:
        with mlflow.start_run(run_id=run_id):
            yield
    finally:
        if status != "RUNNING":
            store.client.set_terminated(run_id, status=status)


def log_pyfunc(
    store: Store,
    run_id: str,
    name: str,
    code: str,
    folder: Path | str,
    registered: str,
    tags: Mapping[str, str],
    note: str,
    **how: Any,
) -> str:
    """Log a folder as a model whose code is the file ``code`` beside this one; return its version in the registry.

    The folder becomes the model's artifact ``name``; models from code hold no pickle. The version has ``tags`` from the
    start, and a ``note`` as its description.
    """
    mlflow = quiet_mlflow()
    # MLflow announces every registration on stderr; the verbs print their own lines.
    with (
        warnings.catch_warnings(action="ignore"),
        contextlib.redirect_stderr(io.StringIO()),
        tracking_at(mlflow, store.uri),
        _resumed(mlflow, store, run_id),
    ):
        logged = mlflow.pyfunc.log_model(
            name=name,
            python_model=str(Path(__file__).with_name(code)),
            artifacts={name: str(folder)},
            pip_requirements=["routepack-tune"],
            **how,
        )
        version = str(mlflow.register_model(logged.model_uri, registered, tags=dict(tags)).version)
    store.client.update_model_version(registered, version, note)
    return version


def _key(name: str) -> str:
    """Return a name that MLflow takes as a key: in its letters, and as a path that stands for itself."""
    parts = [part for part in re.sub(r"[^\w\-./ ]", "_", name, flags=re.ASCII).split("/") if part.strip(". ")]
    return "/".join(parts)[:250].rstrip("/") or "_"


def _short(value: Any, most: int = 500) -> str:
    """Return a text that every database takes: of a certain length, in Unicode, without NUL."""
    text = str(value).encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
    return text if len(text) <= most else text[: most - 3] + "..."

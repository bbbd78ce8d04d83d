"""MLflow's tracking store: where it is, how it is reached, how a run is written.

The default is an explicit SQLite file inside the run's own folder with its artifacts beside it; folder stores are
refused before any work. No non-finite number is ever logged as a metric: a tag holds it instead.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from profiler.errors import RoutePackError
from routepack_tune.config import check_tracking_uri

DATABASE = "mlflow.db"
ARTIFACTS = "artifacts"
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


def quiet_mlflow() -> Any:
    """Import MLflow without its banners and return the module."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import mlflow

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return mlflow


def tracking_uri(configured: str, folder: Path | str) -> str:
    """Return where to track: what is configured, else ``MLFLOW_TRACKING_URI``, else SQLite inside ``folder``.

    Raises
    ------
    RoutePackError
        If the environment names a folder store.
    """
    if configured:
        return configured
    wanted = os.environ.get("MLFLOW_TRACKING_URI", "").strip()
    try:
        check_tracking_uri(wanted)
    except ValueError as error:
        raise RoutePackError(f"MLFLOW_TRACKING_URI: {error}") from None
    return wanted or own_uri(folder)


def own_uri(folder: Path | str) -> str:
    """Return the SQLite store inside a study's folder."""
    return f"{SQLITE}{(Path(folder).resolve() / DATABASE).as_posix()}"


def find_or_make_experiment(client: Any, name: str, uri: str) -> str:
    """Return the id of an experiment; a SQLite store gets an artifact folder beside its file, never the working one."""
    found = client.get_experiment_by_name(name)
    if found is None:
        location = None
        if uri.startswith(SQLITE):
            location = (Path(uri.removeprefix(SQLITE)).resolve().parent / ARTIFACTS).as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=location))
        except Exception:  # another process made it between the two calls
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def log_batch(
    client: Any,
    run_id: str,
    params: Mapping[str, Any],
    metrics: Mapping[str, float],
    tags: Mapping[str, str],
    series: Mapping[str, Sequence[Sequence[float]]] | None = None,
    time_ms: int | None = None,
) -> None:
    """Write parameters, metrics and tags of a run in one call; a number that is not finite becomes a tag.

    ``series`` maps a metric's name to its points (step, value). The same call with the same ``time_ms`` adds nothing.
    """
    from mlflow.entities import Metric, Param, RunTag

    stamp = int(time.time() * 1000) if time_ms is None else time_ms
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    broken = {f"not_a_metric.{name}": repr(value) for name, value in metrics.items() if name not in finite}
    texts = {name: text for name, text in {**tags, **broken}.items() if text}
    points = [Metric(_key(name), float(value), stamp, 0) for name, value in finite.items()]
    for name, steps in (series or {}).items():
        points += [Metric(_key(name), float(value), stamp, int(step)) for step, value in steps]
    whole = {"params": [Param(_key(name), _short(value)) for name, value in params.items()],
             "tags": [RunTag(_key(name), _short(text)) for name, text in texts.items()]}  # fmt: skip
    for begin in range(MOST_METRICS, len(points), MOST_METRICS):
        client.log_batch(run_id, metrics=points[begin : begin + MOST_METRICS])
    client.log_batch(run_id, metrics=points[:MOST_METRICS], **whole)


def _key(name: str) -> str:
    """Return a name that MLflow takes as a key."""
    return re.sub(r"[^\w\-./ ]", "_", name, flags=re.ASCII)[:250]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 500 else text[:497] + "..."

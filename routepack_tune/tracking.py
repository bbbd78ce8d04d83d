"""Track a study in MLflow: one parent run per study, one nested run per trial, and never in the way.

Results are on disk (the study's own storage and ``study.json``) before anything is sent here; a failure to track is a
warning, and what could not be sent is sent when the study ends or is resumed. No non-finite number is ever logged as a
metric: a tag holds it instead.
"""

from __future__ import annotations

import logging
import math
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from profiler.errors import RoutePackError
from routepack_tune.config import check_tracking_uri, without_password
from search import TrialObserver

DATABASE = "mlflow.db"
ARTIFACTS = "artifacts"
MAX_FAILURES = 3
"""After so many failures nothing is sent until the study ends: an outage must not slow every trial."""
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""Defaults for this process, where the user set nothing: quiet, and bounded in time when a server is away."""
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
    return f"sqlite:///{(Path(folder).resolve() / DATABASE).as_posix()}"


def find_or_make_experiment(client: Any, name: str, folder: Path, uri: str) -> str:
    """Return the id of an experiment; the default store inside ``folder`` gets an artifact folder beside it."""
    found = client.get_experiment_by_name(name)
    if found is None:
        location = (folder.resolve() / ARTIFACTS).as_uri() if uri == own_uri(folder) else None
        try:
            return str(client.create_experiment(name, artifact_location=location))
        except Exception:  # another process made it between the two calls
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


class StudyTracker(TrialObserver):
    """Receive a study's events and write them to MLflow.

    Parameters
    ----------
    folder
        The study's folder: home of the default store's artifacts.
    uri, experiment
        The tracking store and the experiment's name in it.
    study_name
        What the parent run is found by when the study is resumed.
    facts
        Parameters of the parent run.
    """

    def __init__(
        self, folder: Path | str, uri: str, experiment: str, study_name: str, facts: Mapping[str, Any] | None = None
    ) -> None:
        self.folder, self.uri, self.experiment, self.study_name = Path(folder), uri, experiment, study_name
        self.facts = dict(facts or {})
        self.run_id = ""
        self._client: Any = None
        self._experiment_id = ""
        self._failures = 0
        self._runs: dict[int, str] = {}
        self._sent: set[int] = set()

    def study_started(self, info: dict[str, Any]) -> None:
        """Open the parent run, the same one when a study is resumed."""
        self._attempt("open the study's run", self._open)

    def trial_finished(
        self, number: int, params: dict[str, Any], metrics: dict[str, float], state: str, reason: str = ""
    ) -> None:
        """Log one trial as a nested run: parameters, finite metrics, its state and why."""
        self._attempt(f"log trial {number}", lambda: self._log_trial(number, params, metrics, state, reason))

    def study_finished(self, summary: dict[str, Any]) -> None:
        """Log the study's outcome, send complete trials that are missing, and close the parent run."""
        self._failures = 0  # one more try: the server may be back
        if not self.run_id:
            self._attempt("open the study's run", self._open)
        for trial in summary.get("history", ()):
            if self.run_id and trial["number"] not in self._sent:
                self.trial_finished(trial["number"], trial["params"], {"objective": trial["value"]}, "complete")
        if self.run_id:
            self._attempt("log the study's outcome", lambda: self._close(summary))

    def log_file(self, path: Path, folder: str) -> None:
        """Attach a file (a picture, a report) to the parent run."""
        if self.run_id:
            self._attempt(f"attach {path.name}", lambda: self._client.log_artifact(self.run_id, str(path), folder))

    def where(self, trial: int | None = None) -> dict[str, str]:
        """Return where the study and one of its trials are tracked, ready for provenance."""
        return {
            "tracking_uri": "" if self.uri == own_uri(self.folder) else without_password(self.uri),
            "experiment": self.experiment,
            "run_id": self.run_id,
            "trial_run_id": "" if trial is None else self._runs.get(trial, ""),
        }

    def _attempt(self, what: str, action: Callable[[], None]) -> None:
        """Run ``action``; whatever it raises becomes a warning, for a tracker must never cost a study."""
        if self._failures >= MAX_FAILURES:
            return
        try:
            action()
        except Exception as error:
            self._failures += 1
            first = without_password(" ".join(str(error).split())[:200])
            rest = " Nothing more is sent until the study ends." if self._failures == MAX_FAILURES else ""
            warnings.warn(
                f"MLflow at {without_password(self.uri)} could not {what} ({type(error).__name__}: {first}). The study "
                f"goes on, its results are in {self.folder}.{rest}",
                stacklevel=3,
            )

    def _open(self) -> None:
        mlflow = quiet_mlflow()
        self._client = self._client or mlflow.MlflowClient(tracking_uri=self.uri)
        self._experiment_id = find_or_make_experiment(self._client, self.experiment, self.folder, self.uri)
        found = self._client.search_runs(
            [self._experiment_id], f"tags.`{STUDY}` = '{self.study_name}' and tags.`{KIND}` = 'study'", max_results=1
        )
        if not found:
            tags = {STUDY: self.study_name, KIND: "study"}
            run = self._client.create_run(self._experiment_id, run_name=self.study_name, tags=tags)
            self.run_id = run.info.run_id
            self._log(self.run_id, self.facts, {}, {})
            return
        self.run_id = found[0].info.run_id
        self._client.update_run(self.run_id, status="RUNNING")
        self._find_trials()

    def _find_trials(self) -> None:
        """Learn which trials were sent; a run without a state was cut short and is written again."""
        token: str | None = ""
        while token is not None:
            page = self._client.search_runs(
                [self._experiment_id], f"tags.`mlflow.parentRunId` = '{self.run_id}'",
                max_results=1000, page_token=token or None,
            )  # fmt: skip
            for run in page:
                if TRIAL in run.data.tags:
                    number = int(run.data.tags[TRIAL])
                    self._runs[number] = run.info.run_id
                    if STATE in run.data.tags:
                        self._sent.add(number)
            token = page.token or None

    def _log_trial(
        self, number: int, params: Mapping[str, Any], metrics: Mapping[str, float], state: str, reason: str
    ) -> None:
        if not self.run_id:
            return
        if number not in self._runs:
            tags = {"mlflow.parentRunId": self.run_id, TRIAL: str(number), KIND: "trial"}
            run = self._client.create_run(self._experiment_id, run_name=f"trial {number}", tags=tags)
            self._runs[number] = run.info.run_id
        run_id = self._runs[number]
        self._log(run_id, params, metrics, {STATE: state, REASON: reason})
        self._client.set_terminated(run_id, status="FAILED" if state == "failed" else "FINISHED")
        self._sent.add(number)

    def _close(self, summary: Mapping[str, Any]) -> None:
        self._log(self.run_id, {}, outcome_metrics(summary), {})
        self._client.set_terminated(self.run_id, status="FINISHED")
        if summary.get("history"):
            from routepack_tune.figures import plot_history, save_png, tuning_history

            with tempfile.TemporaryDirectory() as folder:
                picture = Path(folder) / "history.png"
                save_png(plot_history(tuning_history(summary["history"])).figure, picture)
                self._client.log_artifact(self.run_id, str(picture), "plots")
        self._client.log_dict(self.run_id, dict(summary), "summary.json")

    def _log(
        self, run_id: str, params: Mapping[str, Any], metrics: Mapping[str, float], tags: Mapping[str, str]
    ) -> None:
        """Write everything of a run in one call."""
        log_batch(self._client, run_id, params, metrics, tags)


def log_batch(
    client: Any, run_id: str, params: Mapping[str, Any], metrics: Mapping[str, float], tags: Mapping[str, str]
) -> None:
    """Write parameters, metrics and tags of a run in one call; a number that is not finite becomes a tag."""
    from mlflow.entities import Metric, Param, RunTag

    now_ms = int(time.time() * 1000)
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    broken = {f"not_a_metric.{name}": repr(value) for name, value in metrics.items() if name not in finite}
    texts = {name: text for name, text in {**tags, **broken}.items() if text}
    client.log_batch(
        run_id,
        metrics=[Metric(_key(name), float(value), now_ms, 0) for name, value in finite.items()],
        params=[Param(_key(name), _short(value)) for name, value in params.items()],
        tags=[RunTag(_key(name), _short(text)) for name, text in texts.items()],
    )


def outcome_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a finished study that its parent run shows."""
    holdout = summary.get("holdout") or {}
    numbers = {
        "best_objective": summary["best"]["value"],
        "best_trial": summary["best"]["number"],
        "default_settings_objective": summary["default"]["value"],
        "holdout_best_objective": holdout.get("best_value"),
        "holdout_default_settings_objective": holdout.get("default_value"),
        **{f"trials_{state}": count for state, count in summary["trials"].items()},
    }
    return {name: float(value) for name, value in numbers.items() if value is not None}


def _key(name: str) -> str:
    """Return a name that MLflow takes as a key."""
    return re.sub(r"[^\w\-./ ]", "_", name, flags=re.ASCII)[:250]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 500 else text[:497] + "..."

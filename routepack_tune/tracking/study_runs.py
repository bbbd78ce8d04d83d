"""A study's runs in MLflow: one parent, one nested run a trial, each there exactly once.

Nothing here is caught: the study tracker makes a call that failed again. Every write can be repeated: runs are found again by their tags
before any is made, points of a metric carry the trial's own time, and a run that a lost answer doubled is removed (of runs with one tag the oldest stays, whoever looks).

Only the process that launched a study comes here. Workers have no client and no ids: they write to the study's storage,
from which the launcher reports, so no worker can make an experiment or log to MLflow's Default one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from profiler.errors import RoutePackError
from profiler.files import write_json
from routepack_tune.tracking.store import (
    KIND,
    REASON,
    STATE,
    STUDY,
    TRIAL,
    find_or_make_experiment,
    log_batch,
    quiet_mlflow,
)

ENDED = ("FINISHED", "FAILED")


class StudyRuns:
    """Write one study's runs.

    Parameters
    ----------
    uri, experiment
        The tracking store and the experiment's name in it.
    study_name
        What the parent run is found by when the study is resumed.
    facts
        Parameters of the parent run.
    documents
        What the parent run keeps as JSON files, by name: environment, inputs.
    """

    def __init__(
        self, uri: str, experiment: str, study_name: str,
        facts: Mapping[str, Any], documents: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.uri, self.experiment, self.study_name = uri, experiment, study_name
        self.facts, self.documents = dict(facts), dict(documents)
        self.run_id = ""
        self.trial_runs: dict[int, str] = {}
        self.sent: set[int] = set()
        self._client: Any = None
        self._experiment_id = ""
        self._ended = False

    def open(self) -> None:
        """Find the study's parent run, or make it, and learn which trials are there."""
        mlflow = quiet_mlflow()
        self._client = self._client or mlflow.MlflowClient(tracking_uri=self.uri)
        self._experiment_id = find_or_make_experiment(self._client, self.experiment, self.uri)
        found = self._find(f"tags.`{STUDY}` = '{self.study_name}' and tags.`{KIND}` = 'study'")
        if not found:
            tags = {STUDY: self.study_name, KIND: "study"}
            self._client.create_run(self._experiment_id, run_name=self.study_name, tags=tags)
            found = self._find(f"tags.`{STUDY}` = '{self.study_name}' and tags.`{KIND}` = 'study'")
        for twin in found[1:]:  # several launchers at once, or an answer lost on the way: empty but for the oldest
            if not self._find(f"tags.`mlflow.parentRunId` = '{twin.info.run_id}'"):
                self._client.delete_run(twin.info.run_id)
        self.run_id = found[0].info.run_id
        log_batch(self._client, self.run_id, self.facts, {}, {})
        if not self._ended:
            self._client.update_run(self.run_id, status="RUNNING")
        for name, document in self.documents.items():
            self._client.log_dict(self.run_id, document, f"{name}.json")
        self.find_trials()

    def find_trials(self) -> None:
        """Learn which trials are there; a run without a state was cut short and is written again."""
        self.trial_runs.clear()
        self.sent.clear()
        for run in self._find(f"tags.`mlflow.parentRunId` = '{self.run_id}'"):
            if TRIAL not in run.data.tags:
                continue
            number = int(run.data.tags[TRIAL])
            if number in self.trial_runs:
                self._client.delete_run(run.info.run_id)
                continue
            self.trial_runs[number] = run.info.run_id
            if STATE in run.data.tags and run.info.status in ENDED:
                self.sent.add(number)

    def send_trial(self, record: Mapping[str, Any]) -> None:
        """Write one trial as a nested run, unless it is there."""
        number = int(record["number"])
        if number in self.sent:
            return
        if number not in self.trial_runs:
            tags = {"mlflow.parentRunId": self._parent(), TRIAL: str(number), KIND: "trial"}
            run = self._client.create_run(self._experiment_id, run_name=f"trial {number}", tags=tags)
            self.trial_runs[number] = run.info.run_id
        run_id = self.trial_runs[number]
        tags = {STATE: record["state"], REASON: record["reason"]}
        tags |= {f"not_a_metric.{name}": text for name, text in record["not_finite"].items()}
        series = {f"batch/{name}": points for name, points in record["series"].items()}
        log_batch(self._client, run_id, record["params"], record["metrics"], tags, series, record["time_ms"])
        self._client.set_terminated(run_id, status="FAILED" if record["state"] == "failed" else "FINISHED")
        self.sent.add(number)

    def send_outcome(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        """Write the study's outcome, its pictures and pages, and close the parent run."""
        from routepack_tune.reports.tuning_figures import save_pictures

        log_batch(self._client, self._parent(), {}, outcome_metrics(summary), {"routepack.export": _export(summary)})
        with tempfile.TemporaryDirectory() as folder:
            write_json(Path(folder) / "summary.json", dict(summary))
            save_pictures(summary, Path(folder) / "plots")
            self._client.log_artifacts(self.run_id, folder)
        for path in files:
            self._client.log_artifact(self.run_id, str(path))
        self._client.set_terminated(self.run_id, status="FINISHED")
        self._ended = True
        self.find_trials()  # several launchers may have sent one trial each: the oldest stays

    def _parent(self) -> str:
        if not self.run_id:
            raise RoutePackError("The study has no run in MLflow yet; without its id nothing is logged anywhere.")
        return self.run_id

    def _find(self, condition: str) -> list[Any]:
        """Return all runs of the experiment under a condition, oldest first."""
        found: list[Any] = []
        token: str | None = None
        while True:
            page = self._client.search_runs(
                [self._experiment_id], condition, max_results=1000, page_token=token,
                order_by=["attributes.start_time ASC"],
            )  # fmt: skip
            found += page
            token = page.token or None
            if token is None:
                return sorted(found, key=lambda run: (run.info.start_time, run.info.run_id))


def outcome_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a finished study that its parent run shows."""
    holdout = summary.get("holdout") or {}
    numbers = {
        "best_objective": summary["best"]["value"],
        "best_trial": summary["best"]["number"],
        "default_settings_objective": (summary["default"] or {}).get("value"),
        "holdout_best_objective": holdout.get("best_value"),
        "holdout_default_settings_objective": holdout.get("default_value"),
        **{f"holdout_{name}": holdout.get(name) for name in ("gain_pct", "low_pct", "high_pct")},
        **{f"overhead_{name}": value for name, value in (summary.get("overhead") or {}).items()},
        **{f"trials_{state}": count for state, count in summary["trials"].items()},
    }
    return {name: float(value) for name, value in numbers.items() if value is not None}


def _export(summary: Mapping[str, Any]) -> str:
    return f"{summary.get('export', 'best')}: {summary.get('export_reason', '')}".rstrip(": ")

"""A study in MLflow: one parent run, one nested run a trial, each there exactly once.

The study itself lives in Optuna's storage. What MLflow holds is brought up to it after each trial and at the end: runs
are found by their tags before any is made, points of a metric carry the trial's own time, a run without a state was cut
short and is written again, and of runs with one tag the oldest stays. So each call can be repeated by anybody, and one
that reaches the end has made all whole. A store that is away costs one request's time-out, then none for a growing
while; what it missed is sent by the next call that finds it back, or by the next `routepack tune`.

Only the process that launched a study comes here. Workers write to the study's storage: none can make an experiment or
log to MLflow's Default one.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from profiler.files import write_json
from routepack_tune.config import without_password
from routepack_tune.tracking.store import KIND, REASON, STATE, STUDY, TRIAL, Store, own_uri
from search import TrialRecord

FIRST_PAUSE_S, LAST_PAUSE_S = 30.0, 600.0
"""Time after a failure in which the store is not tried again; it doubles from failure to failure."""
ENOUGH_FAILURES = 2


class StudySync:
    """Brings MLflow up to a study; never raises what a store raises.

    Parameters
    ----------
    folder
        The study's folder: home of the default store.
    uri, experiment
        The tracking store and the experiment's name in it.
    study_name
        What the parent run is found by when the study is resumed.
    names
        Batches in order of time: metrics of one batch become points of a series.
    facts, documents
        Parameters of the parent run, and JSON files it keeps.
    """

    def __init__(
        self,
        folder: Path | str,
        uri: str,
        experiment: str,
        study_name: str,
        names: Sequence[str] = (),
        facts: Mapping[str, Any] | None = None,
        documents: Mapping[str, Any] | None = None,
    ) -> None:
        self.run_id = ""
        self.trial_runs: dict[int, str] = {}
        """Runs of trials by number."""
        self._own_store = uri == own_uri(folder)
        self._store = Store(uri, experiment)
        self._study_name, self._names = study_name, tuple(names)
        self._facts, self._documents = dict(facts or {}), dict(documents or {})
        self._records: Sequence[TrialRecord] = ()
        self._whole: set[int] = set()
        self._known = False
        self._pause_s, self._again = FIRST_PAUSE_S, 0.0

    def __call__(self, records: Sequence[TrialRecord]) -> None:
        """Send what is missing of some trials if the store is there; warn once if it is not."""
        self._records = records
        if time.monotonic() < self._again:
            return
        try:
            self._send(records)
        except Exception as error:
            if self._again == 0:
                self._warn(error, "The study goes on, its trials are sent when it is back")
            self._again = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
        else:
            self._pause_s, self._again = FIRST_PAUSE_S, 0.0

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path] = ()) -> dict[str, str]:
        """Send all that is missing, the study's outcome and ``files``; return where the best trial is tracked."""
        try:
            self._send(self._records)
            self._send_outcome(summary, files)
            self._find_trials()  # several launchers may have sent one trial each: the oldest stays
        except Exception as error:
            self._warn(error, "The study is whole without it; the same command sends what is missing when it is back")
        return {
            "tracking_uri": "" if self._own_store else without_password(self._store.uri),
            "experiment": self._store.experiment,
            "run_id": self.run_id,
            "trial_run_id": self.trial_runs.get(summary["best"]["number"], ""),
        }

    def _send(self, records: Sequence[TrialRecord]) -> None:
        """Send what is missing; a trial that is refused holds up no other, a second failure in a row ends it."""
        if not self._known:
            self.run_id = self._parent_run()
            self._find_trials()
        self._known = False  # what of a request that fails arrived is looked up before anything is sent again
        problem, failures = None, 0
        for record in records:
            if record.number in self._whole:
                continue
            try:
                self._send_trial(record)
                failures = 0
            except Exception as error:
                problem, failures = error, failures + 1
                if failures == ENOUGH_FAILURES:
                    break
        if problem is not None:
            raise problem
        self._known = True

    def _parent_run(self) -> str:
        """Find the study's run, or make it, and write what it is known by."""
        condition = f"tags.`{STUDY}` = '{self._study_name}' and tags.`{KIND}` = 'study'"
        if not (found := self._store.find(condition)):
            self._store.create_run(self._study_name, {STUDY: self._study_name, KIND: "study"})
            found = self._store.find(condition)
        for twin in found[1:]:  # several launchers at once, or an answer lost on the way: empty but for the oldest
            if not self._store.find(f"tags.`mlflow.parentRunId` = '{twin.info.run_id}'"):
                self._store.client.delete_run(twin.info.run_id)
        run_id = str(found[0].info.run_id)
        self._store.log(run_id, params=self._facts)
        self._store.client.update_run(run_id, status="RUNNING")
        for name, document in self._documents.items():
            self._store.client.log_dict(run_id, document, f"{name}.json")
        return run_id

    def _find_trials(self) -> None:
        self.trial_runs.clear()
        self._whole.clear()
        for run in self._store.find(f"tags.`mlflow.parentRunId` = '{self.run_id}' and tags.`{KIND}` = 'trial'"):
            number = int(run.data.tags[TRIAL])
            if number in self.trial_runs:
                self._store.client.delete_run(run.info.run_id)
                continue
            self.trial_runs[number] = run.info.run_id
            if STATE in run.data.tags and run.info.status == "FINISHED":
                self._whole.add(number)

    def _send_trial(self, record: TrialRecord) -> None:
        number = record.number
        if number not in self.trial_runs:
            tags = {"mlflow.parentRunId": self.run_id, TRIAL: str(number), KIND: "trial"}
            self.trial_runs[number] = self._store.create_run(f"trial {number}", tags)
        single, series = split_by_batch(record.metrics, self._names)
        self._store.log(
            self.trial_runs[number],
            params=record.setting,
            metrics=single,
            series=series,
            tags={STATE: record.state, REASON: record.reason},
            time_ms=record.time_ms,
        )
        self._store.client.set_terminated(self.trial_runs[number], status="FINISHED")
        self._whole.add(number)

    def _send_outcome(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        """Write the study's outcome, its pictures and pages, and end the parent run."""
        from routepack_tune.reports.tuning import save_pictures

        export = f"{summary['export']}: {summary['export_reason']}"
        self._store.log(self.run_id, metrics=outcome_metrics(summary), tags={"routepack.export": export})
        with tempfile.TemporaryDirectory() as folder:
            write_json(Path(folder) / "summary.json", dict(summary))
            save_pictures(summary, Path(folder) / "plots")
            self._store.client.log_artifacts(self.run_id, folder)
        for path in files:
            self._store.client.log_artifact(self.run_id, str(path))
        self._store.client.set_terminated(self.run_id, status="FINISHED")

    def _warn(self, error: Exception, way_out: str) -> None:
        told = without_password(" ".join(str(error).split())[:200])
        uri = without_password(self._store.uri)
        warnings.warn(
            f"MLflow at {uri} could not be brought up to date ({type(error).__name__}: {told}). {way_out}.",
            stacklevel=3,
        )


def split_by_batch(
    metrics: Mapping[str, float], names: Sequence[str]
) -> tuple[dict[str, float], dict[str, list[tuple[int, float]]]]:
    """Return single metrics, and series of those that are ``quantity.NAME`` of a batch: (its position, value)."""
    position = {name: k for k, name in enumerate(names)}
    single: dict[str, float] = {}
    series: dict[str, list[tuple[int, float]]] = {}
    for key, value in metrics.items():
        quantity, _, name = key.partition(".")
        if name in position:
            series.setdefault(f"batch/{quantity}", []).append((position[name], value))
        else:
            single[key] = value
    return single, series


def outcome_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a finished study that its parent run shows."""
    holdout = summary["holdout"]
    numbers = {
        "best_objective": summary["best"]["value"],
        "best_trial": summary["best"]["number"],
        "default_settings_objective": (summary["default"] or {}).get("value"),
        "holdout_best_objective": holdout["best_value"],
        "holdout_default_settings_objective": holdout["default_value"],
        **{f"holdout_{name}": holdout[name] for name in ("gain_pct", "low_pct", "high_pct")},
        **{f"overhead_{name}": value for name, value in summary["overhead"].items()},
        **{f"trials_{state}": count for state, count in summary["trials"].items()},
    }
    return {name: float(value) for name, value in numbers.items() if value is not None}

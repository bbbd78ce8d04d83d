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

import contextlib
import dataclasses
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.errors import RoutePackError
from profiler.files import canonical_json, content_hash, write_json
from profiler.redact import redacted
from routepack_tune.tracking.describe import number_metrics, study_note
from routepack_tune.tracking.store import (
    KIND,
    NOTE,
    REASON,
    STATE,
    STUDY,
    TRIAL,
    Store,
    is_cured_by_waiting,
    mlflow_errors,
    own_uri,
    what_mlflow_said,
)
from search import BatchScore, TuneTask
from search.tuning.objective import study_value
from search.tuning.trials import state_of

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

_LOG = logging.getLogger("routepack_tune")
FIRST_PAUSE_S, LAST_PAUSE_S = 30.0, 600.0
"""Time after a failure in which the store is not tried again; it doubles from failure to failure."""
ENOUGH_FAILURES = 2
INPUTS = ("study_name", "signature", "steps", "cost_model", "fingerprint", "tables_hash", "config")
"""What of ``study.json`` the parent run keeps as ``inputs.json``."""


class StudySync:
    """Brings MLflow up to a study; never raises what a store raises.

    The study is of ``task``, described by the ``document`` of its ``study.json``; its ``folder`` is the home of the
    default store, ``uri`` names the store that is used.
    """

    def __init__(self, folder: Path | str, uri: str, task: TuneTask, document: Mapping[str, Any]) -> None:
        self.run_id = ""
        self.trial_runs: dict[int, str] = {}
        """Runs of trials by number."""
        self._own_store = uri == own_uri(folder)
        self._store = Store(uri, task.params.experiment)
        self._task, self._document = task, document
        self._trials: Sequence[Any] = ()
        self._whole: set[int] = set()
        self._known = False
        self._pause_s, self._again = FIRST_PAUSE_S, 0.0

    def __call__(self, trials: Sequence[Any]) -> None:
        """Send what is missing of some finished trials if the store is there; warn once if it is not."""
        self._trials = trials
        if time.monotonic() < self._again:
            return
        try:
            self._send()
        except Exception as error:
            if self._again == 0:
                self._warn(error, "The study goes on", "its trials are sent when it is back")
            self._again = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
        else:
            self._pause_s, self._again = FIRST_PAUSE_S, 0.0

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path] = ()) -> dict[str, str]:
        """Send all that is missing, the study's outcome and ``files``; return where the best trial is tracked."""
        try:
            self._send()
            self._send_outcome(summary, files)
            self._find_trials()  # several launchers may have sent one trial each: the oldest stays
        except Exception as error:
            self._warn(error, "The study is whole without it", "the same command sends what is missing when it is back")
            self.end("FAILED")
        else:
            if page := self._store.runs_page:
                _LOG.info("Runs in MLflow: %s", page)
        return {
            "tracking_uri": "" if self._own_store else redacted(self._store.uri),
            "experiment": self._store.experiment,
            "run_id": self.run_id,
            "trial_run_id": self.trial_runs.get(summary["best"]["number"], ""),
        }

    def end(self, status: str, name: str = "") -> None:
        """Leave no run RUNNING of a study that ended early: this one, or an earlier one by ``name``."""
        if not name and not self.run_id:
            return
        with contextlib.suppress(RoutePackError, *mlflow_errors()):
            found = self._store.find(f"tags.`{STUDY}` = '{name or self._document['study_name']}'")
            for run in found:
                for one in (*self._store.find(f"tags.`mlflow.parentRunId` = '{run.info.run_id}'"), run):
                    self._store.end(one, status)

    def _send(self) -> None:
        """Send what is missing; a trial that is refused holds up no other, a second failure in a row ends it."""
        if not self._known:
            self.run_id = self._parent_run()
            self._find_trials()
        self._known = False  # what of a request that fails arrived is looked up before anything is sent again
        problem, failures = None, 0
        for trial in self._trials:
            if trial.number in self._whole:
                continue
            try:
                self._send_trial(trial)
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
        store, document, name = self._store, self._document, self._document["study_name"]
        condition = f"tags.`{STUDY}` = '{name}' and tags.`{KIND}` = 'study'"
        if not (found := store.find(condition)):
            shown = f"tune {self._task.spec.name} {name.removeprefix('routepack-')}"
            store.create_run(shown, {STUDY: name, KIND: "study"})
            found = store.find(condition)
        for twin in found[1:]:  # several launchers at once, or an answer lost on the way: empty but for the oldest
            if not store.find(f"tags.`mlflow.parentRunId` = '{twin.info.run_id}'"):
                store.client.delete_run(twin.info.run_id)
        run_id = str(found[0].info.run_id)
        known = found[0].data.params  # a parameter has one value
        facts = {name: value for name, value in study_facts(self._task).items() if name not in known}
        store.log(run_id, params=facts, tags=machine_facts(self._task, document))
        store.client.update_run(run_id, status="RUNNING")
        store.client.log_inputs(run_id, step_batches(self._task))
        store.client.log_dict(run_id, {name: document[name] for name in INPUTS}, "inputs.json")
        environment = document["environment"]  # every machine's has a file of its own
        store.client.log_dict(run_id, environment, f"environment/{content_hash(environment)[:8]}.json")
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

    def _send_trial(self, trial: Any) -> None:
        number, attrs, state = trial.number, trial.user_attrs, state_of(trial)
        if number not in self.trial_runs:
            tags = {"mlflow.parentRunId": self.run_id, TRIAL: str(number), KIND: "trial"}
            self.trial_runs[number] = self._store.create_run(f"trial {number}", tags)
        self._store.log(
            self.trial_runs[number],
            params=trial.params,  # what all trials share is the parent's
            metrics=trial_metrics(self._task, attrs["scores"] if state != "infeasible" else ()),
            tags={
                STATE: state,
                REASON: attrs.get("infeasible") or attrs.get("pruned", ""),
                "routepack.machine": attrs.get("machine", ""),
            },
            time_ms=int(trial.datetime_complete.timestamp() * 1000),
        )
        self._store.client.set_terminated(self.trial_runs[number], status="FINISHED")
        self._whole.add(number)

    def _send_outcome(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        """Write the study's outcome, its pictures and pages, and end the parent run."""
        from routepack_tune.reports.figures import save_png
        from routepack_tune.reports.tuning import pictures

        export = f"{summary['export']}: {summary['export_reason']}"
        tags = {"routepack.export": export, NOTE: study_note(self._document, summary)}
        self._store.log(self.run_id, metrics=outcome_metrics(summary), tags=tags)
        with tempfile.TemporaryDirectory() as folder:
            write_json(Path(folder) / "summary.json", dict(summary))
            for name, figure in pictures(summary).items():
                save_png(figure, Path(folder) / "plots" / f"{name}.png")
            self._store.client.log_artifacts(self.run_id, folder)
        for path in files:
            self._store.client.log_artifact(self.run_id, str(path))
        self._store.client.set_terminated(self.run_id, status="FINISHED")

    def _warn(self, error: Exception, meanwhile: str, later: str) -> None:
        """Say what failed, and what becomes of the study: what waiting does not cure nobody is told to wait for."""
        if not is_cured_by_waiting(error):
            later = "no waiting cures this: mend it or name another store, then the same command sends what is missing"
        told = what_mlflow_said(error, self._store.uri)
        if not isinstance(error, RoutePackError):
            told = f"{type(error).__name__}: {told}"
        uri = redacted(self._store.uri)
        warnings.warn(f"MLflow at {uri} could not be brought up to date ({told}). {meanwhile}; {later}.", stacklevel=3)


def study_facts(task: TuneTask) -> dict[str, Any]:
    """Return the parameters that a study's parent run shows: what is the same wherever the study is worked on."""
    constants = {name: value for name, value in dataclasses.asdict(task.base).items() if name not in task.space}
    return {
        "model": task.spec.name,
        **{name: size for name, size in dataclasses.asdict(task.topology).items() if size != 1},
        "max_tokens_per_microbatch": task.max_tokens,
        **{f"planner.{name}": value for name, value in constants.items()},
        "step_batches": len(task.batches),
        "held_out": task.num_holdout,
        "seed": task.seed,
        "tables_hash": task.tables.tables_hash,
        "batches_hash": content_hash(task.signature["batches"]),
    }


def machine_facts(task: TuneTask, document: Mapping[str, Any]) -> dict[str, str]:
    """Return tags of the parent run: what the machine that came last has of its own; trials name theirs."""
    facts = {
        "sampler": task.params.sampler,
        "device": document["fingerprint"]["name"],
        "cost_model_sha256": document["cost_model"]["sha256"],
        "cost_model_data_hash": document["cost_model"]["data_hash"],
        **{f"version.{name}": text for name, text in document["environment"]["versions"].items()},
        **{f"machine.{name}": value for name, value in document["environment"]["machine"].items()},
    }
    return {name: str(fact) for name, fact in facts.items()}


def step_batches(task: TuneTask) -> list[DatasetInput]:
    """Return the step batches as MLflow's datasets, each with what the study used it for."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    found = []
    for index, (name, batch) in enumerate(zip(task.names, task.batches, strict=True)):
        profile = {"samples": batch.num_samples, "tokens": int(batch.lengths.sum())}
        facts = {"source_type": "local", "source": canonical_json({"uri": f"{name}.npz"})}
        dataset = Dataset(name, batch.data_hash[:16], **facts, profile=canonical_json(profile))
        used = "held out" if index in task.held_out else "tuned on"
        found.append(DatasetInput(dataset, [InputTag("mlflow.data.context", used)]))
    return found


def trial_metrics(task: TuneTask, scored: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a trial's planned batches came to: means, and points of (position of the batch in time, value)."""
    scores = [BatchScore(**score) for score in scored]
    if not scores:
        return {}
    metrics: dict[str, Any] = {"objective": study_value(scores, task.params)}
    for name in ("step_time_s", "move_s", "plan_s"):
        metrics[name] = statistics.fmean(getattr(score, name) for score in scores)
    metrics["gap_to_bound"] = statistics.fmean(s.step_time_s / s.lower_bound_s - 1 for s in scores)
    if task.params.two_objectives:
        metrics["plan_value"] = statistics.fmean(score.plan_value for score in scores)
    at = [task.names.index(score.name) for score in scores]
    metrics["batch/step_time_s"] = [(k, score.step_time_s) for k, score in zip(at, scores, strict=True)]
    metrics["batch/value"] = [(k, score.value(task.params)) for k, score in zip(at, scores, strict=True)]
    return metrics


def outcome_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a finished study that its parent run shows."""
    holdout = summary["holdout"]
    numbers = {
        "best_objective": summary["best"]["value"],
        "best_trial": summary["best"]["number"],
        "default_settings_objective": (summary["default"] or {}).get("value"),
        **{f"holdout_{name}": number for name, number in (holdout["gain"] or {}).items()},
        **{f"overhead_{name}": value for name, value in summary["overhead"].items()},
        **{f"trials_{state}": count for state, count in summary["trials"].items()},
        **number_metrics(summary),
    }
    return {name: float(value) for name, value in numbers.items() if value is not None}

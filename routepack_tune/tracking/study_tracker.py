"""Follow a study: each trial goes to the outbox on disk, then a thread sends it to MLflow, and never in the way.

While the store answers, the study waits for it between two trials (at most ``GRACE_S``), so that sending takes no
processor time from a trial that is being timed. When a request fails, the study goes on without waiting and the thread
tries again with growing pauses. At the end, what is left is tried once more; what still cannot be sent stays in the
outbox, and the same ``routepack tune`` command sends it later.

Invariants: nothing raised by a store reaches the study; a trial is on disk before it is sent; a trial is in the store
once, however often it was tried. Workers never come here (see :mod:`routepack_tune.tracking.study_runs`).
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from routepack_tune.config import without_password
from routepack_tune.tracking.outbox import Outbox, trial_record
from routepack_tune.tracking.store import own_uri
from routepack_tune.tracking.study_runs import StudyRuns
from search import TrialObserver

OPEN_S = 15.0
"""Longest wait for the store at a study's start: making a SQLite store takes seconds that no trial should pay."""
GRACE_S = 1.0
"""Longest wait after a trial while the store answers."""
PATIENCE_S = 20.0
"""At the end: longest wait without any progress."""
FIRST_PAUSE_S, LAST_PAUSE_S, SHORT_PAUSE_S = 1.0, 60.0, 0.3
ENOUGH_FAILURES = 2
"""At the end: so many failures in a row mean that the store is away."""

Job = tuple[str, Callable[[], None]]


class StudyTracker(TrialObserver):
    """Receive a study's events, keep them in its folder and send them to MLflow.

    Parameters
    ----------
    folder
        The study's folder: home of the outbox and of the default store.
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
        self.folder, self.uri, self.names = Path(folder), uri, tuple(names)
        self.outbox = Outbox(self.folder)
        self.runs = StudyRuns(uri, experiment, study_name, facts or {}, documents or {})
        self._sender = _Sender(self.runs.open)
        self._kept: set[int] = set()

    def study_started(self, info: dict[str, Any]) -> None:
        """Open the study's run and queue what earlier runs could not send."""
        for record in self.outbox.records().values():
            self._queue(record)
        self._sender.start()
        self._sender.wait(OPEN_S)
        self._warn()

    def trial_finished(
        self, number: int, params: dict[str, Any], metrics: dict[str, float], state: str, reason: str = ""
    ) -> None:
        """Keep one trial on disk and queue it."""
        self._keep(trial_record(number, params, metrics, state, reason, self.names))
        self._sender.wait(GRACE_S)
        self._warn()

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path] = ()) -> dict[str, str]:
        """Send the study's outcome and ``files`` and all that is left; return :meth:`where` of the best trial."""
        for trial in summary.get("history", ()):  # reported by an earlier or another launcher, or lost in a kill
            if trial["number"] not in self._kept:
                metrics = {} if trial["value"] is None else {"objective": trial["value"]}
                self._keep(trial_record(trial["number"], trial["params"], metrics, trial.get("state", "complete")))
        self._sender.add("log the study's outcome", lambda: self.runs.send_outcome(summary, files))
        left = self._sender.flush()
        self._warn(
            f" {left} record(s) are not sent: they are kept in {self.outbox.path.parent}, and the same command sends "
            "them when the store is back."
            if left
            else ""
        )
        return self.where(summary["best"]["number"])

    def close(self) -> None:
        """Let the thread go; what is unsent stays in the outbox."""
        self._sender.stop()

    def where(self, trial: int | None = None) -> dict[str, str]:
        """Return where the study and one of its trials are tracked, ready for provenance."""
        return {
            "tracking_uri": "" if self.uri == own_uri(self.folder) else without_password(self.uri),
            "experiment": self.runs.experiment,
            "run_id": self.runs.run_id,
            "trial_run_id": "" if trial is None else self.runs.trial_runs.get(trial, ""),
        }

    def _keep(self, record: Mapping[str, Any]) -> None:
        self.outbox.append(record)
        self._queue(record)

    def _queue(self, record: Mapping[str, Any]) -> None:
        self._kept.add(record["number"])
        self._sender.add(f"log trial {record['number']}", lambda: self.runs.send_trial(record))

    def _warn(self, rest: str = "") -> None:
        """Tell of an outage once, from the study's own thread."""
        failure = self._sender.news()
        if not failure and not rest:
            return
        what, error = failure or ("be reached", None)
        first = f" ({type(error).__name__}: {without_password(' '.join(str(error).split())[:200])})" if error else ""
        rest = rest or f" The study goes on, its trials are kept in {self.outbox.path} and sent when it is back."
        warnings.warn(f"MLflow at {without_password(self.uri)} could not {what}{first}.{rest}", stacklevel=3)


class _Sender:
    """Do jobs in order in a thread until each has succeeded; one that fails goes to the end of the queue."""

    def __init__(self, open_store: Callable[[], None]) -> None:
        self._open_store = open_store
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._opened = self._stopped = self._hurry = self._woken = self._told = False
        self._late = False
        self._failure: tuple[str, Exception] | None = None
        self._failures = 0  # in a row

    def start(self) -> None:
        """Start the thread; it opens the store first."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="mlflow-sender", daemon=True)
            self._thread.start()

    def add(self, what: str, action: Callable[[], None]) -> None:
        """Queue a job; ``what`` names it in a warning."""
        with self._changed:
            self._jobs.append((what, action))
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until all is sent, unless the store is away or was too slow since all was sent last."""
        with self._changed:
            if not self._late and self._failure is None:
                self._late = not self._changed.wait_for(self._idle_or_away, seconds)

    def _idle_or_away(self) -> bool:
        return (self._opened and not self._jobs) or self._failure is not None

    def news(self) -> tuple[str, Exception] | None:
        """Return the failure that began an outage, once."""
        with self._changed:
            if self._failure is None or self._told:
                return None
            self._told = True
            return self._failure

    def flush(self) -> int:
        """Try everything once more without long pauses; return how many jobs are left."""
        self.start()
        with self._changed:
            self._hurry, self._failures = True, 0
            self._changed.notify_all()
            while self._jobs and self._failures < ENOUGH_FAILURES:
                if not self._changed.wait(PATIENCE_S):
                    break
            return len(self._jobs)

    def stop(self) -> None:
        """End the thread after the request it is in."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(0.1)

    def _work(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or bool(self._jobs) or not self._opened)
                if self._stopped:
                    return
                job = self._jobs[0] if self._jobs else None
            if self._try(job):
                pause_s = FIRST_PAUSE_S
                continue
            with self._changed:
                self._changed.wait_for(self._hurried, SHORT_PAUSE_S if self._hurry else pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def _hurried(self) -> bool:
        """Tell whether a pause is over: the study has ended, or is about to end and has not said so before."""
        woken, self._woken = self._hurry and not self._woken, self._hurry
        return self._stopped or woken

    def _try(self, job: Job | None) -> bool:
        """Open the store where it is not open (looking what it holds), then do one job."""
        what, action = job or ("open the study's run", lambda: None)
        try:
            if not self._opened:
                self._open_store()
            action()
        except Exception as error:
            with self._changed:
                if self._failure is None:
                    self._failure, self._told = (what, error), False
                # What of the failed request arrived is looked up before anything is sent again.
                self._opened, self._failures = False, self._failures + 1
                if job is not None:
                    self._jobs.rotate(-1)
                self._changed.notify_all()
            return False
        with self._changed:
            self._opened, self._failure, self._failures = True, None, 0
            if job is not None:
                self._jobs.popleft()
            self._late = self._late and bool(self._jobs)
            self._changed.notify_all()
        return True

"""Several workers on one study: processes of this machine, or tasks of a Ray cluster.

The parent creates the study and watches it; each worker loads it and claims trials until the total is reached, so the
same command on more machines with one server storage just adds workers. Workers are spawned, never forked: LightGBM
and OpenMP hang in a forked child. The task travels to them in the arguments, from our process to our process.

Invariants: a dead worker ends neither the others nor the study; every finished trial of this machine reaches the
observer once, also when an earlier parent died before it could tell.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from profiler import Observer, RoutePackError
from search.tuning.claims import count_finished, fail_abandoned, first_worker
from search.tuning.storage import is_server, open_study, shown
from search.tuning.task import TrialObserver, TuneTask

POLL_S = 0.5
STOP_S = 5.0
"""Time a worker has to end after a polite signal."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


def run_workers(
    task: TuneTask,
    storage: str,
    study_name: str,
    trials: int,
    workers: int,
    observer: Observer | None = None,
    trial_observer: TrialObserver | None = None,
) -> None:
    """Run a study with so many processes until it holds ``trials`` finished trials, those of other machines included.

    Raises
    ------
    RoutePackError
        If every worker died before that; the message says of what.
    """
    study = open_study(task, storage, study_name)
    watch = _Watch(task, study, trials, observer or Observer(), trial_observer or TrialObserver())
    with tempfile.TemporaryDirectory() as logs, _started_workers(task, storage, study, trials, workers, logs) as crew:
        dead: list[str] = []
        running = dict(crew)
        while running:
            ended = wait([process.sentinel for process in running], timeout=POLL_S)
            for process in [process for process in running if process.sentinel in ended]:
                process.join()
                log = running.pop(process)
                if process.exitcode:
                    dead.append(f"{process.name} {_cause(process.exitcode, log)}")
                    fail_abandoned(study)
            watch.look()
    watch.finish()
    _judge(study, trials, workers, dead)


def run_on_ray(
    task: TuneTask,
    storage: str,
    study_name: str,
    trials: int,
    workers: int,
    observer: Observer | None = None,
    trial_observer: TrialObserver | None = None,
) -> None:
    """Do the same with tasks of a Ray cluster, one core each; a task whose node died is started again by Ray.

    Raises
    ------
    RoutePackError
        If Ray is not installed, the storage cannot be reached from other nodes, or every task failed.
    """
    try:
        import ray
    except ImportError:
        raise RoutePackError(
            "Ray is not installed. Use pip install 'routepack-tune[ray]', or run the command on each machine with the "
            "same --storage postgresql://..."
        ) from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    if not is_server(storage) and len(ray.nodes()) > 1:
        raise RoutePackError(
            f"Storage {shown(storage)} is a file that other nodes cannot lock. Give --storage postgresql://..."
        )
    study = open_study(task, storage, study_name)
    watch = _Watch(task, study, trials, observer or Observer(), trial_observer or TrialObserver())
    first, sent = first_worker(is_server(storage)), ray.put(task)
    environment = {"env_vars": dict.fromkeys(THREAD_VARIABLES, "1")}
    submit = ray.remote(num_cpus=1, runtime_env=environment)(_work).remote
    running: list[Any] = [submit(sent, storage, study.study_name, trials, first + i) for i in range(workers)]
    dead: list[str] = []
    try:
        while running:
            ended, running = ray.wait(running, num_returns=1, timeout=POLL_S)
            for reference in ended:
                try:
                    ray.get(reference)
                except ray.exceptions.RayError as error:
                    dead.append(f"a task failed: {_last_line(str(error))}")
                    fail_abandoned(study)
            watch.look()
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
    watch.finish()
    _judge(study, trials, workers, dead)


class _Watch:
    """Read finished trials from the storage and report each once.

    What was reported is kept in the study under this machine's name: whoever resumes it reports the rest.
    """

    def __init__(
        self, task: TuneTask, study: Any, trials: int, observer: Observer, trial_observer: TrialObserver
    ) -> None:
        self._task, self._study, self._observer, self._trial_observer = task, study, observer, trial_observer
        self._key = f"reported {os.uname().nodename}"
        known = self._finished()
        if self._key not in study.user_attrs:
            study.set_user_attr(self._key, sorted(known))
        self._reported = set(study.user_attrs[self._key])
        observer.start("trials", trials)
        self._counted: set[int] = set()
        self.look()

    def look(self) -> None:
        """Report what finished since the last look: progress of all machines, trials of this one."""
        finished = self._finished()
        for _ in finished.keys() - self._counted:
            self._observer.advance("trials", self._best(finished))
        self._counted |= finished.keys()
        from search.tuning.study import report_trial

        fresh = [
            trial
            for number, trial in sorted(finished.items())
            if number not in self._reported and trial.user_attrs.get("host") == os.uname().nodename
        ]
        for trial in fresh:
            report_trial(self._task, trial, self._trial_observer)
            self._reported.add(trial.number)
        if fresh:
            self._study.set_user_attr(self._key, sorted(self._reported))

    def finish(self) -> None:
        """Report the rest."""
        self.look()
        self._observer.finish("trials")

    def _finished(self) -> dict[int, Any]:
        from optuna.trial import TrialState

        states = (TrialState.COMPLETE, TrialState.PRUNED)
        return {trial.number: trial for trial in self._study.get_trials(deepcopy=False, states=states)}

    def _best(self, finished: dict[int, Any]) -> str:
        values = [trial.values[0] for trial in finished.values() if trial.state.name == "COMPLETE"]
        return f"best {100 * (1 - min(values)):+.2f}% against the defaults" if values else ""


@contextlib.contextmanager
def _started_workers(
    task: TuneTask, storage: str, study: Any, trials: int, workers: int, logs: str
) -> Iterator[dict[Any, Path]]:
    """Start the processes and yield each with its log; on the way out none is left, nor a trial of theirs running."""
    context, crew = multiprocessing.get_context("spawn"), {}
    first, threads = first_worker(is_server(storage)), max(1, len(os.sched_getaffinity(0)) // workers)
    try:
        for i in range(workers):
            log = Path(logs) / f"worker-{i}.log"
            arguments = (task, storage, study.study_name, trials, first + i, log)
            process = context.Process(target=_work_here, args=arguments, name=f"worker {i}", daemon=True)
            with _environment(dict.fromkeys(THREAD_VARIABLES, str(threads))):  # read when the child imports numpy
                process.start()
            crew[process] = log
        yield crew
    finally:
        for process in crew:
            process.terminate()
        for process in crew:
            process.join(STOP_S)
            process.kill()
            process.join()
        fail_abandoned(study)


def _work_here(task: TuneTask, storage: str, study_name: str, trials: int, worker: int, log: Path) -> None:
    """Be one process: say what goes wrong in a log, end with the parent."""
    handle = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent stops its workers
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    try:
        _work(task, storage, study_name, trials, worker)
    except RoutePackError as error:
        sys.exit(str(error))


def _work(task: TuneTask, storage: str, study_name: str, trials: int, worker: int) -> int:
    """Load the study and run trials."""
    from search.tuning.study import run_trials

    study = open_study(task, storage, study_name, read_only=True)
    return run_trials(task, study, trials, worker, TrialObserver(), Observer())


def _judge(study: Any, trials: int, workers: int, dead: list[str]) -> None:
    """Warn of workers that died; raise if that left trials undone."""
    if not dead:
        return
    reasons, finished = "; ".join(dict.fromkeys(dead)), count_finished(study)
    if len(dead) == workers and finished < trials:
        raise RoutePackError(
            f"All {workers} workers of study {study.study_name!r} died with {finished} of {trials} trials finished: "
            f"{reasons}. Run the command again to go on from there, with fewer workers if memory ran out."
        )
    warnings.warn(f"{len(dead)} of {workers} workers died, the others went on: {reasons}.", stacklevel=3)


def _cause(code: int, log: Path) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        return f"was ended by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return f"ended with exit code {code}: {_last_line(text)}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else "it said nothing"


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables of the environment for children started in the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

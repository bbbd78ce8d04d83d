"""Several workers on one study: processes of this machine, or tasks of a Ray cluster.

The parent creates the study and watches it; each worker opens it and begins trials until the total is reached, so the
same command on more machines with one server storage just adds workers. Workers are spawned, never forked: LightGBM
and OpenMP hang in a forked child. The task travels to them in the arguments, from our process to our process.

Invariant: a dead worker ends neither the others nor the study.
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
from collections.abc import Callable, Generator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from profiler import RoutePackError
from profiler.redact import redacted
from search.tuning.storage import explained_storage, is_server, open_study, study_locks
from search.tuning.task import TuneTask
from search.tuning.trials import fail_abandoned, finished_trials, run_trials

POLL_S = 0.5
THREADS = "OMP_NUM_THREADS"
"""A worker's numpy reads it when it is imported."""
STOP_S = 5.0
"""Time a worker has to end after a polite signal."""

Job = tuple[TuneTask, str, str, int]
"""What every worker is given: task, storage, name of the study, trials."""


def work(job: Job, worker: int, after_trial: Callable[[], None] = lambda: None) -> None:
    """Be one worker: run trials, and leave none running."""
    task, storage, name, trials = job
    study = open_study(task, storage, name)
    with explained_storage(storage):
        run_trials(task, study, study_locks(storage, name), trials, worker, after_trial)


def run_workers(job: Job, study: Any, numbers: range, look: Callable[[], None], *, ray: bool = False) -> None:
    """Run a study with workers of such numbers until it holds the job's trials, those of other machines included.

    ``look`` is called again and again. With ``ray`` workers are tasks of its cluster, one core each; one whose node
    died is started again by Ray.
    """
    _, storage, name, trials = job
    dead: list[str] = []
    try:
        with contextlib.closing(_ray_tasks(job, numbers) if ray else _processes(job, numbers)) as polls:
            for reasons in polls:
                dead += reasons
                look()
    finally:
        fail_abandoned(study, study_locks(storage, name))
    if dead:
        told, finished = "; ".join(dict.fromkeys(dead)), len(finished_trials(study))
        if len(dead) == len(numbers) and finished < trials:
            raise RoutePackError(
                f"All {len(dead)} workers of study {name!r} died with {finished} of {trials} trials finished: "
                f"{told}. Run the command again to go on from there, with fewer workers if memory ran out."
            )
        warnings.warn(f"{len(dead)} of {len(numbers)} workers died, the others went on: {told}.", stacklevel=2)


def _processes(job: Job, numbers: range) -> Generator[list[str], None, None]:
    """Start processes of this machine; say again and again of what some died; on the way out none is left."""
    context, threads = multiprocessing.get_context("spawn"), str(max(1, len(os.sched_getaffinity(0)) // len(numbers)))
    with tempfile.TemporaryDirectory() as folder:
        logs = {
            context.Process(target=_work_here, args=(job, number, log), name=log.stem, daemon=True): log
            for number, log in ((number, Path(folder, f"worker {i}.log")) for i, number in enumerate(numbers))
        }
        try:
            own, os.environ[THREADS] = os.environ.get(THREADS), threads
            try:
                for process in logs:
                    process.start()
            finally:  # callers have their own
                os.environ.pop(THREADS)
                os.environ.update({} if own is None else {THREADS: own})
            running = list(logs)
            while running:
                ended = wait([process.sentinel for process in running], timeout=POLL_S)
                gone = [process for process in running if process.sentinel in ended]
                for process in gone:
                    process.join()
                    running.remove(process)
                yield [f"{p.name} {_cause(p.exitcode or 0, logs[p])}" for p in gone if p.exitcode]
        finally:
            begun = [process for process in logs if process.pid]
            for process in begun:
                process.terminate()
            for process in begun:
                process.join(STOP_S)
                process.kill()
                process.join()


def _work_here(job: Job, worker: int, log: Path) -> None:
    """Be one process: say what goes wrong in a log, end with the parent."""
    os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent stops its workers
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    try:
        work(job, worker)
    except RoutePackError as error:
        sys.exit(str(error))


def _cause(code: int, log: Path) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        return f"was ended by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return f"ended with exit code {code}: {_last_line(text)}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else "it said nothing"


def _ray_tasks(job: Job, numbers: range) -> Generator[list[str], None, None]:
    """Start tasks of a Ray cluster; say of what some died; on the way out those that run are cancelled."""
    try:
        import ray
    except ImportError:
        raise RoutePackError(
            "Ray is not installed. Use pip install 'routepack-tune[ray]', or run the command on each machine with the "
            "same --storage postgresql://..."
        ) from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    if not is_server(job[1]) and len(ray.nodes()) > 1:
        raise RoutePackError(
            f"Storage {redacted(job[1])} is a file that other nodes cannot lock. Give --storage postgresql://..."
        )
    submit, sent = ray.remote(num_cpus=1, runtime_env={"env_vars": {THREADS: "1"}})(work).remote, ray.put(job)
    running = [submit(sent, number) for number in numbers]
    try:
        while running:
            ended, running = ray.wait(running, num_returns=1, timeout=POLL_S)
            dead = []
            for task in ended:
                try:
                    ray.get(task)
                except ray.exceptions.RayError as error:
                    dead.append(f"a task failed: {_last_line(str(error))}")
            yield dead
    finally:
        for task in running:
            ray.cancel(task, force=True)

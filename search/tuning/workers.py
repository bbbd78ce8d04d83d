"""Several workers on one study: processes of this machine, or tasks of a Ray cluster.

The parent creates the study and watches it; each worker loads it and claims trials until the total is reached, so the
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
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from profiler import RoutePackError
from search.tuning.claims import Claims, count_finished, fail_abandoned, first_worker
from search.tuning.storage import claim_lock, is_server, open_study, shown
from search.tuning.task import TuneTask
from search.tuning.trials import Watch, run_trials

POLL_S = 0.5
STOP_S = 5.0
"""Time a worker has to end after a polite signal."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")

Job = tuple[TuneTask, str, str, int]
"""What every worker is given: task, storage, name of the study, trials."""
Poll = Callable[[], tuple[bool, list[str]]]
"""Waits a little; returns whether workers are left, and of what others died meanwhile."""


def run_workers(
    task: TuneTask, storage: str, study: Any, trials: int, workers: int, watch: Watch, *, ray: bool = False
) -> None:
    """Run a study with so many workers until it holds ``trials`` finished trials, those of other machines included.

    With ``ray`` they are tasks of its cluster, one core each; one whose node died is started again by Ray.

    Raises
    ------
    RoutePackError
        If every worker died before that (the message says of what), Ray is not installed, or its nodes cannot reach the
        storage.
    """
    job = (task, storage, study.study_name, trials)
    lock, dead = claim_lock(storage, study.study_name), list[str]()
    first = first_worker(is_server(storage))
    numbers = range(first, first + workers)
    try:
        with _ray_tasks(job, numbers) if ray else _processes(job, numbers) as poll:
            left = True
            while left:
                left, reasons = poll()
                if reasons:
                    dead += reasons
                    fail_abandoned(study, lock, is_server(storage))
                watch.look()
    finally:
        fail_abandoned(study, lock, is_server(storage))
    _judge(study, trials, workers, dead)


@contextlib.contextmanager
def _processes(job: Job, numbers: range) -> Iterator[Poll]:
    """Start processes of this machine; on the way out none is left."""
    context = multiprocessing.get_context("spawn")
    threads = max(1, len(os.sched_getaffinity(0)) // len(numbers))
    crew: dict[Any, Path] = {}
    running: list[Any] = []

    def poll() -> tuple[bool, list[str]]:
        ended, dead = wait([process.sentinel for process in running], timeout=POLL_S), []
        for process in [process for process in running if process.sentinel in ended]:
            process.join()
            running.remove(process)
            if process.exitcode:
                dead.append(f"{process.name} {_cause(process.exitcode, crew[process])}")
        return bool(running), dead

    with tempfile.TemporaryDirectory() as logs:
        try:
            for i, number in enumerate(numbers):
                log = Path(logs) / f"worker-{i}.log"
                arguments = (job, number, log)
                process = context.Process(target=_work_here, args=arguments, name=f"worker {i}", daemon=True)
                with _environment(dict.fromkeys(THREAD_VARIABLES, str(threads))):  # read when the child imports numpy
                    process.start()
                crew[process] = log
            running += crew
            yield poll
        finally:
            for process in crew:
                process.terminate()
            for process in crew:
                process.join(STOP_S)
                process.kill()
                process.join()


@contextlib.contextmanager
def _ray_tasks(job: Job, numbers: range) -> Iterator[Poll]:
    """Start tasks of a Ray cluster; on the way out those that run are cancelled."""
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
            f"Storage {shown(job[1])} is a file that other nodes cannot lock. Give --storage postgresql://..."
        )
    environment = {"env_vars": dict.fromkeys(THREAD_VARIABLES, "1")}
    submit, sent = ray.remote(num_cpus=1, runtime_env=environment)(_work).remote, ray.put(job)
    running = [submit(sent, number) for number in numbers]

    def poll() -> tuple[bool, list[str]]:
        ended, running[:] = ray.wait(running, num_returns=1, timeout=POLL_S)
        dead = []
        for task in ended:
            try:
                ray.get(task)
            except ray.exceptions.RayError as error:
                dead.append(f"a task failed: {_last_line(str(error))}")
        return bool(running), dead

    try:
        yield poll
    finally:
        for task in running:
            ray.cancel(task, force=True)


def _work_here(job: Job, worker: int, log: Path) -> None:
    """Be one process: say what goes wrong in a log, end with the parent."""
    handle = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent stops its workers
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    try:
        _work(job, worker)
    except RoutePackError as error:
        sys.exit(str(error))


def _work(job: Job, worker: int) -> None:
    """Load the study and run trials."""
    task, storage, name, trials = job
    study, server = open_study(task, storage, name, read_only=True), is_server(storage)
    run_trials(task, study, Claims(study, claim_lock(storage, name), trials, worker, server=server))


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

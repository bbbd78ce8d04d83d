"""How many trials a second one worker and two workers finish on the same settings.

    python experiments/05_tuning/scaling.py [--trials 24] [--regime real-gptoss] [--shared DIR]

Every worker plans in one thread, alone or not, so that one worker uses one core and two use two: that is the ratio
asked for. Both arms try the same enqueued settings (the defaults with a few proposals more: far enough apart that the
study takes none for a repeat), each in a journal of its own. How early trials are stopped differs between the arms, as
planning times are measured, so batches planned are counted too. Printed are rates from the first trial's start to the
last one's end, of the whole command, in which starting processes and loading kernels count, and of batches in the whole
command. Run it on a quiet machine with at least two cores.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import studies
from regimes import SHARED, all_regimes

from search.tuning.storage import choose_storage, open_study
from search.tuning.task import TuneTask
from search.tuning.workers import run_workers

APART = 10
"""Proposals between two settings; Optuna takes settings nearer than 1e-5 of their value for the same."""


def rates(task: TuneTask, trials: int, workers: int) -> tuple[float, float, float]:
    """Return trials a second between first start and last end, and of the whole run, and batches a second of it."""
    with tempfile.TemporaryDirectory() as folder:
        storage = choose_storage(Path(folder))
        begun = time.perf_counter()
        study = open_study(task, storage, "scaling")
        run_workers((task, storage, "scaling", trials), study, range(workers), lambda: None)
        wall_s = time.perf_counter() - begun
        finished = [trial for trial in study.trials if trial.state.is_finished()]
    span = max(t.datetime_complete for t in finished) - min(t.datetime_start for t in finished)
    planned = sum(len(trial.user_attrs["scores"]) for trial in finished)
    return len(finished) / span.total_seconds(), len(finished) / wall_s, planned / wall_s


def main() -> None:
    """Measure both and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--regime", default="real-gptoss")
    parser.add_argument("--shared", type=Path, default=SHARED)
    options = parser.parse_args()
    regime = all_regimes(options.shared)[options.regime]
    batches, held_out = studies.step_batches(regime)
    task = studies.make_task(regime, batches, held_out, 0.0)
    settings = tuple({"max_iterations": task.base.max_iterations + APART * k} for k in range(1, options.trials))
    task = replace(task, enqueue=settings)
    one, two = (rates(task, options.trials, workers) for workers in (1, 2))
    names = ("trials, first start to last end", "trials, whole command", "batches, whole command")
    for name, a, b in zip(names, one, two, strict=True):
        print(f"{name}: 1 worker {a:.3f} a second, 2 workers {b:.3f}, ratio {b / a:.2f}")


if __name__ == "__main__":
    main()

"""Progress bars on stderr for work over two seconds; silent when nobody watches."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from profiler.observer import Observer

if TYPE_CHECKING:
    from rich.progress import TaskID


def is_first_rank() -> bool:
    """Return whether this process speaks for the job: it is alone, or torchrun's rank 0."""
    return os.environ.get("RANK", "0") == "0"


class ProgressBars(Observer):
    """Draw one bar per running piece of work with rich; use it as a context manager.

    Nothing is drawn when stderr is no terminal, so logs of batch jobs stay clean, nor by other ranks than the first.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "{task.fields[note]}")
        watched = sys.stderr.isatty() and is_first_rank()
        self._bars = Progress(*columns, console=Console(stderr=True), disable=not watched)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> ProgressBars:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for what in list(self._tasks) if kind is None else ():
            self.finish(what)
        self._bars.stop()

    def start(self, what: str, total: int) -> None:
        """Show a bar for ``what``."""
        self._tasks[what] = self._bars.add_task(what, total=total, note="")

    def now(self, what: str, message: str) -> None:
        """Say beside the bar of ``what`` what is running."""
        if what in self._tasks:
            self._bars.update(self._tasks[what], note=message)

    def advance(self, what: str, message: str = "") -> None:
        """Move the bar of ``what`` by one step."""
        if what in self._tasks:
            self._bars.update(self._tasks[what], advance=1, note=message)

    def finish(self, what: str) -> None:
        """Leave a full bar of ``what`` with its time; one that an error ends stays as it stands."""
        if what in self._tasks:
            task = self._tasks.pop(what)
            if sys.exc_info()[0] is None:
                self._bars.update(task, total=self._bars.tasks[self._bars.task_ids.index(task)].completed, note="")
            self._bars.stop_task(task)

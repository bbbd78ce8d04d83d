"""Progress bars on stderr for work over two seconds; silent when nobody watches."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any

from profiler.observer import Observer


def is_first_rank() -> bool:
    """Return whether this process speaks for the job: it is alone, or torchrun's rank 0."""
    return os.environ.get("RANK", "0") == "0"


class ProgressBars(Observer):
    """Draw one bar per running piece of work with rich; use it as a context manager.

    Nothing is drawn when stderr is no terminal, so logs of batch jobs stay clean, nor by other ranks than the first.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, Any] = {}
        self._progress: Any = None

    def __enter__(self) -> ProgressBars:
        if sys.stderr.isatty() and is_first_rank():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                       TextColumn("{task.fields[message]}"))  # fmt: skip
            self._progress = Progress(*columns, console=Console(stderr=True))
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def start(self, what: str, total: int) -> None:
        """Show a bar for ``what``."""
        if self._progress is not None:
            self._tasks[what] = self._progress.add_task(what, total=total, message="")

    def advance(self, what: str, message: str = "") -> None:
        """Move the bar of ``what`` by one step."""
        if self._progress is not None and what in self._tasks:
            self._progress.update(self._tasks[what], advance=1, message=message)

    def finish(self, what: str) -> None:
        """Leave the bar of ``what`` as it stands."""
        task = self._tasks.pop(what, None)
        if self._progress is not None and task is not None:
            self._progress.update(task, message="")
            self._progress.stop_task(task)

"""Budgets: objects that say how far a search has come. Wall time appears here and nowhere else."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol


class StopCriterion(Protocol):
    """Tell a search how much of its budget is spent."""

    def reset(self) -> None:
        """Start counting afresh."""

    def progress(self, iterations: int) -> float:
        """Return the share of the budget spent after so many packing proposals of a chain; 1 or more means stop."""

    @property
    def name(self) -> str:
        """What the plan reports as ``stopped_by``."""


@dataclass(slots=True)
class MaxIterations:
    """Stop after a number of packing proposals per chain: the same plan on every run and machine."""

    iterations: int

    def __post_init__(self) -> None:
        if not self.iterations >= 1:
            raise ValueError(f"Expected max iterations >= 1, got {self.iterations}.")

    def reset(self) -> None:
        """Do nothing: iterations are counted by the search."""

    def progress(self, iterations: int) -> float:
        """Return iterations over the budget."""
        return iterations / self.iterations

    @property
    def name(self) -> str:
        """Return ``max_iterations``."""
        return "max_iterations"


@dataclass(slots=True)
class MaxRuntime:
    """Stop after so many seconds of wall time since ``reset``."""

    seconds: float
    _start_s: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"Expected max runtime > 0 seconds, got {self.seconds}.")
        self.reset()

    def reset(self) -> None:
        """Start the clock."""
        self._start_s = time.monotonic()

    def progress(self, iterations: int) -> float:
        """Return elapsed over allowed seconds."""
        return (time.monotonic() - self._start_s) / self.seconds

    @property
    def name(self) -> str:
        """Return ``max_runtime``."""
        return "max_runtime"


@dataclass(slots=True)
class FirstOf:
    """Stop when the first of several budgets is spent."""

    criteria: tuple[StopCriterion, ...]

    def reset(self) -> None:
        """Reset every criterion."""
        for criterion in self.criteria:
            criterion.reset()

    def progress(self, iterations: int) -> float:
        """Return the largest progress."""
        return max(criterion.progress(iterations) for criterion in self.criteria)

    @property
    def name(self) -> str:
        """Return all names joined by ``|``."""
        return "|".join(criterion.name for criterion in self.criteria)

"""Budgets: objects that say how far a search has come. Wall time appears here and nowhere else."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Protocol


class StopCriterion(Protocol):
    """Tell a search how much of its budget is spent."""

    def reset(self) -> None:
        """Start counting afresh."""

    def progress(self, iterations: int, idle: int = 0, gap: float = math.inf) -> float:
        """Return the share of the budget spent; 1 or more means stop.

        ``iterations`` counts a chain's packing proposals, ``idle`` those since its last improvement, ``gap`` is its
        best time above the lower bound as a share of it (mean over blocks).
        """

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

    def progress(self, iterations: int, idle: int = 0, gap: float = math.inf) -> float:
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

    def progress(self, iterations: int, idle: int = 0, gap: float = math.inf) -> float:
        """Return elapsed over allowed seconds."""
        return (time.monotonic() - self._start_s) / self.seconds

    @property
    def name(self) -> str:
        """Return ``max_runtime``."""
        return "max_runtime"


@dataclass(slots=True)
class NoImprovement:
    """Stop a chain after so many proposals without a better packing; a budget beside it drives the cooling."""

    proposals: int

    def __post_init__(self) -> None:
        if not self.proposals >= 1:
            raise ValueError(f"Expected proposals without improvement >= 1, got {self.proposals}.")

    def reset(self) -> None:
        """Do nothing: the search counts."""

    def progress(self, iterations: int, idle: int = 0, gap: float = math.inf) -> float:
        """Return 1 when the chain has been idle for long enough, else 0."""
        return float(idle >= self.proposals)

    @property
    def name(self) -> str:
        """Return ``no_improvement``."""
        return "no_improvement"


@dataclass(slots=True)
class GapBelow:
    """Stop when the best packing is proven to be within a share of the optimum; a budget beside it drives the
    cooling."""

    gap: float

    def __post_init__(self) -> None:
        if not self.gap >= 0:
            raise ValueError(f"Expected gap >= 0, got {self.gap}.")

    def reset(self) -> None:
        """Do nothing: the search measures."""

    def progress(self, iterations: int, idle: int = 0, gap: float = math.inf) -> float:
        """Return 1 when the gap is reached, else 0."""
        return float(gap <= self.gap)

    @property
    def name(self) -> str:
        """Return ``gap_below``."""
        return "gap_below"


@dataclass(slots=True)
class FirstOf:
    """Stop when the first of several criteria says so."""

    criteria: tuple[StopCriterion, ...]

    def reset(self) -> None:
        """Reset every criterion."""
        for criterion in self.criteria:
            criterion.reset()

    def progress(self, iterations: int, idle: int = 0, gap: float = math.inf) -> float:
        """Return the largest share."""
        return max(criterion.progress(iterations, idle, gap) for criterion in self.criteria)

    @property
    def name(self) -> str:
        """Return all names joined by ``|``."""
        return "|".join(criterion.name for criterion in self.criteria)


def with_budget(stop: StopCriterion | None, iterations: int) -> StopCriterion:
    """Return a criterion that cools: one that only says yes or no is given a number of iterations beside it."""
    if stop is None:
        return MaxIterations(iterations)
    return FirstOf((stop, MaxIterations(iterations))) if isinstance(stop, (NoImprovement, GapBelow)) else stop

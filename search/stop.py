"""Budgets: objects that say how far a search has come. Wall time appears here and nowhere else."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


class StopCriterion:
    """Tell a search how much of its budget is spent."""

    name: str
    """What the plan reports as ``stopped_by``."""

    def reset(self) -> None:
        """Start counting afresh."""

    def progress(self, iterations: int, idle: int = 0, gap: float = math.inf) -> float:
        """Return the share of the budget spent; 1 or more means stop.

        ``iterations`` counts a chain's packing proposals, ``idle`` those since its last improvement, ``gap`` is its
        best time above the lower bound as a share of it (mean over blocks).
        """
        raise NotImplementedError


@dataclass
class _Limit(StopCriterion):
    limit: float
    least, wanted = 1.0, ">= 1"

    def __post_init__(self) -> None:
        if not self.limit >= self.least:
            raise ValueError(f"Expected {self.name.replace('_', ' ')} {self.wanted}, got {self.limit}.")
        self.reset()


class MaxIterations(_Limit):
    """Stop after a number of packing proposals per chain: the same plan on every run and machine."""

    name = "max_iterations"

    def progress(self, iterations: int, idle: int = 0, gap: float = math.inf) -> float:
        """Return iterations over the limit."""
        return iterations / self.limit


class MaxRuntime(_Limit):
    """Stop after so many seconds of wall time since ``reset``."""

    name = "max_runtime"
    least, wanted = math.ulp(0.0), "> 0"

    def reset(self) -> None:
        """Start the clock."""
        self._start_s = time.monotonic()

    def progress(self, iterations: int, idle: int = 0, gap: float = math.inf) -> float:
        """Return elapsed over allowed seconds."""
        return (time.monotonic() - self._start_s) / self.limit


class NoImprovement(_Limit):
    """Stop a chain after so many proposals without a better packing; a budget beside it drives the cooling."""

    name = "no_improvement"

    def progress(self, iterations: int, idle: int = 0, gap: float = math.inf) -> float:
        """Return 1 when the chain has been idle for long enough, else 0."""
        return float(idle >= self.limit)


class GapBelow(_Limit):
    """Stop when the best packing is proven this near the optimum (a share); a budget beside it drives the cooling."""

    name = "gap_below"
    least, wanted = 0.0, ">= 0"

    def progress(self, iterations: int, idle: int = 0, gap: float = math.inf) -> float:
        """Return 1 when the gap is reached, else 0."""
        return float(gap <= self.limit)


class FirstOf(StopCriterion):
    """Stop when the first of several criteria says so."""

    def __init__(self, criteria: tuple[StopCriterion, ...]) -> None:
        self.criteria, self.name = criteria, "|".join(criterion.name for criterion in criteria)

    def reset(self) -> None:
        """Reset every criterion."""
        for criterion in self.criteria:
            criterion.reset()

    def progress(self, iterations: int, idle: int = 0, gap: float = math.inf) -> float:
        """Return the largest share."""
        return max(criterion.progress(iterations, idle, gap) for criterion in self.criteria)


def with_budget(stop: StopCriterion | None, iterations: int) -> StopCriterion:
    """Return a criterion that cools: one that only says yes or no is given a number of iterations beside it."""
    if stop is None:
        return MaxIterations(iterations)
    return FirstOf((stop, MaxIterations(iterations))) if isinstance(stop, (NoImprovement, GapBelow)) else stop

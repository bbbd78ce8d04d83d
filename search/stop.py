"""The budget of a search. Wall time appears here and nowhere else."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, fields


@dataclass
class StopCriterion:
    """Tell a search how much of its budget is spent: the largest share of the limits given.

    One that only says yes or no (the last two) cools nothing: iterations or wall time beside it drive the temperature.
    """

    max_iterations: float | None = None
    """Packing proposals per chain: the same plan on every run and machine."""
    max_runtime: float | None = None
    """Seconds of wall time since ``reset``."""
    no_improvement: float | None = None
    """Proposals of a chain without a better packing."""
    gap_below: float | None = None
    """Share above the lower bound within which the best packing is near enough to the optimum."""

    def __post_init__(self) -> None:
        for name, least in {
            "max_iterations": 1,
            "max_runtime": math.ulp(0.0),
            "no_improvement": 1,
            "gap_below": 0,
        }.items():
            value, wanted = getattr(self, name), "> 0" if name == "max_runtime" else f">= {least:g}"
            if value is not None and not value >= least:
                raise ValueError(f"Expected {name.replace('_', ' ')} {wanted}, got {value}.")
        self.reset()

    @property
    def name(self) -> str:
        """What the plan reports as ``stopped_by``."""
        return "|".join(field.name for field in fields(self) if getattr(self, field.name) is not None)

    def reset(self) -> None:
        """Start the clock."""
        self._start_s = time.monotonic()

    def progress(self, iterations: int, idle: int = 0, gap: float = math.inf) -> float:
        """Return the share of the budget spent; 1 or more means stop.

        ``iterations`` counts a chain's packing proposals, ``idle`` those since its last improvement, ``gap`` is its
        best time above the lower bound as a share of it (mean over blocks).
        """
        spent = 0.0
        if self.max_iterations is not None:
            spent = iterations / self.max_iterations
        if self.max_runtime is not None:
            spent = max(spent, (time.monotonic() - self._start_s) / self.max_runtime)
        enough = self.no_improvement is not None and idle >= self.no_improvement
        near = self.gap_below is not None and gap <= self.gap_below
        return max(spent, 1.0) if enough or near else spent

"""Knobs of the profiler; defaults profile a small model on two CPU cores in a minute or two."""

from __future__ import annotations

from dataclasses import dataclass

FLOAT8 = "float8_e4m3fn"
EXCHANGES = {"nccl": "nccl_perf", "deepep": "deepep_normal_perf"}
"""Libraries whose all-to-all can be imported, with the name of their published table; a job exchanges through one."""
DTYPES = ("auto", "bfloat16", "float16", "float32", FLOAT8)


@dataclass(frozen=True, slots=True)
class ProfileParams:
    """How many cases are timed, how large they may be, and how each is timed."""

    target_error: float = 5.0
    """Rounds of cases end when no operation's held-out median error is above so many percent."""
    max_minutes: float = 10.0
    """They end too when they have taken so long, all runs in a folder together; 0 is no limit."""
    max_points: int = 50
    """Most cases per operation (per window class for attention), each timed forward and backward."""
    size_fraction: float = 1.0
    """Largest cell to time, as a share of the token cap of a microbatch."""
    load_factor: float = 2.0
    """Most routed rows of an expert rank to time, as a multiple of its mean load at a full cap."""
    repeats: int = 7
    """Timed runs per case and direction, all kept."""
    min_repeats: int = 3
    """Runs that are timed even when a case has used up its time."""
    max_case_seconds: float = 4.0
    """Time for one case, warm-up and both directions together; larger sizes are left out and reported."""
    max_memory_gib: float = 0.0
    """Memory one case may take; 0 is half of what is free at the start."""
    dtype: str = "auto"
    """Number type: ``auto`` is bfloat16 where the device computes it natively, else float32; ``float8_e4m3fn`` is the
    experts' forward in 8 bits and all else in bfloat16."""
    exchange: str = "nccl"
    """Which exchange of published tables to import: ``nccl`` or ``deepep``."""
    threads: int = 0
    """CPU threads of torch; 0 is every usable core but one: with none to spare, any other work stalls all threads."""
    anchor_every: int = 12
    """One fixed case is timed again after this many cases, to see the device drift."""
    max_drift: float = 0.25
    """Relative drift of that case beyond which the sweep warns that the device is not steady."""
    time_loops: bool = False
    """Time kernels on CUDA that are Python loops of launches (linear attention without flash-linear-attention)."""
    retry_failed: bool = False
    """Time cases again whose last result was not ``ok``."""
    seed: int = 0
    """Seed of the drawn lengths and routings and of the order of the cases."""

    def __post_init__(self) -> None:
        least = {"max_points": 6, "repeats": 1, "min_repeats": 1, "threads": 0, "anchor_every": 1, "seed": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not value >= low:
                raise ValueError(f"Expected {name} to be an integer >= {low}, got {value!r}.")
        if not self.min_repeats <= self.repeats:
            raise ValueError(f"Expected min_repeats <= repeats = {self.repeats}, got {self.min_repeats}.")
        if not 0 < self.size_fraction <= 1:
            raise ValueError(f"Expected 0 < size_fraction <= 1, got {self.size_fraction}.")
        for name in ("target_error", "load_factor", "max_case_seconds", "max_drift"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"Expected {name} > 0 and finite, got {getattr(self, name)}.")
        for name in ("max_minutes", "max_memory_gib"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"Expected {name} >= 0 and finite, got {getattr(self, name)}.")
        for name, allowed in (("exchange", tuple(EXCHANGES)), ("dtype", DTYPES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"Expected {name} to be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")

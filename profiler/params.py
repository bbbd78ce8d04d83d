"""Knobs of the profiler; defaults profile a small model on two CPU cores in a minute or two."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf

FLOAT8 = "float8_e4m3fn"
EXCHANGES = {"nccl": "nccl_perf", "deepep": "deepep_normal_perf"}
"""Libraries whose all-to-all can be imported, with the name of their published table; a job exchanges through one."""
LEAST, MAY_BE_ZERO = {"max_points": 6, "repeats": 1, "min_repeats": 1}, ("max_minutes", "max_memory_gib")
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
    max_drift: float = 0.25
    """Relative drift of that case beyond which the sweep warns that the device is not steady."""
    time_loops: bool = False
    """Time kernels on CUDA that are Python loops of launches (linear attention without flash-linear-attention)."""
    retry_failed: bool = False
    """Time cases again whose last result was not ``ok``."""
    seed: int = 0
    """Seed of the drawn lengths and routings and of the order of the cases."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, low = getattr(self, field.name), LEAST.get(field.name, 0)
            if field.type == "int" and (isinstance(value, bool) or not isinstance(value, int) or not value >= low):
                raise ValueError(f"Expected {field.name} to be an integer >= {low}, got {value!r}.")
            above = ">=" if field.name in MAY_BE_ZERO else ">"
            if field.type == "float" and not (0 < value < inf or (value == 0 and above == ">=")):
                raise ValueError(f"Expected {field.name} {above} 0 and finite, got {value}.")
        if not self.min_repeats <= self.repeats:
            raise ValueError(f"Expected min_repeats <= repeats = {self.repeats}, got {self.min_repeats}.")
        for name, allowed in (("exchange", tuple(EXCHANGES)), ("dtype", DTYPES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"Expected {name} to be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")

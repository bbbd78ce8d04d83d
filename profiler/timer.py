"""Time one case, forward and backward apart, into rows of measurements.

Warm up until two runs agree, then time runs one by one, each after the caches were displaced, and keep every sample.
What the device cannot do becomes a row that says so, and the sweep goes on.

Hardly anything runs that is not timed: the first warm-up run is also the one whose kernels are named, and the last
forward run leaves the graph that the backward runs go over. Libraries' kernels clear what they saved for the backward:
there an untimed forward run comes before every backward.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler.cases.case import Case
from profiler.cases.doubt import faster
from profiler.cases.operations import DIRECTIONS
from profiler.kernels.choose import Work
from profiler.kernels.works import WORKS
from profiler.params import ProfileParams

if TYPE_CHECKING:
    from profiler.device.backend import TorchBackend

STEADY = 0.10
"""Two warm-up runs within this share of one another count as steady."""
MAX_WARM_UP = 6
MORE_REPEATS = 3
"""Runs that scatter are repeated up to this many times as often, while the case has time."""
MESSAGE_LENGTH = 200
LAUNCH_BOUND = "launch-bound: the host launched longer than the flush before could hide"
"""Flag of rows whose time holds launches that training hides; fits leave flagged rows out where others are near."""


def time_case(
    case: Case, backend: TorchBackend, params: ProfileParams, directions: Sequence[str] = DIRECTIONS
) -> list[dict[str, Any]]:
    """Return one row a direction, ``forward`` first; never raises for what the device cannot do."""
    rows: list[dict[str, Any]] = []
    try:
        with _no_garbage_collection():
            work = Work(*WORKS[case.op](case, backend))
            measured, output = _measure(work.run, "output", backend, params)
            rows.append(_row(case, "forward", backend) | measured)
            if "backward" in directions:
                backward = Backward(work, output, backend.filled(*output.shape).to(output.dtype))
                del output
                measured, _ = _measure(backward.run, "gradient", backend, params, backward.prepare)
                rows.append(_row(case, "backward", backend) | measured)
    except Exception as error:  # any: libraries raise their own kinds, and one case must not end the sweep
        kind = "" if isinstance(error, (_NotFinite, RuntimeError, ValueError)) else f"{type(error).__name__}: "
        message = f"{kind}{error}".split("\n")[0]
        failure = {"status": _status(error), "message": message[:MESSAGE_LENGTH]}
        rows += [_row(case, direction, backend) | failure for direction in directions[len(rows) :]]
    if any(row["status"] != "ok" for row in rows):
        backend.release()
    return rows


class Backward:
    """The backward run of a work: over one kept graph, or over a fresh one each time where a run spoils it."""

    def __init__(self, work: Work, output: Any, upstream: Any) -> None:
        self._work, self._output, self._upstream = work, output, upstream

    def prepare(self) -> None:
        """Make what the next run goes over; not part of what is timed."""
        if not self._work.keeps_graph:
            self._output = None  # freed before the next one needs the room
            self._output = self._work.run()

    def run(self) -> Any:
        """Return the gradients."""
        import torch

        return torch.autograd.grad(self._output, self._work.inputs, self._upstream, retain_graph=self._work.keeps_graph)


class _NotFinite(Exception):
    """A result holds NaN or infinity: its time means nothing."""


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep Python's collector out of timed runs."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _check_finite(tensors: Any, what: str) -> None:
    import torch

    for tensor in tensors if isinstance(tensors, tuple) else (tensors,):
        # A sum is finite only if all terms are, and needs no second tensor of that size.
        if not bool(tensor.detach().sum(dtype=torch.float32).isfinite()):
            raise _NotFinite(f"The {what} holds NaN or infinity.")


def _measure(
    run: Callable[[], Any],
    what: str,
    backend: TorchBackend,
    params: ProfileParams,
    prepare: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Any], Any]:
    """Return the times of a run, and the result of the last of them; ``prepare`` comes before each, untimed."""
    deadline = time.perf_counter() + params.max_case_seconds / len(DIRECTIONS)
    kernel, previous, kept = backend.named(run, prepare)
    _check_finite(kept, what)
    for _ in range(MAX_WARM_UP - 1):
        if time.perf_counter() + previous / 1e6 > deadline:
            break
        kept = None  # Freed before the next run needs the room, and after the clock stopped.
        prepare()
        backend.flush()
        elapsed, kept = backend.timed(run)
        if abs(elapsed - previous) <= STEADY * previous:
            break
        previous = elapsed
    samples: list[float] = []
    while len(samples) < params.min_repeats or (_wants_more(samples, params) and time.perf_counter() < deadline):
        kept = None
        prepare()
        backend.flush()
        elapsed, kept = backend.timed(run)
        samples.append(elapsed)
    flag = {"flag": LAUNCH_BOUND} if backend.launch_bound else {}
    return {"status": "ok", **times_of(samples), "kernel": kernel, **flag}, kept


def times_of(samples: list[float]) -> dict[str, Any]:
    """Return what a row says of its repeats, microseconds."""
    low, middle, high = np.percentile(samples, (25, 50, 75))
    return {"time_us": float(middle), "spread_us": float(high - low), "repeats_us": samples}


def both_looks(first: Mapping[str, Any], second: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return one row of two looks at a case; a row without a time loses.

    On a CPU, where disturbances only add time, the faster look is kept. A GPU's clocks also boost: there the faster one
    would be too fast in the mean, and the repeats of both are pooled.
    """
    if kind == "cpu" or first["status"] != "ok" or second["status"] != "ok":
        return faster(first, second)
    return {**first, **second, **times_of([*first["repeats_us"], *second["repeats_us"]])}


def _wants_more(samples: list[float], params: ProfileParams) -> bool:
    if len(samples) < params.repeats:
        return True
    low, middle, high = np.percentile(samples, (25, 50, 75))
    return bool(high - low > STEADY * middle) and len(samples) < MORE_REPEATS * params.repeats


def _row(case: Case, direction: str, backend: TorchBackend) -> dict[str, Any]:
    return {
        "case_id": case.case_id(direction, backend.dtype_name), "op": case.op, "direction": direction,
        "source": "measured", "dtype": case.dtype or backend.dtype_name, "pattern": case.pattern, **case.features,
    }  # fmt: skip


def _status(error: BaseException) -> str:
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "not enough memory" in str(error):
        return "oom"
    return "unsupported" if isinstance(error, (RuntimeError, NotImplementedError, ValueError)) else "failed"

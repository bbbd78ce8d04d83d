"""Time one case, forward and backward apart, into rows of measurements.

Warm up until two runs agree, then time runs one by one, each after the caches were displaced, and keep every sample.
What the device cannot do becomes a row that says so, and the sweep goes on.

Nothing runs that is not timed: the first warm-up run is also the one whose kernels are named, and the last forward run
leaves the graph that the backward runs go over.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler.cases.case import Case
from profiler.cases.operations import DIRECTIONS
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


def time_case(
    case: Case, backend: TorchBackend, params: ProfileParams, directions: Sequence[str] = DIRECTIONS
) -> list[dict[str, Any]]:
    """Return one row a direction, ``forward`` first; never raises for what the device cannot do."""
    rows: list[dict[str, Any]] = []
    try:
        with _no_garbage_collection():
            run, inputs = WORKS[case.op](case, backend)
            measured, output = _measure(run, "output", backend, params)
            rows.append(_row(case, "forward", backend) | measured)
            if "backward" in directions:
                upstream = backend.filled(*output.shape).to(output.dtype)

                def backward() -> Any:
                    return torch_grad(output, inputs, upstream)

                rows.append(_row(case, "backward", backend) | _measure(backward, "gradient", backend, params)[0])
    except (RuntimeError, NotImplementedError, MemoryError, ValueError, _NotFinite) as error:
        failure = {"status": _status(error), "message": str(error).split("\n")[0][:MESSAGE_LENGTH]}
        rows += [_row(case, direction, backend) | failure for direction in directions[len(rows) :]]
    if any(row["status"] != "ok" for row in rows):
        backend.release()
    return rows


def torch_grad(output: Any, inputs: Sequence[Any], upstream: Any) -> Any:
    """Return the gradients of a run over its kept graph, so that it can be timed again."""
    import torch

    return torch.autograd.grad(output, inputs, upstream, retain_graph=True)


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
    run: Callable[[], Any], what: str, backend: TorchBackend, params: ProfileParams
) -> tuple[dict[str, Any], Any]:
    """Return the times of a run, and the result of the last of them."""
    deadline = time.perf_counter() + params.max_case_seconds / len(DIRECTIONS)
    kernel, previous, kept = backend.named(run)
    _check_finite(kept, what)
    for _ in range(MAX_WARM_UP - 1):
        if time.perf_counter() + previous / 1e6 > deadline:
            break
        kept = None  # Freed before the next run needs the room, and after the clock stopped.
        backend.flush()
        elapsed, kept = backend.timed(run)
        if abs(elapsed - previous) <= STEADY * previous:
            break
        previous = elapsed
    samples: list[float] = []
    while len(samples) < params.min_repeats or (_wants_more(samples, params) and time.perf_counter() < deadline):
        kept = None
        backend.flush()
        elapsed, kept = backend.timed(run)
        samples.append(elapsed)
    low, middle, high = np.percentile(samples, (25, 50, 75))
    return {
        "status": "ok", "time_us": float(middle), "spread_us": float(high - low), "repeats_us": samples,
        "kernel": kernel,
    }, kept  # fmt: skip


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
    return "failed" if isinstance(error, _NotFinite) else "unsupported"

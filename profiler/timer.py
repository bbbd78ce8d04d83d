"""Time one case, forward and backward apart, into rows of measurements.

Warm up until two runs agree, then time runs one by one, each after the caches were displaced, and keep every sample.
What the device cannot do becomes a row that says so, and the sweep goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler.attention import attention_work
from profiler.cases import DIRECTIONS, Case
from profiler.experts import dense_work, experts_work
from profiler.params import ProfileParams

if TYPE_CHECKING:
    from profiler.backends import TorchBackend

STEADY = 0.10
"""Two warm-up runs within this share of one another count as steady."""
MAX_WARM_UP = 6
MORE_REPEATS = 3
"""Runs that scatter are repeated up to this many times as often, while the case has time."""
MESSAGE_LENGTH = 200
WORKS = {"attention": attention_work, "dense": dense_work, "experts": experts_work}


def time_case(case: Case, backend: TorchBackend, params: ProfileParams) -> list[dict[str, Any]]:
    """Return one row forward and one backward; never raises for what the device cannot do."""
    rows: list[dict[str, Any]] = []
    try:
        for direction, run in _runs(case, backend):
            measured = _measure(run, backend, params)
            rows.append(_row(case, direction, backend) | measured)
    except (RuntimeError, NotImplementedError, MemoryError, ValueError, _NotFinite) as error:
        failure = {"status": _status(error), "message": str(error).split("\n")[0][:MESSAGE_LENGTH]}
        rows += [_row(case, direction, backend) | failure for direction in DIRECTIONS[len(rows) :]]
    backend.release()
    return rows


class _NotFinite(Exception):
    """A result holds NaN or infinity: its time means nothing."""


def _runs(case: Case, backend: TorchBackend) -> Any:
    """Yield (direction, run): the forward run, then the backward run over a kept graph."""
    import torch

    run, inputs = WORKS[case.op](case, backend)
    yield "forward", run
    output = run()
    _check_finite(output, "output")
    upstream = torch.randn_like(output)

    def backward() -> Any:
        return torch.autograd.grad(output, inputs, upstream, retain_graph=True)

    for gradient in backward():
        _check_finite(gradient, "gradient")
    yield "backward", backward


def _check_finite(tensor: Any, what: str) -> None:
    # A sum is finite only if all terms are, and needs no second tensor of that size.
    if not bool(tensor.detach().float().sum().isfinite()):
        raise _NotFinite(f"The {what} holds NaN or infinity.")


def _measure(run: Callable[[], Any], backend: TorchBackend, params: ProfileParams) -> dict[str, Any]:
    deadline = time.perf_counter() + params.max_case_seconds / len(DIRECTIONS)
    previous = float("inf")
    for _ in range(MAX_WARM_UP):
        backend.flush()
        elapsed = backend.elapsed_us(run)
        if abs(elapsed - previous) <= STEADY * previous or time.perf_counter() + elapsed / 1e6 > deadline:
            break
        previous = elapsed
    samples: list[float] = []
    while len(samples) < params.min_repeats or (_wants_more(samples, params) and time.perf_counter() < deadline):
        backend.flush()
        samples.append(backend.elapsed_us(run))
    low, middle, high = np.percentile(samples, (25, 50, 75))
    return {
        "status": "ok", "time_us": float(middle), "spread_us": float(high - low), "repeats_us": samples,
        "kernel": backend.kernels(run),
    }  # fmt: skip


def _wants_more(samples: list[float], params: ProfileParams) -> bool:
    if len(samples) < params.repeats:
        return True
    low, middle, high = np.percentile(samples, (25, 50, 75))
    return bool(high - low > STEADY * middle) and len(samples) < MORE_REPEATS * params.repeats


def _row(case: Case, direction: str, backend: TorchBackend) -> dict[str, Any]:
    return {
        "case_id": case.case_id(direction, backend.dtype_name), "op": case.op, "direction": direction,
        "source": "measured", "dtype": backend.dtype_name, "pattern": case.pattern, **case.features,
    }  # fmt: skip


def _status(error: BaseException) -> str:
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "not enough memory" in str(error):
        return "oom"
    return "failed" if isinstance(error, _NotFinite) else "unsupported"

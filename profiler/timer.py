"""Time one case, forward and backward apart, into rows of measurements; and a first look at what a device can do.

Warm up until two runs agree, then time runs one by one, each after the caches were displaced, and keep every sample.
Hardly anything runs untimed: the first warm-up run is the one whose kernels are named, and the last forward run leaves
the graph that the backward runs go over.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from profiler.cases.case import DIRECTIONS, Case, Rates, cell_case, forward_flops
from profiler.device.backend import FLUSH_BYTES, TorchBackend
from profiler.errors import RoutePackError
from profiler.kernels.works import Work, make_work
from profiler.measurements import LEAST_US
from profiler.params import ProfileParams

STEADY = 0.10
"""Two warm-up runs within this share of one another count as steady."""
MAX_WARM_UP = 6
MORE_REPEATS = 3
"""Runs that scatter are repeated up to this many times as often, while the case has time."""
MAX_LOOKS = 3
"""A case that stays slower than a larger one is timed this often in all; then it is marked, for it may be real."""
LAUNCH_BOUND = "launch-bound: the host launched longer than the flush before could hide"
"""Flag of rows whose time holds launches that training hides; fits leave flagged rows out where others are near."""
PROBE_SIZE = {"cpu": 512, "cuda": 4096}
PROBES = 8
USABLE_MEMORY = 0.5
"""Share of the free memory that a case may take unless told otherwise."""


def backward_of(work: Work, output: Any, upstream: Any) -> tuple[Callable[[], Any], Callable[[], None]]:
    """Return the backward run and what comes before each, untimed: a fresh graph, where a run spoils the kept one."""
    keeps_graph = work.library == "torch"

    def prepare() -> None:
        nonlocal output
        if not keeps_graph:
            output = None  # freed before the next one needs the room
            output = work.run()

    def run() -> Any:
        return torch.autograd.grad(output, work.inputs, upstream, retain_graph=keeps_graph)

    return run, prepare


def time_case(
    case: Case, backend: TorchBackend, params: ProfileParams, directions: Sequence[str] = DIRECTIONS
) -> list[dict[str, Any]]:
    """Return one row a direction, ``forward`` first; never raises for what the device cannot do."""
    found: list[dict[str, Any]] = []
    collects = gc.isenabled()
    gc.disable()
    try:
        work = make_work(case, backend)
        measured, output = _measure(work, work.run, lambda: None, "output", backend, params)
        found.append(measured)
        if "backward" in directions:
            backward = backward_of(work, output, backend.tensor(*output.shape).detach().to(output.dtype))
            del output
            found.append(_measure(work, *backward, "gradient", backend, params)[0])
    except Exception as error:  # any: libraries raise their own kinds, and one case must not end the sweep
        known, text = isinstance(error, (RuntimeError, ValueError)), str(error).split("\n")[0]
        is_oom = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "not enough memory" in text
        kind = "" if known or isinstance(error, FloatingPointError) else f"{type(error).__name__}: "
        failure = {"status": "oom" if is_oom else "unsupported" if known else "failed"}
        failure["message"] = f"{kind}{text}"[:200]
        found += [failure] * (len(directions) - len(found))
    finally:
        if collects:
            gc.enable()
    if any(one["status"] != "ok" for one in found):  # the frames that held its tensors are gone by now
        torch.cuda.empty_cache()
    told = zip(directions, found, strict=True)
    return [case.row(direction, backend.dtype_name) | row for direction, row in told]


def _measure(
    work: Work, run: Callable[[], Any], prepare: Callable[[], None], what: str, backend: TorchBackend, params: Any
) -> tuple[dict[str, Any], Any]:
    """Return the times of a run, and the result of the last of them; ``prepare`` comes before each, untimed."""
    deadline = time.perf_counter() + params.max_case_seconds / len(DIRECTIONS)
    kernel, previous, kept = backend.named(run, prepare)
    if not all(map(_is_finite, kept if isinstance(kept, tuple) else (kept,))):
        raise FloatingPointError(f"The {what} holds NaN or infinity.")

    def elapsed() -> float:
        nonlocal kept
        kept = None  # Freed before the next run needs the room, and after the clock stopped.
        prepare()
        backend.flush()
        time_us, kept = backend.timed(run)
        return time_us

    for _ in range(MAX_WARM_UP - 1):
        if time.perf_counter() + previous / 1e6 > deadline:
            break
        before, previous = previous, elapsed()
        if abs(previous - before) <= STEADY * before:
            break
    samples: list[float] = []
    for count in range(MORE_REPEATS * params.repeats):
        times = times_of(samples) if count >= params.repeats else {}
        enough = times and times["spread_us"] <= STEADY * times["time_us"]
        if count >= params.min_repeats and (enough or time.perf_counter() >= deadline):
            break
        samples.append(elapsed())
    if not times_of(samples)["time_us"] >= LEAST_US:
        raise FloatingPointError("The clock saw no time pass.")
    flag = {"flag": LAUNCH_BOUND} if backend.launch_bound else {}
    return {"status": "ok", **times_of(samples), "kernel": f"{work.library}: {kernel}", **flag}, kept


def _is_finite(tensor: torch.Tensor) -> bool:
    # A sum is finite only if all terms are, and needs no second tensor of that size.
    return bool(tensor.detach().sum(dtype=torch.float32).isfinite())


def times_of(samples: list[float]) -> dict[str, Any]:
    """Return what a row says of its repeats, microseconds."""
    low, middle, high = np.percentile(samples, (25, 50, 75))
    return {"time_us": float(middle), "spread_us": float(high - low), "repeats_us": samples}


def both_looks(first: Mapping[str, Any], second: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return one row of two looks at a case; a row without a time loses.

    On a CPU disturbances only add time, and the faster look counts; a GPU's clocks also boost, and repeats are pooled.
    """
    timed = [row for row in (first, second) if row["status"] == "ok"]
    if kind == "cuda" and len(timed) == 2:
        return {**first, **second, **times_of([*first["repeats_us"], *second["repeats_us"]])}
    return dict(min(timed, key=lambda row: row["time_us"], default=second))


def message_of(case: Case, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what a progress line says of a timed case."""
    size = next((case.features[name] for name in ("rows", "tokens", "bytes") if name in case.features), 0)
    times = (f"{row['time_us'] / 1e3:.2f} ms" if row["status"] == "ok" else row["status"] for row in rows)
    return f"{case.op} {size}: {' + '.join(times)}"


def measure_rates(backend: TorchBackend) -> Rates:
    """Time a GEMM, an attention core, a fill and a tiny GEMM, so that a sweep asks for what the device can finish."""
    size = PROBE_SIZE[backend.kind]
    gemm = Case("dense", "", {"tokens": size, "n": size, "k": size})
    core = cell_case("attention", "single", (size,), (8, 8, 64, 64))
    return Rates(
        memory_bytes=int(backend.free_bytes() * USABLE_MEMORY),
        gemm_flops_per_s=forward_flops(gemm) / _best_s(gemm, backend),
        attention_flops_per_s=forward_flops(core) / _best_s(core, backend),
        bytes_per_s=FLUSH_BYTES[backend.kind] / min(backend.timed(backend.flush)[0] * 1e-6 for _ in range(PROBES)),
        call_s=_best_s(Case("dense", "", {"tokens": 1, "n": 8, "k": 8}), backend),
    )


def _best_s(case: Case, backend: TorchBackend) -> float:
    try:
        run = make_work(case, backend).run
        return min(backend.timed(run)[0] for _ in range(PROBES)) * 1e-6
    except Exception as error:
        first = str(error).split("\n")[0]
        raise RoutePackError(
            f"This {backend.kind} device cannot run {case.op} in {backend.dtype_name} ({type(error).__name__}: "
            f"{first}). Set profile.dtype to a type that it computes (auto chooses one), or free its memory."
        ) from error

"""A first look at a device: how fast it computes and copies, so that a sweep asks for what it can finish."""

from __future__ import annotations

from typing import TYPE_CHECKING

from profiler.cases.case import Case, attention_features
from profiler.cases.estimates import Rates, forward_flops
from profiler.errors import RoutePackError
from profiler.kernels.works import WORKS
from profiler.params import ProfileParams

if TYPE_CHECKING:
    from profiler.device.backend import TorchBackend

PROBE_SIZE = {"cpu": 512, "cuda": 4096}
PROBE_HEADS = (8, 8, 64, 64)
TRIES = 8
USABLE_MEMORY = 0.5
"""Share of the free memory that a case may take unless told otherwise."""


def measure_rates(backend: TorchBackend, params: ProfileParams) -> Rates:
    """Time a GEMM, an attention core, a fill and a tiny GEMM; the best of a few runs each.

    Raises
    ------
    RoutePackError
        If the device cannot run one of them in the number type asked for: nothing else would be timed either.
    """
    size = PROBE_SIZE[backend.kind]
    gemm = Case("dense", "", {"tokens": size, "n": size, "k": size})
    core = Case("attention", "single", attention_features((size,), PROBE_HEADS, 0), (size,))
    tiny = Case("dense", "", {"tokens": 1, "n": 8, "k": 8})
    limit = int(params.max_memory_gib * 2**30) or int(backend.free_bytes() * USABLE_MEMORY)
    return Rates(
        gemm_flops_per_s=forward_flops(gemm) / _best_s(gemm, backend),
        attention_flops_per_s=forward_flops(core) / _best_s(core, backend),
        bytes_per_s=backend.flush_bytes / min(backend.elapsed_us(backend.flush) * 1e-6 for _ in range(TRIES)),
        call_s=_best_s(tiny, backend),
        memory_bytes=limit,
    )


def _best_s(case: Case, backend: TorchBackend) -> float:
    try:
        run = WORKS[case.op](case, backend)[0]
        return min(backend.elapsed_us(run) for _ in range(TRIES)) * 1e-6
    except Exception as error:
        first = str(error).split("\n")[0]
        raise RoutePackError(
            f"This {backend.kind} device cannot run {case.op} in {backend.dtype_name} "
            f"({type(error).__name__}: {first}). "
            "Set profile.dtype to a type that it computes (auto chooses one), or free its memory."
        ) from error

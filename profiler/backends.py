"""The devices: one code with torch on CPU and CUDA; they differ in clock, attention kernel and free memory.

``torch.nn.functional.grouped_mm`` runs on both. Attention is ``torch.nn.attention.varlen.varlen_attn`` on CUDA and
``scaled_dot_product_attention`` per sequence on CPU. There is no simulated device.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from profiler.device import query_nvidia_smi, usable_cores
from profiler.errors import RoutePackError
from profiler.params import ProfileParams

if TYPE_CHECKING:
    import torch

FLUSH_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Written between runs, so that every run starts from caches that hold something else."""
HEAVY_OPS = ("mm", "attention", "flash")
"""An operation whose name holds one of these does the work; the rest moves or views."""
LISTED_KERNELS = 3


class TorchBackend:
    """Run torch on one device with a fixed type and thread count."""

    def __init__(self, kind: str, params: ProfileParams) -> None:
        try:
            import torch
        except ImportError:
            raise RoutePackError(
                "Profiling needs torch, which is not installed. Install routepack-tune with its dependencies, or "
                "import --published timings."
            ) from None
        self.kind = kind
        self.device = torch.device(kind)
        self.dtype_name = _native_dtype(kind) if params.dtype == "auto" else params.dtype
        self.dtype: torch.dtype = getattr(torch, self.dtype_name)
        self.threads = params.threads or max(1, usable_cores() - 1)
        self._flush = torch.empty(FLUSH_BYTES[kind], dtype=torch.uint8, device=self.device)
        self.generator = torch.Generator(device=self.device).manual_seed(params.seed)

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """Hold the thread count for the time of a sweep, and give back the caller's."""
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    @property
    def item_bytes(self) -> int:
        """Bytes of one number."""
        return self.dtype.itemsize

    def tensor(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Return a seeded normal tensor that wants a gradient."""
        import torch

        drawn = torch.randn(*shape, dtype=self.dtype, device=self.device, generator=self.generator)
        return drawn.mul_(scale).requires_grad_()

    @property
    def flush_bytes(self) -> int:
        """Bytes that one flush writes."""
        return self._flush.nbytes

    def flush(self) -> None:
        """Displace what the caches hold."""
        self._flush.zero_()

    def elapsed_us(self, run: Callable[[], Any]) -> float:
        """Return the time of one run: events on CUDA, the performance counter on CPU.

        On CUDA nothing waits between the flush before and the run: launches hide behind it, as they do in training.
        """
        import torch

        if self.kind == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            kept = run()
            end.record()
            end.synchronize()
            elapsed = start.elapsed_time(end) * 1e3
        else:
            began = time.perf_counter()
            kept = run()
            elapsed = (time.perf_counter() - began) * 1e6
        del kept  # Freed after the clock stopped.
        return float(elapsed)

    def free_bytes(self) -> int:
        """Return the memory that is free now."""
        import torch

        if self.kind == "cuda":
            return int(torch.cuda.mem_get_info()[0])
        return _free_host_bytes()

    def release(self) -> None:
        """Give cached memory back after a case."""
        import torch

        if self.kind == "cuda":
            torch.cuda.empty_cache()

    def readings(self) -> str:
        """Return clock, temperature and power of the device as its driver words them; empty on CPU."""
        if self.kind != "cuda":
            return ""
        return query_nvidia_smi("--query-gpu=clocks.sm,temperature.gpu,power.draw", "--format=csv,noheader")

    def kernels(self, run: Callable[[], Any]) -> str:
        """Return the names of what did the work in one run, sorted and joined by `` + ``."""
        if self.kind == "cuda":
            named = _cuda_kernels(run)
            if named:
                return named
        return _dispatched_ops(run)


def _native_dtype(kind: str) -> str:
    import torch

    if kind == "cuda":
        return "bfloat16"
    # Private, and so absent in some versions: without an answer float32 is the safe choice.
    probes = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return "bfloat16" if any(probe is not None and probe() for probe in probes) else "float32"


def _free_host_bytes() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as stream:
            facts = dict(line.split(":", 1) for line in stream)
        return int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _dispatched_ops(run: Callable[[], Any]) -> str:
    from torch.utils._python_dispatch import TorchDispatchMode

    names: set[str] = set()

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Recorder():
        run()
    heavy = sorted(name for name in names if any(word in name for word in HEAVY_OPS))
    return " + ".join(heavy or sorted(names)[:LISTED_KERNELS])


def _cuda_kernels(run: Callable[[], Any]) -> str:
    """Return the longest device kernels of one run and their number; empty where torch's profiler cannot tell."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with _quiet_stderr(), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            run()
        events = [event for event in trace.key_averages() if "CUDA" in str(event.device_type)]
        events.sort(key=lambda event: -event.self_device_time_total)
    except (RuntimeError, AttributeError):
        return ""
    return " + ".join(f"{event.key[:80]} x{event.count}" for event in events[:LISTED_KERNELS])


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    # The profiler's library writes notices to file descriptor 2, in the middle of a progress bar.
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)

"""The devices: one code with torch on CPU and CUDA; they differ in clock, attention kernel and free memory."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.device.fingerprint import read_text, usable_cores
from profiler.params import FLOAT8, ProfileParams

Run = tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, ...]]
"""One run of an operation, and the tensors that its backward run differentiates by."""
FLUSH_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Written between runs, so that every run starts from caches that hold something else."""
MAX_WRITES = 8
"""Most writes of that buffer before one run: one that launches for longer than they last is marked."""
COVER = 1.5
"""A flush lasts at least this many times as long as the host needs to launch the run behind it."""
POOL_ELEMENTS = (1 << 21) + 7
"""Normal numbers that are drawn once; every tensor is filled from them, shifted. Odd, so that rows do not repeat."""
HEAVY_OPS = ("mm", "attention", "flash")
"""An operation whose name holds one of these does the work; the rest moves or views."""
LISTED_KERNELS = 3


class TorchBackend:
    """Run torch on one device with a fixed type and thread count."""

    def __init__(self, kind: str, params: ProfileParams) -> None:
        self.kind, self.device = kind, torch.device(kind)
        # Private, and so absent in some versions: without an answer float32 is the safe choice.
        probes = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
        native = "bfloat16" if kind == "cuda" or any(probe is not None and probe() for probe in probes) else "float32"
        self.dtype_name = {"auto": native, FLOAT8: "bfloat16"}.get(params.dtype, params.dtype)
        self.dtype: torch.dtype = getattr(torch, self.dtype_name)
        self.threads = params.threads or max(1, usable_cores() - 1)
        self.times_loops = params.time_loops
        self._flush = torch.empty(FLUSH_BYTES[kind], dtype=torch.uint8, device=self.device)
        generator = torch.Generator(device=self.device).manual_seed(params.seed)
        self._pool = torch.randn(POOL_ELEMENTS, dtype=self.dtype, device=self.device, generator=generator)
        self._drawn = 0
        self._writes, self._write_s = 1, 0.0
        self.launch_bound = False
        """Whether the latest run's launches took longer than the most writes of a flush can cover."""
        self.busy_s = 0.0
        """Wall time spent inside flushes and runs, and nothing else."""

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """Hold the thread count for the time of a sweep, and give back the caller's."""
        # Let glibc keep what is freed, as long jobs come to: new pages are zeroed inside the run that touches them
        # first. When it gives memory back depends on what a process allocated before, so two sweeps would differ.
        with contextlib.suppress(OSError, AttributeError):  # another C library has no such switch
            # M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD of malloc.h
            for parameter, value in ((-4, 0), (-1, 2**31 - 1), (-2, FLUSH_BYTES["cpu"])):
                if self.kind == "cpu":
                    ctypes.CDLL(None).mallopt(parameter, value)
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def tensor(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Return seeded normal numbers that want a gradient, copied from a pool: drawing takes longer than a run."""
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        flat, filled = made.view(-1), 0
        while filled < flat.numel():
            count = min(flat.numel() - filled, POOL_ELEMENTS - self._drawn)
            torch.mul(self._pool[self._drawn : self._drawn + count], scale, out=flat[filled : filled + count])
            filled, self._drawn = filled + count, (self._drawn + count) % POOL_ELEMENTS
        return made.requires_grad_()

    def flush(self) -> None:
        """Displace what the caches hold; on CUDA for long enough that the launches of the next run hide behind it."""
        began = time.perf_counter()
        for _ in range(self._writes):
            self._flush.zero_()
        self.busy_s += time.perf_counter() - began

    def wait(self) -> None:
        """Wait for what a GPU was asked to do."""
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def timed(self, run: Callable[[], Any]) -> tuple[float, Any]:
        """Return the time of one run and its result; on CUDA launches hide behind the flush before."""
        began = time.perf_counter()
        if self.kind == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            kept = run()
            end.record()
            launched = time.perf_counter()
            end.synchronize()
            elapsed = start.elapsed_time(end) * 1e3
            self._cover(launched - began)
        else:
            kept = run()
            elapsed = (time.perf_counter() - began) * 1e6
        self.busy_s += time.perf_counter() - began
        return float(elapsed), kept

    def _cover(self, launch_s: float) -> None:
        """Let the next flush last longer than the launches of a run like this one."""
        if not self._write_s:
            self._write_s = 1e-6
            self._flush.zero_()  # The first write only gets the device going.
            self._write_s = max(self.timed(self._flush.zero_)[0] * 1e-6, 1e-6)
        needed = max(1, math.ceil(COVER * launch_s / self._write_s))
        self._writes, self.launch_bound = min(MAX_WRITES, needed), needed > MAX_WRITES

    def free_bytes(self) -> int:
        """Return the memory that is free now."""
        if self.kind == "cuda":
            return int(torch.cuda.mem_get_info()[0])
        told = re.search(r"^MemAvailable:\s*(\d+) kB$", read_text("/proc/meminfo"), re.MULTILINE)
        return int(told[1]) * 1024 if told else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2

    def readings(self) -> dict[str, float]:
        """Return ``clock_mhz`` (multiprocessors, or the mean of the cores) and ``slowed_by``, as far as they are told.

        ``slowed_by`` is NVML's bit mask of the reasons why clocks are held down; it takes NVML's Python binding.
        """
        if self.kind == "cpu":
            clocks = re.findall(r"^cpu MHz\s*:\s*([\d.]+)$", read_text("/proc/cpuinfo"), re.MULTILINE)
            return {"clock_mhz": sum(map(float, clocks)) / len(clocks)} if clocks else {}
        try:
            import pynvml as nvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError:
            return {}
        found = {}
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
            asked = {"clock_mhz": ("ClockInfo", nvml.NVML_CLOCK_SM), "slowed_by": ("CurrentClocksThrottleReasons",)}
            for name, (function, *arguments) in asked.items():
                # What this card or a tenant may not have, or a binding dropped, hides no other reading.
                with contextlib.suppress(nvml.NVMLError, AttributeError):
                    found[name] = float(getattr(nvml, f"nvmlDeviceGet{function}")(handle, *arguments))
        return found

    def named(self, run: Callable[[], Any], prepare: Callable[[], None]) -> tuple[str, float, Any]:
        """Return the names of what did the work in one run, its time as a warm-up run, and its result."""
        prepare()
        if self.kind == "cuda":
            found = self._device_kernels(run)
            if found[0]:
                return found
            del found  # Its result makes room for the next.
            prepare()
        with _Recorder() as recorder:
            elapsed, kept = self.timed(run)
        heavy = sorted(name for name in recorder.names if any(word in name for word in HEAVY_OPS))
        return " + ".join(heavy or sorted(recorder.names)[:LISTED_KERNELS]), elapsed, kept

    def _device_kernels(self, run: Callable[[], Any]) -> tuple[str, float, Any]:
        """Name the longest device kernels of one run and their number; no names where torch's profiler cannot tell."""
        from torch.profiler import ProfilerActivity, profile

        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Its notices would break a progress bar.
        try:
            trace = profile(activities=[ProfilerActivity.CUDA])
            trace.start()
        except (RuntimeError, AssertionError):
            return "", 0.0, None
        names: list[str] = []
        try:
            elapsed, kept = self.timed(run)
        finally:
            with contextlib.suppress(RuntimeError, AttributeError):
                trace.stop()
                events = [event for event in trace.key_averages() if "CUDA" in str(event.device_type)]
                events.sort(key=lambda event: -event.self_device_time_total)
                names = [f"{event.key[:80]} x{event.count}" for event in events[:LISTED_KERNELS]]
        return " + ".join(names), elapsed, kept


class _Recorder(TorchDispatchMode):
    """Collect the names of the operations that torch dispatches meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

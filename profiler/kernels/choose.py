"""Which kernel runs an operation: other libraries' where they can be imported and can run the case, else torch's own.

A kernel is anything with this Protocol. ``build`` returns the run and the tensors it is differentiated by; an exchange
(``alltoall``) differentiates by nothing and finds its ranks in ``torch.distributed``'s default group. Kernels of an
operation are asked in order, torch's own is the last and takes everything.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from profiler.cases.case import Case

if TYPE_CHECKING:
    from profiler.device.backend import TorchBackend


class Work(NamedTuple):
    """What is timed."""

    run: Callable[[], Any]
    inputs: tuple[Any, ...]
    """Tensors that its backward run differentiates by."""
    kernel: str = "torch"
    keeps_graph: bool = True
    """Whether one forward run's graph bears several backward runs. Libraries free or overwrite what they saved: a
    second backward over the same graph computes less, or something else, without a word."""


class Kernel(Protocol):
    """Run one operation in one library's way."""

    @property
    def name(self) -> str:
        """What messages call it."""

    def available(self, case: Case, backend: TorchBackend) -> bool:
        """Return whether it can run this case on this device, its library included."""

    def build(self, case: Case, backend: TorchBackend) -> Work:
        """Return the run of a case and the tensors it is differentiated by; nothing here is timed."""


@dataclass(frozen=True, slots=True)
class TorchKernel:
    """Torch's own: always there."""

    build: Callable[[Case, TorchBackend], Work]
    name: str = "torch"
    loops: bool = False
    """Whether it is a Python loop of small kernels, of which CUDA would only time the launches."""

    def available(self, case: Case, backend: TorchBackend) -> bool:
        """Return True but for loops on CUDA."""
        return not self.loops or backend.kind != "cuda" or backend.times_loops


@dataclass(frozen=True, slots=True)
class LibraryKernel:
    """A CUDA library's, used where ``module`` has ``function`` and the case ``fits``."""

    name: str
    module: str
    function: str
    build: Callable[[Case, TorchBackend], Work]
    fits: Callable[[Case, TorchBackend], bool]

    def available(self, case: Case, backend: TorchBackend) -> bool:
        """Return whether the library can be imported and the case suits it."""
        return backend.kind == "cuda" and self.fits(case, backend) and _importable(self.module, self.function)


def _importable(module: str, function: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), function)
    except (ImportError, OSError, RuntimeError):
        # Absent, or built for another torch or driver.
        return False


def build_work(kernels: Sequence[Kernel], case: Case, backend: TorchBackend) -> Work:
    """Return the work of the first kernel that can run a case.

    A library's runs it once, there and back, before it is trusted: what it raises is a warning, and the next is asked.

    Raises
    ------
    NotImplementedError
        If no kernel can run it.
    """
    import torch

    for kernel in kernels:
        if not kernel.available(case, backend):
            continue
        if isinstance(kernel, TorchKernel):
            return kernel.build(case, backend)
        try:
            work = kernel.build(case, backend)._replace(kernel=kernel.name, keeps_graph=False)
            output = work.run()
            torch.autograd.grad(output, work.inputs, torch.ones_like(output))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # any: libraries raise their own kinds, and another kernel follows
            warnings.warn(
                f"{kernel.name} cannot run {case.op} here ({type(error).__name__}: {error}); torch's own kernel is "
                "timed instead.",
                stacklevel=2,
            )
        else:
            return work
    raise NotImplementedError(
        f"{case.op} on {backend.kind} needs {kernels[0].name}: torch's own is a Python loop, whose launches would be "
        "timed instead of the work. Install it, or set profile.time_loops."
    )

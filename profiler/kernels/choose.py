"""Which kernel runs an operation: other libraries' where they can be imported and can run the case, else torch's own.

A kernel is anything with this Protocol. ``build`` returns the run and the tensors it is differentiated by; an exchange
(``alltoall``) differentiates by nothing and finds its ranks in ``torch.distributed``'s default group. Kernels of an
operation are asked in order, torch's own is the last and takes everything.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from profiler.cases.case import Case

if TYPE_CHECKING:
    from profiler.device.backend import TorchBackend

Work: TypeAlias = tuple[Callable[[], Any], tuple[Any, ...]]
"""What is timed, and the tensors that its backward run differentiates by."""


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

    def available(self, case: Case, backend: TorchBackend) -> bool:
        """Return True."""
        return True


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


def pick_kernel(kernels: Sequence[Kernel], case: Case, backend: TorchBackend) -> Kernel:
    """Return the first kernel that can run a case."""
    return next(kernel for kernel in kernels if kernel.available(case, backend))

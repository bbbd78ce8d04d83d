"""What runs for a case: one function per operation, from a case to a run and the tensors it is differentiated by."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from profiler.cases.case import Case
from profiler.kernels.attention import attention_work
from profiler.kernels.choose import Kernel, TorchKernel, Work, build_work
from profiler.kernels.experts import dense_work, experts_work
from profiler.kernels.libraries import DELTA_RULE, FLASH_ATTENTION, GROUPED_LINEAR
from profiler.kernels.linear_attention import linear_attention_work
from profiler.kernels.router import router_work

if TYPE_CHECKING:
    from profiler.device.backend import TorchBackend

KERNELS: dict[str, tuple[Kernel, ...]] = {
    "attention": (FLASH_ATTENTION, TorchKernel(attention_work)),
    "linear_attention": (DELTA_RULE, TorchKernel(linear_attention_work, loops=True)),
    "dense": (TorchKernel(dense_work),),
    "router": (TorchKernel(router_work),),
    "experts": (GROUPED_LINEAR, TorchKernel(experts_work)),
}
"""By operation, in the order in which they are asked; what ran is in the ``kernel`` column of every row."""


WORKS: dict[str, Callable[[Case, TorchBackend], Work]] = {op: partial(build_work, KERNELS[op]) for op in KERNELS}

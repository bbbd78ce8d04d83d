"""What runs for a case: a library's kernel on CUDA, where it can be imported and can run the case, else torch's own.

What ran is in the ``kernel`` column of every row.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.functional import silu

from profiler.cases.case import Case, filled
from profiler.device.backend import Run, TorchBackend
from profiler.kernels.attention import attention_work, linear_attention_work, packed_core
from profiler.kernels.gemms import dense_work, experts_work, router_work


class Work(NamedTuple):
    """What is timed."""

    run: Callable[[], Any]
    inputs: tuple[Any, ...]
    """Tensors that its backward run differentiates by."""
    library: str = "torch"
    """Whose kernels run. Libraries free or overwrite what they saved: a second backward over the same graph computes
    less, or something else, without a word; torch's graphs bear several."""


def _flash_attention(case: Case, backend: TorchBackend) -> Run | None:
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    if case.features["qk_head_dim"] > 256:  # its widest head
        return None
    return attention_work(case, backend, packed_core(flash_attn_varlen_func, case, backend, (-1, -1), causal=True))


def _delta_rule(case: Case, backend: TorchBackend) -> Run | None:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]

    starts = torch.tensor((0, *filled(case.parts)), device=backend.device).cumsum(0)

    def core(*inputs: torch.Tensor) -> torch.Tensor:
        # A batch of one, whose sequences are packed.
        query, key, value, decay, write = (tensor[None] for tensor in inputs)
        output: torch.Tensor = chunk_gated_delta_rule(query, key, value, g=decay, beta=write, cu_seqlens=starts)[0]
        return output[0]

    return linear_attention_work(case, backend, core)


def _grouped_linear(case: Case, backend: TorchBackend) -> Run | None:
    from transformer_engine.pytorch import GroupedLinear  # type: ignore[import-not-found]

    f = case.features
    if not f["rows"]:  # A rank without any row crashed versions of it: torch's own times that floor.
        return None
    hidden, inter, experts, splits = f["hidden_size"], f["inter_size"], f["local_experts"], list(case.parts)
    facts: dict[str, Any] = {"bias": False, "params_dtype": backend.dtype, "device": backend.device}
    gate_up, down = GroupedLinear(experts, hidden, 2 * inter, **facts), GroupedLinear(experts, inter, hidden, **facts)
    rows_RH = backend.tensor(f["rows"], hidden)

    def run() -> torch.Tensor:
        gate, up = gate_up(rows_RH, splits).chunk(2, dim=-1)
        output: torch.Tensor = down(silu(gate) * up, splits)
        return output

    return run, (rows_RH, *gate_up.parameters(), *down.parameters())


WORKS: dict[str, Callable[[Case, TorchBackend], Run]] = {
    "attention": attention_work,
    "linear_attention": linear_attention_work,
    "dense": dense_work,
    "router": router_work,
    "experts": experts_work,
}
"""Torch's own, which take every case."""
LIBRARIES: dict[str, tuple[str, Callable[[Case, TorchBackend], Run | None]]] = {
    "attention": ("flash-attn", _flash_attention),
    "linear_attention": ("flash-linear-attention", _delta_rule),
    "experts": ("transformer-engine", _grouped_linear),
}
"""CUDA libraries' ways in 16-bit types: None for a case they do not take, ImportError where they are not installed."""


def make_work(case: Case, backend: TorchBackend) -> Work:
    """Return what runs for a case; NotImplementedError if that is a Python loop, on CUDA.

    A library's kernel runs it once, there and back, before it is trusted: what it raises is a warning.
    """
    on_gpu, is_16_bit = backend.kind == "cuda", (case.dtype or backend.dtype_name) in ("bfloat16", "float16")
    library, build = LIBRARIES.get(case.op, ("", WORKS[case.op]))
    if library and on_gpu and is_16_bit:
        try:
            if built := build(case, backend):
                work = Work(*built, library)
                output = work.run()
                torch.autograd.grad(output, work.inputs, torch.ones_like(output))
                return work
        except ImportError:
            pass
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # any: libraries raise their own kinds, and torch's own follows
            why = f"{type(error).__name__}: {error}"
            warnings.warn(f"{library} cannot run {case.op} here ({why}): torch's own is timed.", stacklevel=2)
    if case.op == "linear_attention" and on_gpu and not backend.times_loops:
        raise NotImplementedError(
            f"{case.op} on cuda needs {library}: torch's own is a Python loop, whose launches would be timed "
            "instead of the work. Install it, or set profile.time_loops."
        )
    return Work(*WORKS[case.op](case, backend))

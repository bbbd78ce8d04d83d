"""Kernels of other libraries, as :class:`profiler.kernels.choose.Kernel`: used on CUDA where they can be imported.

flash-attn 2 (``flash_attn_varlen_func``), Transformer Engine (``GroupedLinear``), flash-linear-attention
(``chunk_gated_delta_rule``). All want 16-bit types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from profiler.cases.case import Case
from profiler.kernels.attention import attention_work, packed_starts
from profiler.kernels.choose import LibraryKernel, Work
from profiler.kernels.linear_attention import linear_attention_work

if TYPE_CHECKING:
    import torch

    from profiler.device.backend import TorchBackend
    from profiler.kernels.attention import Core

FLASH_HEAD_DIM = 256
"""flash-attn's widest head."""


def _is_16_bit(case: Case, backend: TorchBackend) -> bool:
    return (case.dtype or str(backend.dtype).removeprefix("torch.")) in ("bfloat16", "float16")


def _flash_fits(case: Case, backend: TorchBackend) -> bool:
    return _is_16_bit(case, backend) and case.features["qk_head_dim"] <= FLASH_HEAD_DIM


def _flash_core(case: Case, backend: TorchBackend) -> Core:
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    (starts, longest), window = packed_starts(case, backend), case.features["window"]
    # The kernel counts keys to the left of the query, we count the query itself too.
    reach = (window - 1, 0) if window else (-1, -1)

    def core(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = flash_attn_varlen_func(
            query, key, value, starts, starts, longest, longest, causal=True, window_size=reach
        )
        return output

    return core


def _delta_rule_core(lengths: tuple[int, ...], backend: TorchBackend) -> Core:
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]

    starts = torch.tensor((0, *lengths), device=backend.device).cumsum(0)

    def core(*inputs: torch.Tensor) -> torch.Tensor:
        # A batch of one, whose sequences are packed.
        query, key, value, decay, write = (tensor[None] for tensor in inputs)
        output: torch.Tensor = chunk_gated_delta_rule(query, key, value, g=decay, beta=write, cu_seqlens=starts)[0]
        return output[0]

    return core


def _grouped_linear_work(case: Case, backend: TorchBackend) -> Work:
    from torch.nn.functional import silu
    from transformer_engine.pytorch import GroupedLinear  # type: ignore[import-not-found]

    f = case.features
    hidden, inter, experts, splits = f["hidden_size"], f["inter_size"], f["local_experts"], list(case.parts)
    facts: dict[str, Any] = {"bias": False, "params_dtype": backend.dtype, "device": backend.device}
    gate_up = GroupedLinear(experts, hidden, 2 * inter, **facts)
    down = GroupedLinear(experts, inter, hidden, **facts)
    rows_RH = backend.tensor(f["rows"], hidden)

    def run() -> torch.Tensor:
        gate, up = gate_up(rows_RH, splits).chunk(2, dim=-1)
        output: torch.Tensor = down(silu(gate) * up, splits)
        return output

    return Work(run, (rows_RH, *gate_up.parameters(), *down.parameters()))


def _grouped_fits(case: Case, backend: TorchBackend) -> bool:
    # A rank without any row crashed versions of it: torch's own times that floor.
    return _is_16_bit(case, backend) and case.features["rows"] > 0


FLASH_ATTENTION = LibraryKernel(
    "flash-attn", "flash_attn", "flash_attn_varlen_func",
    lambda case, backend: attention_work(case, backend, _flash_core), _flash_fits,
)  # fmt: skip
GROUPED_LINEAR = LibraryKernel(
    "transformer-engine", "transformer_engine.pytorch", "GroupedLinear", _grouped_linear_work, _grouped_fits
)
DELTA_RULE = LibraryKernel(
    "flash-linear-attention", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule",
    lambda case, backend: linear_attention_work(case, backend, _delta_rule_core), _is_16_bit,
)  # fmt: skip

"""The GEMMs: the grouped expert feed-forward of one EP rank, and plain dense ones.

Shape suffixes: R routed rows sorted by expert, E local experts, H hidden size, I expert width; of one
GEMM: K inner and N output width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from profiler.cases.case import Case
from profiler.kernels.choose import Work
from profiler.params import FLOAT8

if TYPE_CHECKING:
    import torch

    from profiler.device.backend import TorchBackend


FLOAT8_LARGEST = 448.0
"""Largest number of that type."""


def experts_work(case: Case, backend: TorchBackend) -> Work:
    """Return the run of a grouped feed-forward (gate and up in one, SwiGLU, down) and what it is differentiated by.

    A case of type ``float8_e4m3fn`` multiplies in 8 bits forward, the casts of rows and weights included, and in the
    sweep's type backward, as trainers do.

    Raises
    ------
    ValueError
        If there are more rows than the experts' parts hold: a grouped GEMM leaves such rows unwritten.
    """
    import torch

    f = case.features
    if sum(case.parts) != f["rows"]:
        raise ValueError(f"Expected the experts' parts to add up to {f['rows']} rows, got {sum(case.parts)}.")
    hidden, inter, experts = f["hidden_size"], f["inter_size"], f["local_experts"]
    rows_RH = backend.tensor(f["rows"], hidden)
    gate_up_EIH = backend.tensor(experts, 2 * inter, hidden, scale=hidden**-0.5)
    down_EHI = backend.tensor(experts, hidden, inter, scale=inter**-0.5)
    # Ends of the groups; an expert without rows repeats its neighbour's.
    ends = torch.tensor(case.parts, device=backend.device).cumsum(0).to(torch.int32)
    multiply = _float8_multiply() if case.dtype == FLOAT8 else _multiply

    def run() -> torch.Tensor:
        from torch.nn.functional import silu

        gate, up = multiply(rows_RH, gate_up_EIH, ends).chunk(2, dim=-1)
        return multiply(silu(gate) * up, down_EHI, ends)

    return Work(run, (rows_RH, gate_up_EIH, down_EHI))


def _multiply(rows_RK: torch.Tensor, weight_ENK: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import grouped_mm

    return grouped_mm(rows_RK, weight_ENK.transpose(1, 2), offs=ends)


def _float8_multiply() -> Callable[..., torch.Tensor]:
    """Return :func:`_multiply` with a forward of 8-bit numbers, one scale a row of either side."""
    import torch
    from torch.nn.functional import ScalingType, grouped_mm, scaled_grouped_mm  # type: ignore[attr-defined]

    def cast(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = tensor.abs().amax(dim=-1, keepdim=True).float().clamp(min=1e-12) / FLOAT8_LARGEST
        return (tensor / scale).to(torch.float8_e4m3fn), scale[..., 0]

    class Multiply(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows_RK: torch.Tensor, weight_ENK: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(rows_RK, weight_ENK, ends)
            (rows, row_scale), (weight, weight_scale) = cast(rows_RK), cast(weight_ENK)
            return scaled_grouped_mm(
                rows, weight.transpose(1, 2), row_scale, ScalingType.RowWise, weight_scale, ScalingType.RowWise,
                offs=ends, output_dtype=rows_RK.dtype,
            )  # fmt: skip

        @staticmethod
        def backward(ctx: Any, upstream_RN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
            rows_RK, weight_ENK, ends = ctx.saved_tensors
            upstream_RN = upstream_RN.contiguous()
            return (
                grouped_mm(upstream_RN, weight_ENK, offs=ends),
                grouped_mm(upstream_RN.transpose(0, 1), rows_RK, offs=ends),
                None,
            )

    multiply: Callable[..., torch.Tensor] = Multiply.apply
    return multiply


def dense_work(case: Case, backend: TorchBackend) -> Work:
    """Return the run of one GEMM, ``tokens x k @ k x n``, and what it is differentiated by."""
    f = case.features
    tokens, weight = backend.tensor(f["tokens"], f["k"]), backend.tensor(f["n"], f["k"], scale=f["k"] ** -0.5)

    def run() -> torch.Tensor:
        from torch.nn.functional import linear

        return linear(tokens, weight)

    return Work(run, (tokens, weight))

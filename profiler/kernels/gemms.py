"""The GEMMs: plain dense ones, the router with its permutation, and the grouped expert feed-forward of one EP rank.

The router's run: logits, softmax, the top k experts of every token, sorting the (token, expert) pairs by expert,
gathering their rows in that order, and the weighted sum of a token's rows back at its place. The exchange and the
experts between them are operations of their own.

Shape suffixes: T tokens, E experts, H hidden size, I expert width, R routed rows sorted by expert; of the router K
experts chosen per token; of one grouped GEMM K inner and N output width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.nn.functional import grouped_mm, linear, silu, softmax

from profiler.cases.case import Case
from profiler.device.backend import Run, TorchBackend
from profiler.params import FLOAT8


def dense_work(case: Case, backend: TorchBackend) -> Run:
    """Return the run of one GEMM, ``tokens x k @ k x n``."""
    f = case.features
    tokens, weight = backend.tensor(f["tokens"], f["k"]), backend.tensor(f["n"], f["k"], scale=f["k"] ** -0.5)
    return lambda: linear(tokens, weight), (tokens, weight)


def router_work(case: Case, backend: TorchBackend) -> Run:
    """Return the run of a router with permutation and un-permutation."""
    f = case.features
    tokens_TH = backend.tensor(f["tokens"], f["hidden_size"])
    weight_EH = backend.tensor(f["num_experts"], f["hidden_size"], scale=f["hidden_size"] ** -0.5)

    def run() -> torch.Tensor:
        # Probabilities in float32, as trainers take them: experts of a token are close to one another.
        shares_TE = softmax(linear(tokens_TH, weight_EH).float(), dim=-1)
        share_TK, expert_TK = shares_TE.topk(f["top_k"], dim=-1)
        share_TK = share_TK / share_TK.sum(dim=-1, keepdim=True)
        order_R = expert_TK.flatten().argsort(stable=True)
        rows_RH = tokens_TH.index_select(0, order_R // f["top_k"])
        rows_TKH = rows_RH.index_select(0, order_R.argsort()).unflatten(0, (f["tokens"], f["top_k"]))
        return (share_TK.to(rows_TKH.dtype)[:, None] @ rows_TKH)[:, 0]

    return run, (tokens_TH, weight_EH)


def experts_work(case: Case, backend: TorchBackend) -> Run:
    """Return the run of a grouped feed-forward: gate and up in one, SwiGLU, down.

    A case of type ``float8_e4m3fn`` multiplies in 8 bits forward, the casts of rows and weights included, and in the
    sweep's type backward, as trainers do.
    """
    f = case.features
    if sum(case.parts) != f["rows"]:
        raise ValueError(f"Expected the experts' parts to add up to {f['rows']} rows, got {sum(case.parts)}.")
    hidden, inter, experts = f["hidden_size"], f["inter_size"], f["local_experts"]
    rows_RH = backend.tensor(f["rows"], hidden)
    gate_up_EIH = backend.tensor(experts, 2 * inter, hidden, scale=hidden**-0.5)
    down_EHI = backend.tensor(experts, hidden, inter, scale=inter**-0.5)
    # Ends of the groups; an expert without rows repeats its neighbour's.
    ends = torch.tensor(case.parts, device=backend.device).cumsum(0).to(torch.int32)
    multiply: Callable[..., torch.Tensor] = _Float8.apply if case.dtype == FLOAT8 else _multiply

    def run() -> torch.Tensor:
        gate, up = multiply(rows_RH, gate_up_EIH, ends).chunk(2, dim=-1)
        return multiply(silu(gate) * up, down_EHI, ends)

    return run, (rows_RH, gate_up_EIH, down_EHI)


def _multiply(rows_RK: torch.Tensor, weight_ENK: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return grouped_mm(rows_RK, weight_ENK.transpose(1, 2), offs=ends)


class _Float8(torch.autograd.Function):
    """:func:`_multiply` with a forward of 8-bit numbers, one scale a row of either side."""

    @staticmethod
    def forward(ctx: Any, rows_RK: torch.Tensor, weight_ENK: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows_RK, weight_ENK, ends)
        (rows, row_scale), (weight, weight_scale) = _cast(rows_RK), _cast(weight_ENK)
        multiply: Any = functional.scaled_grouped_mm  # type: ignore[attr-defined]
        by_row = functional.ScalingType.RowWise
        scales = (row_scale, by_row, weight_scale, by_row)
        output: torch.Tensor = multiply(rows, weight.transpose(1, 2), *scales, offs=ends, output_dtype=rows_RK.dtype)
        return output

    @staticmethod
    def backward(ctx: Any, upstream_RN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows_RK, weight_ENK, ends = ctx.saved_tensors
        upstream_RN = upstream_RN.contiguous()
        to_weight = grouped_mm(upstream_RN.transpose(0, 1), rows_RK, offs=ends)
        return grouped_mm(upstream_RN, weight_ENK, offs=ends), to_weight, None


def _cast(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = tensor.abs().amax(dim=-1, keepdim=True).float().clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (tensor / scale).to(torch.float8_e4m3fn), scale[..., 0]

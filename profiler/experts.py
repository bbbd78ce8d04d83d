"""The GEMMs: the grouped expert feed-forward of one EP rank, and plain dense ones.

Shape suffixes: R routed rows sorted by expert, E local experts, H hidden size, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from profiler.cases import Case

if TYPE_CHECKING:
    import torch

    from profiler.backends import TorchBackend


def experts_work(case: Case, backend: TorchBackend) -> tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, ...]]:
    """Return the run of a grouped feed-forward (gate and up in one, SwiGLU, down) and what it is differentiated by."""
    import torch

    f = case.features
    hidden, inter, experts = f["hidden_size"], f["inter_size"], f["local_experts"]
    rows_RH = backend.tensor(f["rows"], hidden)
    gate_up_EIH = backend.tensor(experts, 2 * inter, hidden, scale=hidden**-0.5)
    down_EHI = backend.tensor(experts, hidden, inter, scale=inter**-0.5)
    # Ends of the groups; an expert without rows repeats its neighbour's.
    ends = torch.tensor(case.parts, device=backend.device).cumsum(0).to(torch.int32)

    def run() -> torch.Tensor:
        from torch.nn.functional import grouped_mm, silu

        gate, up = grouped_mm(rows_RH, gate_up_EIH.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        return grouped_mm(silu(gate) * up, down_EHI.transpose(1, 2), offs=ends)

    return run, (rows_RH, gate_up_EIH, down_EHI)


def dense_work(case: Case, backend: TorchBackend) -> tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, ...]]:
    """Return the run of one GEMM, ``tokens x k @ k x n``, and what it is differentiated by."""
    f = case.features
    tokens, weight = backend.tensor(f["tokens"], f["k"]), backend.tensor(f["n"], f["k"], scale=f["k"] ** -0.5)

    def run() -> torch.Tensor:
        from torch.nn.functional import linear

        return linear(tokens, weight)

    return run, (tokens, weight)

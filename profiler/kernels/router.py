"""The router of one MoE layer on one rank, and what it takes to bring rows into expert order and back.

Timed: logits, softmax, the top k experts of every token, sorting the (token, expert) pairs by expert, gathering their
rows in that order, and the weighted sum of a token's rows back at its place. The exchange and the experts between them
are operations of their own.

Shape suffixes: T tokens, K experts chosen per token, R rows = T x K in expert order, E experts, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from profiler.cases.case import Case
from profiler.kernels.choose import Work

if TYPE_CHECKING:
    import torch

    from profiler.device.backend import TorchBackend


def router_work(case: Case, backend: TorchBackend) -> Work:
    """Return the run of a router with permutation and un-permutation, and what it is differentiated by."""
    f = case.features
    tokens_TH = backend.tensor(f["tokens"], f["hidden_size"])
    weight_EH = backend.tensor(f["num_experts"], f["hidden_size"], scale=f["hidden_size"] ** -0.5)

    def run() -> torch.Tensor:
        from torch.nn.functional import linear, softmax

        # Probabilities in float32, as trainers take them: experts of a token are close to one another.
        shares_TE = softmax(linear(tokens_TH, weight_EH).float(), dim=-1)
        share_TK, expert_TK = shares_TE.topk(f["top_k"], dim=-1)
        share_TK = share_TK / share_TK.sum(dim=-1, keepdim=True)
        order_R = expert_TK.flatten().argsort(stable=True)
        rows_RH = tokens_TH.index_select(0, order_R // f["top_k"])
        back_R = order_R.argsort()
        rows_TKH = rows_RH.index_select(0, back_R).unflatten(0, (f["tokens"], f["top_k"]))
        return (share_TK.to(rows_TKH.dtype)[:, None] @ rows_TKH)[:, 0]

    return Work(run, (tokens_TH, weight_EH))

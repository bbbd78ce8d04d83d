"""Variable-length causal attention of one cell: softmax(Q K^T) V over packed sequences.

Shape suffixes: T packed tokens, H heads, G key-value heads, D head dimension, S tokens of one sequence, N blocks of a
windowed sequence, W window.

Values narrower than queries (multi-head latent shapes) are padded to their width and the result is cut, inside the
timed run: the flash kernels of both devices want one width, and trainers do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from profiler.cases.case import Case, filled
from profiler.device.backend import Run, TorchBackend

Core = Callable[..., torch.Tensor]
"""From queries, keys and values to outputs."""


def attention_work(case: Case, backend: TorchBackend, core: Core | None = None) -> Run:
    """Return the run of an attention case, by another ``core`` than torch's own if given."""
    f = case.features
    query_THD = backend.tensor(f["tokens"], f["num_heads"], f["qk_head_dim"])
    key_TGD = backend.tensor(f["tokens"], f["num_kv_heads"], f["qk_head_dim"])
    value_TGD = backend.tensor(f["tokens"], f["num_kv_heads"], f["v_head_dim"])
    if core is None and backend.kind == "cuda":
        from torch.nn.attention.varlen import varlen_attn

        core = packed_core(varlen_attn, case, backend, (-1, 0), enable_gqa=f["num_heads"] != f["num_kv_heads"])
    core = core or _sequence_core(case)
    extra = f["qk_head_dim"] - f["v_head_dim"]

    def run() -> torch.Tensor:
        output = core(query_THD, key_TGD, pad(value_TGD, (0, extra)) if extra > 0 else value_TGD)
        return output[..., : f["v_head_dim"]] if extra > 0 else output

    return run, (query_THD, key_TGD, value_TGD)


def packed_core(attend: Any, case: Case, backend: TorchBackend, no_window: tuple[int, int], **options: Any) -> Core:
    """Return the core of a kernel for packed sequences; ``no_window`` is how it writes that all keys are seen."""
    (starts, longest), window = packed_starts(case, backend), case.features["window"]
    # The kernels count keys to the left of the query, we count the query itself too.
    reach = (window - 1, 0) if window else no_window

    def core(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        packed = (starts, starts, longest, longest)
        output: torch.Tensor = attend(query, key, value, *packed, window_size=reach, **options)
        return output

    return core


def packed_starts(case: Case, backend: TorchBackend) -> tuple[torch.Tensor, int]:
    """Return where the sequences of a cell start and end, int32, and a bound on their lengths, for packed kernels.

    Empty sequences are left out, and the bound is at least 2: some versions fail on length 0, or take a longest length
    of 1 for decoding.
    """
    starts = torch.tensor((0, *filled(case.parts)), device=backend.device).cumsum(0).to(torch.int32)
    return starts, max(2, case.features["max_length"])


def _sequence_core(case: Case) -> Core:
    lengths, window = list(filled(case.parts)), case.features["window"]

    def core(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # split, not slices: the gradient of n slices would write n times the whole tensor.
        packed = zip(*(tensor.transpose(0, 1).split(lengths, dim=1) for tensor in (query, key, value)), strict=True)
        outputs = [_windowed(q, k, v, window) if 0 < window < q.shape[1] else _causal(q, k, v) for q, k, v in packed]
        return torch.cat(outputs, dim=1).transpose(0, 1)

    return core


def _causal(query_HSD: torch.Tensor, key_GSD: torch.Tensor, value_GSD: torch.Tensor) -> torch.Tensor:
    batches = (query_HSD[None], key_GSD[None], value_GSD[None])
    return scaled_dot_product_attention(*batches, is_causal=True, enable_gqa=len(query_HSD) != len(key_GSD))[0]


def _windowed(query_HSD: torch.Tensor, key_GSD: torch.Tensor, value_GSD: torch.Tensor, window: int) -> torch.Tensor:
    """Return causal attention in which a query sees itself and ``window - 1`` keys before it.

    Queries go in blocks of one window, each against its own block of keys and the one before: the work grows with
    tokens x window, not with their square.
    """
    heads, tokens, _ = query_HSD.shape
    blocks = -(-tokens // window)
    short = blocks * window - tokens
    query_NHWD = pad(query_HSD, (0, 0, 0, short)).unflatten(1, (blocks, window)).transpose(0, 1)
    keys, values = (
        # One empty block in front, then overlapping views of two blocks each.
        pad(tensor, (0, 0, window, short)).unfold(1, 2 * window, window).permute(1, 0, 3, 2)
        for tensor in (key_GSD, value_GSD)
    )
    mask = torch.ones(window, 2 * window, dtype=torch.bool, device=query_HSD.device).tril(window).triu(1)
    mask = mask.expand(blocks, 1, -1, -1).clone()
    mask[0, ..., :window] = False
    output = scaled_dot_product_attention(query_NHWD, keys, values, attn_mask=mask, enable_gqa=heads != len(key_GSD))
    return output.transpose(0, 1).flatten(1, 2)[:, :tokens]

"""Gated delta-rule attention of one cell, in chunks: the core of a linear attention layer (Qwen3-Next, Kimi-Linear).

Token by token, with keys k and queries q of length 1, a decay a = exp(g) and a write strength b:

    S <- a S;   S <- S + k (b (v - S^T k))^T;   o = S^T q / sqrt(key dim)

In chunks (Yang et al., Gated Delta Networks, 2024): inside a chunk the writes solve one unit-triangular system, and
between chunks only the state S passes. Sequences are padded to whole chunks inside the timed run, so that a chunk never
crosses two of them; padding writes nothing, and is cut from the output. Work grows with tokens. The sequences that
still have a next chunk form a prefix (longest first), so that one step of the chain serves all of them.

Shape suffixes: T packed tokens, N chunks of all sequences, B sequences in one step of the chain, H value heads, G key
heads, C tokens of a chunk, K key dimension, V value dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import normalize, softplus

from profiler.cases.case import CHUNK_TOKENS, Case, filled
from profiler.device.backend import Run, TorchBackend
from profiler.kernels.attention import Core


def linear_attention_work(case: Case, backend: TorchBackend, core: Core | None = None) -> Run:
    """Return the run of a linear attention case, by another ``core`` than torch's own if given."""
    f = case.features
    query_TGK = backend.tensor(f["tokens"], f["num_kv_heads"], f["qk_head_dim"])
    key_TGK = backend.tensor(f["tokens"], f["num_kv_heads"], f["qk_head_dim"])
    value_THV = backend.tensor(f["tokens"], f["num_heads"], f["v_head_dim"])
    decay_TH, write_TH = (backend.tensor(f["tokens"], f["num_heads"]) for _ in range(2))
    shared = f["num_heads"] // f["num_kv_heads"]
    # From queries and keys (normalised, one per value head), values, log decays and write strengths to outputs.
    core = core or chunked_core(filled(case.parts), backend)

    def run() -> torch.Tensor:
        query, key = (normalize(t, dim=-1).repeat_interleave(shared, dim=1) for t in (query_TGK, key_TGK))
        return core(query, key, value_THV, -softplus(decay_TH.float()), write_TH.sigmoid())

    return run, (query_TGK, key_TGK, value_THV, decay_TH, write_TH)


def chunked_core(lengths: tuple[int, ...], backend: TorchBackend) -> Core:
    """Return torch's own core for packed sequences; it computes in float32 whatever the type of its inputs."""
    place_T, steps = _chunk_plan(lengths, backend.device)

    def chunked(packed: torch.Tensor) -> torch.Tensor:
        """Scatter [T, H, ...] into zero-padded chunks [N, H, C, ...]."""
        spread = packed.new_zeros(sum(steps) * CHUNK_TOKENS, *packed.shape[1:], dtype=packed.float().dtype)
        return spread.index_copy(0, place_T, packed.float()).unflatten(0, (-1, CHUNK_TOKENS)).transpose(1, 2)

    def core(query_THK: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        parts = _inside_chunks(*map(chunked, (query_THK * query_THK.shape[-1] ** -0.5, *others)))
        output_NHCV = _chain([part.split(steps) for part in parts])
        return output_NHCV.transpose(1, 2).flatten(0, 1).index_select(0, place_T).to(query_THK.dtype)

    return core


def _inside_chunks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay_NHC: torch.Tensor, write_NHC: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return what the chain needs of every chunk, all chunks at once.

    New values and what they lose by the state, scores, queries and keys of the state, and the share of it kept.
    """
    reach_NHC = decay_NHC.cumsum(-1)
    # Differences above the diagonal are positive and would overflow: masked before the exponential.
    fade = (reach_NHC[..., :, None] - reach_NHC[..., None, :]).tril().exp().tril()
    since_start, last = reach_NHC.exp()[..., None], reach_NHC[..., -1:]
    written = write_NHC[..., None] * key
    system = (written @ key.transpose(-1, -2) * fade).tril(-1)
    targets = torch.cat([write_NHC[..., None] * value, written * since_start], dim=-1)
    # unitriangular: the ones on the diagonal are not read.
    solved = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)
    new_value, state_key = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    scores = query @ key.transpose(-1, -2) * fade
    end_key = key * (last - reach_NHC).exp()[..., None]
    return new_value, state_key, scores, query * since_start, end_key, last.exp()


def _chain(parts: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """Pass the state from chunk to chunk; return the outputs [N, H, C, V] in the order of the chunks."""
    outputs, state_BHKV = [], None
    for new_value, state_key, scores, state_query, end_key, kept in zip(*parts, strict=True):
        if state_BHKV is None:
            outputs.append(scores @ new_value)
            state_BHKV = end_key.transpose(-1, -2) @ new_value
            continue
        state = state_BHKV[: len(new_value)]
        value = new_value - state_key @ state
        outputs.append(state_query @ state + scores @ value)
        state_BHKV = state * kept[..., None] + end_key.transpose(-1, -2) @ value
    return torch.cat(outputs)


def _chunk_plan(lengths: tuple[int, ...], device: Any) -> tuple[torch.Tensor, list[int]]:
    """Return the padded place of every token, and the number of sequences at each step of the chain.

    Chunks are ordered by step (the first chunk of every sequence, then the second ones), sequences longest first.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    most = -(-lengths[order[0]] // CHUNK_TOKENS)
    steps = [sum(length > step * CHUNK_TOKENS for length in lengths) for step in range(most)]
    first = torch.tensor([0, *steps]).cumsum(0)
    rank = torch.empty(len(lengths), dtype=torch.int64)
    rank[torch.tensor(order)] = torch.arange(len(lengths))
    sizes = torch.tensor(lengths)
    sequence_T = torch.arange(len(lengths)).repeat_interleave(sizes)
    position_T = torch.arange(int(sizes.sum())) - (sizes.cumsum(0) - sizes)[sequence_T]
    chunk_T = first[position_T // CHUNK_TOKENS] + rank[sequence_T]
    return (chunk_T * CHUNK_TOKENS + position_T % CHUNK_TOKENS).to(device), steps

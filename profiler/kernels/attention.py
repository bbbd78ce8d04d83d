"""Attention cores of one cell over packed sequences: causal softmax(Q K^T) V, and the gated delta rule in chunks.

Values narrower than queries (multi-head latent shapes) are padded to their width and the result is cut, inside the
timed run: the flash kernels of both devices want one width, and trainers do the same.

The gated delta rule (linear attention: Qwen3-Next, Kimi-Linear) is, token by token, with keys k and queries q of length
1, a decay a = exp(g) and a write strength b:

    S <- a S;   S <- S + k (b (v - S^T k))^T;   o = S^T q / sqrt(key dim)

In chunks (Yang et al., Gated Delta Networks, 2024): inside a chunk the writes solve one unit-triangular system, and
between chunks only the state S passes. Sequences are padded to whole chunks inside the timed run, so that a chunk never
crosses two of them; padding writes nothing, and is cut from the output. Work grows with tokens. The sequences that
still have a next chunk form a prefix (longest first), so that one step of the chain serves all of them.

Shape suffixes: T packed tokens, H heads of queries or linear values, G heads of keys, D head dimension, S tokens of one
sequence, N blocks of a windowed sequence or chunks of all sequences, W window; of linear attention B sequences in one
step of the chain, C tokens of a chunk, K key dimension, V value dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import normalize, pad, scaled_dot_product_attention, softplus

from profiler.cases.case import CHUNK_TOKENS, Case, filled
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


def linear_attention_work(case: Case, backend: TorchBackend, core: Core | None = None) -> Run:
    """Return the run of a linear attention case, by another ``core`` than torch's own if given."""
    f = case.features
    query_TGK, key_TGK = (backend.tensor(f["tokens"], f["num_kv_heads"], f["qk_head_dim"]) for _ in range(2))
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
    """Return all chunks' new values, their loss by the state, scores, the state's queries and keys, its share kept."""
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

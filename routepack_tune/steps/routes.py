"""Decode token-level routes into counts, refusing what cannot be right.

A *route* is the ``top_k`` distinct logical expert ids of one token in one MoE layer. ``-1`` means unknown: the token
adds no expert load of its own and is costed as an average one. Rows are never shifted or stretched to fit.

Shape suffixes: N samples, T tokens, L MoE layers, K top-k, E experts.
"""

from __future__ import annotations

import warnings

import numpy as np

from profiler.errors import RoutePackError

STALE_RUN_TOKENS = 16
"""So many identical rows in a row, over all layers, look like a stale buffer rather than like text."""


def count_routes(
    expert_ids: np.ndarray, offsets: np.ndarray, lengths: np.ndarray, names: np.ndarray, num_experts: int, source: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return counts [N, L, E] int32 and known tokens [N] int64 of routes ``expert_ids`` [T, L, K].

    Sample i owns the rows ``offsets[i]:offsets[i + 1]``: as many as its length, or one fewer (engines do not route the
    last sampled token).
    """
    _check_offsets(offsets, len(lengths), len(expert_ids), source)
    _, layers, _ = expert_ids.shape
    counts = np.zeros((len(lengths), layers, num_experts), dtype=np.int32)
    known = np.zeros(len(lengths), dtype=np.int64)
    stale: list[str] = []
    for i, name in enumerate(names.tolist()):
        begin, end = int(offsets[i]), int(offsets[i + 1])
        where = f"{source}: sample {name!r}"
        if end - begin not in (int(lengths[i]), int(lengths[i]) - 1):
            length = int(lengths[i])
            raise RoutePackError(
                f"{where} has {end - begin} rows of routes for a length of {length}: expected {length}, or "
                f"{length - 1} when the last token was not routed. Write one row a token, -1 where unknown."
            )
        ids = expert_ids[begin:end].astype(np.int64)  # widened before any arithmetic: engines store 8 and 16 bits
        counts[i], known[i] = _count_sample(ids, num_experts, where)
        run = _stale_run(ids)
        if run is not None:
            stale.append(f"sample {name!r} rows {run[0]}-{run[1]}")
    if stale:
        warnings.warn(
            f"{source}: {len(stale)} sample(s) hold long runs of identical routes in all layers (first: {stale[0]}): "
            "possibly a stale buffer. Mark such rows -1 (unknown).",
            stacklevel=3,
        )
    return counts, known


def _count_sample(ids: np.ndarray, num_experts: int, where: str) -> tuple[np.ndarray, int]:
    _, layers, top_k = ids.shape
    wrong = np.argwhere((ids < -1) | (ids >= num_experts))
    if wrong.size:
        token, layer, k = wrong[0]
        value = int(ids[token, layer, k])
        hint = (
            "Ids at or above the number of experts are usually physical slots of a rebalanced engine (redundant "
            "experts): record logical ids."
            if value >= num_experts
            else "Negative ids other than -1 (unknown) are usually a wrapped 8-bit store: record wider integers."
        )
        raise RoutePackError(
            f"{where} layer {layer}: token {token} has expert id {value}, outside 0..{num_experts - 1}. {hint}"
        )
    unknown = ids < 0
    known_rows = ~unknown.any(axis=(1, 2))
    mixed = np.argwhere(unknown.any(axis=(1, 2)) & ~unknown.all(axis=(1, 2)))
    if mixed.size:
        token = int(mixed[0, 0])
        layer = int(np.argwhere(unknown[token])[0, 0])
        raise RoutePackError(
            f"{where} layer {layer}: token {token} mixes ids and -1. A token's routes are known in all layers or in "
            "none: mark the whole row -1."
        )
    ordered = np.sort(ids[known_rows], axis=2)
    twice = np.argwhere(ordered[:, :, 1:] == ordered[:, :, :-1])
    if twice.size:
        row, layer, k = twice[0]
        token = int(np.flatnonzero(known_rows)[row])
        raise RoutePackError(
            f"{where} layer {layer}: token {token} names expert {int(ordered[row, layer, k])} twice; the {top_k} ids "
            "of a token are distinct. Check the layout of the array: [tokens, layers, top_k]."
        )
    keys = ordered + (np.arange(layers) * num_experts)[:, None]
    counts = np.bincount(keys.ravel(), minlength=layers * num_experts).reshape(layers, num_experts)
    return counts.astype(np.int32), int(known_rows.sum())


def _stale_run(ids: np.ndarray) -> tuple[int, int] | None:
    """Return the first and last row of the longest run of identical known rows, if it is suspiciously long."""
    if len(ids) < STALE_RUN_TOKENS:
        return None
    same = (ids[1:] == ids[:-1]).all(axis=(1, 2)) & (ids[1:] >= 0).all(axis=(1, 2))
    breaks = np.flatnonzero(np.concatenate(([True], ~same, [True])))
    runs = np.diff(breaks)
    longest = int(runs.argmax())
    if runs[longest] < STALE_RUN_TOKENS:
        return None
    return int(breaks[longest]), int(breaks[longest + 1] - 1)


def _check_offsets(offsets: np.ndarray, num_samples: int, num_rows: int, source: str) -> None:
    if offsets.shape != (num_samples + 1,):
        raise RoutePackError(
            f"{source}: expected offsets [{num_samples + 1}] (one more than samples), got {list(offsets.shape)}."
        )
    if offsets[0] != 0 or offsets[-1] != num_rows or (np.diff(offsets) < 0).any():
        raise RoutePackError(
            f"{source}: offsets must rise from 0 to the {num_rows} rows of expert_ids; they run from {int(offsets[0])} "
            f"to {int(offsets[-1])}. Write the array again."
        )

"""Token-level routes: which rows a router made, and how often each expert is in them.

A *route* is the K distinct expert ids of one token in one MoE layer; -1 is unknown. Rows that no router can have made
are unknown too: engines and frameworks leave buffers in them that were never filled. Every reader of routes ends here.

Shape suffixes: N samples, T tokens, L MoE layers, K top-k, E logical experts.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence

import numpy as np

from profiler.errors import RoutePackError

LEAST_NUMBERS = 16
"""Fewer numbers that look unfilled may be routes by chance: zeros at the ends of top-1 samples, 0, 1, 2... in a row."""
STALE_RUN_TOKENS = 16
"""So many identical rows in a row, over all layers, look like a stale buffer rather than like text."""
TOLD_SHARE, MOST_SHARE = 0.1, 0.9
"""Unfilled rows above the first share are worth a warning (prompts from a prefix cache have some); above the second
routes were not captured."""
_LOG = logging.getLogger("routepack_tune")


def count_routes(
    ids: np.ndarray, offsets: np.ndarray, lengths: np.ndarray, num_experts: int, where: Sequence[str], source: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return counts [N, L, E] int32 and known tokens [N] int64 of routes ``ids`` [T, L, K].

    Sample i owns the rows ``offsets[i]:offsets[i + 1]``: as many as its length, or one fewer (engines do not route the
    last sampled token). ``where`` names every sample for an error.
    """
    rows = _rows(offsets, lengths, len(ids), where, source)
    counts = np.zeros((len(lengths), ids.shape[1], num_experts), dtype=np.int32)
    known = np.zeros(len(lengths), dtype=np.int64)
    ends = _zero_ends(ids, offsets, rows == lengths)
    lost = int(np.iinfo(ids.dtype).max) if ids.dtype.kind == "u" else None
    unfilled_L, unfilled = np.zeros(ids.shape[1], dtype=np.int64), 0
    stale: list[str] = []
    for i, begin in enumerate(offsets[:-1]):
        own = ids[begin : offsets[i + 1]].astype(np.int64)  # widened here: engines store 8 and 16 bits
        blank_TL = unfilled_rows(own) | ends[begin : offsets[i + 1], None]
        unfilled_L += blank_TL.sum(axis=0)
        unfilled += int(blank_TL.any(axis=1).sum())
        own[blank_TL.any(axis=1)] = -1
        counts[i], known[i] = _count_sample(own, num_experts, lost, where[i])
        if (run := _stale_run(own)) is not None:
            stale.append(f"{where[i]} rows {run[0]}-{run[1]}")
    _tell_unfilled(unfilled, unfilled_L, len(ids), source)
    if stale:
        warnings.warn(
            f"{len(stale)} sample(s) hold long runs of identical routes in all layers (first: {stale[0]}): possibly a "
            "stale buffer. Mark such rows -1 (unknown).",
            stacklevel=3,
        )
    return counts, known


def first(wrong: np.ndarray) -> list[list[int]]:
    """Return the indices of the first true value: no entry, or one."""
    flat = int(wrong.argmax()) if wrong.size else 0
    return [[int(i) for i in np.unravel_index(flat, wrong.shape)]] if wrong.size and wrong.flat[flat] else []


def unfilled_rows(ids: np.ndarray) -> np.ndarray:
    """Return which routes [T, L] of ``ids`` [T, L, K] no router can have made.

    They are one expert K times (which with top-1 is a route), or 0, 1, 2... in every layer.
    """
    num_layers, top_k = ids.shape[1:]
    if top_k == 1:
        return np.zeros(ids.shape[:2], dtype=bool)
    blank = (ids == ids[:, :, :1]).all(axis=2) & (ids[:, :, 0] >= 0)
    if num_layers * top_k >= LEAST_NUMBERS:
        blank |= (ids == np.arange(top_k)).all(axis=(1, 2))[:, None]
    return blank


def _rows(offsets: np.ndarray, lengths: np.ndarray, num_rows: int, where: Sequence[str], source: str) -> np.ndarray:
    """Return the rows of each sample, [N], after checking that offsets and lengths agree."""
    rows = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != num_rows or (rows < 0).any():
        raise RoutePackError(
            f"{source}: offsets must rise from 0 to the {num_rows} rows of expert_ids; they run from "
            f"{offsets[0]} to {offsets[-1]}. Write the array again."
        )
    for (i,) in first((rows != lengths) & (rows != lengths - 1)):
        raise RoutePackError(
            f"{where[i]} has {rows[i]} rows of routes for a length of {lengths[i]}: expected {lengths[i]}, or "
            f"{lengths[i] - 1} when the last token was not routed. Write one row a token, -1 where unknown."
        )
    return rows


def _zero_ends(ids: np.ndarray, offsets: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return which tokens [T] of top-1 routes are a framework's padding.

    The last rows of samples that have a row for every token (``whole``) are, where all of them are 0 in every layer and
    no other row is.
    """
    none = np.zeros(len(ids), dtype=bool)
    if ids.shape[2] > 1 or not whole.all():
        return none
    last = none.copy()
    last[offsets[1:] - 1] = True
    enough = last.sum() * ids.shape[1] >= LEAST_NUMBERS
    return last if enough and np.array_equal((ids == 0).all(axis=(1, 2)), last) else none


def _stale_run(ids: np.ndarray) -> tuple[int, int] | None:
    """Return the first and last row of the longest run of equal known rows, if it is long."""
    same = ((ids[1:] == ids[:-1]) & (ids[1:] >= 0)).all(axis=(1, 2))
    ends = np.flatnonzero(np.concatenate(([True], ~same, [True])))
    longest = np.diff(ends).argmax()
    return (int(ends[longest]), int(ends[longest + 1]) - 1) if np.diff(ends)[longest] >= STALE_RUN_TOKENS else None


def _tell_unfilled(unfilled: int, unfilled_L: np.ndarray, num_rows: int, source: str) -> None:
    """Say how many rows no router made, by layer; refuse a batch of hardly any other."""
    if not unfilled:
        return
    most, least = int(unfilled_L.argmax()), int(unfilled_L.argmin())
    by_layer = f"{unfilled_L[most]} in each MoE layer"
    if unfilled_L[most] != unfilled_L[least]:
        by_layer = f"{unfilled_L[most]} in MoE layer {most}, {unfilled_L[least]} in MoE layer {least}"
    said = f"{unfilled} of {num_rows} rows of routes are padding (one expert throughout, or 0, 1, 2...; {by_layer})"
    if unfilled > MOST_SHARE * num_rows:
        raise RoutePackError(
            f"{source}: routes were not captured: {said}. Enable routing replay in the rollout, or write -1 for what "
            "is unknown."
        )
    level = logging.WARNING if unfilled > TOLD_SHARE * num_rows else logging.INFO
    _LOG.log(level, "%s: %s: unknown.", source, said)


def _count_sample(ids: np.ndarray, num_experts: int, lost: int | None, where: str) -> tuple[np.ndarray, int]:
    """Return one sample's counts [L, E] and its number of known tokens; ``lost`` is what -1 became, if it did."""
    ids = np.sort(ids, axis=2)
    known = ids.max(axis=(1, 2)) >= 0
    has = f"has expert id {{id}}, outside 0..{num_experts - 1}:"
    wrong = (
        (
            ids == lost if lost is not None and lost >= num_experts else np.zeros((0, 0, 0), dtype=bool),
            f"{has} the largest of its type without a sign, a lost -1 (unknown)? Record signed integers.",
        ),
        (ids >= num_experts, f"{has} a physical slot of an engine with redundant experts? Record logical ids."),
        (ids < -1, f"{has} negative but not -1 (unknown), a wrapped 8-bit store? Record wider integers."),
        (
            (ids < 0) & known[:, None, None],
            "mixes ids and -1: its routes are known in all layers or in none. Mark the whole row -1.",
        ),
        (
            (np.diff(ids, axis=2) == 0) & known[:, None, None],
            "names expert {id} twice. Check the layout of the array: [tokens, layers, top_k].",
        ),
    )
    for places, problem in wrong:
        for token, layer, k in first(places):
            said = problem.format(id=ids[token, layer, k])
            raise RoutePackError(f"{where} MoE layer {layer}: token {token} {said}")
    layers = ids.shape[1]
    keys = ids[known] + (np.arange(layers) * num_experts)[:, None]
    counts = np.bincount(keys.ravel(), minlength=layers * num_experts).reshape(layers, num_experts)
    return counts, int(known.sum())

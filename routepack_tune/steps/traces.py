"""Step batches on disk: the one door through which rollouts' lengths and routes enter.

A step batch is an ``.npz`` with ``lengths [N]`` and either ``expert_counts [N, L, E]`` or token-level routes
``expert_ids [T, L, K]`` with ``offsets [N + 1]``; ``sample_ids``, ``prompt_ids`` and ``known_tokens`` are optional.
A *route* is the K distinct logical expert ids of one token in one MoE layer; -1 is unknown: the token adds no expert
load of its own and is costed as an average one; so is one whose K ids are all the same, which is a framework's padding.
Every check names the file, the sample, the layer and the value.

Shape suffixes: N samples, T tokens, L MoE layers (or all hidden layers), K top-k, E logical experts.
"""

from __future__ import annotations

import glob
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler.errors import RoutePackError, explained
from profiler.readers import read_npz

if TYPE_CHECKING:
    from profiler import ModelSpec
    from search import StepBatch

LAYOUT = dict.fromkeys(("lengths", "sample_ids", "prompt_ids", "known_tokens"), "N")
LAYOUT |= {"expert_counts": "NLE", "expert_ids": "TLK", "offsets": "O"}
"""Names that are read, with their axes; others are left alone."""
AXES = {"N": "samples", "T": "tokens", "L": "layers", "E": "experts", "K": "experts a token", "O": "offsets"}
EXPECTED = {
    "N": "lengths has {N} samples.",
    "O": "lengths has {N} samples.",
    "L": "{model} has {L} MoE layers ({hidden} hidden ones, which may be given too). Is it a batch of another model?",
    "E": "{model} has {E}. More are usually physical slots of a rebalanced engine (redundant experts): record logical "
    "experts. Or is it a batch of another model?",
    "K": "{model} has {K}. Is it a batch of another model?",
}
"""What an axis of another size should have been."""
_LOG = logging.getLogger("routepack_tune")
MAX_BYTES = 16 << 30
"""What the arrays of one step may take."""
LEAST_ZEROS = 16
"""Fewer zeros at the ends of top-1 samples may be routes by chance."""
STALE_RUN_TOKENS = 16
"""So many identical rows in a row, over all layers, look like a stale buffer rather than like text."""


def load_step_batch(path: Path | str, spec: ModelSpec, max_tokens: int | None = None) -> StepBatch:
    """Read and check one step batch.

    Raises
    ------
    RoutePackError
        If the file is missing, truncated or pickled, an array is missing or of the wrong shape or type, a value cannot
        be right for ``spec``, or a sample is longer than ``max_tokens``.
    """
    from search import check_lengths

    if Path(path).is_dir():
        raise RoutePackError(f"Step batch {path} is a folder. Give one .npz of it.")
    batch = batch_from_arrays(read_npz(path, "Step batch", LAYOUT, MAX_BYTES), spec, str(path))
    if max_tokens is not None:
        with explained(f"{path}: "):
            check_lengths(batch, max_tokens)
    return batch


def batch_from_arrays(arrays: Mapping[str, Any], spec: ModelSpec, source: str = "step batch") -> StepBatch:
    """Check the arrays of one step batch and return it (what :func:`load_step_batch` does after reading)."""
    from search import StepBatch
    from search.problem import known_tokens, prompt_numbers

    arrays = {name: arrays[name] for name in LAYOUT if arrays.get(name) is not None}
    if "expert_ids" in arrays and np.ndim(arrays["expert_ids"]) == 4:
        raise RoutePackError(
            f"{source}: expert_ids has the shape {list(np.shape(arrays['expert_ids']))}, one padded row of tokens a "
            "sample. Index it with the mask of real tokens, expert_ids[attention_mask.astype(bool)], and give offsets: "
            "0, then the cumulated sums of the mask's rows."
        )
    if "lengths" not in arrays or not ("expert_counts" in arrays or {"expert_ids", "offsets"} <= arrays.keys()):
        raise RoutePackError(
            f"{source} is no step batch: it needs `lengths` [N] and `expert_counts` [N, L, E], or `expert_ids` "
            "[T, L, K] with `offsets` [N + 1], where each sample's rows begin."
        )
    num_samples = np.shape(arrays["lengths"])[0] if np.ndim(arrays["lengths"]) else 0
    given = {name: _array(name, array, spec, num_samples, source) for name, array in arrays.items()}
    lengths = given["lengths"].astype(np.int64)
    if num_samples == 0:
        raise RoutePackError(f"{source}: the step is empty (lengths has no sample). Skip planning for such a step.")
    names = given.get("sample_ids", np.arange(num_samples).astype(np.str_))
    values, seen = np.unique(names, return_counts=True)
    if (seen > 1).any():
        raise RoutePackError(f"{source}: sample id {str(values[seen > 1][0])!r} occurs twice; ids must be distinct.")
    where = [f"{source}: sample {name!r}" for name in names.tolist()]
    for (i,) in _found(lengths < 1):
        raise RoutePackError(f"{where[i]} has length {lengths[i]}; lengths are at least 1. Drop the sample.")
    if "expert_counts" in given:
        counts = given["expert_counts"]
        stated = given["known_tokens"].astype(np.int64) if "known_tokens" in given else None
        known = known_tokens(counts, lengths, names, spec.top_k, stated, f"{source}: sample")
    else:
        counts, known = _count_routes(given["expert_ids"], given["offsets"], lengths, spec.num_experts, where, source)
    prompts = None
    if "prompt_ids" in given:
        with explained(f"{source}: "):
            prompts = prompt_numbers(given["prompt_ids"].tolist())
    return StepBatch(lengths, counts.astype(np.int32), names, known, prompts)


def list_step_files(steps: Path | str | Sequence[Path | str]) -> list[Path]:
    """Return the step batches that ``steps`` names, in order of name: a folder, a file, a glob, or several of them.

    Raises
    ------
    RoutePackError
        If there is none.
    """
    if isinstance(steps, (str, Path)):
        found = Path(steps).glob("*.npz") if Path(steps).is_dir() else map(Path, [steps, *glob.glob(str(steps))])
        files = sorted({path for path in found if path.is_file()})
    else:
        files = [path for one in steps for path in list_step_files(one)]
    if not files:
        raise RoutePackError(f"Step batches not found: {steps}. Give a folder of .npz files, a file or a quoted glob.")
    return files


def save_step_batch(path: Path | str, batch: StepBatch) -> None:
    """Write a step batch as ``.npz``, whole or not at all; the same batch gives the same bytes."""
    from costmodels.tables import npz_bytes
    from profiler.files import write_bytes

    most = int(batch.expert_counts.max(initial=0))
    arrays = {
        "lengths": batch.lengths.astype(np.int32),
        "expert_counts": batch.expert_counts.astype(np.uint16 if most < 1 << 16 else np.int32),
        "sample_ids": np.asarray(batch.sample_ids, dtype=np.str_),
        "known_tokens": batch.known_tokens.astype(np.int32),
    }
    if batch.prompt_ids is not None:
        arrays["prompt_ids"] = batch.prompt_ids
    write_bytes(path, npz_bytes(arrays))


def _found(wrong: np.ndarray) -> list[list[int]]:
    """Return the indices of the first true value: no entry, or one."""
    return np.argwhere(wrong)[:1].tolist()


def _array(name: str, value: Any, spec: ModelSpec, num_samples: int, source: str) -> np.ndarray:
    """Return an array whose type and axes are as its name asks; large ones stay as narrow as they are stored."""
    is_ids, axes = name in ("sample_ids", "prompt_ids"), LAYOUT[name]
    array = _ids(name, value) if is_ids else np.asarray(value)
    if not is_ids and array.dtype.kind not in "iu":
        raise RoutePackError(f"{source}: expected {name} to hold integers, got {array.dtype}. Convert it when writing.")
    if array.dtype == np.uint64 and array.max(initial=0) > np.iinfo(np.int64).max:
        raise RoutePackError(f"{source}: {name} holds {array.max()}, beyond any count of tokens.")
    if array.ndim != len(axes):
        wanted = " x ".join(AXES[axis] for axis in axes)
        raise RoutePackError(f"{source}: expected {name} as {wanted}, got the shape {list(array.shape)}.")
    if axes[1:2] == "L" and array.shape[1] == spec.num_layers:  # engines record all hidden layers
        array = array[:, np.asarray(spec.moe_layers)]
    sizes = {"N": num_samples, "O": num_samples + 1, "L": spec.num_moe_layers, "E": spec.num_experts, "K": spec.top_k}
    for axis, size in zip(axes, array.shape, strict=True):
        if size != sizes.get(axis, size):
            expected = EXPECTED[axis].format(model=spec.name, hidden=spec.num_layers, **sizes)
            raise RoutePackError(f"{source}: {name} has {size} {AXES[axis]}, {expected}")
    return array


def _ids(name: str, value: Any) -> np.ndarray:
    """Return ids of any type as an array of them; those of samples as text."""
    array = np.asarray(value)
    if isinstance(value, (list, tuple)) and array.ndim != 1:  # of tuples, say
        array = np.fromiter(value, dtype=object)
    if array.dtype.kind == "S":
        array = np.char.decode(array, "utf-8", "backslashreplace")
    if array.dtype.kind not in "iuU":
        array = array.astype(object)
    return array.astype(np.str_) if name == "sample_ids" else array


def _count_routes(
    ids: np.ndarray, offsets: np.ndarray, lengths: np.ndarray, num_experts: int, where: Sequence[str], source: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return counts [N, L, E] int32 and known tokens [N] int64 of routes ``ids`` [T, L, K].

    Sample i owns the rows ``offsets[i]:offsets[i + 1]``: as many as its length, or one fewer (engines do not route the
    last sampled token).
    """
    offsets = offsets.astype(np.int64)
    rows = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != len(ids) or (rows < 0).any():
        raise RoutePackError(
            f"{source}: offsets must rise from 0 to the {len(ids)} rows of expert_ids; they run from "
            f"{offsets[0]} to {offsets[-1]}. Write the array again."
        )
    for (i,) in _found((rows != lengths) & (rows != lengths - 1)):
        raise RoutePackError(
            f"{where[i]} has {rows[i]} rows of routes for a length of {lengths[i]}: expected {lengths[i]}, or "
            f"{lengths[i] - 1} when the last token was not routed. Write one row a token, -1 where unknown."
        )
    counts = np.zeros((len(lengths), ids.shape[1], num_experts), dtype=np.int32)
    known = np.zeros(len(lengths), dtype=np.int64)
    blank = _blank_rows(ids, offsets, rows == lengths)
    if blank.any():
        _LOG.info(
            "%s: %d of %d rows of routes are padding (one expert throughout): unknown.", source, blank.sum(), len(ids)
        )
    stale: list[str] = []
    for i, begin in enumerate(offsets[:-1]):
        own = ids[begin : offsets[i + 1]].astype(np.int64)  # widened here: engines store 8 and 16 bits
        own[blank[begin : offsets[i + 1]]] = -1
        counts[i], known[i] = _count_sample(own, num_experts, where[i])
        same = ((own[1:] == own[:-1]) & (own[1:] >= 0)).all(axis=(1, 2))
        ends = np.flatnonzero(np.concatenate(([True], ~same, [True])))
        if np.diff(ends).max() >= STALE_RUN_TOKENS:
            longest = np.diff(ends).argmax()
            stale.append(f"{where[i]} rows {ends[longest]}-{ends[longest + 1] - 1}")
    if stale:
        warnings.warn(
            f"{len(stale)} sample(s) hold long runs of identical routes in all layers (first: {stale[0]}): possibly a "
            "stale buffer. Mark such rows -1 (unknown).",
            stacklevel=3,
        )
    return counts, known


def _blank_rows(ids: np.ndarray, offsets: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return which tokens [T] hold a framework's padding instead of a route.

    K times one expert in every layer is no route. With top-1 it may be one: there the last rows of samples that have a
    row for every token (``whole``) are padding where all of them are 0 in every layer and no other row is.
    """
    if ids.shape[2] > 1:
        return (ids == ids[:, :, :1]).all(axis=(1, 2)) & (ids[:, 0, 0] >= 0)
    last = np.zeros(len(ids), dtype=bool)
    last[offsets[1:][whole] - 1] = True
    zero = (ids == 0).all(axis=(1, 2))
    enough = last.sum() * ids.shape[1] >= LEAST_ZEROS
    return last if enough and whole.all() and np.array_equal(zero, last) else np.zeros(len(ids), dtype=bool)


def _count_sample(ids: np.ndarray, num_experts: int, where: str) -> tuple[np.ndarray, int]:
    """Return one sample's counts [L, E] and its number of known tokens."""
    ids = np.sort(ids, axis=2)
    known = ids.max(axis=(1, 2)) >= 0
    has = f"has expert id {{id}}, outside 0..{num_experts - 1}:"
    wrong = (
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
        for token, layer, k in _found(places):
            said = problem.format(id=ids[token, layer, k])
            raise RoutePackError(f"{where} MoE layer {layer}: token {token} {said}")
    layers = ids.shape[1]
    keys = ids[known] + (np.arange(layers) * num_experts)[:, None]
    counts = np.bincount(keys.ravel(), minlength=layers * num_experts).reshape(layers, num_experts)
    return counts, int(known.sum())

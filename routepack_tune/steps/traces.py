"""Step batches on disk: the one door through which rollouts' lengths and routes enter.

A step batch is an ``.npz`` with ``lengths [N]`` and either ``expert_counts [N, L, E]`` or token-level routes
``expert_ids [T, L, K]`` with ``offsets [N + 1]``; ``sample_ids``, ``prompt_ids`` and ``known_tokens`` are optional.
A *route* is the K distinct logical expert ids of one token in one MoE layer; -1 is unknown: the token adds no expert
load of its own and is costed as an average one; so is one that no router can have made (:mod:`.routes`).
Every check names the file, the sample, the layer and the value.

Shape suffixes: N samples, T tokens, L MoE layers (or all hidden layers), K top-k, E logical experts.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler.errors import RoutePackError, explained
from profiler.readers import Header, read_npz
from routepack_tune.steps.routes import count_routes, first

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
MAX_BYTES = 8 << 30
"""What the arrays of one step may take: routes [T, L, K] of four million tokens, 58 layers and top-8 as int32."""
MOST_TOKENS = 2**31 - 1
IDS = ("sample_ids", "prompt_ids")


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

    def check(headers: Mapping[str, Header]) -> None:
        check_shapes(headers, spec, str(path))

    batch = batch_from_arrays(read_npz(path, "Step batch", LAYOUT, MAX_BYTES, check), spec, str(path))
    if max_tokens is not None:
        with explained(f"{path}: "):
            check_lengths(batch, max_tokens)
    return batch


def batch_from_arrays(arrays: Mapping[str, Any], spec: ModelSpec, source: str = "step batch") -> StepBatch:
    """Check the arrays of one step batch and return it (what :func:`load_step_batch` does after reading)."""
    from search import StepBatch
    from search.problem import known_tokens, prompt_numbers

    given = {name: _array(name, arrays[name], source) for name in LAYOUT if arrays.get(name) is not None}
    check_shapes(given, spec, source)
    lengths = given["lengths"].astype(np.int64)
    names = given.get("sample_ids", np.arange(len(lengths)).astype(np.str_))
    values, seen = np.unique(names, return_counts=True)
    if (seen > 1).any():
        raise RoutePackError(
            f"{source}: sample id {str(values[seen > 1][0])!r:.80} occurs twice; ids must be distinct. Ids of prompts, "
            "which several samples share, are `prompt_ids`."
        )
    where = [f"{source}: sample {name!r:.80}" for name in names.tolist()]
    for (i,) in first(lengths < 1):
        raise RoutePackError(f"{where[i]} has length {lengths[i]}; lengths are at least 1. Drop the sample.")
    for (i,) in first(lengths > MOST_TOKENS):
        raise RoutePackError(f"{where[i]} has length {lengths[i]}, beyond any cap. Check the array's type.")
    if "expert_counts" in given:
        counts = _moe_layers(given["expert_counts"], spec)
        stated = given["known_tokens"].astype(np.int64) if "known_tokens" in given else None
        known = known_tokens(counts, lengths, names, spec.top_k, stated, f"{source}: sample")
    else:
        ids, offsets = _moe_layers(given["expert_ids"], spec), given["offsets"].astype(np.int64)
        counts, known = count_routes(ids, offsets, lengths, spec.num_experts, where, source)
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


def check_shapes(arrays: Mapping[str, Any], spec: ModelSpec, source: str) -> None:
    """Refuse arrays that are no step batch of this model by their names, types and shapes alone."""
    if "expert_ids" in arrays and len(arrays["expert_ids"].shape) == 4:
        raise RoutePackError(
            f"{source}: expert_ids has the shape {list(arrays['expert_ids'].shape)}, one padded row of tokens a "
            "sample. Index it with the mask of real tokens, expert_ids[attention_mask.astype(bool)], and give offsets: "
            "0, then the cumulated sums of the mask's rows."
        )
    if "lengths" not in arrays or not ("expert_counts" in arrays or {"expert_ids", "offsets"} <= arrays.keys()):
        raise RoutePackError(
            f"{source} is no step batch: it needs `lengths` [N] and `expert_counts` [N, L, E], or `expert_ids` "
            "[T, L, K] with `offsets` [N + 1], where each sample's rows begin."
        )
    num_samples = (*arrays["lengths"].shape, 0)[0]
    sizes = {"N": num_samples, "O": num_samples + 1, "L": spec.num_moe_layers, "E": spec.num_experts, "K": spec.top_k}
    for name, array in arrays.items():
        axes = LAYOUT[name]
        if name not in IDS and array.dtype.kind not in "iu":
            raise RoutePackError(
                f"{source}: expected {name} to hold integers, got {array.dtype}. Convert it when writing."
            )
        if len(array.shape) != len(axes):
            wanted = " x ".join(AXES[axis] for axis in axes)
            raise RoutePackError(f"{source}: expected {name} as {wanted}, got the shape {list(array.shape)}.")
        for axis, size in zip(axes, array.shape, strict=True):
            every = axis == "L" and size == spec.num_layers  # engines record all hidden layers
            if size != sizes.get(axis, size) and not every:
                more = size - (spec.num_layers if size > spec.num_layers else spec.num_moe_layers)
                draft = (
                    f" The last {more} may be draft (MTP) layers: drop them." if axis == "L" and 0 < more < 5 else ""
                )
                expected = EXPECTED[axis].format(model=spec.name, hidden=spec.num_layers, **sizes)
                raise RoutePackError(f"{source}: {name} has {size} {AXES[axis]}, {expected}{draft}")
    if num_samples == 0:
        raise RoutePackError(f"{source}: the step is empty (lengths has no sample). Skip planning for such a step.")


def _moe_layers(array: np.ndarray, spec: ModelSpec) -> np.ndarray:
    """Return an array's MoE layers where it has all hidden ones."""
    return array[:, np.asarray(spec.moe_layers)] if array.shape[1] != spec.num_moe_layers else array


def _array(name: str, value: Any, source: str) -> np.ndarray:
    """Return a value as an array; large ones stay as narrow as they are stored."""
    array = _ids(name, value) if name in IDS else np.asarray(value)
    if array.dtype == np.uint64 and name not in IDS:
        if name == "expert_ids":
            return array.view(np.int64)  # where -1 was one
        if array.max(initial=0) > np.iinfo(np.int64).max:
            raise RoutePackError(f"{source}: {name} holds {array.max()}, beyond any count of tokens.")
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

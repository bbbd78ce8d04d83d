"""Step batches on disk: the one door through which rollouts' lengths and routes enter.

A step batch is an ``.npz`` with ``lengths [N]`` and either ``expert_counts [N, L, E]`` or token-level routes
``expert_ids [T, L, K]`` with ``offsets [N + 1]`` (-1: unknown); optional ``sample_ids [N]``, ``prompt_ids [N]``,
``known_tokens [N]``. Every check names the file, the sample, the layer and the value.

Shape suffixes: N samples, T tokens, L MoE layers (or all hidden layers), K top-k, E logical experts.
"""

from __future__ import annotations

import glob
import io
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler.errors import RoutePackError
from routepack_tune.steps.routes import count_routes

if TYPE_CHECKING:
    from profiler import ModelSpec
    from search import StepBatch

ARRAYS = ("lengths", "expert_counts", "expert_ids", "offsets", "sample_ids", "prompt_ids", "known_tokens")
"""Names that are read; others are left alone."""


def load_step_batch(path: Path | str, spec: ModelSpec) -> StepBatch:
    """Read and check one step batch.

    Raises
    ------
    RoutePackError
        If the file is missing, truncated or pickled, an array is missing or of the wrong shape or type, or a value
        cannot be right for ``spec``.
    """
    return batch_from_arrays(_read_arrays(Path(path)), spec, str(path))


def batch_from_arrays(arrays: Mapping[str, Any], spec: ModelSpec, source: str = "step batch") -> StepBatch:
    """Check the arrays of one step batch and return it (what :func:`load_step_batch` does after reading)."""
    from search import StepBatch
    from search.problem import known_tokens

    lengths = _integers(arrays, "lengths", 1, source)
    if len(lengths) == 0:
        raise RoutePackError(f"{source}: the step is empty (lengths has no sample). Skip planning for such a step.")
    names = _sample_ids(arrays, len(lengths), source)
    if (lengths < 1).any():
        i = int(np.argmin(lengths >= 1))
        raise RoutePackError(
            f"{source}: sample {names[i]!r} has length {int(lengths[i])}; lengths are at least 1. Drop the sample."
        )
    if arrays.get("expert_counts") is not None:
        counts = _moe_layers(_integers(arrays, "expert_counts", 3, source, widen=False), spec, "expert_counts", source)
        _check_experts(counts, len(lengths), spec, source)
        given = arrays.get("known_tokens")
        given = None if given is None else _integers(arrays, "known_tokens", 1, source, len(lengths))
        known = known_tokens(counts, lengths, names, spec.top_k, given, f"{source}: sample")
        counts = counts.astype(np.int32)
    elif arrays.get("expert_ids") is not None:
        ids = _moe_layers(_integers(arrays, "expert_ids", 3, source, widen=False), spec, "expert_ids", source)
        if ids.shape[2] != spec.top_k:
            raise RoutePackError(
                f"{source}: expert_ids holds {ids.shape[2]} experts a token, {spec.name} routes to {spec.top_k}."
            )
        counts, known = count_routes(
            ids, _integers(arrays, "offsets", 1, source), lengths, names, spec.num_experts, source
        )
    else:
        raise RoutePackError(
            f"{source} has neither `expert_counts` [N, L, E] nor `expert_ids` [T, L, K]: it is no step batch."
        )
    prompts = None if arrays.get("prompt_ids") is None else _integers(arrays, "prompt_ids", 1, source, len(lengths))
    return StepBatch(
        lengths=lengths, expert_counts=counts, sample_ids=names, prompt_ids=prompts, known_tokens=known
    )  # fmt: skip


def check_cap(batch: StepBatch, max_tokens: int, source: str) -> None:
    """Refuse samples longer than the cap of a microbatch, naming the file: no packing can hold them.

    Raises
    ------
    RoutePackError
        Naming the longest sample, its length, the cap and the least cap that fits.
    """
    from search import check_lengths

    try:
        check_lengths(batch, max_tokens)
    except RoutePackError as error:
        raise RoutePackError(f"{source}: {error}") from None


def list_step_files(steps: Path | str | Sequence[Path | str]) -> list[Path]:
    """Return the step batches that ``steps`` names, in order of name: a folder, a file, a glob, or several of them.

    Raises
    ------
    RoutePackError
        If there is none.
    """
    if not isinstance(steps, (str, Path)):
        return [path for one in steps for path in list_step_files(one)]
    path = Path(steps)
    if path.is_file():
        return [path]
    if path.is_dir():
        files = sorted(path.glob("*.npz"))
        if not files:
            raise RoutePackError(f"{path} holds no step batch (*.npz). Write one per optimizer step there.")
        return files
    files = sorted(Path(match) for match in glob.glob(str(steps)) if Path(match).is_file())
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


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise RoutePackError(f"Step batch not found: {path}.") from None
    except OSError as error:
        raise RoutePackError(f"Step batch {path} cannot be read: {error.strerror or error}.") from None
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files if name in ARRAYS}
    except (ValueError, EOFError, OSError, KeyError, TypeError, AttributeError, MemoryError, zipfile.BadZipFile,
            zlib.error, NotImplementedError) as error:  # fmt: skip
        if data[:2] == b"PK" and "allow_pickle" in str(error):
            raise RoutePackError(
                f"Step batch {path} holds Python objects (pickle), which are never loaded. Write plain integer arrays."
            ) from None
        raise RoutePackError(f"Step batch {path} is truncated or not an .npz. Write it again.") from None


def _integers(
    arrays: Mapping[str, Any], name: str, ndim: int, source: str, size: int | None = None, *, widen: bool = True
) -> np.ndarray:
    """Return an integer array with ``ndim`` axes, as int64 unless it is large and stays narrow until used."""
    if arrays.get(name) is None:
        raise RoutePackError(f"{source} has no array `{name}`: it is no step batch. It needs lengths [N] and "
                             "expert_counts [N, L, E], or expert_ids [T, L, K] and offsets [N + 1].")  # fmt: skip
    array = np.asarray(arrays[name])
    if array.dtype.kind not in "iu":
        raise RoutePackError(f"{source}: expected {name} to hold integers, got {array.dtype}. Convert it when writing.")
    if array.ndim != ndim or (size is not None and len(array) != size):
        wanted = f"[{size}]" if size is not None else f"{ndim} axes"
        raise RoutePackError(f"{source}: expected {name} with {wanted}, got the shape {list(array.shape)}.")
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise RoutePackError(f"{source}: {name} holds {int(array.max())}, beyond any count of tokens.")
    return array.astype(np.int64) if widen else array


def _sample_ids(arrays: Mapping[str, Any], num_samples: int, source: str) -> np.ndarray:
    """Return one distinct name per sample, [N] of str; the index where the file has none."""
    if arrays.get("sample_ids") is None:
        return np.array([str(i) for i in range(num_samples)])
    ids = np.asarray(arrays["sample_ids"])
    if ids.dtype.kind not in "iuU" or ids.shape != (num_samples,):
        raise RoutePackError(
            f"{source}: expected sample_ids [{num_samples}] of integers or text, got {ids.dtype} {list(ids.shape)}."
        )
    names = ids.astype(np.str_)
    values, seen = np.unique(names, return_counts=True)
    if (seen > 1).any():
        raise RoutePackError(f"{source}: sample id {str(values[seen > 1][0])!r} occurs twice; ids must be distinct.")
    return names


def _moe_layers(array: np.ndarray, spec: ModelSpec, name: str, source: str) -> np.ndarray:
    """Return the MoE layers of an array over them, or over all hidden layers (as engines record)."""
    layers = array.shape[1]
    if layers == spec.num_moe_layers:
        return array
    if layers == spec.num_layers:
        return array[:, np.asarray(spec.moe_layers)]
    all_layers = f" (or all {spec.num_layers} hidden layers)" if spec.num_layers != spec.num_moe_layers else ""
    raise RoutePackError(
        f"{source}: {name} has {layers} layers, {spec.name} has {spec.num_moe_layers} MoE layers{all_layers}. "
        "Is it a batch of another model?"
    )


def _check_experts(counts: np.ndarray, num_samples: int, spec: ModelSpec, source: str) -> None:
    if len(counts) != num_samples:
        raise RoutePackError(f"{source}: expert_counts has {len(counts)} samples, lengths has {num_samples}.")
    if counts.shape[2] != spec.num_experts:
        hint = (
            "More than the model's are usually physical slots of a rebalanced engine (redundant experts): record "
            "logical experts."
            if counts.shape[2] > spec.num_experts
            else "Is it a batch of another model?"
        )
        raise RoutePackError(
            f"{source}: expert_counts has {counts.shape[2]} experts, {spec.name} has {spec.num_experts}. {hint}"
        )

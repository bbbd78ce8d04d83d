"""Find and read the files of a published timing folder; what their rows mean is the importer's business."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from profiler.errors import RoutePackError
from profiler.params import EXCHANGES

LAYOUT = "<framework>/<version>/<op>_perf.txt or <framework>-<version>/<op>_perf.parquet, with system.yaml"
CELL = ("batch_size", "isl", "num_heads", "kv_cache_dtype")
EXPERTS = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size", "distribution")
KEY_COLUMNS: dict[str, tuple[str, ...]] = {
    "context_attention_perf": (*CELL, "num_key_value_heads", "head_dim", "attn_dtype"),
    "context_mla_perf": (*CELL, "mla_dtype"),
    "gemm_perf": ("gemm_dtype", "m", "n", "k"),
    "moe_perf": ("moe_dtype", "num_tokens", *EXPERTS),
    "nccl_perf": ("op_name", "nccl_dtype", "num_gpus", "message_size"),
    "deepep_normal_perf": ("node_num", "hidden_size", "num_token", "num_topk", "num_experts", "dispatch_sms"),
}
"""Columns that every table must have besides its device, kernel and latencies."""
MAY_BE_ZERO = ("dispatch_notify_us", "combine_notify_us")
LATENCIES = {"deepep_normal_perf": ("dispatch_transmit_us", "combine_transmit_us", *MAY_BE_ZERO)}
"""Columns of times where a table has others than one ``latency`` in milliseconds."""
RENAMED = {"wideep_deepep_normal_perf": "deepep_normal_perf"}
TEXT = {"device", "kernel_source", "op_name", "distribution", "framework", "version"}


@dataclass(frozen=True, slots=True)
class PublishedFolder:
    """The tables chosen in one GPU's folder."""

    folder: Path
    framework: str
    """Framework and version whose kernels were timed, as ``trtllm-1.2.0rc5``."""
    tables: dict[str, Path]
    """Table name (``moe_perf`` ...) to its file."""
    passed_over: tuple[str, ...]
    """Other frameworks and versions with expert timings that were not read."""


def find_tables(folder: Path, exchange: str = "nccl") -> PublishedFolder:
    """Choose the tables of one framework version (trtllm before others, newest first) and the newest exchange table.

    Raises
    ------
    RoutePackError
        If the folder is missing, is not one GPU's, or holds no expert timings.
    """
    if not folder.is_dir():
        raise RoutePackError(f"Published timings not found: {folder} is not a folder.")
    sets = _table_sets(folder)
    with_experts = sorted((name for name in sets if "moe_perf" in sets[name]), key=_preference, reverse=True)
    if not with_experts:
        inside = sorted(child.name for child in folder.iterdir() if child.is_dir() and _table_sets(child))
        way_out = f"Give one GPU of it: {', '.join(inside)}." if inside else f"Expected {LAYOUT}."
        raise RoutePackError(f"{folder} holds no moe_perf table of published timings. {way_out}")
    chosen = with_experts[0]
    tables = {
        name: path for name, path in sets[chosen].items() if name in KEY_COLUMNS and name not in EXCHANGES.values()
    }
    wanted = EXCHANGES[exchange]
    networks = sorted((name for name in sets if wanted in sets[name]), key=_preference, reverse=True)
    if networks:
        tables[wanted] = sets[networks[0]][wanted]
    elif exchange != "nccl":
        raise RoutePackError(f"{folder} holds no {wanted} table. Import with exchange nccl.")
    return PublishedFolder(folder, chosen, tables, tuple(with_experts[1:]))


def _table_sets(folder: Path) -> dict[str, dict[str, Path]]:
    """Return tables by framework-version; a Parquet and a CSV of one name count once (Parquet)."""
    sets: dict[str, dict[str, Path]] = {}
    for pattern in ("*/*/*_perf.txt", "*/*_perf.txt", "*/*_perf.parquet", "*/*/*_perf.parquet"):
        for path in sorted(folder.glob(pattern)):
            name = "-".join(path.relative_to(folder).parts[:-1])
            sets.setdefault(name, {})[RENAMED.get(path.stem, path.stem)] = path
    return sets


def _preference(name: str) -> tuple[bool, list[tuple[int, str]]]:
    # Digits compare as numbers, so that 1.10 is newer than 1.9; a release is newer than its candidate.
    version = [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|[a-z]+", name.lower())]
    return name.lower().startswith("trtllm"), version


def read_table(path: Path) -> dict[str, np.ndarray]:
    """Read a table into plain columns: integers, float latencies, text.

    Raises
    ------
    RoutePackError
        If the file cannot be read, lacks a column, or holds a latency that is not positive.
    """
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    try:
        table = pa.parquet.read_table(path) if path.suffix == ".parquet" else pa.csv.read_csv(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise RoutePackError(f"Published table {path} cannot be read ({reason}). Fetch it again.") from None
    kind = RENAMED.get(path.stem, path.stem)
    needed = (*LATENCIES.get(kind, ("latency",)), *KEY_COLUMNS[kind], "device", "kernel_source")
    missing = [name for name in needed if name not in table.column_names]
    if missing:
        raise RoutePackError(
            f"Published table {path} lacks the columns {', '.join(missing)}: not a table of this layout."
        )
    columns = {name: table.column(name).to_numpy() for name in table.column_names}
    columns |= {name: values.astype(str) for name, values in columns.items() if name in TEXT or name.endswith("_dtype")}
    _check_numbers(path, kind, columns)
    return columns


def _check_numbers(path: Path, kind: str, columns: dict[str, np.ndarray]) -> None:
    for name in KEY_COLUMNS[kind]:
        column = columns[name]
        if column.dtype.kind not in "iU":
            raise RoutePackError(f"Published table {path}: column {name} must hold whole numbers, got {column.dtype}.")
    for name in LATENCIES.get(kind, ("latency",)):
        latency, unit = columns[name], "microseconds" if name.endswith("_us") else "milliseconds"
        if latency.dtype.kind not in "if" or not ((latency > 0) | (name in MAY_BE_ZERO) & (latency == 0)).all():
            raise RoutePackError(f"Published table {path}: every {name} must be a positive number of {unit}.")


def read_system(found: PublishedFolder) -> dict[str, Any]:
    """Read the peaks and link rates of the GPU; an empty mapping where no such file is found."""
    folder = found.folder.resolve()
    names = [folder / "system.yaml"]
    names += [parent / f"{folder.name}.yaml" for parent in (folder, folder.parent, folder.parent.parent)]
    path = next((name for name in names if name.is_file()), None)
    if path is None:
        return {}
    import yaml

    try:
        system = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RoutePackError(f"System file {path} cannot be read: {str(error).splitlines()[0]}.") from None
    return system if isinstance(system, dict) else {}

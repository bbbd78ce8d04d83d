"""Find and read the files of a published timing folder; what their rows mean is the importer's business."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

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
TEXT = {"device", "kernel_source", "op_name", "distribution"}


def find_tables(folder: Path, exchange: str) -> tuple[list[str], dict[str, Path]]:
    """Return the framework versions with expert timings, that to read first, and its tables (``moe_perf`` ...) by name.

    trtllm comes before others and the newest first; the exchange's table is the newest of any framework.
    """
    if not folder.is_dir():
        raise RoutePackError(f"Published timings not found: {folder} is not a folder.")
    sets = _table_sets(folder)
    with_experts = _newest_first(name for name in sets if "moe_perf" in sets[name])
    if not with_experts:
        inside = sorted(child.name for child in folder.iterdir() if child.is_dir() and _table_sets(child))
        way_out = f"Give one GPU of it: {', '.join(inside)}." if inside else f"Expected {LAYOUT}."
        raise RoutePackError(f"{folder} holds no moe_perf table of published timings. {way_out}")
    wanted, own = EXCHANGES[exchange], sets[with_experts[0]]
    tables = {name: path for name, path in own.items() if name in KEY_COLUMNS.keys() - EXCHANGES.values()}
    networks = _newest_first(name for name in sets if wanted in sets[name])
    if networks:
        tables[wanted] = sets[networks[0]][wanted]
    elif exchange != "nccl":
        raise RoutePackError(f"{folder} holds no {wanted} table. Import with exchange nccl.")
    return with_experts, tables


def _table_sets(folder: Path) -> dict[str, dict[str, Path]]:
    """Return tables by framework-version; a Parquet and a CSV of one name count once (Parquet)."""
    sets: dict[str, dict[str, Path]] = {}
    for pattern in ("*/*/*_perf.txt", "*/*_perf.txt", "*/*_perf.parquet", "*/*/*_perf.parquet"):
        for path in sorted(folder.glob(pattern)):
            name = "-".join(path.relative_to(folder).parts[:-1])
            sets.setdefault(name, {})[RENAMED.get(path.stem, path.stem)] = path
    return sets


def _newest_first(names: Iterable[str]) -> list[str]:
    def preference(name: str) -> tuple[bool, list[tuple[int, str]]]:
        # Digits compare as numbers, so that 1.10 is newer than 1.9; a release is newer than its candidate.
        parts = re.findall(r"\d+|[a-z]+", name.lower())
        return name.lower().startswith("trtllm"), [(int(p), "") if p.isdigit() else (-1, p) for p in parts]

    return sorted(names, key=preference, reverse=True)


def read_table(path: Path) -> pd.DataFrame:
    """Read a table, and check that the columns it must have are text, whole numbers or positive latencies."""
    try:
        table = pa.parquet.read_table(path) if path.suffix == ".parquet" else pa.csv.read_csv(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise RoutePackError(f"Published table {path} cannot be read ({reason}). Fetch it again.") from None
    kind = RENAMED.get(path.stem, path.stem)
    latencies = LATENCIES.get(kind, ("latency",))
    missing = [n for n in (*latencies, *KEY_COLUMNS[kind], "device", "kernel_source") if n not in table.column_names]
    if missing:
        raise RoutePackError(
            f"Published table {path} lacks the columns {', '.join(missing)}: not a table of this layout."
        )
    frame = table.to_pandas()
    text = [name for name in frame if name in TEXT or name.endswith("_dtype")]
    frame[text] = frame[text].astype(str)
    for name in KEY_COLUMNS[kind]:
        if name not in text and frame[name].dtype.kind != "i":
            raise RoutePackError(
                f"Published table {path}: column {name} must hold whole numbers, got {frame[name].dtype}."
            )
    for name in latencies:
        times, unit = frame[name], "microseconds" if name.endswith("_us") else "milliseconds"
        if times.dtype.kind not in "if" or not ((times > 0) | (times == 0) & (name in MAY_BE_ZERO)).all():
            raise RoutePackError(f"Published table {path}: every {name} must be a positive number of {unit}.")
    return frame


def read_system(folder: Path) -> dict[str, Any]:
    """Read the peaks and link rates of the GPU; an empty mapping where no such file is found."""
    import yaml

    folder = folder.resolve()
    outside = (parent / f"{folder.name}.yaml" for parent in (folder, folder.parent, folder.parent.parent))
    path = next((path for path in (folder / "system.yaml", *outside) if path.is_file()), None)
    if path is None:
        return {}
    try:
        system = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RoutePackError(f"System file {path} cannot be read: {str(error).splitlines()[0]}.") from None
    return system if isinstance(system, dict) else {}

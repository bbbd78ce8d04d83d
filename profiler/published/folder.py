"""Where published tables lie: the GPU's folder, the sets of tables in it by software and version, its system file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from profiler.errors import RoutePackError
from profiler.params import EXCHANGES
from profiler.readers import build, read_yaml

LAYOUT = "<framework>/<version>/<op>_perf.txt or <framework>-<version>/<op>_perf.parquet, with system.yaml"
RENAMED = {"wideep_deepep_normal_perf": "deepep_normal_perf"}
OWN = ("context_attention_perf", "context_mla_perf", "gemm_perf", "moe_perf")
"""Tables that come from one software; the exchange's may be another's."""
SYSTEM = {
    "gpu": ("float16_tc_flops", "bfloat16_tc_flops", "mem_bw", "mem_capacity", "sm_version"),
    "node": ("intra_node_bw", "inter_node_bw", "num_gpus_per_node"),
}
"""Numbers of a system file that are read; all may be absent."""
DEEPEST = 3
"""Levels below a folder that are searched for a GPU, to name it."""


def find_tables(folder: Path, exchange: str, wanted: str | None = None) -> tuple[list[str], dict[str, Path]]:
    """Return the sets with expert timings (``trtllm-1.2.0``), the one to read first, and its tables by name.

    ``wanted`` names that set, or its framework where it is in one version alone; without, the newest of TensorRT-LLM is
    taken, else of another. The exchange's table is the newest one of any set.
    """
    if not folder.is_dir():
        raise RoutePackError(f"Published timings not found: {folder} is not a folder.")
    sets = _table_sets(folder)
    found = _with_experts(sets)
    if not found:
        raise RoutePackError(f"{folder} holds no moe_perf table of published timings. {_way_out(folder)}")
    if wanted is not None:
        exact = [name for name in found if wanted.lower() in (name.lower(), name.lower().replace("-", "/", 1))]
        chosen = exact or [name for name in found if name.lower().startswith(f"{wanted.lower()}-")]
        if len(chosen) != 1:
            raise RoutePackError(f"Tables {wanted!r} of {folder}: expected one of {', '.join(found)}.")
        found = [*chosen, *(name for name in found if name not in chosen)]
    needed, own = EXCHANGES[exchange], sets[found[0]]
    tables = {name: path for name, path in own.items() if name in OWN}
    networks = _newest_first(name for name in sets if needed in sets[name])
    if networks:
        tables[needed] = sets[networks[0]][needed]
    elif exchange != "nccl":
        raise RoutePackError(f"{folder} holds no {needed} table. Import with exchange nccl.")
    return found, tables


def set_name(folder: Path, path: Path) -> str:
    """Return the set that a table of the GPU's folder belongs to, ``trtllm-1.2.0``."""
    return "-".join(path.relative_to(folder).parts[:-1])


def _with_experts(sets: dict[str, dict[str, Path]]) -> list[str]:
    return _newest_first(name for name in sets if "moe_perf" in sets[name])


def _way_out(folder: Path) -> str:
    """Name folders of a GPU below or above that can be imported."""
    for depth in range(1, DEEPEST + 1):
        inside = (child for child in sorted(folder.glob("/".join("*" * depth))) if child.is_dir())
        if gpus := [str(child) for child in inside if _with_experts(_table_sets(child))]:
            return f"Give one GPU of it: {', '.join(gpus)}."
    for above in (folder.absolute().parent, folder.absolute().parent.parent):
        if _with_experts(_table_sets(above)):
            return f"Give the whole folder of the GPU: {above}."
    return f"Expected {LAYOUT}."


def _table_sets(folder: Path) -> dict[str, dict[str, Path]]:
    """Return tables by framework-version; a Parquet and a CSV of one name count once (Parquet)."""
    sets: dict[str, dict[str, Path]] = {}
    for pattern in ("*/*/*_perf.txt", "*/*_perf.txt", "*/*_perf.parquet", "*/*/*_perf.parquet"):
        for path in sorted(folder.glob(pattern)):
            # A version begins with its number: else these are the tables of a GPU one level down.
            if len(path.relative_to(folder).parts) == 2 or re.match(r"v?\d", path.parent.name):
                sets.setdefault(set_name(folder, path), {})[RENAMED.get(path.stem, path.stem)] = path
    return sets


def _newest_first(names: Iterable[str]) -> list[str]:
    def preference(name: str) -> tuple[bool, list[tuple[int, str]]]:
        # Digits compare as numbers, so that 1.10 is newer than 1.9; a release is newer than its candidate.
        parts = re.findall(r"\d+|[a-z]+", name.lower())
        return name.lower().startswith("trtllm"), [(int(p), "") if p.isdigit() else (-1, p) for p in parts]

    return sorted(names, key=preference, reverse=True)


def read_system(folder: Path) -> dict[str, Any]:
    """Read the peaks and link rates of the GPU; an empty mapping where no such file is found."""
    folder = folder.resolve()
    name = f"{folder.name}.yaml"
    named = (folder / "system.yaml", folder / name, folder.parent / name, folder.parent.parent / name)
    path = next((path for path in named if path.is_file()), None)
    if path is None:
        return {}
    system = read_yaml(path, "System file") or {}
    for section, names in SYSTEM.items():
        told = build(dict[str, Any], build(dict[str, Any], system, f"System file {path}").get(section) or {}, f"{path}")
        for name in names:
            if not 0 <= (value := build(float, told.get(name) or 0, f"System file {path}, {section}.{name}")) <= 1e20:
                raise RoutePackError(f"System file {path}, {section}.{name}: {value:g} is no rate or size.")
    return system

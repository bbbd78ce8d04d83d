"""Make the stored hashes of changed artifacts right again: a hash that anyone can compute protects from accident only.

Each returns whether it could; where the text is no JSON there is nothing to make right.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np


def canonical(value: Any) -> str:
    """Return what the product hashes of plain data."""
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    ).hexdigest()


def file_sha256(path: Path) -> str:
    """Return the hash of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _load(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _store(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2))


def rehash_plan(path: Path) -> bool:
    """Make right what a plan says twice: its hashes, and orders that follow from packing and placement."""
    document = _load(path)
    try:
        names = ("micro_batches", "logical_to_physical", "sample_ids", "topology", "model")
        whole = {**{name: document[name] for name in names}, "num_tokens": document["denominators"]["num_tokens"]}
        whole["max_tokens"] = document["max_tokens_per_microbatch"]
        document["plan_hash"] = canonical(whole)
        document["placement_id"] = canonical(document["logical_to_physical"])
    except (TypeError, KeyError, ValueError, RecursionError, UnicodeEncodeError):
        return False
    try:
        placement, order = (
            document["logical_to_physical"],
            [i for slot in document["micro_batches"] for c in slot for i in c],
        )
        inverse = [sorted(range(len(layer)), key=lambda e, layer=layer: layer[e]) for layer in placement]
        back = sorted(range(len(order)), key=lambda place: order[place])
        gap = document["predicted"]["step_time_s"] / document["lower_bound_s"] - 1
        document |= {"physical_to_logical": inverse, "packed_order": order, "inverse_order": back, "gap": gap}
    except (TypeError, KeyError, ValueError, ZeroDivisionError, OverflowError):
        pass  # what is wrong in itself stays so
    _store(path, document)
    return True


def tables_hash(path: Path) -> str:
    """Return the hash of frozen tables as other files name it."""
    with np.load(path, allow_pickle=False) as archive:
        found = {name: archive[name] for name in archive.files}
    digest = hashlib.sha256()
    for name in sorted(found):
        array = np.ascontiguousarray(found[name])
        digest.update(f"{name}|{array.dtype.str}|{array.shape}|".encode() + array.tobytes())
    return digest.hexdigest()


def rehash_bundle(path: Path) -> bool:
    """Make a bundle's hashes of its tables and of itself right, and what else it repeats of them."""
    document, tables = _load(path), path.with_name("tables.npz")
    try:
        document["files"] = {"tables.npz": file_sha256(tables)}
    except (TypeError, OSError):
        return False
    try:
        document["provenance"]["tables_hash"] = tables_hash(tables)
        with np.load(tables, allow_pickle=False) as archive:
            header = json.loads(archive["header"].tobytes())
        document["notes"], document["tables_key"] = header["notes"], header["key"]
    except Exception:  # whatever a damaged archive makes numpy say
        pass
    if zlib.crc32(path.read_bytes()) % 2:  # tables that say they are of this model, these sizes and cap
        with contextlib.suppress(Exception):
            _rekey(document, tables)
    try:
        document.pop("content_hash", None)
        document["content_hash"] = canonical(document)
    except (TypeError, ValueError, RecursionError, UnicodeEncodeError):
        return False
    _store(path, document)
    return True


def _rekey(document: dict[str, Any], tables: Path) -> None:
    """Write the key of the bundle's own job into its tables."""
    from costmodels import tables_key
    from profiler import ModelSpec, Topology

    job = ModelSpec(**document["model"]), Topology(**document["topology"]), document["max_tokens_per_microbatch"]
    with np.load(tables, allow_pickle=False) as archive:
        found = {name: archive[name] for name in archive.files}
    header = json.loads(found["header"].tobytes())
    if header["key"] == (key := tables_key(*job)):
        return
    header["key"] = document["tables_key"] = key
    text = json.dumps(header, sort_keys=True, separators=(",", ":"))
    found["header"] = np.frombuffer(text.encode(), np.uint8)
    np.savez_compressed(tables, **found)
    document["files"] = {"tables.npz": file_sha256(tables)}
    document["provenance"]["tables_hash"] = tables_hash(tables)


def rehash_costmodel(folder: Path) -> bool:
    """Make ``tables_hash`` and the hashes of the residuals in ``costmodel.json`` right."""
    document = _load(folder / "costmodel.json")
    try:
        for entry in document["operations"].values():
            if "file" in entry:
                entry["sha256"] = file_sha256(folder / entry["file"])
        document["tables_hash"] = tables_hash(folder / "tables.npz")
        _store(folder / "costmodel.json", document)
    except Exception:  # whatever a damaged archive makes numpy say
        return False
    return True


def rehash_study(path: Path) -> bool:
    """Make a study's hashes of its files right."""
    document = _load(path)
    try:
        document["files"] = {name: file_sha256(path.with_name(Path(name).name)) for name in document["files"]}
    except (TypeError, KeyError, ValueError, AttributeError, OSError):
        return False
    with contextlib.suppress(Exception):  # whatever a damaged archive makes numpy say
        document["tables_hash"] = tables_hash(path.with_name("tables.npz"))
    _store(path, document)
    return True


def check_formulas(job: Path) -> None:
    """Make every hash of an unchanged job right again: were it another, nothing behind hashes would be attacked."""
    with tempfile.TemporaryDirectory() as folder:
        for name, make in REHASH.items():
            copied = Path(folder, name)
            shutil.copytree(job / copied.parent.relative_to(folder), copied.parent, dirs_exist_ok=True)
            before = json.loads(copied.read_text())
            if not make(copied) or json.loads(copied.read_text()) != before:
                raise SystemExit(f"The hashes of {name} have another formula than hashes.py has.")


REHASH = {
    "plan.json": rehash_plan,
    "bundle/planner.yaml": rehash_bundle,
    "costmodel/costmodel.json": lambda path: rehash_costmodel(path.parent),
    "study/study.json": rehash_study,
}

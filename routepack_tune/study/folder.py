"""The study's folder: all that ``deploy`` needs, whichever machine it runs on.

``study.json`` (what was tuned, on what, the best trial), ``study.journal`` (Optuna: every trial), ``mlflow.db`` and
``artifacts/`` (tracking), ``tables.npz`` and ``costmodel.json`` (the frozen times and where they come from;
``tables-CAP.npz`` for further caps), ``recheck.npz`` (the step batch on which the winner is planned once more before it
is deployed), ``tuning-report.html``.

Invariants: ``study.json`` is whole at every moment; one process writes a study at a time; a folder holds one study:
other inputs are refused with the difference, or begin a new study, and the earlier one moves to ``earlier/``.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler.errors import RoutePackError, explained
from profiler.files import file_hash, write_bytes, write_json
from profiler.places import check_place, new_folder
from profiler.readers import read_json
from routepack_tune.bundle import COST_MODEL_FILE, dtype_of
from routepack_tune.environment import environment

if TYPE_CHECKING:
    from costmodels.cost_model import Header
    from routepack_tune.config import Config
    from search import TuneTask

STUDY_SCHEMA_VERSION = 1
STUDY_FILE = "study.json"
TABLES_FILE = "tables.npz"
RECHECK_FILE = "recheck.npz"
TUNING_REPORT_FILE = "tuning-report.html"
EARLIER = "earlier"


def tables_file(cap: int, configured: int) -> str:
    """Return the name of the file with the frozen times of a cap."""
    return TABLES_FILE if cap == configured else f"tables-{cap}.npz"


def _is_ours(name: str) -> bool:
    """Tell whether a name is one that tuning writes into its folder; a kill may leave some without the others."""
    own = (STUDY_FILE, COST_MODEL_FILE, RECHECK_FILE, TUNING_REPORT_FILE, EARLIER)
    return name in own or re.fullmatch(r"tables(-\d+)?\.npz|study\.journal.*", name) is not None


@contextlib.contextmanager
def locked_study(folder: Path) -> Iterator[None]:
    """Hold a study's folder; a killed process lets go by itself."""
    from filelock import FileLock, Timeout

    check_place(folder, folder=True)
    found = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if STUDY_FILE not in found and any(not name.startswith(".") and not _is_ours(name) for name in found):
        raise RoutePackError(f"{folder} is not empty and holds no {STUDY_FILE}. Choose another --out.")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        held = FileLock(folder / ".lock").acquire(blocking=False)
    except Timeout:
        raise RoutePackError(f"Another process is tuning in {folder}. Wait for it, or choose another --out.") from None
    with held:
        yield


def known_study(folder: Path, task: TuneTask, costmodel: Path) -> dict[str, Any] | None:
    """Return what the folder's ``study.json`` holds, None where there is none; files that were lost are made again."""
    if not (folder / STUDY_FILE).is_file():
        return None
    known = read_study(folder)
    task.check_same(known["signature"], f"The study in {folder}")
    if any(not (folder / name).is_file() for name in known["files"]):
        known["files"] = write_inputs(folder, task, costmodel)  # the same inputs give the same files
    return known


def set_aside(folder: Path) -> str:
    """Move the folder's study to ``earlier/NAME``; storages and the tracking store stay, they hold many studies.

    Return its name, empty where there is none.
    """
    if not (folder / STUDY_FILE).is_file():
        return ""
    document = read_json(folder / STUDY_FILE, "Study")
    told = document.get("study_name", "study") if isinstance(document, dict) else "study"
    name = re.sub(r"[^\w.-]", "_", str(told)[:100]).lstrip(".") or "study"
    target, number, kept = folder / EARLIER / name, 1, list[Path]()
    while target.exists():
        number += 1
        target = folder / EARLIER / f"{name}-{number}"
    # Whole there before anything goes here, the document first: a kill leaves the study here or there, never in parts.
    with new_folder(target) as copy:
        for path in folder.iterdir():
            if _is_ours(path.name) and not path.name.startswith((EARLIER, "study.journal")):
                shutil.copy2(path, copy / path.name)
                kept.append(path)
    for path in sorted(kept, key=lambda path: path.name != STUDY_FILE):
        path.unlink()
    return str(document.get("study_name", ""))


def write_inputs(folder: Path, task: TuneTask, costmodel: Path) -> dict[str, str]:
    """Write what ``deploy`` needs beside the document; return the SHA-256 of each file by name."""
    from routepack_tune.steps.traces import save_step_batch

    tables = {tables_file(cap, task.max_tokens): task.tables_of(cap) for cap in task.caps}
    for file, frozen in tables.items():
        frozen.save(folder / file)
    write_bytes(folder / COST_MODEL_FILE, (costmodel / COST_MODEL_FILE).read_bytes())
    save_step_batch(folder / RECHECK_FILE, task.batches[-1])
    return {file: file_hash(folder / file) for file in (*tables, COST_MODEL_FILE, RECHECK_FILE)}


def stated_half_log(header: Header) -> dict[str, float]:
    """Return the cost model's 90 % half-widths (log of time) by component, from what ``costmodel.json`` holds."""
    component = {"attention": "attention", "dense": "attention", "experts": "experts", "alltoall": "exchange"}
    found: dict[str, float] = {}
    for entry in header.operations.values():
        name = component.get(entry.operation)
        if entry.intervals and name:
            found[name] = max(found.get(name, 0.0), float(np.median(entry.intervals.half_log)))
    return found


def begin_study(
    folder: Path, task: TuneTask, name: str, settings: Config, files: Sequence[Path], costmodel: Path, storage: str
) -> dict[str, Any]:
    """Write what a new study's folder must hold; return what ``study.json`` says."""
    from costmodels.cost_model import read_header
    from routepack_tune.steps.workload import workload_statistics

    hashes = write_inputs(folder, task, costmodel)
    header, steps = read_header(costmodel), zip(task.names, files, task.batches, strict=True)
    document = {
        "schema_version": STUDY_SCHEMA_VERSION,
        "study_name": name,
        "state": "running",
        "signature": task.signature,
        "config": settings.effective,
        "steps": [{"name": name, "file": path.name, "data_hash": batch.data_hash} for name, path, batch in steps],
        "storage": storage,
        "fingerprint": header.fingerprint.to_dict(),
        "cost_model": {
            "sha256": hashes[COST_MODEL_FILE],
            "data_hash": header.data_hash,
            "half_log": stated_half_log(header),
            "dtype": dtype_of(header.provenance),
        },
        "workload": workload_statistics(task.names, task.batches),
        "environment": environment(),
        "tables_hash": task.tables.tables_hash,
        "notes": list(task.tables.notes),
        "files": hashes,
        "tracking": {},
        "summary": None,
    }
    write_json(folder / STUDY_FILE, document)
    return document


def read_study(folder: Path | str, *, whole: bool = False) -> dict[str, Any]:
    """Read ``study.json``; ``whole`` also refuses a folder whose tables or recheck batch are gone or were changed."""
    path = Path(folder) / STUDY_FILE
    if not path.is_file():
        raise RoutePackError(
            f"{folder} holds no {STUDY_FILE}: it is no study. Give the folder that `routepack tune` wrote."
        )
    from routepack_tune.study.document import check_document

    document = read_json(path, "Study")
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != STUDY_SCHEMA_VERSION:
        raise RoutePackError(
            f"Study {folder} has schema_version {version!r:.40}, this version reads {STUDY_SCHEMA_VERSION}. Update "
            "routepack-tune, or tune again."
        )
    with explained(after=" Tune again."):
        check_document(document, f"Study {path} is damaged")
    for name, expected in document["files"].items() if whole else ():
        path = Path(folder, Path(name).name)
        if not path.is_file() or file_hash(path) != expected:
            raise RoutePackError(f"Study {folder}: {name} is missing or was changed since tuning. Tune again.")
    return document

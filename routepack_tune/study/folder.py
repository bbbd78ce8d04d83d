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

from profiler.errors import RoutePackError
from profiler.files import check_place, file_hash, write_bytes, write_json
from profiler.readers import read_json
from routepack_tune.bundle import COST_MODEL_FILE, cost_model_header, dtype_of
from routepack_tune.environment import environment

if TYPE_CHECKING:
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


def known_study(folder: Path, task: TuneTask) -> dict[str, Any] | None:
    """Return what the folder's ``study.json`` holds, None where there is none."""
    if not (folder / STUDY_FILE).is_file():
        return None
    known = read_study(folder)
    task.check_same(known["signature"], f"The study in {folder}")
    return known


def set_aside(folder: Path) -> str:
    """Move the folder's study to ``earlier/NAME``; storages and the tracking store stay, they hold many studies.

    Return its name, empty where there is none.
    """
    if not (folder / STUDY_FILE).is_file():
        return ""
    document = read_json(folder / STUDY_FILE, "Study")
    name = re.sub(r"[^\w.-]", "_", str(document.get("study_name", "study")))
    target, number = folder / EARLIER / name, 1
    while target.exists():
        number += 1
        target = folder / EARLIER / f"{name}-{number}"
    target.mkdir(parents=True)
    names = [path.name for path in folder.iterdir() if _is_ours(path.name)]
    # The document goes last: until then the folder is the earlier study's.
    for name in sorted(names, key=lambda name: (name == STUDY_FILE, name)):
        if not name.startswith((EARLIER, "study.journal")):
            shutil.move(folder / name, target / name)
    return str(document.get("study_name", ""))


def begin_study(
    folder: Path, task: TuneTask, name: str, settings: Config, files: Sequence[Path], costmodel: Path, storage: str
) -> dict[str, Any]:
    """Write what a new study's folder must hold; return what ``study.json`` says."""
    from routepack_tune.drift import stated_half_log
    from routepack_tune.steps.traces import save_step_batch
    from routepack_tune.steps.workload import workload_statistics

    tables = {tables_file(cap, task.max_tokens): task.tables_of(cap) for cap in task.caps}
    for file, frozen in tables.items():
        frozen.save(folder / file)
    write_bytes(folder / COST_MODEL_FILE, (costmodel / COST_MODEL_FILE).read_bytes())
    save_step_batch(folder / RECHECK_FILE, task.batches[-1])
    header, steps = cost_model_header(costmodel), zip(task.names, files, task.batches, strict=True)
    hashes = {file: file_hash(folder / file) for file in (*tables, COST_MODEL_FILE, RECHECK_FILE)}
    document = {
        "schema_version": STUDY_SCHEMA_VERSION,
        "study_name": name,
        "state": "running",
        "signature": task.signature,
        "config": settings.effective,
        "steps": [{"name": name, "file": path.name, "data_hash": batch.data_hash} for name, path, batch in steps],
        "storage": storage,
        "fingerprint": header["fingerprint"],
        "cost_model": {
            "sha256": hashes[COST_MODEL_FILE],
            "data_hash": header.get("data_hash"),
            "half_log": stated_half_log(header),
            "dtype": dtype_of(header),
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
    document = read_json(path, "Study")
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != STUDY_SCHEMA_VERSION:
        raise RoutePackError(
            f"Study {folder} has schema_version {version!r}, this version reads {STUDY_SCHEMA_VERSION}. Update "
            "routepack-tune, or tune again."
        )
    missing = {"signature", "config", "files", "summary", "study_name", "tracking"} - set(document)
    if missing:
        raise RoutePackError(f"Study {path} lacks {', '.join(sorted(missing))}: it was edited. Tune again.")
    for name, expected in document["files"].items() if whole else ():
        path = Path(folder, Path(name).name)
        if not path.is_file() or file_hash(path) != expected:
            raise RoutePackError(f"Study {folder}: {name} is missing or was changed since tuning. Tune again.")
    return document

"""The study's folder: all that ``deploy`` needs, whichever machine it runs on.

``study.json`` (what was tuned, on what, the best trial), ``study.db`` (Optuna), ``mlflow.db`` and ``artifacts/``
(tracking), ``tables.npz`` and ``costmodel.json`` (the frozen times and where they come from), ``recheck.npz`` (the step
batch on which the winner is planned once more before it is deployed).

Invariants: ``study.json`` is whole at every moment; one process writes a study at a time; a folder holds one study for
ever: other inputs are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.errors import RoutePackError
from profiler.files import content_hash, file_hash, read_json, write_bytes, write_json

if TYPE_CHECKING:
    from search import TuneTask

STUDY_SCHEMA_VERSION = 1
STUDY_FILE = "study.json"
TABLES_FILE = "tables.npz"
COST_MODEL_FILE = "costmodel.json"
RECHECK_FILE = "recheck.npz"
OPTUNA_FILE = "study.db"


def study_name(task: TuneTask) -> str:
    """Return the name that the same inputs always get, in any storage."""
    return f"routepack-{content_hash(task.signature)[:12]}"


def default_storage(folder: Path) -> str:
    """Return the Optuna URL of the SQLite file inside a study's folder."""
    return f"sqlite:///{(folder.resolve() / OPTUNA_FILE).as_posix()}"


@contextlib.contextmanager
def locked_study(folder: Path) -> Iterator[None]:
    """Hold a study's folder; a killed process lets go by itself.

    Raises
    ------
    RoutePackError
        If another process holds it, or it is a folder of something else.
    """
    import fcntl

    if folder.exists() and not folder.is_dir():
        raise RoutePackError(f"{folder} is a file, a folder is to be written there. Choose another --out.")
    own = {STUDY_FILE, TABLES_FILE, COST_MODEL_FILE, RECHECK_FILE}  # a kill may leave some of them without the others
    found = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if STUDY_FILE not in found and any(not name.startswith(".") and name not in own for name in found):
        raise RoutePackError(f"{folder} is not empty and holds no {STUDY_FILE}. Choose another --out.")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RoutePackError(
                f"Another process is tuning in {folder}. Wait for it, or choose another --out."
            ) from None
        yield


def begin_study(folder: Path, task: TuneTask, costmodel: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    """Write what a new study's folder must hold, or check that the one there is of the same inputs.

    Raises
    ------
    RoutePackError
        If the folder holds a study of other inputs; the message names them.
    """
    from routepack_tune.traces import save_step_batch

    if (folder / STUDY_FILE).is_file():
        known = read_study(folder)
        changed = [name for name, value in task.signature.items() if known["signature"].get(name) != value]
        if changed:
            raise RoutePackError(
                f"{folder} holds a study with other {', '.join(_WORDS.get(name, name) for name in changed)}: its "
                "trials cannot be compared with new ones. Give another --out, or the earlier inputs."
            )
        return known
    task.tables.save(folder / TABLES_FILE)
    write_bytes(folder / COST_MODEL_FILE, (costmodel / COST_MODEL_FILE).read_bytes())
    save_step_batch(folder / RECHECK_FILE, task.batches[-1])
    begun = {
        "schema_version": STUDY_SCHEMA_VERSION,
        "study_name": study_name(task),
        "state": "running",
        "signature": task.signature,
        **document,
        "tables_hash": task.tables.tables_hash,
        "files": {name: file_hash(folder / name) for name in (TABLES_FILE, COST_MODEL_FILE, RECHECK_FILE)},
        "tracking": {},
        "summary": None,
    }
    write_json(folder / STUDY_FILE, begun)
    return begun


_WORDS = {"batches": "step batches", "tables": "times (cost model, model, topology or cap)", "base": "planner settings",
          "space": "tunable ranges", "objective": "tune settings"}  # fmt: skip


def finish_study(folder: Path, document: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Write ``study.json`` with what has become known."""
    done = {**document, **changes}
    write_json(folder / STUDY_FILE, done)
    return done


def read_study(folder: Path | str) -> dict[str, Any]:
    """Read ``study.json``.

    Raises
    ------
    RoutePackError
        If it is missing, damaged or of another schema.
    """
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
    return document


def check_study_files(folder: Path, document: Mapping[str, Any]) -> None:
    """Refuse a study whose tables or recheck batch are gone or were changed."""
    for name, expected in document["files"].items():
        path = folder / Path(name).name
        if not path.is_file() or file_hash(path) != expected:
            raise RoutePackError(f"Study {folder}: {name} is missing or was changed since tuning. Tune again.")

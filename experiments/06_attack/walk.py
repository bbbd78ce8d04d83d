"""One mutation from its seed to its outcome: refused clearly, accepted and judged, or a fault."""

from __future__ import annotations

import os
import shutil
import traceback
from pathlib import Path

import doors
import judge
import operators
from ask_doors import DOORS

from profiler.errors import RoutePackError

ROOMS = ("profiler", "costmodels", "search", "routepack_tune")
LONGEST = 800
"""Characters of an error line that a person still reads."""


def copy_job(door: str, folder: Path) -> None:
    """Copy what a door needs of the unchanged job."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in DOORS[door].needs:
        source = doors.PRISTINE / name
        if source.is_dir():
            shutil.copytree(source, folder / name)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / name)


def run_case(door: str, seed: int, folder: Path) -> tuple[str, str, str]:
    """Change a copy of the job, walk through the door; return outcome, what was changed and a detail."""
    copy_job(door, folder)
    said = DOORS[door].mutate(operators.seeded(door, seed), folder)
    folder.parent.joinpath(f"said-{os.getpid()}").write_text(said, errors="replace")
    try:
        DOORS[door].walk(folder)
    except RoutePackError as error:
        unclear = unclear_words(str(error))
        return ("unclear", said, f"{unclear}: {error}") if unclear else ("clear", said, str(error)[:300])
    except judge.Wrong as wrong:
        return "wrongly accepted", said, str(wrong)
    except Exception as error:
        if traceback.extract_tb(error.__traceback__)[-1].filename == judge.__file__:
            return "wrongly accepted", said, f"cannot be judged: {type(error).__name__} {str(error)[:100]}"
        return "traceback", said, place_of(error)
    return "accepted", said, ""


def unclear_words(message: str) -> str:
    """Return what keeps an error from being one line that a person can act on; empty where nothing does."""
    if any(not char.isprintable() for char in message):
        return "several lines or control characters"
    if len(message) > LONGEST:
        return f"{len(message)} characters"
    return "" if len(message) > 20 else "too short"


def place_of(error: BaseException) -> str:
    """Return kind, text and innermost place in the packages of a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if any(f"/{room}/" in f.filename for room in ROOMS)]
    judged = [f for f in frames if "06_attack" in f.filename]
    at = (ours or judged or frames)[-1]
    text = " ".join(str(error).split())[:150]
    return f"{type(error).__name__} at {Path(at.filename).name}:{at.lineno} ({at.name}): {text}"

"""Files that are whole or absent, and hashes that mean the same in every process.

Everything goes through a temporary name in the same folder and one rename, so that a kill never leaves half a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from profiler.errors import RoutePackError


def canonical_json(value: Any) -> str:
    """Return ``value`` as JSON with sorted keys and no spaces; NaN and infinities are errors."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain, allow_nan=False)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"Expected a JSON-ready value, got {type(value).__name__}.")


def content_hash(value: Any) -> str:
    """Return the SHA-256 of the canonical JSON of ``value``, 64 hex digits."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def arrays_hash(**arrays: np.ndarray) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes of ``arrays``, in order of name."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def file_hash(path: Path | str) -> str:
    """Return the SHA-256 of a file's bytes."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def check_place(path: Path | str, folder: bool = False) -> None:
    """Refuse a place where no file (or ``folder``) can be written, before any work and in the caller's words."""
    place = Path(path).absolute()
    if os.path.lexists(place) and not (place.is_dir() if folder else place.is_file()):
        kind = "a folder" if place.is_dir() else "a file" if place.is_file() else "neither a file nor a folder"
        problem = f"is {kind}, {'a folder' if folder else 'one file'} is to be written there"
    else:
        inside = next(one for one in (place if folder else place.parent, *place.parents) if os.path.lexists(one))
        try:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                place.lstat()  # tells whether the name can be one at all
            with tempfile.TemporaryFile(dir=inside):
                return
        except OSError as error:
            problem = f"cannot be written: {inside}: {error.strerror}"
    raise RoutePackError(f"{path} {problem}. Choose another --out.")


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let what goes wrong while writing name the file that was asked for, not a temporary one."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def write_bytes(path: Path | str, data: bytes) -> None:
    """Write a file under a temporary name beside it, flush it to disk, then rename."""
    path = Path(path)
    with _named(path):
        _write_whole(path, data)


def _write_whole(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def write_text(path: Path | str, text: str) -> None:
    """Write text as UTF-8 through :func:`write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path | str, value: Any) -> None:
    """Write indented JSON (keys in the order given); NaN and infinities are errors."""
    write_text(path, json.dumps(value, indent=2, default=_plain, allow_nan=False) + "\n")


@contextlib.contextmanager
def new_folder(path: Path | str) -> Iterator[Path]:
    """Yield a temporary folder that takes the name ``path`` when the block ends well.

    An older folder of that name is replaced whole, at the end; after an error it is left as it was.
    """
    path = Path(path)
    check_place(path, folder=True)
    with _named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        yield temporary
        os.chmod(temporary, 0o755)
        old = temporary.with_suffix(".old")
        if path.exists():
            os.replace(path, old)
        os.replace(temporary, path)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise

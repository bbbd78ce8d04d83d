"""Files that are whole or absent, and hashes that mean the same in every process.

Everything goes through a temporary name in the same folder and one rename, so that a kill never leaves half a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from profiler.places import clear_leftovers, temporary_name, writing


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


def write_bytes(path: Path | str, data: bytes) -> None:
    """Write a file under a temporary name beside it, flush it to disk, then rename.

    RoutePackError, which names the file that was asked for, where there is no room or no right to write.
    """
    path = Path(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers(path)
        temporary = temporary_name(path)
        try:
            # Made as any new file is, so that the process's umask holds.
            with open(temporary, "xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def write_text(path: Path | str, text: str) -> None:
    """Write text as UTF-8 through :func:`write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path | str, value: Any) -> None:
    """Write indented JSON (keys in the order given); NaN and infinities are errors."""
    write_text(path, json.dumps(value, indent=2, default=_plain, allow_nan=False) + "\n")

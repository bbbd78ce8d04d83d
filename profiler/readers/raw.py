"""The bytes of a file, whatever its format: there, a plain file, of sane size, no placeholder of Git LFS."""

from __future__ import annotations

import os
from pathlib import Path

from profiler.errors import RoutePackError

LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def checked_size(path: Path | str, what: str, most: int) -> int:
    """Return a file's size in bytes; RoutePackError unless it is a file of at most ``most`` and no LFS pointer."""
    try:
        with open(path, "rb", opener=_without_waiting) as stream:
            size = os.fstat(stream.fileno()).st_size
            plain = os.path.isfile(path)
            pointer = plain and stream.read(len(LFS_POINTER)) == LFS_POINTER
    except FileNotFoundError:
        raise RoutePackError(f"{what} not found: {shown(path)}.") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise RoutePackError(f"{what} {shown(path)} cannot be read: {reason(error)}.") from None
    if pointer:
        raise RoutePackError(f"{what} {shown(path)} is a Git LFS pointer, not the file itself: run `git lfs pull`.")
    if not plain:
        raise RoutePackError(f"{what} {shown(path)} is no file. Give the path of one.")
    if size > most:
        raise RoutePackError(
            f"{what} {shown(path)} has {size / 2**20:,.0f} MiB, at most {most / 2**20:,.0f} are read. Is it another "
            "file?"
        )
    return size


def read_bytes(path: Path | str, what: str, most: int) -> bytes:
    """Return a file's bytes; RoutePackError, in which ``what`` names it, as :func:`checked_size` says."""
    checked_size(path, what, most)
    try:
        with open(path, "rb") as stream:
            return stream.read(most)
    except OSError as error:
        raise RoutePackError(f"{what} {shown(path)} cannot be read: {reason(error)}.") from None


def shown(value: object, most: int = 200) -> str:
    """Return ``value`` on one line, without control characters or halves of characters, shortened in the middle."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 2 :]}"


def reason(error: BaseException) -> str:
    """Return why the system or a library refused, on one line."""
    told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return shown(" ".join(told.split())) or type(error).__name__


def _without_waiting(path: str, flags: int) -> int:
    # A pipe without a writer would be waited for.
    return os.open(path, flags | os.O_NONBLOCK)

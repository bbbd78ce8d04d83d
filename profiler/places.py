"""Places where something is written: whether it can be, who else writes there, what killed processes left beside it.

Whatever is made appears whole: under a temporary name in the same folder, then renamed. A folder changes places with
the one it replaces in one step of the system, so that a reader, or a kill, finds one of the two at every moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from profiler.errors import RoutePackError
from profiler.readers.raw import reason, shown

T = TypeVar("T")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
"""What file systems without locks answer."""
_EXCHANGE = 2
"""RENAME_EXCHANGE of renameat2(2)."""


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
def writing(path: Path | str) -> Iterator[None]:
    """Turn what the system refuses while ``path`` is written into one line that names it, not a temporary file."""
    try:
        yield
    except OSError as error:
        help_ = "Make room there; the same command goes on." if error.errno in NO_ROOM else "Choose another place."
        raise RoutePackError(f"{shown(path)} cannot be written: {reason(error)}. {help_}") from None


def temporary_name(path: Path) -> Path:
    """Return a new name beside ``path`` which tells whose it is: of this process, on this machine."""
    return path.with_name(f".{path.name[:60]}.{_host()}-{os.getpid()}-{secrets.token_hex(4)}.tmp")


@functools.cache
def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", socket.gethostname())[:40]


def _left_by_the_dead(path: Path) -> Iterator[Path]:
    """Yield what processes of this machine that no longer live left beside ``path``."""
    pattern = re.compile(rf"\.{re.escape(path.name[:60])}\.{_host()}-(\d+)-[0-9a-f]{{8}}\.(tmp|old)")
    with os.scandir(path.parent) as found:
        names = [entry.name for entry in found if entry.name.startswith(f".{path.name[:60]}.")]
    for name in names:
        if (match := pattern.fullmatch(name)) and not _lives(int(match[1])):
            yield path.with_name(name)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def clear_leftovers(path: Path | str) -> None:
    """Remove what killed processes left beside ``path``; bring back a folder that one of them had moved away."""
    path = Path(path)
    for left in _left_by_the_dead(path):
        if left.suffix == ".old" and not path.exists():
            os.rename(left, path)
        elif left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: Path | str) -> Iterator[Path]:
    """Yield a temporary folder that takes the name ``path`` when the block ends well.

    An older folder of that name is replaced whole, at the end; after an error it is left as it was.
    """
    path = Path(path)
    check_place(path, folder=True)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers(path)
        temporary = temporary_name(path)
        temporary.mkdir()
    try:
        yield temporary
        with writing(path):
            replace_folder(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def replace_folder(new: Path, path: Path) -> None:
    """Give ``new`` the name ``path``; a folder that had it is then at ``new``, or gone."""
    if not path.exists():
        os.rename(new, path)
    elif not _exchanged(new, path):
        # File systems that cannot exchange names: the old folder is away for a moment, and comes back after a kill.
        old = new.with_suffix(".old")
        os.rename(path, old)
        os.rename(new, path)
        shutil.rmtree(old, ignore_errors=True)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step; false where system or file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # no such call in this C library
        return False
    here = -100  # AT_FDCWD
    return bool(rename(here, os.fsencode(one), here, os.fsencode(other), _EXCHANGE) == 0)


def read_folder(path: Path | str, read: Callable[[], T]) -> T:
    """Return what ``read`` makes of a folder's files, read again where the folder was replaced meanwhile."""
    path = Path(path)
    for _ in range(100):
        before = _identity(path)
        try:
            return read()
        except RoutePackError:
            if before is not None and before == _identity(path):
                raise
        if before is None and path.parent.is_dir():
            time.sleep(0.005)  # it may be away for a moment; after a kill it is brought back
            with contextlib.suppress(OSError):
                clear_leftovers(path)
    return read()


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns  # numbers of removed folders are used again


@contextlib.contextmanager
def claimed(path: Path | str, doing: str) -> Iterator[None]:
    """Hold ``path`` against other processes while this one is ``doing`` something there; a kill lets go.

    RoutePackError where another holds it; a warning where the file system knows no locks.
    """
    import fcntl

    path = Path(path).absolute()
    claim = path.with_name(f".{path.name[:60]}.claim")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with writing(path):
            handle = os.open(claim, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise RoutePackError(f"Another process is {doing} {path}. Wait for it, or choose another --out.") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(handle)
                raise
            warnings.warn(
                f"The file system of {path} knows no locks: nothing keeps a second process from {doing} it too.",
                stacklevel=3,
            )
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(handle), os.stat(claim)):
                break
        os.close(handle)  # its holder ended and removed it meanwhile
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(claim)
        os.close(handle)

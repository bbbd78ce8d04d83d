"""Kernels compiled by numba, and the folder that keeps what was compiled.

Keeping it saves half a minute a process; it is never a condition. numba alone refuses to define a kernel where it finds
no folder to write to (a read-only image, a user without home), and fails inside a plan where the folder has become full
or read-only. Here such a folder is read if it can be, and one note says what is not kept and how to keep it.

numba also takes a kernel for unchanged as long as its own file is: here its callees' files count too, so that an update
of the package never runs old code.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import inspect
import logging
import os
import pickle
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

import numba
from numba import njit
from numba.core import caching
from numba.core.dispatcher import Dispatcher

_LOG = logging.getLogger("routepack_tune")
_STAMPS: dict[Any, str] = {}
"""What each kernel was made from."""
_TOLD = threading.Event()


def compiled(function: Callable | None = None, *, inline: Literal["never", "always"] = "never") -> Any:
    """Compile a function of arrays and numbers when it is first called, without the interpreter's lock."""
    if function is None:
        return functools.partial(compiled, inline=inline)
    kernel: Any = njit(nogil=True, inline=inline)(function)
    if isinstance(kernel, Dispatcher):  # not so under NUMBA_DISABLE_JIT
        _STAMPS[kernel] = _stamp(function)
        kernel.__dict__["_cache"] = _Cache(function)
    return kernel


def _stamp(function: Callable) -> str:
    """Hash a function's file, the numbers it may have compiled in, and its callees' files."""
    path, names = inspect.getfile(function), sorted(function.__globals__.items())
    numbers = [(name, value) for name, value in names if isinstance(value, (int, float))]
    callees = {_STAMPS[value] for _, value in names if isinstance(value, Dispatcher) and value in _STAMPS}
    return hashlib.sha256(repr((_text(path), numbers, sorted(callees))).encode()).hexdigest()


@functools.cache
def _text(path: str) -> bytes:
    return Path(path).read_bytes()


@functools.cache
def cache_folder(source: str, given: str) -> str:
    """Return where kernels of a folder are kept: ``given``, beside the source, or below the user's home.

    The first that can be written, or one that can only be read: it may have been filled when an image was made.
    Without a home there is none: numba would make a folder ``~`` wherever the process runs.
    """
    named = f"{os.path.basename(source)}_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    beside, home = os.path.join(source, "__pycache__"), os.path.expanduser("~/.cache")
    if given and (_writable(folder := os.path.join(given, named)) or os.path.isdir(folder)):
        return folder
    if not _writable(beside) and os.path.isabs(home):
        folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or home, "numba", named)
        return folder if _writable(folder) else beside
    return beside


def _writable(folder: str) -> bool:
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


class _Locator:
    """Where one kernel is kept, in numba's terms."""

    def __init__(self, function: Callable, path: str) -> None:
        self._py_file, self._line, self._stamp = path, function.__code__.co_firstlineno, _stamp(function)
        self._folder = cache_folder(os.path.dirname(os.path.abspath(path)), numba.config.CACHE_DIR)  # type: ignore[attr-defined]

    @classmethod
    def from_function(cls, function: Callable, path: str) -> Self:
        return cls(function, path)

    def get_cache_path(self) -> str:
        return self._folder

    def get_source_stamp(self) -> str:
        return self._stamp

    def get_disambiguator(self) -> str:
        return str(self._line)

    def ensure_cache_path(self) -> None:
        os.makedirs(self._folder, exist_ok=True)


class _Files(caching.CompileResultCacheImpl):
    _locator_classes = [_Locator]  # noqa: RUF012


class _Cache(caching.FunctionCache):
    """numba's cache of one kernel, which gives up where numba would raise."""

    _impl_class = _Files

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except OSError:  # saving says so
            return None
        except (EOFError, pickle.UnpicklingError):  # a machine that went down left half a file
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            os.makedirs(self.cache_path, exist_ok=True)
            # Two processes that add different types at once would give their code one name.
            with open(os.path.join(self.cache_path, "routepack.lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                super().save_overload(sig, data)
        except OSError as error:
            self.disable()
            _tell(self.cache_path, error.strerror or str(error))


def _tell(folder: str, why: str) -> None:
    """Say once in a job that nothing is kept."""
    if not _TOLD.is_set() and os.environ.get("RANK", "0") == "0":
        _TOLD.set()
        _LOG.warning(
            "Compiled code cannot be kept in %s (%s): every process compiles again, about half a minute. Set "
            "NUMBA_CACHE_DIR to a folder that can be written.",
            folder,
            why,
        )

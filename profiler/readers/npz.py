"""``.npz`` archives judged by what their headers say before anything is allocated: no pickle, no records, no lies.

numpy evaluates a member's header as Python and allocates what it states; here a header is one fixed pattern, and shape,
type, stated and stored size must agree first.
"""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Callable, Container, Mapping
from math import prod
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from profiler.errors import RoutePackError
from profiler.readers.raw import checked_size, reason, shown

MAX_BYTES = 256 << 20
"""What small archives (tables, residuals) may unpack to, unless the caller allows more."""
MAX_MEMBERS = 64
MAX_DIRECTORY = 128 << 10
MOST_PACKED = 256
"""Above ``MAX_BYTES``, arrays unpack to at most so many times the file: counts of samples of 8 tokens and 512 experts,
nearly all of them zero, pack 60 times; zeros alone 1,000 times."""
_HEADER = re.compile(
    rb"\{'descr': '([<>|=]?[a-zA-Z]\d{0,9})', 'fortran_order': (True|False), 'shape': \(([\d, ]{0,200})\), ?\} *\n?"
)
"""What numpy and others write."""
_DAMAGE = (zlib.error, NotImplementedError, EOFError, OverflowError, ValueError, OSError)


class Header(NamedTuple):
    """Type and shape of one array, as its header states them."""

    dtype: np.dtype
    shape: tuple[int, ...]
    fortran_order: bool
    begin: int
    """Bytes of the header."""


class _Bounded(io.FileIO):
    """Never return more at once than a directory of few members has, whatever an archive says of its own."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(min(size, MAX_DIRECTORY) if size is not None and size >= 0 else MAX_DIRECTORY)


def read_npz(
    path: Path | str,
    what: str,
    names: Container[str] | None = None,
    most: int = MAX_BYTES,
    check: Callable[[Mapping[str, Header]], None] | None = None,
) -> dict[str, np.ndarray]:
    """Read the arrays of an ``.npz``, or those of them in ``names``: numbers and text, in the machine's byte order.

    ``check`` sees types and shapes before anything is allocated, and raises RoutePackError where they cannot be right;
    ``most`` bounds the bytes of all arrays together.

    Raises
    ------
    RoutePackError
        If the file is missing, damaged, encrypted, holds Python objects or records, or more than ``most``.
    """
    size = checked_size(path, what, most + MAX_DIRECTORY)
    try:
        with _Bounded(path) as stream, zipfile.ZipFile(stream) as archive:
            members = _members(archive, names)
            headers = {name: _header(archive, info) for name, info in members.items()}
            total = sum(prod(header.shape) * header.dtype.itemsize for header in headers.values())
            most = min(most, max(MAX_BYTES, MOST_PACKED * size))
            if total > most:
                raise ValueError(f"its arrays take {total:,} bytes, at most {most:,} are read")
            if check is not None:
                check(headers)
            return {name: _array(archive, info, headers[name]) for name, info in members.items()}
    except zipfile.BadZipFile as error:
        told = f"truncated or not an .npz ({reason(error)})"
        raise RoutePackError(f"{what} {shown(path)} cannot be read: {told}. Write it again.") from None
    except _DAMAGE as error:
        raise RoutePackError(f"{what} {shown(path)} cannot be read: {reason(error)}. Write it again.") from None


def _members(archive: zipfile.ZipFile, names: Container[str] | None) -> dict[str, zipfile.ZipInfo]:
    infos = archive.infolist()
    if len(infos) > MAX_MEMBERS:
        raise ValueError(f"it has {len(infos):,} members, at most {MAX_MEMBERS} are read")
    members: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        name = info.filename.removesuffix(".npy")
        if name in members:
            raise ValueError(f"the array {shown(name, 80)!r} is there twice")
        members[name] = info
        if info.flag_bits & 0x2041:
            raise ValueError(f"the array {shown(name, 80)!r} is encrypted")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others take memory of their choice
            raise ValueError(f"the array {shown(name, 80)!r} is packed otherwise than numpy does")
    return {name: info for name, info in members.items() if names is None or name in names}


def _header(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Header:
    """Parse a member's header: one fixed pattern, so that nothing is evaluated."""
    name = shown(info.filename.removesuffix(".npy"), 80)
    with archive.open(info) as stream:
        start = stream.read(12)
        wide = 4 if start[6:7] > b"\x01" else 2
        length = int.from_bytes(start[8 : 8 + wide], "little")
        if start[:6] != b"\x93NUMPY" or not 0 < length <= 4096:
            raise ValueError(f"{name!r} is no array")
        text = (start[8 + wide :] + stream.read(length))[:length]
    if b"'|O'" in text:
        raise ValueError(f"{name!r} holds Python objects, write ids as numbers or text: np.array(ids, dtype=str)")
    found = _HEADER.fullmatch(text)
    if found is None:
        raise ValueError(f"{name!r} is no array of numbers or text")
    dtype = np.dtype(found[1].decode()) if found[1][1:2] in b"biufSU" else None
    if dtype is None or (dtype.itemsize == 0 and dtype.kind not in "SU"):
        raise ValueError(f"{name!r} is of the type {found[1].decode()}, expected numbers or text")
    shape = tuple(int(size) for size in found[3].decode().replace(",", " ").split())
    held = info.file_size - 8 - wide - length
    if max(shape, default=0) >= 1 << 48 or len(shape) > 8 or prod(shape) * dtype.itemsize != held:
        raise ValueError(f"{name!r} states the shape {shown(list(shape), 80)} of {dtype}, and holds {held:,} bytes")
    return Header(dtype, shape, found[2] == b"True", 8 + wide + length)


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, header: Header) -> np.ndarray:
    dtype, shape, fortran_order, begin = header
    array = np.empty(prod(shape), dtype)
    with archive.open(info) as stream:
        stream.read(begin)
        _fill(stream, array.view(np.uint8) if array.nbytes else np.empty(0, np.uint8))
        stream.read(1)  # the end, where the checksum is compared
    if dtype.kind == "U" and array.nbytes:
        points = array.view(dtype.byteorder + "u4")
        if ((points > 0x10FFFF) | ((points >= 0xD800) & (points < 0xE000))).any():
            raise ValueError(f"the array {shown(info.filename, 80)!r} holds text that is no Unicode")
    array = array.reshape(shape[::-1]).T if fortran_order else array.reshape(shape)
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


def _fill(stream: IO[bytes], data: np.ndarray) -> None:
    done = 0
    while done < data.size:
        part = stream.read(min(1 << 20, data.size - done))
        if not part:
            raise EOFError("truncated")
        data[done : done + len(part)] = np.frombuffer(part, np.uint8)
        done += len(part)

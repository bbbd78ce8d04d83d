"""Operators on ``.npz`` files: on the arrays, on the headers that announce them, and on the zip around them."""

from __future__ import annotations

import ast
import io
import struct
import zipfile
from typing import Any

import numpy as np
from operators import Rng, change_bytes, one_of

Arrays = dict[str, np.ndarray]
EXTREMES = (0, 1, -1, 2, 255, 2**15, 2**31 - 1, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63))
FLOATS = (np.nan, np.inf, -np.inf, -0.0, 1e300, -1e300, 5e-324, 0.5)
TYPES = (
    "f4",
    "f8",
    "?",
    "i1",
    "u1",
    "i2",
    "u2",
    "i4",
    "u8",
    ">i8",
    "c16",
    "U5",
    "S5",
    "M8[s]",
    "m8[ns]",
    "f2",
    "V8",
    "O",
)
SHAPES = (
    "(-1,)",
    "(9223372036854775807,)",
    "(18446744073709551616,)",
    "(1000000000, 1000000000)",
    "(4000000000,)",
    "(2147483648,)",
    "(500000000,)",
    "(0,)",
    "()",
    "(3",
    "None",
    "(3,)*9",
    "('3',)",
    "(3.5,)",
    "(True,)",
    "[3]",
    "(" + "1," * 200 + ")",
    "(" * 3000 + ")" * 3000,
    "(1e9,)",
    "(100000000, 0)",
)
DESCRS = (
    "'<i8'",
    "'|O'",
    "'<U1000000000'",
    "'|S2147483647'",
    "'|V0'",
    "'<i3'",
    "''",
    "None",
    "'x'",
    "[('a', '<i8')]",
    "[('a', '|O')]",
    "'<f16'",
    "'<M8[xx]'",
    "'<i8, <f8'",
    "('<i8', (100000000,))",
    "__import__('os')",
    "'" + "x" * 5000 + "'",
)
HEADERS = (
    "",
    "{",
    "}",
    "{'descr': '<i8'}",
    "{'descr': '<i8', 'fortran_order': 3, 'shape': (3,)}",
    "'''",
    "(" * 5000,
    "\\\n",
    "\x00",
    "{'descr': '<i8', 'fortran_order': False, 'shape': (3,), 'more': 1}",
    "[1, 2]",
    "{1: 2}",
    "  x\n y",
    "\xff",
    "9" * 5000,
    "-" * 5000 + "1",
    "{'descr': '<i8', 'fortran_order': False, 'shape': (3L,), }",
)
NAMES = ("../evil", "/evil", "a\x00b", "", "x" * 300, "é", "a/b", "\x1b[31m", "a\nb", "C:\\evil", "header", "lengths")


def npz(arrays: Arrays, compressed: bool = True) -> bytes:
    """Return the bytes of an archive of plain arrays."""
    buffer = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(buffer, **arrays)
    return buffer.getvalue()


def members(data: bytes) -> dict[str, bytes]:
    """Return the files inside an archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def change_array(rng: Rng, array: np.ndarray) -> tuple[np.ndarray, str]:
    """Change an array's values, type or shape; return it and what was done."""
    kind = one_of(rng, ("values",) * 5 + ("type", "shape", "shape", "shuffle", "offset", "same", "empty"))
    if kind == "values" and array.size and array.dtype.kind in "iuf":
        found, count = array.copy(), int(one_of(rng, (1, 1, 1, 3, array.size)))
        flat, places = found.reshape(-1), rng.integers(0, array.size, count)
        told = []
        for place in places[:50] if count < array.size else [slice(None)]:
            value = (
                float(one_of(rng, FLOATS)) if array.dtype.kind == "f" and rng.random() < 0.5 else one_of(rng, EXTREMES)
            )
            if rng.random() < 0.35 and count < array.size:
                value = flat[place].item() + one_of(rng, (-1, 1, 1000, -1000))
            with np.errstate(all="ignore"):
                flat[place] = np.array([value]).astype(array.dtype)[0]
            told.append(f"[{place}] = {flat[place] if isinstance(place, (int, np.integer)) else value}")
        return found, ", ".join(told[:3])
    if kind == "type":
        wanted = one_of(rng, TYPES)
        try:
            with np.errstate(all="ignore"):
                return array.astype(wanted), f"type {wanted}"
        except (ValueError, TypeError):
            return np.zeros(array.shape, "S3"), "type S3"
    if kind == "shape" and array.size:
        return _reshaped(rng, array)
    if kind == "shuffle" and array.size:
        return rng.permutation(array.reshape(-1)).reshape(array.shape), "values shuffled"
    if kind == "offset" and array.dtype.kind in "iuf":
        with np.errstate(all="ignore"):
            return (array + np.array(one_of(rng, (-1, 1, 1000, -1000))).astype(array.dtype)), "all values shifted"
    if kind == "same" and array.size:
        return np.full_like(array, array.reshape(-1)[0]), "all values the first"
    return array[:0] if array.ndim else np.zeros((0, 0), array.dtype), "empty"


def _reshaped(rng: Rng, array: np.ndarray) -> tuple[np.ndarray, str]:
    axis = int(rng.integers(max(1, array.ndim)))
    size = array.shape[axis] if array.ndim else 1
    changed = {
        "longer": lambda: np.concatenate([array, array.take(range(min(size, 3)), axis)], axis),
        "much longer": lambda: np.concatenate([array] * 50, axis),
        "shorter": lambda: array.take(range(max(0, size - int(rng.integers(1, 4)))), axis),
        "one": lambda: array.take([0], axis),
        "flat": lambda: array.reshape(-1),
        "an axis more": lambda: array[None],
        "an axis less": lambda: array.reshape(array.shape[0], -1) if array.ndim > 1 else array[0],
        "transposed": lambda: np.ascontiguousarray(array.T) if array.ndim > 1 else array[::-1],
        "scalar": lambda: array.reshape(-1)[0],
    }
    kind = one_of(rng, list(changed)) if array.ndim else "an axis more"
    return np.asarray(changed[kind]()), f"axis {axis} {kind}"


def change_arrays(rng: Rng, arrays: Arrays) -> str:
    """Change one array of several, or which there are."""
    if not arrays:
        return "no array is left"
    name, kind = one_of(rng, sorted(arrays)), one_of(rng, ("change",) * 8 + ("gone", "renamed", "swapped", "more"))
    if kind == "gone":
        del arrays[name]
    elif kind == "renamed":
        arrays[one_of(rng, (name.upper(), name + "_", "x", "arr_0"))] = arrays.pop(name)
    elif kind == "swapped":
        other = one_of(rng, sorted(arrays))
        arrays[name], arrays[other] = arrays[other], arrays[name]
        kind = f"swapped with {other}"
    elif kind == "more":
        arrays[one_of(rng, ("extra", "known_tokens", "expert_counts", "prompt_ids", "sample_ids"))] = np.arange(3)
    else:
        arrays[name], kind = change_array(rng, arrays[name])
    return f"{name}: {kind}"


def header_bytes(text: str, version: tuple[int, int] = (1, 0)) -> bytes:
    """Return a .npy header with any text in it."""
    raw = text.encode("latin-1") + b"\n"
    size = struct.pack("<H", len(raw) & 0xFFFF) if version == (1, 0) else struct.pack("<I", len(raw))
    return b"\x93NUMPY" + bytes(version) + size + raw


def change_archive(rng: Rng, data: bytes) -> tuple[bytes, str]:
    """Change an archive below the arrays: one member's header or bytes, the zip's own entries, or plain bytes."""
    kind = one_of(rng, ("header", "header", "header", "member", "zip", "zip", "bytes", "bytes"))
    if kind == "bytes":
        return change_bytes(rng, data, tail=True)
    files = members(data)
    name = one_of(rng, sorted(files))
    if kind == "member":
        files[name], said = change_bytes(rng, files[name])
        return zipped(list(files.items())), f"{name}: {said}"
    if kind == "header":
        text, body = _header(rng, files[name])
        version = one_of(rng, ((1, 0), (2, 0), (3, 0), (1, 0), (9, 9)))
        files[name] = header_bytes(text, version) + body
        return zipped(list(files.items())), f"{name}: header {text[:70]!r} version {version}"
    return _rezipped(rng, files, name)


def _header(rng: Rng, member: bytes) -> tuple[str, bytes]:
    """Return a changed header's text and the bytes behind it."""
    size = struct.unpack("<H", member[8:10])[0]
    body = member[10 + size :]
    parts: dict[str, Any] = ast.literal_eval(member[10 : 10 + size].decode("latin-1"))
    kind = one_of(rng, ("shape", "shape", "descr", "whole"))
    if kind == "whole":
        return one_of(rng, HEADERS), body
    shown = {"descr": repr(parts["descr"]), "fortran_order": "False", "shape": repr(parts["shape"])}
    shown[kind] = one_of(rng, SHAPES if kind == "shape" else DESCRS)
    return "{" + ", ".join(f"{key!r}: {value}" for key, value in shown.items()) + ", }", body


def zipped(files: list[tuple[str, bytes]], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """Return an archive of these files in order; names may occur twice."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in files:
            info = zipfile.ZipInfo("x")
            info.filename, info.compress_type = name, method
            archive.writestr(info, content)
    return buffer.getvalue()


def _rezipped(rng: Rng, files: dict[str, bytes], name: str) -> tuple[bytes, str]:
    kinds = ("twice", "named", "encrypted", "method", "size", "many", "folder", "suffix", "bomb", "stored", "offset")
    kind, listed = one_of(rng, kinds), list(files.items())
    if kind == "twice":
        other = npz({"x": np.arange(int(rng.integers(5)))})
        return zipped([*listed, (name, members(other)["x.npy"])]), f"{name} twice"
    if kind == "named":
        new = one_of(rng, NAMES) + one_of(rng, (".npy", ""))
        return zipped([*listed, (new or "x", files[name])]), f"a member {new!r}"
    if kind == "many":
        return zipped(
            [*listed, *((f"m{i}.npy", files[name][:200]) for i in range(int(one_of(rng, (70, 5000)))))]
        ), "many"
    if kind == "folder":
        return zipped([*listed, ("folder/", b"")]), "a folder inside"
    if kind == "suffix":
        return zipped([(n.removesuffix(".npy"), c) for n, c in listed]), "names without .npy"
    if kind == "bomb":  # 64 MiB of zeros a member, which shrink to 64 KiB
        head = header_bytes(f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({1 << 23},), }}")
        return zipped([(n, head + bytes(1 << 26) if n == name else c) for n, c in listed]), f"{name}: 64 MiB of zeros"
    if kind == "stored":
        return zipped(
            listed, int(one_of(rng, (zipfile.ZIP_STORED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)))
        ), "other method"
    data = bytearray(zipped(listed))
    places = _entries(data, b"PK\x01\x02") if rng.random() < 0.7 else _entries(data, b"PK\x03\x04")
    central = data[places[0] + 2] == 1
    at = one_of(rng, places)
    if kind == "encrypted":
        data[at + (8 if central else 6)] |= 1
    elif kind == "method":
        struct.pack_into("<H", data, at + (10 if central else 8), int(one_of(rng, (0, 1, 6, 9, 12, 14, 93, 99))))
    elif kind == "size":
        field = int(one_of(rng, (20, 24) if central else (18, 22)))
        struct.pack_into("<I", data, at + field, int(one_of(rng, (0, 1, 10**6, 2**31, 2**32 - 1))))
    else:
        end = data.rfind(b"PK\x05\x06")
        struct.pack_into("<I", data, end + 16, int(one_of(rng, (0, 1, 10**6, 2**32 - 1))))
    return bytes(data), f"zip entry at {at}: {kind}"


def _entries(data: bytearray, mark: bytes) -> list[int]:
    found, at = [], data.find(mark)
    while at >= 0:
        found.append(at)
        at = data.find(mark, at + 1)
    return found

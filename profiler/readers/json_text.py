"""JSON of sane size: at most 32 MiB, two million values, 64 levels, numbers of 64 bits, no key twice, text in UTF-8.

What the standard library accepts beyond that ends in errors far from the file: in recursion, in numpy, in the terminal.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from profiler.errors import RoutePackError
from profiler.readers.raw import read_bytes, reason, shown

MAX_BYTES = 32 << 20
MAX_VALUES = 1 << 21
"""A plan of 20,000 samples, 94 layers and 512 experts has 100,000."""
MAX_DEPTH = 64
_CHUNK = 1 << 20
_STRING = re.compile(rb'"(?:[^"\\]++|\\.?+)*+(?:"|\Z)', re.DOTALL)
"""A string, whole or cut off: always a match, so that no text is scanned twice."""
_LARGE = re.compile(rb"\d{19}|[eE]\+?\d{3}")
"""Numbers that may leave 64 bits or be infinite; the hooks that look at each one are slow, and seldom needed."""
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_STEPS = np.zeros(256, np.int64)
_STEPS[[ord("["), ord("{")]], _STEPS[[ord("]"), ord("}")]] = 1, -1


def read_json(path: Path | str, what: str, most: int = MAX_BYTES) -> Any:
    """Read a JSON file; RoutePackError, in which ``what`` names it, if it is missing, too large or no such JSON."""
    return parse_json(read_bytes(path, what, most), f"{what} {shown(path)}")


def parse_json(text: bytes | str, what: str) -> Any:
    """Return the value of JSON text; RoutePackError that begins with ``what`` if it is none, or beyond the limits."""
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    try:
        if len(raw) > MAX_BYTES:
            raise ValueError(f"it has {len(raw) >> 20:,} MiB, at most {MAX_BYTES >> 20} are read")
        bare = _STRING.sub(b"", raw)
        if (values := sum(map(bare.count, (b",", b"[", b"{")))) > MAX_VALUES:
            raise ValueError(f"it has {values:,} values, at most {MAX_VALUES:,} are read")
        _check_depth(bare.translate(None, _NO_BRACKETS))
        numbers: dict[str, Any] = {"parse_int": _whole, "parse_float": _real} if _LARGE.search(bare) else {}
        value = json.loads(raw.decode("utf-8"), parse_constant=_never, object_pairs_hook=_once, **numbers)
        if _SURROGATE.search(raw):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        raise RoutePackError(f"{what} cannot be read: it holds text that is no UTF-8. Write it again.") from None
    except ValueError as error:
        raise RoutePackError(f"{what} cannot be read: {reason(error)}. Write it again.") from None
    return value


def _check_depth(brackets: bytes) -> None:
    """Refuse what nests too deep, before a parser recurses into it."""
    depth = 0
    for begin in range(0, len(brackets), _CHUNK):
        part = np.frombuffer(brackets, np.uint8, min(_CHUNK, len(brackets) - begin), begin)
        depths = depth + np.cumsum(_STEPS[part])
        if depths.max() > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        depth = int(depths[-1])


def _whole(digits: str) -> int:
    if len(digits) > 20 or not -(1 << 63) <= (number := int(digits)) < 1 << 63:
        raise ValueError(f"{shown(digits[:40])} is beyond 64 bits")
    return number


def _real(digits: str) -> float:
    if abs(number := float(digits)) == float("inf"):
        raise ValueError(f"{shown(digits[:40])} is not finite")
    return number


def _never(word: str) -> None:
    raise ValueError(f"it holds {word}, which is no JSON number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (name, _), *_ = (Counter(name for name, _ in pairs)).most_common(1)
        raise ValueError(f"the key {shown(name, 80)!r} is given twice")
    return found

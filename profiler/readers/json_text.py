"""JSON of sane size: at most 32 MiB, 64 levels, whole numbers of 64 bits, finite, no key twice, text that is UTF-8.

What the standard library accepts beyond that ends in errors far from the file: in recursion, in numpy, in the terminal.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from profiler.errors import RoutePackError
from profiler.readers.raw import read_bytes, reason, shown

MAX_BYTES = 32 << 20
MAX_DEPTH = 64
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_STEPS = np.zeros(256, np.int32)
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
        if _depth(raw) > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        value = json.loads(
            raw.decode("utf-8"),
            parse_int=_whole,
            parse_float=_real,
            parse_constant=_never,
            object_pairs_hook=_once,
        )
        if _SURROGATE.search(raw):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        raise RoutePackError(f"{what} cannot be read: it holds text that is no UTF-8. Write it again.") from None
    except (ValueError, RecursionError) as error:
        raise RoutePackError(f"{what} cannot be read: {reason(error)}. Write it again.") from None
    return value


def _depth(raw: bytes) -> int:
    """Return how deep brackets nest, before a parser recurses into them."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return 0
    bare = np.frombuffer(_STRING.sub(b"", raw), np.uint8)
    brackets = bare[(bare == ord("[")) | (bare == ord("]")) | (bare == ord("{")) | (bare == ord("}"))]
    return int(np.cumsum(_STEPS[brackets]).max(initial=0))


def _whole(digits: str) -> int:
    if len(digits) > 20 or not -(1 << 63) <= (number := int(digits)) < 1 << 63:
        raise ValueError(f"{shown(digits, 40)} is beyond 64 bits")
    return number


def _real(digits: str) -> float:
    if abs(number := float(digits)) == float("inf"):
        raise ValueError(f"{shown(digits, 40)} is not finite")
    return number


def _never(word: str) -> None:
    raise ValueError(f"it holds {word}, which is no JSON number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = [name for name, _ in pairs]
        raise ValueError(f"the key {shown(next(name for name in found if seen.count(name) > 1), 80)!r} is given twice")
    return found

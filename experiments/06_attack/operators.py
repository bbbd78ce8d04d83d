"""Operators on plain data (what JSON and YAML hold), on their text, and on bytes; every one says what it did.

All draw from the ``numpy`` generator they are given, so that (door, seed) is one mutation for ever. ``Raw`` stands for
text that no Python value prints as: numbers of 5,000 digits, NaN, keys given twice, thousands of brackets.
"""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from values import DEEP, FORMATS, NUMBERS, OTHER, TEXTS, Raw

Rng = np.random.Generator
Path_ = tuple[Any, ...]
"""Keys and positions from the root to a node."""


def one_of(rng: Rng, choices: Sequence[Any]) -> Any:
    """Draw one of them."""
    return choices[int(rng.integers(len(choices)))]


def nasty(rng: Rng, like: Any = None) -> Any:
    """Draw a value; more often a number where a number stands, text where text stands."""
    kinds: list[Sequence[Any]] = [NUMBERS, TEXTS, OTHER]
    if isinstance(like, (int, float)) and not isinstance(like, bool):
        kinds += [NUMBERS] * 3
    elif isinstance(like, str):
        kinds += [TEXTS] * 2
    return copy.deepcopy(one_of(rng, one_of(rng, kinds)))


def near(rng: Rng, value: Any) -> Any:
    """Return a number a little or much away from ``value``."""
    return one_of(rng, (value + 1, value - 1, -value, value * 2, value * 1000, value + 2**31, value / 2, value + 0.5))


def dumps(tree: Any, indent: bool = True) -> str:
    """Return JSON text; ``Raw`` nodes as they are, NaN and infinities in Python's spelling."""
    if isinstance(tree, Raw):
        return tree.text
    if isinstance(tree, dict):
        inside = [f"{json.dumps(str(key))}: {dumps(value, indent)}" for key, value in tree.items()]
        return "{" + (",\n" if indent else ",").join(inside) + "}"
    if isinstance(tree, (list, tuple)):
        return "[" + ", ".join(dumps(value, indent) for value in tree) + "]"
    return json.dumps(tree)


def shown(value: Any) -> str:
    """Return a value in a few characters."""
    text = value.text if isinstance(value, Raw) else repr(value)
    return text if len(text) <= 40 else f"{text[:20]}...({len(text)})"


def draw_place(rng: Rng, tree: Any, only: Callable[[Path_], bool] = lambda _: True) -> Path_:
    """Draw a node, level by level, so that long lists of numbers do not swallow every draw."""
    for _ in range(200):
        path: Path_ = ()
        node = tree
        while isinstance(node, (dict, list)) and node and (not path or rng.random() < 0.75):
            key = one_of(rng, list(node)) if isinstance(node, dict) else int(rng.integers(len(node)))
            path, node = (*path, key), node[key]
        if path and only(path):
            return path
    return path


def _at(tree: Any, path: Path_) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def change_tree(rng: Rng, tree: Any, path: Path_ | None = None) -> str:
    """Change one place of ``tree`` (a dictionary or list) and return what was done."""
    path = path or draw_place(rng, tree)
    parent, key = _at(tree, path[:-1]), path[-1]
    where, value = ".".join(map(str, path)), _at(tree, path)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    kinds = ["value"] * 4 + ["remove", "type", "wrap"] + ["near"] * 3 * number
    kinds += ["rename", "twice", "extra"] if isinstance(parent, dict) else ["again", "drop", "swap"]
    kinds += ["size", "shuffle", "empty"] if isinstance(value, (dict, list)) and value else []
    kind = one_of(rng, kinds)
    if kind == "value":
        parent[key] = new = nasty(rng, value)
        return f"{where} = {shown(new)}"
    if kind == "near":
        parent[key] = new = near(rng, value)
        return f"{where} = {shown(new)} for {shown(value)}"
    if kind == "type":
        parent[key] = new = one_of(rng, (str(value), [value], {"value": value}, bool(value), None))
    elif kind == "wrap":
        parent[key] = Raw("[" * DEEP + dumps(value) + "]" * DEEP)
    elif kind == "remove":
        del parent[key]
    elif kind == "rename":
        new_key = one_of(rng, (str(key).upper(), f"{key}_", str(key).replace("_", "-"), f" {key}", "", str(key)[:-1]))
        parent[new_key] = parent.pop(key)
    elif kind == "twice":
        text = dumps(parent).rstrip().removesuffix("}")
        _put(tree, path[:-1], Raw(f"{text}, {json.dumps(str(key))}: {dumps(nasty(rng, value))}}}"))
    elif kind == "extra":
        parent[one_of(rng, ("extra", "__class__", "name", "\x1b[1m", "x" * 5000))] = nasty(rng)
    elif kind == "again":
        parent.insert(key, copy.deepcopy(value))
    elif kind == "drop":
        del parent[key:]
    elif kind == "swap":
        other = int(rng.integers(len(parent)))
        parent[key], parent[other] = parent[other], parent[key]
    elif kind == "size":
        _resize(rng, value)
    elif kind == "shuffle":
        _shuffle(rng, value)
    else:
        value.clear()
    return f"{where}: {kind}"


def _put(tree: Any, path: Path_, value: Any) -> None:
    """Set a node; the root itself becomes the one member ``@`` that ``dumps_root`` knows."""
    if path:
        _at(tree, path[:-1])[path[-1]] = value
    else:
        tree.clear()
        tree["@root"] = value


def dumps_root(tree: Any) -> str:
    """Return JSON text of a changed tree, whose root may have become raw text."""
    return dumps(tree["@root"] if isinstance(tree, dict) and "@root" in tree else tree)


def _resize(rng: Rng, value: Any) -> None:
    if isinstance(value, dict):
        value.update({f"more{i}": nasty(rng) for i in range(int(rng.integers(1, 50)))})
    elif rng.random() < 0.5:
        value *= int(one_of(rng, (2, 3, 100, 10_000)))
    else:
        del value[: int(rng.integers(1, len(value) + 1))]


def _shuffle(rng: Rng, value: Any) -> None:
    if isinstance(value, list):
        value[:] = [value[i] for i in rng.permutation(len(value))]
    else:
        names = list(value)
        items = [(names[i], value[names[i]]) for i in rng.permutation(len(names))]
        value.clear()
        value.update(items)


def change_text(rng: Rng, text: str) -> tuple[str, str]:
    """Change text that some parser reads: brackets, quotes, line ends, marks; return it and what was done."""
    lines, kind = text.splitlines(), one_of(rng, TEXT_KINDS)
    at = int(rng.integers(len(text) + 1))
    if kind == "insert":
        piece = one_of(
            rng, ("{", "}", "[", "]", '"', "'", ",", ":", "\\", "\x00", "\t", "#", "&a ", "*a", "!!python/x ")
        )
        return text[:at] + piece + text[at:], f"{piece!r} at {at}"
    if kind == "delete":
        return text[:at] + text[at + int(rng.integers(1, 20)) :], f"characters gone at {at}"
    if kind == "line":
        lines.insert(int(rng.integers(len(lines) + 1)), one_of(rng, lines or [""]))
        return "\n".join(lines) + "\n", "a line twice"
    if kind == "no line":
        gone = int(rng.integers(max(1, len(lines))))
        return "\n".join(lines[:gone] + lines[gone + 1 :]) + "\n", f"line {gone + 1} gone"
    if kind == "root":
        text = one_of(
            rng, ("null", "[]", "{}", "0", '""', "true", "[" * DEEP, '{"a":' * DEEP, "9" * 5000, "NaN", "- " * DEEP)
        )
        return text, f"nothing but {text[:10]!r}"
    changed = {"crlf": text.replace("\n", "\r\n"), "bom": "\ufeff" + text, "two": text + text, "half": text[:at]}
    return changed[kind], kind


TEXT_KINDS = ("insert", "insert", "delete", "line", "no line", "root", "crlf", "bom", "two", "half")


def other_formats(rng: Rng) -> bytes:
    """Draw a file of another format."""
    return bytes(one_of(rng, FORMATS))


def change_bytes(rng: Rng, data: bytes, tail: bool = False) -> tuple[bytes, str]:
    """Change a file's bytes; ``tail`` prefers its end, where Parquet and zip keep their directories."""
    kind = one_of(rng, ("flip", "flip", "flips", "cut", "cut", "other", "insert", "zero", "ends", "swap"))
    size = len(data)
    at = int(rng.integers(max(0, size - 1500) if tail and rng.random() < 0.7 else 0, size)) if size else 0
    if kind in ("flip", "flips"):
        found = bytearray(data)
        for _ in range(1 if kind == "flip" else int(rng.integers(2, 30))):
            at = int(rng.integers(max(0, size - 1500) if tail else 0, size))
            found[at] = int(rng.integers(256)) if rng.random() < 0.5 else found[at] ^ (1 << int(rng.integers(8)))
        return bytes(found), f"{kind} near byte {at} of {size}"
    if kind == "cut":
        return data[:at], f"cut to {at} of {size} bytes"
    if kind == "other":
        found_ = other_formats(rng)
        return found_, f"another format: {found_[:16]!r}"
    if kind == "insert":
        return data[:at] + rng.bytes(int(rng.integers(1, 64))) + data[at:], f"bytes inserted at {at}"
    if kind == "zero":
        length = int(rng.integers(1, 400))
        return data[:at] + bytes(len(data[at : at + length])) + data[at + length :], f"zeros at {at}"
    if kind == "ends":
        return one_of(rng, (data + rng.bytes(50), rng.bytes(50) + data, data + data)), "more before or after"
    half = size // 2
    return data[half:] + data[:half], "halves swapped"


def seeded(door: str, seed: int) -> Rng:
    """Return the generator of one mutation."""
    return np.random.default_rng([zlib.crc32(door.encode()), seed])

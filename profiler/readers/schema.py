"""From plain data, as a file holds it, to a dataclass whose annotations are the schema.

Types are checked here, ranges by the dataclass' own ``__post_init__``: what is read passes the checks of what is made.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from profiler.errors import RoutePackError

T = TypeVar("T")
MOST_WHOLE = 2**63
_NAMES = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}


def build(cls: type[T], data: Any, where: str) -> T:
    """Return ``data`` as the dataclass ``cls``; ``where`` names its place for an error.

    Numbers may be whole where floats are wanted; lists become tuples; None is taken only where it is annotated.

    Raises
    ------
    RoutePackError
        If a key is missing or unknown, a value is of another type, or the dataclass refuses it.
    """
    if not isinstance(data, Mapping):
        raise _unexpected(where, "a mapping", data)
    hints, fields = typing.get_type_hints(cls), {one.name: one for one in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in data:
        if name not in fields:
            near = difflib.get_close_matches(str(name), fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(fields)}."
            raise RoutePackError(f"{where}: unknown key {name!r:.80}: {hint}")
    for name, one in fields.items():
        if name not in data and one.default is one.default_factory is dataclasses.MISSING:
            raise RoutePackError(f"{where}: the key {name!r} is missing.")
    values = {name: _typed(hints[name], value, f"{where}.{name}") for name, value in data.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise RoutePackError(f"{where}: {error}") from None


def _typed(kind: Any, value: Any, where: str) -> Any:
    """Return a value as what its annotation says."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return build(typing.cast(type, kind), value, where)
    if origin in (types.UnionType, typing.Union):
        if value is None and types.NoneType in inside:
            return None
        (kind,) = (one for one in inside if one is not types.NoneType)
        return _typed(kind, value, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _unexpected(where, "a list", value)
        return tuple(_typed(inside[0], one, f"{where}[{i}]") for i, one in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise _unexpected(where, "a mapping from text", value)
        return {key: _typed(inside[1], one, f"{where}.{key:.40}") for key, one in value.items()}
    if kind is Any:
        return value
    return _plain(kind, value, where)


def _plain(kind: Any, value: Any, where: str) -> Any:
    if kind is float and type(value) is int and abs(value) < MOST_WHOLE:
        return float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise _unexpected(where, _NAMES[kind], value)
    if kind is int and not -MOST_WHOLE <= value < MOST_WHOLE:
        raise _unexpected(where, "a whole number of 64 bits", value)
    return value


def _unexpected(where: str, wanted: str, value: Any) -> RoutePackError:
    return RoutePackError(f"{where}: expected {wanted}, got {value!r:.80}.")

"""Dataclasses from plain data, checked by their own annotations: the declared schema of what training loads.

pydantic does the same for what the command line reads; training has numpy and numba alone.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from profiler.errors import RoutePackError
from profiler.readers.raw import shown

T = TypeVar("T")


def build(cls: type[T], data: Any, where: str) -> T:
    """Return ``cls`` made of ``data``, the plain value of a dataclass or of any annotated type.

    Integers are no booleans and no text, floats finite; lists become tuples; keys are all known and all there but for
    those with defaults. What ``__post_init__`` refuses (ValueError) is refused here.

    Raises
    ------
    RoutePackError
        One line: ``where``, the place inside, what was expected and the value.
    """
    try:
        return typing.cast(T, _value(cls, data, ""))
    except _Wrong as wrong:
        raise RoutePackError(f"{where}: {wrong}{'' if str(wrong).endswith('?') else '.'}") from None


class _Wrong(Exception):
    """What is wrong where."""


def _value(kind: Any, value: Any, place: str) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _record(kind, value, place)
    if origin in (types.UnionType, typing.Union):
        return _one_of(inner, value, place)
    if origin is typing.Literal:
        if not any(type(value) is type(one) and value == one for one in inner):
            raise _wrong(place, f"one of {', '.join(map(repr, inner))}", value)
        return value
    if origin is tuple or kind is tuple:
        return _items(inner, value, place)
    if origin is list:
        return list(_items((*inner, ...), value, place))
    if origin in (dict, Mapping) or kind is dict:
        return _mapping(inner, value, place)
    if kind is float and type(value) is int and abs(value) < 2**63:
        value = float(value)
    if type(value) is not kind:
        names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
        raise _wrong(place, names.get(kind, str(kind)), value)
    if kind is float and not math.isfinite(value):
        raise _wrong(place, "a finite number", value)
    return value


def _record(cls: Any, value: Any, place: str) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong(place, f"a mapping of {cls.__name__}", value)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    if unknown := [name for name in value if name not in fields]:
        near = difflib.get_close_matches(str(unknown[0]), fields, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(fields)}"
        raise _Wrong(f"{_at(place)}unknown key {shown(unknown[0], 80)!r}: {hint}")
    for name, field in fields.items():
        no_default = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if no_default and name not in value:
            raise _Wrong(f"{_at(place)}the key {name!r} is missing")
    hints = _hints(cls)
    made = {name: _value(hints[name], one, f"{place}.{name}" if place else name) for name, one in value.items()}
    try:
        return cls(**made)
    except ValueError as error:
        raise _Wrong(f"{_at(place)}{str(error).rstrip('.')}") from None


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _one_of(kinds: tuple[Any, ...], value: Any, place: str) -> Any:
    wrong: _Wrong | None = None
    for kind in kinds:
        try:
            return _value(kind, value, place)
        except _Wrong as error:
            wrong = wrong or error
    raise wrong or _wrong(place, "another value", value)


def _items(inner: tuple[Any, ...], value: Any, place: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise _wrong(place, "a list", value)
    if not inner:
        return tuple(value)
    kinds = [inner[0]] * len(value) if inner[-1] is ... else list(inner)
    if len(kinds) != len(value):
        raise _wrong(place, f"{len(kinds)} items", value)
    if set(kinds) == {int} and all(type(item) is int for item in value):  # long lists of numbers
        return tuple(value)
    return tuple(_value(kind, item, f"{place}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True)))


def _mapping(inner: tuple[Any, ...], value: Any, place: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(place, "a mapping", value)
    key_kind, kind = inner or (str, Any)
    return {_value(key_kind, key, place): _value(kind, one, f"{place}.{shown(key, 40)}") for key, one in value.items()}


def _wrong(place: str, expected: str, value: Any) -> _Wrong:
    return _Wrong(f"expected {place or 'the content'} to be {expected}, got {shown(repr(value), 80)}")


def _at(place: str) -> str:
    return f"{place}: " if place else ""

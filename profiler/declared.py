"""Whole files against the dataclasses that declare them, by pydantic: not for what training loads, which has none."""

from __future__ import annotations

import functools
import json
from typing import Any

from profiler.errors import RoutePackError


def declared(kind: Any, data: Any, where: str, way_out: str) -> Any:
    """Return plain data, as a reader gave it, as what ``kind`` declares; no number is text, no key is unknown.

    RoutePackError, in which ``where`` names the file, with place and value of the first mistake.
    """
    import pydantic

    try:
        return _validator(kind).model_validate_json(json.dumps({"it": data})).it
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"][1:])) or "it"
        message = first["msg"].removeprefix("Value error, ").rstrip(".")
        raise RoutePackError(f"{where}: `{place}`: {message}, got {first['input']!r:.80}. {way_out}") from None


@functools.cache
def _validator(kind: Any) -> Any:
    import pydantic

    rules = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    return pydantic.create_model("Declared", __config__=rules, it=(kind, ...))

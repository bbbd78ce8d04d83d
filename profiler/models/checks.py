"""What a configuration may hold: keys that cannot be priced, are unknown, or hold another type are refused by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from profiler.errors import RoutePackError
from profiler.models.keys import (
    CANNOT,
    GATES,
    HARMLESS,
    HARMLESS_NAMES,
    KIND_KEYS,
    KINDS,
    LAYOUT,
    MOST,
    MOST_WINDOW,
    SAID_BY_LIST,
    SAME_AS,
    SPARSE_ATTENTION,
    SPELLINGS,
    SWITCHES,
    UNGATED,
    WAY,
)
from profiler.readers import raw


def shown(value: object) -> str:
    """Return a value or key on one short line."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    return raw.shown(value, 80)


def quoted(value: object) -> str:
    """Return a value likewise, text in quotes."""
    return f"'{shown(value)}'" if isinstance(value, str) else shown(value)


def is_off(value: object) -> bool:
    """Tell whether a key states that what it names is not there."""
    switched_off = isinstance(value, Mapping) and value.get("enabled") is False
    return not value or switched_off or value in ("none", "full", "dense", "disabled")


def refuse_sparse_attention(config: Mapping[str, Any], name: str) -> None:
    """Raise RoutePackError where a query attends to keys chosen by an indexer or in blocks: that cannot be priced yet.

    Keys tell it at any depth (``index_topk``, ``use_nsa``) unless they are off, and values that name kinds of layers.
    """
    for key, value in config.items():
        off = is_off(value)
        if isinstance(value, Mapping) and key != "quantization_config":
            refuse_sparse_attention(value, name)
        kinds = (value if isinstance(value, list) else [value]) if KIND_KEYS.search(str(key)) else ()
        if (_is_sparse(str(key)) and not off) or any(isinstance(kind, str) and _is_sparse(kind) for kind in kinds):
            raise RoutePackError(
                f"Model {name}: {shown(key)} = {shown(value)} means sparse attention, whose times depend "
                "on the keys it chooses: it cannot be priced yet. Plan a model of dense, windowed or linear attention."
            )


def _is_sparse(word: str) -> bool:
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|\W+", "_", word[:200]).lower()
    return SPARSE_ATTENTION.search(snake) is not None


def refuse_what_cannot_be_priced(part: Mapping[str, Any], name: str) -> None:
    """Raise RoutePackError for keys that state layers, heads or experts that no table prices."""
    for key, value in part.items():
        if SWITCHES.fullmatch(str(key)) and value is False:
            raise RoutePackError(f"Model {name}: {key} = False means that its layers hold no experts.")
        if (reason := CANNOT.get(key)) and not is_off(value):
            raise RoutePackError(f"Model {name}: {key} = {shown(value)} means {reason}: it cannot be priced yet. {WAY}")
        ungated = "hidden_act" in str(key) and isinstance(value, str) and UNGATED.search(value)
        if ungated or (GATES.search(str(key)) and value is False):
            raise RoutePackError(
                f"Model {name}: {key} = {shown(value)} means feed-forwards with one up-projection: only gated ones "
                "(SwiGLU and kin) can be priced yet."
            )


def refuse_other_types(part: Mapping[str, Any], name: str) -> None:
    """Raise RoutePackError for a key that is read and holds something else, used or not; null states nothing."""
    by_layer = {*SAME_AS, *(key for keys in SPELLINGS.values() for key in keys)}
    for key, (kind, words) in KINDS.items():
        stated = part.get(key)
        least, most = -(key == "moe_layer_end_index"), MOST_WINDOW if key in SPELLINGS["sliding_window"] else MOST
        for value in stated if key in by_layer and isinstance(stated, list | tuple) else [stated]:
            fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
            if value is not None and not (fits and (not isinstance(value, int) or least <= value <= most)):
                raise RoutePackError(f"Model {name}: {key} = {quoted(value)} is wrong: expected {words}.")


def refuse_unknown(part: Mapping[str, Any], name: str) -> None:
    """Raise RoutePackError for a key that looks like layout and is not known."""
    listed = isinstance(part.get("layer_types") or part.get("layers_block_type"), list)
    for key in map(str, part):
        unused = listed and SAID_BY_LIST.fullmatch(key)
        known = key in KINDS or key in CANNOT or key in HARMLESS_NAMES or unused
        if LAYOUT.search(key) and not (known or HARMLESS.search(key) or is_off(part[key])):
            near = difflib.get_close_matches(key[:100], KINDS, n=1, cutoff=0.75)
            raise RoutePackError(
                f"Model {name}: {shown(key)} = {shown(part[key])} looks like layout of layers or experts and is not "
                f"known: the model could be priced wrongly.{f' Did you mean {near[0]}?' if near else ''} If it changes "
                "no shape and no kind of layer, remove it from a copy of config.json and give the copy."
            )

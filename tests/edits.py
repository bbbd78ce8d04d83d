"""Edits of a JSON document, drawn by Hypothesis: what a file may hold after an accident or a hand."""

from __future__ import annotations

import copy

from hypothesis import strategies as st

from profiler import RoutePackError

ODD = (None, True, -1, 0, 1, 7, 2**31, -(2**40), 2**63, 2**70, 0.5, -0.5, 1e300, float("nan"), float("inf"),
       "", "x", "0" * 64, [], {}, [0], [[]], {"a": 1})  # fmt: skip


def said(call):
    """What a call returns and, where it refuses, why: one of them is None."""
    try:
        return call(), None
    except RoutePackError as error:
        return None, str(error)


def places(node, path=()):
    """Every place of a document, by its keys from the root."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def set_at(document, place, value):
    """Put a value at a place."""
    *way, last = place
    for key in way:
        document = document[key]
    document[last] = value


@st.composite
def edited(draw, document, keep=("schema_version",)):
    """A document after one to three edits; ``keep`` names keys of the root that stay."""
    every = [place for place in places(document) if place[0] not in keep]
    shallow = [place for place in every if len(place) <= 2]
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from(shallow if draw(st.booleans()) else every))
        node = document
        try:
            for key in way:
                node = node[key]
            _edit(draw, node, last)
        except (KeyError, IndexError, TypeError, AttributeError):
            continue  # an earlier edit took the place away, or it is no list
    return document


def _edit(draw, node, last):
    kind = draw(st.sampled_from(("value", "value", "delete", "again", "swap", "add")))
    if kind == "value":
        node[last] = copy.deepcopy(draw(st.sampled_from(ODD)))
    elif kind == "delete":
        del node[last]
    elif kind == "again":
        node.insert(last, copy.deepcopy(node[last]))
    elif kind == "swap":
        other = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        node[last], node[other] = node[other], node[last]
    else:
        node["surplus"] = 1

"""Dataclasses from plain data: every wrong kind is one line with its place."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import pytest

from profiler import RoutePackError
from profiler.readers import build


@dataclass(frozen=True)
class Part:
    size: int
    share: float = 0.5

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"Expected size >= 1, got {self.size}.")


@dataclass(frozen=True)
class Whole:
    name: str
    part: Part
    sizes: tuple[int, ...] = ()
    pair: tuple[int, str] = (1, "a")
    parts: tuple[Part, ...] = ()
    by_name: dict[str, float] | None = None
    kind: Literal["a", "b"] = "a"
    flag: bool = False
    any: Any = None


GOOD = {"name": "n", "part": {"size": 2}, "sizes": [1, 2], "parts": [{"size": 3}], "by_name": {"x": 1}}
WRONG = {
    "expected the content to be a mapping of Whole, got ": [],
    "expected name to be text, got 3": {**GOOD, "name": 3},
    "expected part to be a mapping of Part, got 3": {**GOOD, "part": 3},
    "the key 'part' is missing": {"name": "n"},
    "unknown key 'more': known: name": {**GOOD, "more": 1},
    "expected part.size to be a whole number, got True": {**GOOD, "part": {"size": True}},
    "expected part.size to be a whole number, got '2'": {**GOOD, "part": {"size": "2"}},
    "part: Expected size >= 1, got 0": {**GOOD, "part": {"size": 0}},
    "expected part.share to be a finite number, got nan": {**GOOD, "part": {"size": 1, "share": float("nan")}},
    "expected part.share to be a number, got '1'": {**GOOD, "part": {"size": 1, "share": "1"}},
    r"expected sizes\[1\] to be a whole number, got 2.0": {**GOOD, "sizes": [1, 2.0]},
    "expected sizes to be a list, got '12'": {**GOOD, "sizes": "12"},
    "expected pair to be 2 items": {**GOOD, "pair": [1]},
    r"expected parts\[0\].size to be a whole number, got None": {**GOOD, "parts": [{"size": None}]},
    "expected by_name to be a mapping, got 1": {**GOOD, "by_name": 1},
    "expected by_name.x to be a number, got ''": {**GOOD, "by_name": {"x": ""}},
    "expected kind to be one of 'a', 'b', got 'c'": {**GOOD, "kind": "c"},
    "expected flag to be true or false, got 1": {**GOOD, "flag": 1},
}


def test_plain_data_becomes_the_dataclass():
    made = build(Whole, GOOD, "x")
    assert made == Whole("n", Part(2), (1, 2), parts=(Part(3),), by_name={"x": 1.0})
    assert build(Whole, asdict(made), "x") == made


@pytest.mark.parametrize("said", WRONG)
def test_wrong_kinds_are_named_with_their_place(said):
    with pytest.raises(RoutePackError, match=f"^file: {said}") as refused:
        build(Whole, WRONG[said], "file")
    assert "\n" not in str(refused.value)

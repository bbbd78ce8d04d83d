"""LightGBM's text of a model, checked line by line before LightGBM sees it: its own reader trusts every number.

A text that passes is one that LightGBM writes for a regression by numeric splits, cut after its last tree: what follows
(importances, parameters) and the lines of :data:`UNUSED` no prediction reads. Whatever else is in it is refused, for an
index out of bounds or a circle of nodes would end the process.

A tree of n leaves has n - 1 splits; a child is a later split, or a leaf k as ``-1 - k``; each has one parent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from costmodels.features import MOST, MOST_LOG
from costmodels.params import MOST_LEAVES, MOST_TREES

UNUSED = ("leaf_weight=", "leaf_count=", "internal_value=", "internal_weight=", "internal_count=", "tree_sizes=")
"""Lines that no prediction reads: statistics, and sizes in bytes that would have to agree."""
END = "end of trees"
OBJECTIVES = ("regression_l1", "huber")
"""Losses of ours; all answer the sum of leaves as it is."""
MOST_THRESHOLD = 2e300
"""LightGBM writes 1e300 for infinity."""
SPLIT_KINDS = (0, 2, 4, 6, 8, 10)
"""``decision_type`` of numeric splits: where missing values go, and what counts as missing."""
_WHOLE = re.compile(r" *(?:-?[0-9]{1,9}(?: +|$))*")
_REAL = re.compile(r" *(?:-?[0-9]{1,20}(?:\.[0-9]{1,20})?(?:e[-+][0-9]{1,3})?(?: +|$))*")
_RANGES = re.compile(r"(?:(?:none|\[[-+.e0-9]{1,30}:[-+.e0-9]{1,30}\])(?: |$))+")


def stored_text(booster: Any) -> str:
    """Return the text of a trained model as it is kept and predicted with."""
    whole = str(booster.model_to_string()).partition(END)[0]
    return "".join(line for line in whole.splitlines(keepends=True) if not line.startswith(UNUSED)) + END + "\n"


def check_text(text: str, names: Sequence[str]) -> None:
    """Raise ValueError unless LightGBM can safely load a text, whose inputs are ``names`` in order."""
    lines = _Lines(text)
    for expected in ("tree", "version=v4", "num_class=1", "num_tree_per_iteration=1", "label_index=0"):
        lines.expect(expected)
    lines.expect(f"max_feature_idx={len(names) - 1}")
    if (objective := lines.value("objective")) not in OBJECTIVES:
        raise ValueError(f"{lines.place}: objective {objective!r:.40}, expected {' or '.join(OBJECTIVES)}")
    lines.expect(f"feature_names={' '.join(names)}")
    if not _RANGES.fullmatch(ranges := lines.value("feature_infos")) or len(ranges.split()) != len(names):
        raise ValueError(f"{lines.place}: expected one range for each of {len(names)} inputs, got {ranges!r:.60}")
    lines.expect("")
    for tree in range(MOST_TREES + 1):
        if lines.next_is(END):
            break
        lines.expect(f"Tree={tree}")
        _check_tree(lines, len(names))
    if tree == 0 or tree > MOST_TREES:
        raise ValueError(f"{lines.place}: expected 1 to {MOST_TREES} trees")
    for last in (END, "", None):
        lines.expect(last)


def _check_tree(lines: _Lines, inputs: int) -> None:
    (leaves,) = lines.whole("num_leaves", 1, 1, MOST_LEAVES).tolist()
    splits = leaves - 1
    lines.expect("num_cat=0")
    lines.whole("split_feature", splits, 0, inputs - 1)
    lines.real("split_gain", splits, MOST)
    lines.real("threshold", splits, MOST_THRESHOLD)
    if set(lines.whole("decision_type", splits, 0, max(SPLIT_KINDS)).tolist()) - set(SPLIT_KINDS):
        raise ValueError(f"{lines.place}: no numeric splits")
    children = np.concatenate([lines.whole(f"{side}_child", splits, -leaves, splits - 1) for side in ("left", "right")])
    once = np.concatenate([np.arange(-leaves, 0), np.arange(1, splits)])
    later = (children < 0) | (children > np.tile(np.arange(splits), 2))
    if splits and not (later.all() and np.array_equal(np.sort(children), once)):
        raise ValueError(f"{lines.place}: the children of its splits make no tree")
    lines.real("leaf_value", leaves, MOST_LOG)
    if lines.whole("is_linear", 1, 0, 1)[0]:
        lines.real("leaf_const", leaves, MOST)
        count = int(lines.whole("num_features", leaves, 0, inputs).sum())
        lines.whole("leaf_features", count, 0, inputs - 1)
        lines.real("leaf_coeff", count, MOST)
    lines.real("shrinkage", 1, MOST)
    for expected in ("", ""):
        lines.expect(expected)


class _Lines:
    """A text line by line; what is not as expected is a ValueError that names the line."""

    def __init__(self, text: str) -> None:
        self._lines, self._number = text.split("\n"), 0

    @property
    def place(self) -> str:
        """Name the line that was read last."""
        return f"line {self._number} of a LightGBM text"

    def next_is(self, line: str) -> bool:
        """Tell whether the next line is this one."""
        return self._lines[self._number : self._number + 1] == [line]

    def expect(self, line: str | None) -> None:
        """Go on over a line, or the end (None)."""
        found = next(iter(self._lines[self._number : self._number + 1]), None)
        self._number += 1
        if found != line:
            told = ("the end" if one is None else f"{one!r:.60}" for one in (line, found))
            raise ValueError("{}: expected {}, got {}".format(self.place, *told))

    def value(self, key: str) -> str:
        """Return what the next line, ``key=...``, says."""
        line = next(iter(self._lines[self._number : self._number + 1]), "the end")
        self._number += 1
        if not line.startswith(f"{key}="):
            raise ValueError(f"{self.place}: expected {key}=..., got {line!r:.60}")
        return line[len(key) + 1 :]

    def whole(self, key: str, count: int, least: int, most: int) -> np.ndarray:
        """Return so many whole numbers of a range."""
        return self._numbers(key, _WHOLE, np.int64, count, least, most)

    def real(self, key: str, count: int, most: float) -> np.ndarray:
        """Return so many numbers, whatever their sign."""
        return self._numbers(key, _REAL, np.float64, count, -most, most)

    def _numbers(self, key: str, form: re.Pattern[str], kind: Any, count: int, least: float, most: float) -> np.ndarray:
        text = self.value(key)
        parts = text.split() if form.fullmatch(text) else []
        found = np.array(parts, dtype=kind)
        if found.size != count or not ((found >= least) & (found <= most)).all():
            raise ValueError(f"{self.place}: expected {key} to be {count} numbers of {least:g} to {most:g}")
        return found

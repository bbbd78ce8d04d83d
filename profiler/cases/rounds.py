"""What a sweep times next is decided in rounds, by a chooser of a floor above or by an even choice.

Invariant: a round is a function of the pool, of which cases were timed, of their rows and of the seed. Nothing else is
remembered, so that a killed sweep goes on with the same cases.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from profiler.cases.case import Case
from profiler.cases.design import class_of
from profiler.params import ProfileParams

LEAST_POINTS = 4
"""Of an operation with many classes (dense shapes), each gets at least so many cases."""
SIZE_FEATURES = ("tokens", "rows", "num_sequences", "active_experts")

ClassKey = tuple[str, int, int, int]


@dataclass(frozen=True)
class Round:
    """What to time next, or why nothing more is timed, and how wrong predictions are so far."""

    cases: tuple[Case, ...] = ()
    errors_pct: Mapping[str, float] = field(default_factory=dict)
    """Median error of held-out rows per operation, percent; operations that cannot be judged yet are absent."""
    stopped_by: str = ""
    """``target_error``, ``max_points``, or empty while there is something to time."""


Chooser = Callable[[Sequence[Case], Collection[Case], Iterable[Mapping[str, Any]], ProfileParams], Round]
"""From the pool, the finished ones among its own objects, all rows so far and the settings to the next round."""


def even_round(
    pool: Sequence[Case], timed: Collection[Case], _: Iterable[Mapping[str, Any]], params: ProfileParams
) -> Round:
    """Return what is not timed yet of ``max_points`` cases of every class, even over each pattern's sizes."""
    caps = points_by_class(pool, params.max_points)
    wanted = {id(case) for key, cases in by_class(pool).items() for case in even_choice(cases, caps[key])}
    wanted -= {id(case) for case in timed}
    cases = tuple(case for case in pool if id(case) in wanted)
    return Round(cases, stopped_by="" if cases else "max_points")


def by_class(pool: Sequence[Case]) -> dict[ClassKey, list[Case]]:
    """Return the cases of every class, classes and cases in an order that the pool's does not touch."""
    classes: dict[ClassKey, list[Case]] = {}
    for case in sorted(pool, key=lambda case: (class_of(case), case.case_id("forward", ""))):
        classes.setdefault(class_of(case), []).append(case)
    return classes


def points_by_class(pool: Sequence[Case], max_points: int) -> dict[ClassKey, int]:
    """Return the most cases of every class: ``max_points``, which the shapes of dense share."""
    keys = sorted({class_of(case) for case in pool})
    shapes = sum(key[0] == "dense" for key in keys)
    return {key: max(LEAST_POINTS, max_points // shapes) if key[0] == "dense" else max_points for key in keys}


def even_choice(cases: Sequence[Case], count: int) -> list[Case]:
    """Return at most ``count`` cases: every pattern its share, from its least to its largest case."""
    patterns: dict[str, list[Case]] = {}
    for case in sorted(cases, key=lambda case: tuple(case.features.get(name, 0) for name in SIZE_FEATURES)):
        patterns.setdefault(case.pattern, []).append(case)
    chosen: list[Case] = []
    # Small patterns first: what they leave goes to the others.
    for left, members in zip(range(len(patterns), 0, -1), sorted(patterns.values(), key=len), strict=True):
        share = min((count - len(chosen)) // left, len(members))
        # A single place is the largest: it costs most of a step.
        last = len(members) - 1
        chosen += [members[i] for i in np.linspace(last if share == 1 else 0, last, share).round().astype(np.int64)]
    return chosen

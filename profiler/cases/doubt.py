"""Find measured rows that contradict others: larger work should not be faster. They are timed again, then marked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from profiler.cases.operations import OPERATIONS

LIMIT, SLACK_US = 1.25, 20.0
"""A row in doubt is slower by this factor and by more than that: smaller differences are scheduling, not work."""
DOUBT = "slower than a case that asks more in every feature"


def doubtful_cases(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the ids of measured rows that are slower than a row of the same kind that asks more in every feature."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["status"] == "ok":
            groups.setdefault((row["op"], row["direction"]), []).append(row)
    doubts: set[str] = set()
    for (op, _), listed in groups.items():
        features = np.array([[row[name] for name in OPERATIONS[op].features] for row in listed])
        time = np.array([row["time_us"] for row in listed])
        asks_less = (features[:, None] <= features[None]).all(axis=2)
        slower = time[:, None] > LIMIT * time[None] + SLACK_US
        doubts |= {listed[i]["case_id"] for i in np.flatnonzero((asks_less & slower).any(axis=1))}
    return doubts

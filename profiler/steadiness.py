"""Was the device steady? What a profile says about its own trustworthiness.

One fixed case, the anchor, is timed again through the sweep: its spread is the drift. Every run of a sweep also notes
how its time went: inside timed work or not, who else used the CPU, and what the device said of its clocks.

Legend: a *session* is one run of the command, a resumed sweep has several; a *problem* is one plain sentence; a profile
is steady when it has none.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from profiler.cases.case import Case
from profiler.device.backend import TorchBackend
from profiler.device.cpu_use import cpu_use, foreign_share
from profiler.device.readings import FAULTS, slowdowns
from profiler.journal import Journal
from profiler.params import ProfileParams
from profiler.timer import time_case

WARM_UP_S = {"cpu": 0.1, "cuda": 1.0}
"""Work before the first case: right after idling, clocks still rise."""
MAX_FOREIGN = {"cpu": 0.10, "cuda": 0.50}
"""Share of the CPU that others may use; a GPU only needs the host to launch."""
MAX_ORDER_EFFECT = 0.10
"""Later repeats of a case may be this much slower than its first ones, in the median over cases."""
FEWEST_REPEATS = 6
SHORTEST_US = 100.0
"""Shorter runs scatter too much to tell their order."""
FEWEST_FOR_ENDS = 4
"""Anchor readings from which the beginning and the end of a sweep are compared."""


def anchor_of(cases: tuple[Case, ...]) -> Case:
    """Return a dense case in the upper middle by size: long enough to time well, short enough to repeat."""
    dense = [case for case in cases if case.op == "dense"]
    dense.sort(key=lambda case: (case.features["tokens"], case.features["n"], case.features["k"]))
    return dense[len(dense) * 3 // 4]


def time_anchor(anchor: Case, backend: TorchBackend, params: ProfileParams, journal: Journal) -> None:
    """Time the anchor once more, forward, and note it with what the device said right after."""
    forward = time_case(anchor, backend, params, directions=("forward",))[0]
    if forward["status"] == "ok":
        journal.add_anchor({
            "case_id": forward["case_id"], "time_us": forward["time_us"], "after_rows": len(journal.rows),
            "readings": backend.readings(),
        })  # fmt: skip


class Watch:
    """Note how one run of a sweep went: one ``session`` line of the journal, written also when it was interrupted."""

    def __init__(self, backend: TorchBackend, journal: Journal) -> None:
        self.backend, self.journal = backend, journal

    def __enter__(self) -> Watch:
        self._busy_s, self._load = self.backend.busy_s, _load()
        self._wall, self._cpu, self._held = time.perf_counter(), cpu_use(), self._size()
        self.backend.warm_up(WARM_UP_S[self.backend.kind])
        self._before = self.backend.readings()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A refused folder stays as it was, and a run that found everything done says nothing about the device.
        if self._size() != self._held:
            wall_s, cpu = time.perf_counter() - self._wall, cpu_use()
            self.journal.add_session({
                "kind": self.backend.kind, "wall_s": wall_s, "busy_s": self.backend.busy_s - self._busy_s,
                "own_cpu_s": cpu.job_s - self._cpu.job_s,
                "foreign_cpu_share": foreign_share(self._cpu, cpu, wall_s),
                "throttled": cpu.throttled - self._cpu.throttled, "load_before": self._load,
                "before": self._before, "after": self.backend.readings(), "threads": self.backend.threads,
            })  # fmt: skip

    def _size(self) -> int:
        return len(self.journal.rows) + len(self.journal.anchors)


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def steadiness(journal: Journal, params: ProfileParams) -> dict[str, Any]:
    """Return the verdict over all sessions of a sweep and the numbers behind it; call it when the watch has ended.

    ``steady`` is False where ``problems`` has an entry; a number that nobody could tell is None.
    """
    anchors, sessions = journal.anchors, journal.sessions
    found: dict[str, Any] = {
        "drift": drift(anchors)["drift"],
        "ends": ends_apart(anchors),
        "order_effect": order_effect([row["repeats_us"] for row in journal.rows.values() if "repeats_us" in row]),
        "clock_fall": clock_fall(anchors),
        "held_by": held_by(anchors),
        "wall_s": sum(one["wall_s"] for one in sessions),
        "busy_share": _weighted(sessions, [one["busy_s"] / one["wall_s"] for one in sessions]),
        "foreign_cpu_share": _weighted(sessions, [one["foreign_cpu_share"] for one in sessions]),
        "load_before": max((one["load_before"] or 0.0 for one in sessions), default=None),
        "throttled": sum(one["throttled"] for one in sessions),
        "sessions": len(sessions),
    }
    kind = sessions[-1]["kind"] if sessions else "cpu"
    problems = _problems(found, kind, anchors, params)
    return found | {"steady": not problems, "problems": problems}


def _problems(found: dict[str, Any], kind: str, anchors: Sequence[dict[str, Any]], params: ProfileParams) -> list[str]:
    said = []
    if found["drift"] > params.max_drift:
        said.append(
            f"one case left its median by {found['drift']:.0%} through the sweep (limit {params.max_drift:.0%})"
        )
    if found["ends"] is not None and abs(found["ends"]) > params.max_drift / 2:
        faster = "slower" if found["ends"] > 0 else "faster"
        said.append(f"the same case was {abs(found['ends']):.0%} {faster} at the end of the sweep than at the start")
    if found["order_effect"] is not None and found["order_effect"] > MAX_ORDER_EFFECT:
        said.append(f"the last repeats of a case were {found['order_effect']:.0%} slower than its first ones")
    if (found["foreign_cpu_share"] or 0.0) > MAX_FOREIGN[kind]:
        said.append(f"other processes used {found['foreign_cpu_share']:.0%} of the CPU that this one may use")
    if found["throttled"] > 0:
        said.append(f"the container's CPU limit stopped this process {found['throttled']} times")
    for reason, count in found["held_by"].items():
        if reason in FAULTS:
            said.append(f"clocks were held down by {reason} at {count} of {len(anchors)} looks")
    return said


def held_by(anchors: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return how many looks found clocks held down, by reason.

    A power cap is how such a card works under GEMMs, in training too: a fact, like clocks that fall, and no fault while
    the anchor keeps its time.
    """
    return dict(Counter(reason for one in anchors for reason in slowdowns(one["readings"].get("slowed_by", 0))))


def drift(readings: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the anchor's readings and the largest share by which one of them leaves their median."""
    drift = 0.0
    for times in _times_by_case(readings):
        middle = statistics.median(times)
        drift = max(drift, max(times) / middle - 1, 1 - min(times) / middle)
    return {"readings": readings, "drift": drift}


def ends_apart(readings: Sequence[dict[str, Any]]) -> float | None:
    """Return by which share the last tenth of the anchor's times lies above the first tenth; None with few readings."""
    apart = None
    for times in _times_by_case(readings):
        if len(times) >= FEWEST_FOR_ENDS:
            tenth = max(1, len(times) // 10)
            found = statistics.median(times[-tenth:]) / statistics.median(times[:tenth]) - 1
            apart = found if apart is None or abs(found) > abs(apart) else apart
    return apart


def order_effect(repeats: Sequence[Sequence[float]]) -> float | None:
    """Return by which share a case's last third of repeats is slower than its first, median over long enough cases."""
    ratios = []
    for times in repeats:
        if len(times) >= FEWEST_REPEATS and statistics.median(times) >= SHORTEST_US:
            third = max(1, len(times) // 3)
            ratios.append(statistics.median(times[-third:]) / statistics.median(times[:third]) - 1)
    return statistics.median(ratios) if ratios else None


def clock_fall(readings: Sequence[dict[str, Any]]) -> float | None:
    """Return by which share the lowest clock at an anchor lies under the highest; None without clocks."""
    clocks = [float(one["readings"]["clock_mhz"]) for one in readings if one["readings"].get("clock_mhz", 0) > 0]
    return 1 - min(clocks) / max(clocks) if len(clocks) > 1 else None


def _times_by_case(readings: Sequence[dict[str, Any]]) -> list[list[float]]:
    cases = dict.fromkeys(reading["case_id"] for reading in readings)
    return [[reading["time_us"] for reading in readings if reading["case_id"] == case] for case in cases]


def _weighted(sessions: Sequence[dict[str, Any]], values: Sequence[float | None]) -> float | None:
    pairs = [(one["wall_s"], value) for one, value in zip(sessions, values, strict=True) if value is not None]
    return sum(wall * value for wall, value in pairs) / sum(wall for wall, _ in pairs) if pairs else None


def warn_of_problems(found: dict[str, Any]) -> None:
    """Warn where a verdict of :func:`steadiness` names problems."""
    if found["problems"]:
        warnings.warn(
            f"The device was not steady: {'; '.join(found['problems'])}. Close other work and profile again into a new "
            "folder.",
            stacklevel=3,
        )

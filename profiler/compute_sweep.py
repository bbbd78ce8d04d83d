"""The sweep of one process over what a rank computes: time rounds of cases until predictions are good enough.

Cases run in a seeded random order, so that drift of the device does not look like a size effect.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from profiler.cases.case import doubtful_cases, middle_case
from profiler.cases.design import Chooser, Design, Round
from profiler.device.backend import TorchBackend
from profiler.errors import RoutePackError
from profiler.journal import Journal
from profiler.observer import Observer
from profiler.steadiness import time_anchor
from profiler.timer import MAX_LOOKS, both_looks, message_of, time_case

WHAT, WHAT_AGAIN = "profile", "profile short and doubtful cases again"
ANCHOR_EVERY = 12
"""One fixed case is timed again after this many cases, to see the device drift."""
SHORT_US = 5000.0
"""All repeats of a shorter case fall into one moment of the device: it gets a second one, later."""


def progress_message(errors_pct: Mapping[str, float], minutes_left: float, latest: str) -> str:
    """Return what a progress line says: errors so far, minutes to the end of the round, the latest case."""
    errors = ", ".join(f"{op} {error:.1f}%" for op, error in sorted(errors_pct.items()))
    left = f"about {minutes_left:.0f} min left" if minutes_left >= 1 else "less than a minute left"
    return "; ".join(part for part in (errors, left, latest) if part)


class ComputeSweep:
    """Time the cases of a design into a journal, tell an observer, and know what is timed."""

    def __init__(self, design: Design, backend: TorchBackend, journal: Journal, observer: Observer) -> None:
        self.pool, self.params, self.backend = design.cases, design.params, backend
        self.journal, self.observer = journal, observer
        # All runs in a folder share the minutes.
        left = self.params.max_minutes - sum(one["minutes"] for one in journal.rounds)
        self._end = time.monotonic() + 60.0 * left if self.params.max_minutes else float("inf")
        self.timed = [case for case in self.pool if journal.is_done(case, backend.dtype_name, self.params)]
        self._anchor = middle_case(self.pool, "dense")

    def run(self, chooser: Chooser) -> None:
        """Time rounds of cases until the chooser wants no more or the minutes are used up."""
        rows, before, stopped_by = self.journal.rows, len(self.timed), ""
        asked = chooser(self.pool, self.timed, rows.values(), self.params)
        while not stopped_by:
            begun = time.monotonic()
            count = self._time_round(asked, before)
            before = 0  # Only the first bar counts the cases of earlier runs.
            self._look_again()
            asked = chooser(self.pool, self.timed, rows.values(), self.params)
            stopped_by = asked.stopped_by or ("max_minutes" if self._minutes_left() <= 0 else "")
            if count or not self.journal.rounds:
                gained = {"cases": count, "minutes": (time.monotonic() - begun) / 60.0, "stopped_by": stopped_by}
                errors_pct = {op: round(error, 3) for op, error in asked.errors_pct.items()}
                self.journal.add(round=gained | {"errors_pct": errors_pct})

    def _minutes_left(self) -> float:
        return (self._end - time.monotonic()) / 60.0

    def _time_round(self, asked: Round, before: int) -> int:
        """Time the cases of a round while there is time; return how many."""
        number = len(self.journal.rounds) + 1
        what = WHAT if number == 1 else f"{WHAT}, round {number}"
        count, begun = 0, time.monotonic()
        self.observer.start(what, before + len(asked.cases))
        try:
            for _ in range(before):
                self.observer.advance(what, "done before")
            for case in asked.cases:
                if self._minutes_left() <= 0:
                    break
                if count % ANCHOR_EVERY == 0:
                    time_anchor(self._anchor, self.backend, self.params, self.journal)
                rows = time_case(case, self.backend, self.params)
                self.journal.add(rows=rows)
                self.timed.append(case)
                if broken := [row["message"] for row in rows if "CUDA error" in row.get("message", "")]:
                    # Every later call fails too; the row is kept, so the next run goes on past this case.
                    raise RoutePackError(
                        f"The CUDA device stopped working at {case.op} {dict(case.features)}: {broken[0]}. Run the "
                        "same command again: it continues after that case."
                    )
                count += 1
                pace = (time.monotonic() - begun) / 60.0 / count
                left = min(self._minutes_left(), pace * (len(asked.cases) - count))
                self.observer.advance(what, progress_message(asked.errors_pct, left, message_of(case, rows)))
            if count:
                time_anchor(self._anchor, self.backend, self.params, self.journal)
        finally:
            self.observer.finish(what)
        return count

    def _look_again(self) -> None:
        """Time short and doubtful cases again."""
        known = self.journal.rows
        for look in range(2, MAX_LOOKS + 1):
            wanted = doubtful_cases(known.values())
            if look == 2:
                wanted |= {row_id for row_id, row in known.items() if row.get("time_us", SHORT_US) < SHORT_US}
            wanted -= {row_id for row_id, row in known.items() if row.get("looks", 1) >= look}
            looked = ((case, self.journal.known(case, self.backend.dtype_name)) for case in self.pool)
            again = [(case, first) for case, first in looked if any(row.get("case_id") in wanted for row in first)]
            if not again or self._minutes_left() <= 0:
                continue
            self.observer.start(WHAT_AGAIN, len(again))
            for case, first in again:
                rows = time_case(case, self.backend, self.params)
                both = [both_looks(*looks, self.backend.kind) for looks in zip(first, rows, strict=True)]
                self.journal.add(rows=[row | {"looks": look} for row in both])
                self.observer.advance(WHAT_AGAIN, message_of(case, rows))
            self.observer.finish(WHAT_AGAIN)

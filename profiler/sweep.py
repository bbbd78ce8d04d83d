"""The profile of a device: design the cases, time what the journal does not hold yet, write one Parquet file.

Under torchrun rank 0 times what one rank computes while the others wait; then all compare their speed, and exchange.
Cases run in a seeded random order, so that drift of the device does not look like a size effect.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from profiler.cases.case import DOUBT, Rates, Seen, doubtful_cases, middle_case
from profiler.cases.design import Chooser, Design, Round, even_round
from profiler.device.backend import TorchBackend
from profiler.device.fingerprint import DeviceFingerprint, fingerprint_device
from profiler.errors import RoutePackError
from profiler.files import content_hash, file_hash
from profiler.journal import JOURNAL_NAME, Journal
from profiler.measurements import SCHEMA_VERSION, Measurements
from profiler.model_spec import ModelSpec
from profiler.observer import Observer
from profiler.params import FLOAT8, ProfileParams, Topology
from profiler.ranks.exchanges import design_exchanges, group_sizes, measure_links, run_exchanges
from profiler.ranks.ranks import Ranks, Stage, check_alike, relative_times, time_speeds, warn_of_slow_ranks
from profiler.steadiness import steadiness, time_anchor, watched
from profiler.timer import MAX_LOOKS, both_looks, measure_rates, message_of, time_case

WHAT, WHAT_AGAIN = "profile", "profile short and doubtful cases again"
ANCHOR_EVERY = 12
"""One fixed case is timed again after this many cases, to see the device drift."""
SHORT_US = 5000.0
"""All repeats of a shorter case fall into one moment of the device: it gets a second one, later."""


def profile_device(
    spec: ModelSpec,
    topology: Topology,
    max_tokens: int,
    params: ProfileParams,
    out: Path | str,
    device: str | None = None,
    observer: Observer | None = None,
    chooser: Chooser = even_round,
    seen: Seen | None = None,
) -> Measurements:
    """Time one model's operations on this machine, forward and backward, and write ``measurements.parquet``.

    Started by torchrun, the ranks share the work and every one of them returns the same. A run that was killed
    continues where it stopped when it is called again with the same folder.

    RoutePackError if the device is absent, the folder is another profile's or in use, the device affords no case, or
    another rank stopped.
    """
    if not max_tokens >= 1:
        raise RoutePackError(f"Expected a token cap of at least 1, got {max_tokens}.")
    with Ranks(device) as ranks, ExitStack() as stack:
        first = ranks.rank == 0
        observer = observer if observer and first else Observer()
        with ranks.together():
            journal = stack.enter_context(Journal(Path(out) if first else None))
            fingerprint = fingerprint_device(device)
            if ranks.size > 1:
                fingerprint = replace(fingerprint, ranks_per_node=ranks.per_node)
            backend = TorchBackend(fingerprint.kind, params)
            stack.enter_context(backend.pinned())
        described = check_alike(ranks, fingerprint, content_hash([spec, topology, max_tokens, params, seen]))
        fingerprints = [one.pop("fingerprint") for one in described]
        stage = Stage(ranks, backend, params, DeviceFingerprint.from_dict(fingerprints[0]))
        sizes = group_sizes(topology, ranks.size, ranks.per_node)
        _begin(journal, stage, spec, sizes, fingerprints)
        # What the first run saw of the device; a stated limit wins.
        stated = {"memory_bytes": int(params.max_memory_gib * 2**30)} if params.max_memory_gib else {}
        rates = Rates(**(journal.header["rates"] | stated))
        with watched(backend, journal):
            with ranks.together():
                design = Design(spec, topology, max_tokens, params, rates, backend.dtype.itemsize, seen or Seen())
                if first:
                    ComputeSweep(design, backend, journal, observer).run(chooser)
            if ranks.size > 1:
                times = relative_times(time_speeds(stage, design.cases))
                described = [one | {"speed": time} for one, time in zip(described, times, strict=True)]
                sharing = 1 if backend.kind == "cuda" else ranks.per_node
                cases = design_exchanges(design, sizes, ranks.per_node, sharing, journal.header["links"])
                run_exchanges(stage, cases, journal, observer)
        merged: list[Any] = []
        with ranks.together():
            if first:
                meta: dict[str, Any] = _meta(journal, params) | {"model": asdict(spec), "topology": asdict(topology)}
                meta |= {"max_tokens": max_tokens, "limits": design.limits, "ranks": described}
                doubts = doubtful_cases(journal.rows.values())  # Even after more looks: marked.
                rows = [({"flag": DOUBT} if i in doubts else {}) | journal.rows[i] for i in sorted(journal.rows)]
                Measurements.from_rows(rows, meta).save(out)
                merged = [rows, meta]
        measurements = Measurements.from_rows(*ranks.agree(merged))
    if first:
        if problems := "; ".join(measurements.meta["steadiness"]["problems"]):
            way_out = "Close other work and profile again into a new folder."
            warnings.warn(f"The device was not steady: {problems}. {way_out}", stacklevel=2)
        warn_of_slow_ranks(described)
    return measurements


def _begin(journal: Journal, stage: Stage, spec: ModelSpec, sizes: list[int], fingerprints: list[Any]) -> None:
    """Look at the device, unless an earlier run did, and let the journal say what it belongs to."""
    ranks, backend, params = stage.ranks, stage.backend, stage.params
    known = ranks.agree(journal.header)
    with ranks.together():
        # A first look stays, so that every run designs the same cases.
        rates = known.get("rates") or (asdict(measure_rates(backend)) if ranks.rank == 0 else {})
    links = known.get("links", {})
    if not set(map(str, sizes)) <= links.keys():
        links |= measure_links(stage, sizes)
    dtype = FLOAT8 if params.dtype == FLOAT8 else backend.dtype_name
    header: dict[str, Any] = {"model": spec.name, "spec_hash": spec.spec_hash, "dtype": dtype}
    header |= {"threads": backend.threads, "fingerprints": fingerprints, "rates": ranks.agree(rates), "links": links}
    with ranks.together():
        journal.begin(header)


def _meta(journal: Journal, params: ProfileParams) -> dict[str, Any]:
    header, folder = journal.header, journal.folder or Path()
    return {
        "schema_version": SCHEMA_VERSION,
        "fingerprint": header["fingerprints"][0],
        "params": asdict(params),
        **{name: header[name] for name in ("dtype", "threads", "rates", "links")},
        "backward": "measured",
        "anchor": {"readings": journal.anchors},
        "rounds": journal.rounds,
        "steadiness": steadiness(journal, params),
        "provenance": {"journal": JOURNAL_NAME, "files": {JOURNAL_NAME: file_hash(folder / JOURNAL_NAME)}},
    }


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

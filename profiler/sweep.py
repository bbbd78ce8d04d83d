"""The sweep: design the cases, time what the journal does not hold yet, write one Parquet file.

Invariants: a finished case is on disk before the next begins; cases run in a seeded random order, so that drift of the
device does not look like a size effect; one anchor case is timed again and again to show that drift.
"""

from __future__ import annotations

import statistics
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from profiler.backends import TorchBackend
from profiler.cases import DIRECTIONS, Case
from profiler.design import Design, design_cases
from profiler.device import fingerprint_device
from profiler.errors import RoutePackError
from profiler.files import file_hash
from profiler.flags import DOUBT, doubtful_cases, faster
from profiler.journal import FORMAT, JOURNAL_NAME, Journal
from profiler.measurements import SCHEMA_VERSION, Measurements
from profiler.model_spec import ModelSpec
from profiler.observer import Observer
from profiler.params import ProfileParams
from profiler.rates import measure_rates
from profiler.timer import time_case
from profiler.topology import Topology
from profiler.work import Rates

WHAT, WHAT_AGAIN = "profile", "profile doubtful cases again"
"""Names under which a sweep reports its progress."""
MAX_LOOKS = 3
"""A case that stays slower than a larger one is timed this often in all; then it is marked, for it may be real."""


def profile_device(
    spec: ModelSpec,
    topology: Topology,
    max_tokens: int,
    params: ProfileParams,
    out: Path | str,
    device: str | None = None,
    observer: Observer | None = None,
) -> Measurements:
    """Time one model's operations on this machine, forward and backward, and write ``measurements.parquet``.

    A run that was killed continues where it stopped when it is called again with the same folder.

    Raises
    ------
    RoutePackError
        If the device is absent, the folder is another profile's or in use, or the device affords no case.
    """
    if not max_tokens >= 1:
        raise RoutePackError(f"Expected a token cap of at least 1, got {max_tokens}.")
    observer, out = observer or Observer(), Path(out)
    with Journal(out) as journal:
        fingerprint = fingerprint_device(device)
        backend = TorchBackend(fingerprint.kind, params)
        with backend.pinned():
            rates = _rates(journal, backend, params)
            journal.begin({
                "format": FORMAT, "fingerprint": fingerprint.to_dict(), "model": spec.name, "spec_hash": spec.spec_hash,
                "dtype": backend.dtype_name, "threads": backend.threads, "rates": rates, "params": asdict(params),
                "topology": asdict(topology), "max_tokens": max_tokens,
            })  # fmt: skip
            design = design_cases(spec, topology, max_tokens, params, Rates(**rates), backend.item_bytes)
            _run_cases(design, backend, params, journal, observer)
        measurements = Measurements.from_rows(_by_id(journal), _meta(journal, design, spec, topology, params))
        measurements.save(out)
    _warn_of_drift(measurements.meta["anchor"], params)
    return measurements


def _rates(journal: Journal, backend: TorchBackend, params: ProfileParams) -> dict[str, Any]:
    """Return what the first run saw of the device, so that every run designs the same cases; a stated limit wins."""
    rates = journal.header.get("rates") or asdict(measure_rates(backend, params))
    return rates | ({"memory_bytes": int(params.max_memory_gib * 2**30)} if params.max_memory_gib else {})


def _run_cases(
    design: Design, backend: TorchBackend, params: ProfileParams, journal: Journal, observer: Observer
) -> None:
    missing = [case for case in design.cases if not _is_done(case, backend, params, journal)]
    anchor = _anchor(design.cases)
    observer.start(WHAT, len(design.cases))
    try:
        for _ in range(len(design.cases) - len(missing)):
            observer.advance(WHAT, "done before")
        for i, case in enumerate(missing):
            if i % params.anchor_every == 0:
                _time_anchor(anchor, backend, params, journal)
            rows = time_case(case, backend, params)
            journal.add_case(rows)
            _stop_if_broken(case, rows)
            observer.advance(WHAT, _message(case, rows))
        if missing:
            _time_anchor(anchor, backend, params, journal)
    finally:
        observer.finish(WHAT)
    _look_again(design, backend, params, journal, observer)


def _look_again(
    design: Design, backend: TorchBackend, params: ProfileParams, journal: Journal, observer: Observer
) -> None:
    """Time doubtful cases again and keep each direction's faster result: what disturbs a run only adds time."""
    for look in range(2, MAX_LOOKS + 1):
        doubts = doubtful_cases(journal.rows.values())
        looked = {row_id for row_id, row in journal.rows.items() if row.get("looks", 1) >= look}
        again = [case for case in design.cases if _row_ids(case, backend) & (doubts - looked)]
        if again:
            observer.start(WHAT_AGAIN, len(again))
        for case in again:
            rows = time_case(case, backend, params)
            journal.add_case([faster(journal.rows[row["case_id"]], row) | {"looks": look} for row in rows])
            observer.advance(WHAT_AGAIN, _message(case, rows))
        if again:
            observer.finish(WHAT_AGAIN)


def _row_ids(case: Case, backend: TorchBackend) -> set[str]:
    return {case.case_id(direction, backend.dtype_name) for direction in DIRECTIONS}


def _is_done(case: Case, backend: TorchBackend, params: ProfileParams, journal: Journal) -> bool:
    known = [journal.rows.get(row_id) for row_id in _row_ids(case, backend)]
    return all(row is not None and (row["status"] == "ok" or not params.retry_failed) for row in known)


def _anchor(cases: tuple[Case, ...]) -> Case:
    """Return a dense case in the upper middle by size: long enough to time well, short enough to repeat."""
    dense = [case for case in cases if case.op == "dense"]
    dense.sort(key=lambda case: (case.features["tokens"], case.features["n"], case.features["k"]))
    return dense[len(dense) * 3 // 4]


def _time_anchor(anchor: Case, backend: TorchBackend, params: ProfileParams, journal: Journal) -> None:
    forward = time_case(anchor, backend, params)[0]
    if forward["status"] == "ok":
        journal.add_anchor({
            "case_id": forward["case_id"], "time_us": forward["time_us"], "after_rows": len(journal.rows),
            "readings": backend.readings(),
        })  # fmt: skip


def _stop_if_broken(case: Case, rows: list[dict[str, Any]]) -> None:
    # After such an error every later call fails too; the row is kept, so the next run goes on past this case.
    message = next((row["message"] for row in rows if "CUDA error" in row.get("message", "")), "")
    if message:
        raise RoutePackError(
            f"The CUDA device stopped working at {case.op} {dict(case.features)}: {message}. Run the same command "
            "again: it continues after that case."
        )


def _message(case: Case, rows: list[dict[str, Any]]) -> str:
    size = case.features.get("rows", case.features.get("tokens", 0))
    times = " + ".join(f"{row['time_us'] / 1e3:.2f} ms" if row["status"] == "ok" else row["status"] for row in rows)
    return f"{case.op} {size}: {times}"


def _by_id(journal: Journal) -> list[dict[str, Any]]:
    """Return the rows in order of id, those still in doubt after a second look marked."""
    doubts = doubtful_cases(journal.rows.values())
    return [journal.rows[i] | ({"flag": DOUBT} if i in doubts else {}) for i in sorted(journal.rows)]


def _meta(
    journal: Journal, design: Design, spec: ModelSpec, topology: Topology, params: ProfileParams
) -> dict[str, Any]:
    header = journal.header
    return {
        "schema_version": SCHEMA_VERSION,
        "fingerprint": header["fingerprint"],
        "model": asdict(spec),
        "topology": asdict(topology),
        "max_tokens": header["max_tokens"],
        "params": asdict(params),
        "backward": "measured",
        "dtype": header["dtype"],
        "threads": header["threads"],
        "rates": header["rates"],
        "limits": list(design.limits),
        "anchor": _drift(journal.anchors),
        "provenance": {"journal": JOURNAL_NAME, "files": {JOURNAL_NAME: file_hash(journal.path)}},
    }


def _drift(readings: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the anchor's readings and the largest share by which one of them leaves their median."""
    drift = 0.0
    for case in sorted({reading["case_id"] for reading in readings}):
        times = [reading["time_us"] for reading in readings if reading["case_id"] == case]
        middle = statistics.median(times)
        drift = max(drift, max(times) / middle - 1, 1 - min(times) / middle)
    return {"readings": readings, "drift": drift}


def _warn_of_drift(anchor: dict[str, Any], params: ProfileParams) -> None:
    if anchor["drift"] > params.max_drift:
        warnings.warn(
            f"The device was not steady: one case left its median by {anchor['drift']:.0%} through the sweep (limit "
            f"{params.max_drift:.0%}). Close other work and profile again into a new folder.",
            stacklevel=3,
        )

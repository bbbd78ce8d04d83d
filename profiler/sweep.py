"""The profile of a device: design the cases, time what the journal does not hold yet, write one Parquet file.

Under torchrun rank 0 times what one rank computes while the others wait; then all compare their speed, and exchange.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from profiler.cases.case import Rates, Seen
from profiler.cases.design import RUNS_OUTSIDE_REPEATS, Chooser, Design, design_cases, even_round
from profiler.cases.doubt import DOUBT, doubtful_cases
from profiler.compute_sweep import ComputeSweep
from profiler.device.backend import TorchBackend
from profiler.device.fingerprint import DeviceFingerprint, fingerprint_device
from profiler.errors import RoutePackError
from profiler.files import content_hash, file_hash
from profiler.journal import FORMAT, JOURNAL_NAME, Journal
from profiler.measurements import SCHEMA_VERSION, Measurements
from profiler.model_spec import ModelSpec
from profiler.observer import Observer
from profiler.params import FLOAT8, ProfileParams
from profiler.ranks.collectives import Stage, measure_links, run_exchanges
from profiler.ranks.exchange_cases import design_exchanges, group_sizes
from profiler.ranks.ranks import Ranks
from profiler.ranks.slow_ranks import (
    check_alike,
    relative_times,
    speed_cases,
    time_speeds,
    warn_of_slow_ranks,
)
from profiler.steadiness import steadiness, warn_of_problems, watched
from profiler.timer import measure_rates
from profiler.topology import Topology


@dataclass(frozen=True, slots=True)
class _Question:
    """What is asked of the device, the same on every rank."""

    spec: ModelSpec
    topology: Topology
    max_tokens: int
    params: ProfileParams
    seen: Seen | None


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

    Raises
    ------
    RoutePackError
        If the device is absent, the folder is another profile's or in use, the device affords no case, or another rank
        stopped.
    """
    if not max_tokens >= 1:
        raise RoutePackError(f"Expected a token cap of at least 1, got {max_tokens}.")
    question = _Question(spec, topology, max_tokens, params, seen)
    with Ranks(device) as ranks, ExitStack() as stack:
        observer = observer if observer and ranks.rank == 0 else Observer()
        with ranks.together():
            journal = stack.enter_context(Journal(Path(out), ranks.rank))
            fingerprint = _fingerprint(device, ranks)
            backend = TorchBackend(fingerprint.kind, params)
            stack.enter_context(backend.pinned())
        described = check_alike(ranks, fingerprint, content_hash(asdict(question)))
        stage = Stage(ranks, backend, params, fingerprint)
        _begin(journal, stage, question)
        limits: list[dict[str, Any]] = []
        with watched(backend, journal):
            with ranks.together():
                design = _design(journal, backend, question)
                if ranks.rank == 0:
                    ComputeSweep(design, backend, params, journal, observer).run(chooser)
            if ranks.size > 1:
                times = time_speeds(speed_cases(design.cases), ranks, backend, params, journal)
                described = [one | {"speed": time} for one, time in zip(described, relative_times(times), strict=True)]
                limits = _exchange(journal, stage, question, observer)
        files = dict(ranks.gather([journal.path.name, file_hash(journal.path)]))
        merged: list[Any] = []
        with ranks.together():
            if ranks.rank == 0:
                about = _meta(journal, question) | {"limits": [*design.limits, *limits], "ranks": described}
                merged = [_by_id(journal), about | {"provenance": {"journal": JOURNAL_NAME, "files": files}}]
        rows, meta = ranks.agree(merged)
        measurements = Measurements.from_rows(rows, meta)
        with ranks.together():
            if ranks.rank == 0:
                measurements.save(out)
    if ranks.rank == 0:
        warn_of_problems(measurements.meta["steadiness"])
        warn_of_slow_ranks(described)
    return measurements


def _fingerprint(device: str | None, ranks: Ranks) -> DeviceFingerprint:
    found = fingerprint_device(device)
    return replace(found, ranks_per_node=ranks.per_node) if ranks.size > 1 else found


def _begin(journal: Journal, stage: Stage, question: _Question) -> None:
    """Look at the device, unless an earlier run did, and let every rank's file say what it belongs to."""
    ranks, backend = stage.ranks, stage.backend
    rates: dict[str, Any] = {}
    with ranks.together():
        if ranks.rank == 0:
            rates = journal.header.get("rates") or asdict(measure_rates(backend, question.params))
    known = ranks.agree(journal.header.get("links", {}))
    sizes = group_sizes(question.topology, ranks.size, ranks.per_node)
    links = known if set(map(str, sizes)) <= known.keys() else known | measure_links(stage, sizes)
    dtype = FLOAT8 if question.params.dtype == FLOAT8 else backend.dtype_name
    header = {
        "format": FORMAT, "fingerprint": stage.fingerprint.to_dict(), "model": question.spec.name,
        "spec_hash": question.spec.spec_hash, "dtype": dtype, "threads": backend.threads,
        "rates": ranks.agree(rates), "links": links, "params": asdict(question.params),
        "topology": asdict(question.topology), "max_tokens": question.max_tokens,
    }  # fmt: skip
    with ranks.together():
        journal.begin(header)


def _rates(journal: Journal, params: ProfileParams) -> Rates:
    """Return what the first run saw of the device, so that every run designs the same cases; a stated limit wins."""
    stated = {"memory_bytes": int(params.max_memory_gib * 2**30)} if params.max_memory_gib else {}
    return Rates(**(journal.header["rates"] | stated))


def _design(journal: Journal, backend: TorchBackend, question: _Question) -> Design:
    rates = _rates(journal, question.params)
    return design_cases(
        question.spec,
        question.topology,
        question.max_tokens,
        question.params,
        rates,
        backend.dtype.itemsize,
        question.seen,
    )


def _exchange(journal: Journal, stage: Stage, question: _Question, observer: Observer) -> list[dict[str, Any]]:
    """Time the exchanges between ranks and return which sizes were left out."""
    ranks, params = stage.ranks, question.params
    sharing = 1 if stage.backend.kind == "cuda" else ranks.per_node
    memory = _rates(journal, params).memory_bytes // (2 * sharing)
    seconds = params.max_case_seconds / (params.min_repeats + RUNS_OUTSIDE_REPEATS)
    most_bytes = {name: min(memory, int(rate * seconds)) for name, rate in journal.header["links"].items()}
    sizes = group_sizes(question.topology, ranks.size, ranks.per_node)
    cases, limits = design_exchanges(
        question.spec, question.topology, question.max_tokens, params, sizes, ranks.per_node, ranks.agree(most_bytes)
    )
    run_exchanges(stage, cases, journal, observer)
    return limits


def _by_id(journal: Journal) -> list[dict[str, Any]]:
    """Return the rows in order of id, those still in doubt after a second look marked."""
    doubts = doubtful_cases(journal.rows.values())
    return [({"flag": DOUBT} if i in doubts else {}) | journal.rows[i] for i in sorted(journal.rows)]


def _meta(journal: Journal, question: _Question) -> dict[str, Any]:
    header, params = journal.header, question.params
    return {
        "schema_version": SCHEMA_VERSION,
        "fingerprint": header["fingerprint"],
        "model": asdict(question.spec),
        "topology": asdict(question.topology),
        "max_tokens": header["max_tokens"],
        "params": asdict(params),
        "backward": "measured",
        "dtype": header["dtype"],
        "threads": header["threads"],
        "rates": header["rates"],
        "links": header["links"],
        "anchor": {"readings": journal.anchors},
        "rounds": journal.rounds,
        "steadiness": steadiness(journal, params),
    }

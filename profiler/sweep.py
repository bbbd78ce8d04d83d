"""The profile of a device: design the cases, time what the journal does not hold yet, write one Parquet file.

Under torchrun rank 0 times what one rank computes while the others wait; then all compare their speed, and exchange.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from profiler.cases.case import DOUBT, Rates, Seen, doubtful_cases
from profiler.cases.design import Chooser, Design, even_round
from profiler.compute_sweep import ComputeSweep
from profiler.device.backend import TorchBackend
from profiler.device.fingerprint import DeviceFingerprint, fingerprint_device
from profiler.errors import RoutePackError
from profiler.files import content_hash, file_hash
from profiler.journal import JOURNAL_NAME, Journal
from profiler.measurements import SCHEMA_VERSION, Measurements
from profiler.model_spec import ModelSpec
from profiler.observer import Observer
from profiler.params import FLOAT8, ProfileParams
from profiler.ranks.collectives import Stage, measure_links, run_exchanges
from profiler.ranks.exchange_cases import design_exchanges, group_sizes
from profiler.ranks.ranks import Ranks
from profiler.ranks.slow_ranks import check_alike, relative_times, time_speeds, warn_of_slow_ranks
from profiler.steadiness import steadiness, warn_of_problems, watched
from profiler.timer import measure_rates
from profiler.topology import Topology


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
        warn_of_problems(measurements.meta["steadiness"])
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

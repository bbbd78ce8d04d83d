"""What a cost model costs: fitting, its file, a look-up; and how far its tables lie from it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from held_out import rows_of
from models import CAP, DEEPSEEK_V2_LITE, Clock, fit_params, load_cost_model, measured_rows, seconds_of, topology
from numba import njit
from records import CheckRecord

from costmodels import CostModel, StepTables, freeze_tables, lookup_ns
from costmodels.freezing.freeze import table_errors
from costmodels.learned.baseline import fit_baseline
from costmodels.learned.residual import fit_residual
from costmodels.operations import OPERATIONS
from profiler import load_model
from routepack_tune.reports.fit import coverages

CHECK, FITTED = "serving", "fitted"
LOOKUPS = 20_000_000
CHECKED_MODELS = ("Qwen3-30B-A3B", "gpt-oss-20b", "DeepSeek-V2-Lite")


def fit_records(gpu: str, model: CostModel, clock: Clock) -> Iterator[CheckRecord]:
    """Yield what a fit took with its validation, and what it says of its intervals."""
    for name, seconds in clock.seconds.items():
        yield CheckRecord(FITTED, gpu, f"validated fit of {name}, s", seconds)
    for where, entry in model.validation.items():
        if where != "tables":
            for split, share in coverages(entry).items():
                yield CheckRecord(FITTED, gpu, f"coverage {split}, {where}, %", share)


def serving_records(gpu: str, shared: Path, *, quick: bool) -> Iterator[CheckRecord]:
    """Yield fit times and sizes per operation, look-up time, table errors, falling steps."""
    params, measured = fit_params(quick=quick), measured_rows(gpu, shared, quick=quick)
    for name, operation in OPERATIONS.items():
        columns, time_us = rows_of(measured, name, flagged=False)
        if time_us.size:

            def one_fit(operation=operation, columns=columns, time_us=time_us) -> None:
                parameters = fit_baseline(operation, columns, time_us, params)
                target = np.log(time_us / operation.baseline(columns, parameters))
                for unseen in (False, True):
                    fit_residual(operation, columns, target, params, unseen, {"trees", "smooth", "curve"})

            yield CheckRecord(CHECK, gpu, f"fit {name}, s", seconds_of(one_fit))
    model = load_cost_model(gpu, shared, quick=quick)
    yield from _sizes(gpu, model)
    yield CheckRecord(CHECK, gpu, "look-up, ns", lookup_time_ns(freeze_tables(model, model.spec, model.topology, CAP)))
    for name in CHECKED_MODELS:
        spec = DEEPSEEK_V2_LITE if name == "DeepSeek-V2-Lite" else load_model(name)
        tables = freeze_tables(model, spec, topology(), CAP)
        errors = table_errors(replace(model, spec=spec, topology=topology()), tables)
        means = [entry["mean_pct"] for entry in errors.values() if isinstance(entry, dict) and "mean_pct" in entry]
        yield CheckRecord(CHECK, gpu, f"mean table error {name}, worst table, %", max(means))
        yield CheckRecord(CHECK, gpu, f"falling table steps {name}", float(falling_steps(tables)))


def _sizes(gpu: str, model: CostModel) -> Iterator[CheckRecord]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "costmodel"
        model.save(folder)
        files = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
        for name in sorted({op for op, _ in model.models}):
            mine = sum(size for path, size in files.items() if path.name.startswith(f"{name}-"))
            yield CheckRecord(CHECK, gpu, f"model size {name}, bytes of its own files", float(mine))
        yield CheckRecord(CHECK, gpu, "the whole folder without held-out times, bytes", float(sum(files.values())))


@njit
def _sum_lookups(table, shift, places):
    total = 0
    for place in places:
        # Each place waits for the answer before it: a look-up's whole time shows, not what overlaps.
        total += lookup_ns(table, shift, place + (total & 1))
    return total


def lookup_time_ns(tables: StepTables) -> float:
    """Return nanoseconds of one look-up at a random place, loop included."""
    places = np.random.default_rng(0).integers(0, tables.max_rows - 1, 1_000_000)
    _sum_lookups(tables.expert_rank_ns, tables.rows_shift, places[:10])
    rounds = LOOKUPS // places.size

    def run() -> None:
        for _ in range(rounds):
            _sum_lookups(tables.expert_rank_ns, tables.rows_shift, places)

    return seconds_of(run) / LOOKUPS * 1e9


def falling_steps(tables: StepTables) -> int:
    """Return how many steps of all tables go down."""
    every = (*tables.sequence_ns, *tables.cell_ns, tables.expert_rank_ns, tables.exchange_ns)
    return sum(int((np.diff(table) < 0).sum()) for table in every)

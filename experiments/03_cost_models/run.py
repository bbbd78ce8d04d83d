"""How wrong learned times are on public GPU tables, against what one could use instead, and what that does to plans.

    python experiments/03_cost_models/run.py [--gpus H200,H100,A100] [--quick] [--shared DIR]

Resumable: a row of results.csv or checks.csv that is there is not measured again. ``--redo TEXT`` first drops those
whose GPU, task, contestant or check contains TEXT (``--redo ""`` is everything). ``--quick`` fits every seventh row
with few trees, and writes to experiments/.cache/03_quick. Writes results.csv, transfer.csv, checks.csv, table.md,
figure.png and plans.png.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import figures
import gates
import held_out
import plans
import serving
import summary
from models import CACHE, HERE, fit_and_keep, fit_params, measured_rows
from records import CheckRecord, ErrorRecord, RecordFile, TransferRecord
from rich.console import Console
from rich.table import Table

from routepack_tune.progress import ProgressBars as Bars

DOCS = HERE.parents[1] / "docs" / "cost-models.md"
SHARED = HERE.parents[2] / "shared" / "data"
TRANSFER, TRANSFER_DONE = "transfer_rows", ("transfer", "all")


def run_errors(gpus: list[str], given: argparse.Namespace, errors: RecordFile, checks: RecordFile, bars: Bars) -> None:
    """Fit every GPU's cost model, read off its validation, and run what that does not hold, where records lack."""
    params, todo = fit_params(quick=given.quick), []
    for gpu in gpus:
        if (gpu, gates.EXPERTS_SIZES, "model") not in errors.keys or (serving.FITTED, gpu) not in checks.keys:
            todo.append((gpu, "fit", ()))
        if (gpu, gates.EXPERTS_ALL, "model") not in errors.keys:
            todo.append((gpu, "flagged", ()))
        if not given.quick:
            lacking = [
                one for one in held_out.LIGHTGBM_ALONE if (gpu, held_out.TASKS[one], held_out.RAW) not in errors.keys
            ]
            todo += [(gpu, "alone", one) for one in lacking]
    bars.start("held out", len(todo))
    for gpu, what, which in todo:
        measured = measured_rows(gpu, given.shared, quick=given.quick)
        if what == "fit":
            model, clock = fit_and_keep(gpu, given.shared, quick=given.quick)
            errors.append(held_out.fitted_records(gpu, model, measured))
            checks.append(serving.fit_records(gpu, model, clock))
        elif what == "flagged":
            errors.append(held_out.flagged_records(gpu, measured, params))
        else:
            errors.append(held_out.alone_records(gpu, *which, measured, params))
        bars.advance("held out", " ".join((gpu, what, *which)))
    bars.finish("held out")


def run_transfer(shared: Path, records: RecordFile, checks: RecordFile, *, quick: bool) -> list[str]:
    """Run what new GPUs and single models cost in points, where that module is present; return notes."""
    if importlib.util.find_spec(TRANSFER) is None:
        return [f"{TRANSFER}.py is absent: new GPUs from few points and known shapes were not measured."]
    module = importlib.import_module(TRANSFER)
    if TRANSFER_DONE in checks.keys:
        return []
    names = {folder: gpu for gpu, folder in held_out.GPUS.items()}
    done = {(r.task, held_out.GPUS[r.gpu], r.points) for r in records.records}
    for row in module.rows(shared.parent, quick, done):
        gpu = names.get(row["gpu"], row["gpu"])
        records.append([TransferRecord(gpu, row["task"], row["points"], row["median"], row["mape"], row["p95"])])
    checks.append([CheckRecord(*TRANSFER_DONE, "rows", len(records.records))])
    return []


def run_checks(
    checks: RecordFile, work: dict[tuple[str, str], Callable[[], Iterable[CheckRecord]]], bars: Bars
) -> None:
    """Run every check that has no record yet."""
    missing = {key: action for key, action in work.items() if key not in checks.keys}
    bars.start("checks", len(missing))
    for key, action in missing.items():
        checks.append(action())
        bars.advance("checks", " ".join(key))
    bars.finish("checks")


def all_checks(
    gpus: list[str], shared: Path, *, quick: bool
) -> dict[tuple[str, str], Callable[[], Iterable[CheckRecord]]]:
    """Return every check by its key."""
    found: dict[tuple[str, str], Callable[[], Iterable[CheckRecord]]] = {}
    for gpu in gpus:
        found[serving.CHECK, gpu] = lambda gpu=gpu: serving.serving_records(gpu, shared, quick=quick)
    if plans.GPU in gpus:
        for work in plans.all_works(shared, quick=quick):
            found[plans.CHECK, work.name] = lambda work=work: plans.plan_records(work, shared, quick=quick)
    return found


def write_docs(rows: list[list[str]]) -> None:
    """Put a table between the markers of the documentation."""
    text = DOCS.read_text()
    start = text.index(">\n", text.index("<!-- results of experiments/03_cost_models")) + 2
    end = text.index("<!-- end of results -->")
    DOCS.write_text(f"{text[:start]}{summary.markdown(rows)}\n{text[end:]}")


def show(rows: list[list[str]], title: str) -> None:
    """Print a table."""
    table = Table(title=title)
    header, *body = rows
    for k, name in enumerate(header):
        table.add_column(name, justify="right" if k > 1 else "left")
    for row in body:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def main() -> None:
    """Measure what is missing, then write and print the results."""
    given = _arguments()
    gpus = [gpu for gpu in given.gpus.split(",") if gpu]
    if unknown := [gpu for gpu in gpus if gpu not in held_out.GPUS]:
        raise SystemExit(f"Unknown GPUs {', '.join(unknown)}; there are {', '.join(held_out.GPUS)}.")
    out = CACHE / "03_quick" if given.quick else HERE
    errors, checks = RecordFile(out / "results.csv", ErrorRecord), RecordFile(out / "checks.csv", CheckRecord)
    transfer = RecordFile(out / "transfer.csv", TransferRecord)
    if given.redo is not None:
        errors.forget(lambda r: r.gpu in gpus and given.redo in f"{r.gpu} {r.task} {r.contestant}")
        checks.forget(lambda r: given.redo in f"{r.check} {r.of}")
        transfer.forget(lambda r: given.redo in f"{r.gpu} {r.task}")
    notes = []
    present = [gpu for gpu in gpus if held_out.measurements_of(gpu, given.shared) is not None]
    if missing := [gpu for gpu in gpus if gpu not in present]:
        notes.append(f"No published timings of {', '.join(missing)} under {given.shared.name}/gpu-timings: left out.")
    if not given.report and present:
        with Bars() as bars:
            run_errors(present, given, errors, checks, bars)
            run_checks(checks, all_checks(present, given.shared, quick=given.quick), bars)
            if {"H200", "H100"} <= set(present):
                notes += run_transfer(given.shared, transfer, checks, quick=given.quick)
    (out / "table.md").write_text(summary.report(errors.records, transfer.records, checks.records, notes))
    if given.docs:
        write_docs(summary.docs_table(errors.records))
    figures.draw_errors(errors.records, out / "figure.png")
    figures.draw_plans(checks.records, out / "plans.png")
    for note in notes:
        print(note)
    show(summary.gate_table(errors.records, members=False), "held-out errors, median / MAPE / p95 in %")
    show(
        summary.transfer_table(transfer.records), "new GPUs and single models from few points, median / MAPE / p95 in %"
    )
    show(summary.number_table(checks.records), "serving and intervals")
    show(summary.plan_table(checks.records), "what errors of times do to plans")
    print(f"Wrote results.csv, transfer.csv, checks.csv, table.md, figure.png and plans.png to {out}.")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default=",".join(held_out.GPUS), help="comma-separated; default all")
    parser.add_argument("--quick", action="store_true", help="every seventh row, few trees, short plans")
    parser.add_argument("--redo", default=None, help="measure again what contains this; empty: everything")
    parser.add_argument("--report", action="store_true", help="measure nothing; write tables and pictures again")
    parser.add_argument("--docs", action="store_true", help="also write the table of docs/cost-models.md")
    parser.add_argument("--shared", type=Path, default=SHARED, help="folder with gpu-timings and routing")
    return parser.parse_args()


if __name__ == "__main__":
    main()

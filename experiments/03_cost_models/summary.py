"""The gate table, the other numbers and what errors do to plans, as Markdown and for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from gates import GATED, GATES, NUMBER_GATES, QUANTITIES, Errors, error_verdict, transfer_gate, verdict_of
from plans import BASELINE, CURVES, MODEL, TOKENS
from records import CheckRecord, ErrorRecord, TransferRecord

SHOWN = ("fitted baseline", "LightGBM on raw time", "LightGBM alone", "curve interpolation", "residual trees",
         "smooth residual", "model")  # fmt: skip

MEMBERS = ("residual trees", "smooth residual")


def contestants_of(records: Iterable[ErrorRecord]) -> list[str]:
    """Return the contestants that have records: the known ones in their order, then others, the model last."""
    present = list(dict.fromkeys(record.contestant for record in records))
    known = [name for name in SHOWN if name in present and name != "model"]
    return [*known, *(name for name in present if name not in SHOWN), "model"]


def gate_table(records: Sequence[ErrorRecord], *, members: bool = True) -> list[list[str]]:
    """Return the header and one row per GPU and task: every contestant's median / MAPE / p95, limits, verdict.

    ``members`` shows what the model averages too.
    """
    names = [name for name in contestants_of(records) if members or name not in MEMBERS]
    by_key = {record.key: record for record in records}
    header = [
        "GPU",
        "task (median / MAPE / p95, %)",
        "rows",
        *(_titled(name) for name in names),
        "gate",
        "aim",
        "verdict",
    ]
    table = [header]
    order = [*GATES, *(record.task for record in records)]
    for gpu in dict.fromkeys(record.gpu for record in records):
        tasks = {record.task for record in records if record.gpu == gpu}
        for task in dict.fromkeys(task for task in order if task in tasks):
            found = [by_key.get((gpu, task, name)) for name in names]
            model, gate = by_key.get((gpu, task, "model")), GATES.get(task)
            asked = gate if gpu in GATED else None
            rows = max(record.rows for record in found if record)
            errors: Errors = (None, None, None) if model is None else tuple(getattr(model, q) for q in QUANTITIES)  # type: ignore[assignment]
            table.append([gpu, task, str(rows), *(_cell(record) for record in found),
                          _limits(asked.gate) if asked else "-", _limits(asked.aim) if asked else "-",
                          error_verdict(gpu, gate, errors)])  # fmt: skip
    return table


def docs_table(records: Sequence[ErrorRecord]) -> list[list[str]]:
    """Return the part of the gate table that the documentation shows: GPUs with gates, without gates and members."""
    header, *body = gate_table([record for record in records if record.gpu in GATED], members=False)
    kept = [k for k, name in enumerate(header) if name not in ("rows", "gate", "aim", "verdict")]
    return [[row[k] for k in kept] for row in (header, *body)]


def _titled(name: str) -> str:
    return "LightGBM on log time" if name == "LightGBM alone" else name


def _cell(record: ErrorRecord | None) -> str:
    return "-" if record is None else f"{record.median_pct:.1f} / {record.mape_pct:.1f} / {record.p95_pct:.1f}"


def _limits(limits: Errors) -> str:
    return " / ".join("-" if limit is None else f"{limit:g}" for limit in limits)


def missing_tasks(records: Sequence[ErrorRecord]) -> list[str]:
    """Return the GPU and task of every gate that nobody measured."""
    measured = {(record.gpu, record.task) for record in records}
    gpus = [gpu for gpu in GATED if any(record.gpu == gpu for record in records)]
    return [f"{gpu}: {task}" for gpu in gpus for task in GATES if (gpu, task) not in measured]


def transfer_table(records: Sequence[TransferRecord]) -> list[list[str]]:
    """Return the errors from few points, with limits where there are any."""
    table = [["GPU", "task", "points", "median / MAPE / p95, %", "gate", "aim", "verdict"]]
    for record in records:
        gate = transfer_gate(record.task, record.points)
        errors: Errors = (record.median_pct, record.mape_pct, record.p95_pct)
        table.append([record.gpu, record.task, str(record.points), " / ".join(f"{value:.1f}" for value in errors),
                      _limits(gate.gate) if gate else "-", _limits(gate.aim) if gate else "-",
                      error_verdict(record.gpu, gate, errors)])  # fmt: skip
    return table


def number_table(checks: Sequence[CheckRecord]) -> list[list[str]]:
    """Return every other number that has a limit, and those recorded beside them."""
    table = [["GPU", "number", "found", "gate", "aim", "verdict"]]
    for record in checks:
        if record.check not in ("serving", "fitted"):
            continue
        gate = next((g for g in NUMBER_GATES if record.quantity.startswith(g.quantity)), None)
        row = [record.of, record.quantity, f"{record.value:.4g}"]
        if gate is None or record.of not in GATED:
            table.append([*row, "-", "-", "-"])
        else:
            table.append([*row, _range(gate.gate), _range(gate.aim), verdict_of(record.value, gate.gate, gate.aim)])
    return table


def _range(limits: tuple[float, float]) -> str:
    low, high = limits
    return f"<= {high:g}" if low == 0.0 else f"{low:g} to {high:g}"


def plan_table(checks: Sequence[CheckRecord]) -> list[list[str]]:
    """Return what every kind of times costs in step time, per batch."""
    table = [["batch", f"planned by {CURVES}, s", *(f"by {kind}: slower, %" for kind in (TOKENS, BASELINE, MODEL)),
              *(f"by {kind}: promised less priced, %" for kind in (TOKENS, BASELINE, MODEL))]]  # fmt: skip
    found = {(record.of, record.quantity): record.value for record in checks if record.check == "plans"}
    works = dict.fromkeys(of for of, _ in found)
    for work in works:
        slower = [
            found.get((work, f"planned by {kind}: slower than planned by {CURVES}, %"))
            for kind in (TOKENS, BASELINE, MODEL)
        ]
        promised = [
            found.get((work, f"planned by {kind}: promised over priced - 1, %")) for kind in (TOKENS, BASELINE, MODEL)
        ]
        step = found.get((work, f"planned by {CURVES}: step, s"))
        table.append([work, *(_number(value) for value in (step, *slower, *promised))])
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def plan_medians(checks: Sequence[CheckRecord]) -> dict[str, dict[str, float]]:
    """Return the median slow-down in percent per model and kind of times."""
    found: dict[str, dict[str, list[float]]] = {}
    for record in checks:
        if record.check == "plans" and "slower than" in record.quantity:
            kind = record.quantity.removeprefix("planned by ").partition(":")[0]
            family = record.of.rpartition(", ")[0]
            found.setdefault(family, {}).setdefault(kind, []).append(record.value)
    return {family: {kind: median(values) for kind, values in kinds.items()} for family, kinds in found.items()}


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    header, *body = rows
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def report(
    records: Sequence[ErrorRecord],
    transfer: Sequence[TransferRecord],
    checks: Sequence[CheckRecord],
    notes: Sequence[str],
) -> str:
    """Return the whole document."""
    missing = missing_tasks(records)
    parts = [
        "# Results of 03_cost_models\n\nWritten by run.py from published tables (forward, 16-bit). Absolute relative "
        "errors in percent, median / MAPE / 95th percentile, of rows that were held out by group; every contestant was "
        "fitted without them.",
        "## Gate table\n\n" + markdown(gate_table(records)),
        "## Not measured\n\n" + "\n".join(f"* {line}" for line in missing) if missing else "",
        "## New GPUs and single models from few points\n\nOn all rows that were not used; means over designs.\n\n"
        + markdown(transfer_table(transfer)),
        "## Serving and intervals\n\nTimes are processor time of one thread. `fit` is the baseline and every "
        "residual on all rows; a validated fit, which `routepack fit` runs, fits them anew for every fold.\n\n"
        + markdown(number_table(checks)),
        "## What errors of times do to plans\n\nThe same search with the same number of proposals plans with four "
        f"kinds of times; all plans are priced by {CURVES} (raw_curves.py says what they are). Slower: than the plan "
        "made with those curves themselves; below zero, the search was luckier. Promised less priced: what the planner "
        "said the step would take.\n\n" + markdown(plan_table(checks)),
        "## Notes\n\n" + "\n".join(f"* {line}" for line in notes) if notes else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"

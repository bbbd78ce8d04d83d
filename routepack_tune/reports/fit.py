"""What ``routepack fit`` shows when it is done: a table for the terminal and one self-contained HTML page.

The page lies in the cost model's folder as ``costmodel-report.html``. All errors are of rows that were held out by
group, and every contestant was fitted without them: the fitted baseline, LightGBM alone, interpolation of measured
curves where a validation has it, and the model.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler.files import write_text
from routepack_tune.reports.figures import as_svg, draw_parities, parity
from routepack_tune.reports.fit_figures import (
    HeldOutRows,
    colour_of,
    contestant_label,
    contestants,
    coverages,
    draw_errors,
    gains,
    plot_coverages,
)
from routepack_tune.reports.page import Block, Section, Table, page

if TYPE_CHECKING:
    from markupsafe import Markup

    from costmodels import CostModel
    from costmodels.features import Operation
    from profiler import Measurements

REPORT_FILE = "costmodel-report.html"
WIDEST = 500
"""Characters in a line of the terminal's table, which is never folded."""
QUANTITIES = (("median_pct", "median"), ("mape_pct", "MAPE"), ("p95_pct", "p95"), ("worst_pct", "worst"))

KINDS = {
    "lightgbm": "the physics baseline and LightGBM on its residual",
    "smooth": "the physics baseline and a smooth residual",
    "baseline": "the physics baseline alone",
}


@dataclass(frozen=True, slots=True)
class ErrorLine:
    """One contestant's errors on one split of one operation, percent."""

    operation: str
    """``experts/forward`` and the like."""
    split: str
    contestant: str
    rows: int
    median_pct: float
    mape_pct: float
    p95_pct: float
    worst_pct: float


def error_lines(validation: Mapping[str, Any]) -> list[ErrorLine]:
    """Return every contestant of every split of every operation, from a cost model's ``validation``."""
    lines = []
    for operation, entry in validation.items():
        for split, report in entry.items():
            if not isinstance(report, Mapping):
                continue
            for key, errors in report.items():
                if isinstance(errors, Mapping) and all(name in errors for name, _ in QUANTITIES):
                    numbers = [float(errors[name]) for name, _ in QUANTITIES]
                    rows = int(errors.get("rows", report.get("rows", 0)))
                    lines.append(ErrorLine(operation, split, contestant_label(key), rows, *numbers))
    return lines


def error_table(validation: Mapping[str, Any]) -> list[str]:
    """Return the lines of a plain table: a row per operation and split, a column per contestant."""
    from rich.console import Console
    from rich.table import Table as Grid

    cells: dict[tuple[str, str], dict[str, str]] = {}
    for line in error_lines(validation):
        shown = f"{line.median_pct:.1f} / {line.mape_pct:.1f} / {line.p95_pct:.1f}"
        cells.setdefault((line.operation, line.split), {})[line.contestant] = shown
    if not cells:
        return []
    columns = [*(name for name in dict.fromkeys(name for row in cells.values() for name in row) if name != "model")]
    columns.append("model")
    grid = Grid("held out, median / MAPE / p95 in %", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        grid.add_column(name, justify="right")
    for (operation, split), row in cells.items():
        grid.add_row(f"{operation}, {split}", *(row.get(name, "-") for name in columns))
    console = Console(file=io.StringIO(), width=WIDEST, force_terminal=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(grid)
    return captured.get().splitlines()


def held_out_rows(model: CostModel, measurements: Sequence[Measurements]) -> dict[str, HeldOutRows]:
    """Return the validation's rows with the size and shape of each, per operation and direction.

    Rows are found again in the measurements; where their times do not agree with the validation's, sizes and shapes
    are left out rather than guessed.
    """
    from costmodels.features import size_of

    found = {}
    for (name, direction), fitted in model.models.items():
        held_out = model.parity.get(f"{name}_{direction}")
        if held_out is None:
            continue
        operation, size_N, shape_N = fitted.own.operation, None, None
        columns = _fitted_rows(measurements, operation, direction)
        if np.array_equal(columns["time_us"], held_out.true_us):
            size_N, shape_N = size_of(operation, columns), _shapes(operation, columns)
        label = operation.features[operation.size[0]]
        found[f"{name}-{direction}"] = HeldOutRows(
            f"{name} {direction}", held_out.true_us, contestants(held_out), size_N, label, shape_N
        )
    return found


def _fitted_rows(measurements: Sequence[Measurements], operation: Operation, direction: str) -> dict[str, np.ndarray]:
    parts = [batch.select(op=operation.name, direction=direction, status="ok", flag="").rows for batch in measurements]
    names = (*operation.features, "time_us")
    columns = {name: np.concatenate([np.asarray(part[name], dtype=np.float64) for part in parts]) for name in names}
    good = np.isfinite(columns["time_us"]) & (columns["time_us"] > 0)
    for name in operation.features:
        if name not in operation.zero_allowed:
            good &= columns[name] > 0
    return {name: column[good] for name, column in columns.items()}


def _shapes(operation: Operation, columns: dict[str, np.ndarray]) -> np.ndarray:
    keys = np.stack([columns[name] for name in operation.family], axis=1).astype(np.int64)
    distinct, inverse = np.unique(keys, axis=0, return_inverse=True)
    short = [name.removeprefix("num_").replace("_", " ") for name in operation.family]
    texts = [", ".join(f"{name} {value}" for name, value in zip(short, key, strict=True)) for key in distinct.tolist()]
    return np.array(texts)[np.asarray(inverse).reshape(-1)]


def fit_pictures(model: CostModel, rows: Mapping[str, HeldOutRows]) -> dict[str, Markup]:
    """Return every picture as SVG, by name: ``experts-forward-parity`` and the like."""
    figures: dict[str, Any] = {}
    for (name, direction), fitted in model.models.items():
        key = f"{name}-{direction}"
        if key in rows:
            held = rows[key]
            parities = [parity(label, held.true_us, predicted) for label, predicted in held.predicted_us.items()]
            colours = [colour_of(label, place) for place, label in enumerate(held.predicted_us)]
            figures[f"{key}-parity"] = draw_parities(parities, colours)
            figures[f"{key}-errors"] = draw_errors(held, gains(fitted))
    inside = {
        f"{operation} {where}": share
        for operation, entry in model.validation.items()
        if operation != "tables"
        for where, share in coverages(entry).items()
    }
    if inside:
        figures["coverage"] = plot_coverages(inside).figure
    return {name: as_svg(figure, name) for name, figure in figures.items()}


def write_fit_report(model: CostModel, measurements: Sequence[Measurements], folder: Path | str) -> dict[str, Markup]:
    """Write the page into the cost model's folder; return its pictures, SVG by name."""
    pictures = fit_pictures(model, held_out_rows(model, measurements))
    write_text(Path(folder) / REPORT_FILE, render_fit(model, pictures))
    return pictures


def render_fit(model: CostModel, pictures: Mapping[str, Markup]) -> str:
    """Return the page."""
    device = model.fingerprint
    times = f"{device.origin} times"
    sections: list[Section] = [
        ("Errors on rows that were held out", times, _errors(model)),
        *(
            (f"{name} {direction}", times, _operation(model, name, direction, pictures))
            for name, direction in model.models
        ),
        ("Intervals", "held out", [pictures.get("coverage", "")]),
        ("Frozen tables against the model", "", [_tables(model)]),
        ("What to keep in mind", "", [model.tables.notes if model.tables else ()]),
        ("Where it comes from", "", [_facts(model)]),
    ]
    subtitle = f"{device.name} ({device.arch}), {model.spec.name}, cap {model.max_tokens} tokens"
    return page("Cost model", subtitle, sections)


def _errors(model: CostModel) -> list[Block]:
    lines = error_lines(model.validation)
    heads = ("task", "contestant", "rows", *(name for _, name in QUANTITIES))
    rows = [
        (
            f"{line.operation}, {line.split}",
            line.contestant,
            line.rows,
            *(f"{getattr(line, name):.1f}" for name, _ in QUANTITIES),
        )
        for line in lines
    ]
    words = (
        "Rows of one size, or of one shape, are held out together; every contestant is fitted without them. Absolute "
        "relative errors in percent."
    )
    return [words, Table(heads, rows, frozenset(k for k, line in enumerate(lines) if line.contestant == "model"))]


def _operation(model: CostModel, name: str, direction: str, pictures: Mapping[str, Markup]) -> list[Block]:
    fitted = model.models[name, direction]
    said = f"{fitted.own.rows} rows fitted, {fitted.own.flagged_rows} left out by the consistency flags; priced by "
    words = " ".join([f"{said}{KINDS.get(fitted.kind, fitted.kind)}.", *(f"{reason}." for reason in fitted.reasons)])
    return [words, *(pictures.get(f"{name}-{direction}-{kind}", "") for kind in ("parity", "errors"))]


def _tables(model: CostModel) -> Table:
    found = {name: errors for name, errors in model.table_errors.items() if isinstance(errors, Mapping)}
    heads = [name.removesuffix("_pct") + ", %" for name in next(iter(found.values()), ())]
    return Table(
        ("table", *heads), [(name, *(f"{value:.3f}" for value in errors.values())) for name, errors in found.items()]
    )


def _facts(model: CostModel) -> dict[str, str]:
    device = model.fingerprint
    sizes = asdict(model.topology)
    return {
        "device": f"{device.name}, {device.arch}, {device.memory_gib} GiB, {device.origin}",
        "software": ", ".join(f"{name} {value}" for name, value in sorted(device.software.items())),
        "model": model.spec.name,
        "topology": ", ".join(f"{name} {size}" for name, size in sizes.items() if size != 1) or "one device",
        "measurements": model.data_hash,
        "seed": str(model.params.seed),
    }

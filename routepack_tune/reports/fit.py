"""What ``routepack fit`` shows when it is done: a table for the terminal and one self-contained HTML page.

The page lies in the cost model's folder as ``costmodel-report.html``. All errors are of rows that were held out by
group, and every contestant was fitted without them: the fitted baseline, LightGBM alone, interpolation of measured
curves where a validation has it, and the model.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler.files import write_text
from routepack_tune.reports.figures import as_svg
from routepack_tune.reports.fit_figures import (
    HeldOutRows,
    contestant_label,
    contestants,
    coverages,
    draw_errors,
    draw_parities,
    gains,
    plot_coverages,
)
from routepack_tune.reports.quickstart import page, section

if TYPE_CHECKING:
    from costmodels import CostModel
    from costmodels.features import Operation
    from profiler import Measurements

REPORT_FILE = "costmodel-report.html"
QUANTITIES = (("median_pct", "median"), ("mape_pct", "MAPE"), ("p95_pct", "p95"), ("worst_pct", "worst"))

KINDS = {
    "lightgbm": "the physics baseline and LightGBM on its residual",
    "smooth": "the physics baseline and a smooth residual",
    "baseline": "the physics baseline alone",
}


@dataclass(frozen=True, slots=True)
class ErrorLine:
    """Hold one contestant's errors on one split of one operation, percent."""

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
    lines = error_lines(validation)
    if not lines:
        return []
    columns = [name for name in dict.fromkeys(line.contestant for line in lines) if name != "model"] + ["model"]
    cells = {
        (
            line.operation,
            line.split,
            line.contestant,
        ): f"{line.median_pct:.1f} / {line.mape_pct:.1f} / {line.p95_pct:.1f}"
        for line in lines
    }
    table = [["held out, median / MAPE / p95 in %", *columns]]
    for operation, split in dict.fromkeys((line.operation, line.split) for line in lines):
        table.append([f"{operation}, {split}", *(cells.get((operation, split, name), "-") for name in columns)])
    widths = [max(len(row[k]) for row in table) for k in range(len(columns) + 1)]
    return ["  ".join(cell.ljust(width) if k == 0 else cell.rjust(width)
                      for k, (cell, width) in enumerate(zip(row, widths, strict=True))) for row in table]  # fmt: skip


def held_out_rows(model: CostModel, measurements: Sequence[Measurements]) -> dict[str, HeldOutRows]:
    """Return the validation's rows with the size and shape of each, per operation and direction.

    Rows are found again in the measurements; where their times do not agree with the validation's, sizes and shapes
    are left out rather than guessed.
    """
    found = {}
    for (name, direction), fitted in model.models.items():
        held_out = model.parity.get(f"{name}_{direction}")
        if held_out is None:
            continue
        operation, size_N, shape_N = fitted.own.operation, None, None
        columns = _fitted_rows(measurements, operation, direction)
        if np.array_equal(columns["time_us"], held_out.true_us):
            size_N, shape_N = _sizes(operation, columns), _shapes(operation, columns)
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


def _sizes(operation: Operation, columns: dict[str, np.ndarray]) -> np.ndarray:
    from costmodels.features import size_of

    return size_of(operation, columns)


def _shapes(operation: Operation, columns: dict[str, np.ndarray]) -> np.ndarray:
    keys = np.stack([columns[name] for name in operation.family], axis=1).astype(np.int64)
    distinct, inverse = np.unique(keys, axis=0, return_inverse=True)
    short = [name.removeprefix("num_").replace("_", " ") for name in operation.family]
    texts = [", ".join(f"{name} {value}" for name, value in zip(short, key, strict=True)) for key in distinct.tolist()]
    return np.array(texts)[np.asarray(inverse).reshape(-1)]


def fit_pictures(model: CostModel, rows: Mapping[str, HeldOutRows]) -> dict[str, str]:
    """Return every picture as SVG, by name: ``experts-forward-parity`` and the like."""
    pictures = {}
    for (name, direction), fitted in model.models.items():
        key = f"{name}-{direction}"
        if key in rows:
            pictures[f"{key}-parity"] = as_svg(draw_parities(rows[key]), f"{key}-parity")
            pictures[f"{key}-errors"] = as_svg(draw_errors(rows[key], gains(fitted)), f"{key}-errors")
    if found := _coverages(model):
        pictures["coverage"] = as_svg(plot_coverages(found).figure, "coverage")
    return pictures


def _coverages(model: CostModel) -> dict[str, float]:
    return {
        f"{operation} {where}": share
        for operation, entry in model.validation.items()
        if operation != "tables"
        for where, share in coverages(entry).items()
    }


def write_fit_report(model: CostModel, measurements: Sequence[Measurements], folder: Path | str) -> dict[str, str]:
    """Write the page into the cost model's folder; return its pictures, SVG by name."""
    pictures = fit_pictures(model, held_out_rows(model, measurements))
    write_text(Path(folder) / REPORT_FILE, render_fit(model, pictures))
    return pictures


def render_fit(model: CostModel, pictures: Mapping[str, str]) -> str:
    """Return the page."""
    origin = model.fingerprint.origin
    sections = [
        section("Errors on rows that were held out", f"{origin} times", _errors(model)),
        *(section(name, f"{origin} times", body) for name, body in _operations(model, pictures)),
        section("Intervals", "held out", pictures.get("coverage", "")),
        section("Frozen tables against the model", "", _tables(model)),
        section("What to keep in mind", "", _list(model.tables.notes if model.tables else ())),
        section("Where it comes from", "", _facts(model)),
    ]
    device = model.fingerprint
    subtitle = f"{device.name} ({device.arch}), {model.spec.name}, cap {model.max_tokens} tokens"
    return page("Cost model", subtitle, "".join(sections))


def _errors(model: CostModel) -> str:
    words = (
        '<p class="soft">Rows of one size, or of one shape, are held out together; every contestant is fitted without '
        "them. Absolute relative errors in percent.</p>"
    )
    body = []
    for line in error_lines(model.validation):
        numbers = "".join(f"<td>{getattr(line, name):.1f}</td>" for name, _ in QUANTITIES)
        tuned = " class=tuned" if line.contestant == "model" else ""
        label = html.escape(f"{line.operation}, {line.split}")
        body.append(
            f"<tr{tuned}><td>{label}</td><td>{html.escape(line.contestant)}</td><td>{line.rows}</td>{numbers}</tr>"
        )
    head = "".join(f"<th>{name}</th>" for name in ("task", "contestant", "rows", *(name for _, name in QUANTITIES)))
    return (
        f'{words}<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    )


def _operations(model: CostModel, pictures: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for (name, direction), fitted in model.models.items():
        kind = KINDS.get(fitted.kind, fitted.kind)
        said = [
            f"{fitted.own.rows} rows fitted, {fitted.own.flagged_rows} left out by the consistency flags; "
            f"priced by {kind}."
        ]
        body = f'<p class="soft">{html.escape(" ".join([*said, *(f"{reason}." for reason in fitted.reasons)]))}</p>'
        shown = [
            pictures[key] for key in (f"{name}-{direction}-parity", f"{name}-{direction}-errors") if key in pictures
        ]
        yield f"{name} {direction}", body + "".join(shown)


def _tables(model: CostModel) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td>" + "".join(f"<td>{value:.3f}</td>" for value in errors.values()) + "</tr>"
        for name, errors in model.table_errors.items()
        if isinstance(errors, Mapping)
    )
    if not rows:
        return ""
    heads = [name.removesuffix("_pct") + ", %" for name in _first_mapping(model.table_errors)]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("table", *heads))
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _first_mapping(errors: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(entry for entry in errors.values() if isinstance(entry, Mapping))


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _facts(model: CostModel) -> str:
    device = model.fingerprint
    sizes = {name: getattr(model.topology, name) for name in model.topology.__dataclass_fields__}
    facts = {
        "device": f"{device.name}, {device.arch}, {device.memory_gib} GiB, {device.origin}",
        "software": ", ".join(f"{name} {value}" for name, value in sorted(device.software.items())),
        "model": model.spec.name,
        "topology": ", ".join(f"{name} {size}" for name, size in sizes.items() if size != 1) or "one device",
        "measurements": model.data_hash,
        "seed": str(model.params.seed),
    }
    shown = "".join(f"<dt>{name}</dt><dd>{html.escape(value)}</dd>" for name, value in facts.items() if value)
    return f"<dl>{shown}</dl>"

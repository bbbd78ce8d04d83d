"""What ``routepack fit`` shows when it is done: a table for the terminal and one self-contained HTML page.

The page lies in the cost model's folder as ``costmodel-report.html``. All errors are of rows that were held out by
group, and every contestant was fitted without them: the fitted baseline, LightGBM alone, interpolation of measured
curves where a validation has it, and the model. Every contestant keeps its colour.

Shape suffixes: N held-out rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]

from routepack_tune.reports.figures import (
    AFTER,
    ATTENTION,
    BEFORE,
    EXPERTS,
    INK,
    as_svg,
    panels,
    parity_figure,
    plot_bars,
)
from routepack_tune.reports.page import Block, Section, Table, page

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes

    from costmodels import CostModel
    from costmodels.learned.predictor import OperationModel
    from costmodels.learned.validation import HeldOut
    from profiler import Measurements

REPORT_FILE = "costmodel-report.html"
QUANTITIES = {"median_pct": "median", "mape_pct": "MAPE", "p95_pct": "p95", "worst_pct": "worst"}
KINDS = {
    "lightgbm": "the physics baseline and LightGBM on its residual",
    "smooth": "the physics baseline and a smooth residual",
    "baseline": "the physics baseline alone",
}
LABELS = {
    "baseline": "fitted baseline",
    "lightgbm_alone": "LightGBM alone",
    "curve": "curve interpolation",
    "trees": "residual trees",
    "smooth": "smooth residual",
}
COLOURS = {"model": AFTER, "fitted baseline": BEFORE, "LightGBM alone": EXPERTS, "curve interpolation": ATTENTION}
OTHER_COLOURS = ("#a855f7", "#ef4444", "#14b8a6")
FEWEST_IN_BIN = 5
MOST_SHAPES = 12
MOST_INPUTS = 12


@dataclass(frozen=True)
class HeldOutRows:
    """What every contestant said about rows that it had not seen."""

    true_us: np.ndarray
    """[N] measured times."""
    predicted_us: Mapping[str, np.ndarray]
    """Per contestant, [N]; the model last. A row that a contestant cannot answer is NaN."""
    size_label: str
    size_N: np.ndarray | None = None
    """The size by which rows were held out; None where rows are not known any more."""
    shape_N: np.ndarray | None = None
    """[N] text: the model's shape behind every row."""

    def errors_pct(self) -> pd.DataFrame:
        """Return ``predicted / true - 1`` in percent, a column per contestant, NaN where there is no prediction."""
        return pd.DataFrame({name: 100 * (us / self.true_us - 1) for name, us in self.predicted_us.items()})


def contestant_label(key: str) -> str:
    """Return a contestant's name for people."""
    return LABELS.get(key, key.replace("_", " "))


def colour_of(name: str, place: int = 0) -> str:
    """Return a contestant's colour."""
    return COLOURS.get(name, OTHER_COLOURS[place % len(OTHER_COLOURS)])


def contestants(held_out: HeldOut) -> dict[str, np.ndarray]:
    """Return the predictions of every contestant that a validation holds, by name, the model last."""
    found = held_out.contestants()
    return {contestant_label(key): us for key, us in found.items() if key not in ("trees", "smooth")}


def error_lines(validation: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every contestant of every split of every operation, from a cost model's ``validation``.

    A line holds ``operation`` (``experts/forward`` and the like), ``split``, ``contestant``, ``rows`` and the errors in
    percent.
    """
    for operation, entry in validation.items():
        for split, report in entry.items():
            for key, errors in report.items() if isinstance(report, Mapping) else ():
                if isinstance(errors, Mapping) and errors.keys() >= QUANTITIES.keys():
                    line = {"operation": operation, "split": split, "contestant": contestant_label(key)}
                    yield line | {"rows": report["rows"]} | dict(errors)


def error_table(validation: Mapping[str, Any]) -> list[str]:
    """Return the lines of a plain table: a row per operation and split, a column per contestant."""
    cells: dict[str, dict[str, str]] = {}
    for line in error_lines(validation):
        row = cells.setdefault(f"{line['operation']}, {line['split']}", {})
        row[line["contestant"]] = f"{line['median_pct']:.1f} / {line['mape_pct']:.1f} / {line['p95_pct']:.1f}"
    if not cells:
        return []
    grid = pd.DataFrame.from_dict(cells, orient="index")
    columns = [*grid.columns.drop("model", errors="ignore"), "model"]
    grid = grid.reindex(columns=columns).fillna("-").rename_axis(columns="held out, median / MAPE / p95 in %")
    return grid.to_string().splitlines()


def held_out_rows(model: CostModel, measurements: Sequence[Measurements]) -> dict[str, HeldOutRows]:
    """Return the validation's rows with the size and shape of each, per operation and direction.

    Rows are found again in the measurements; where their times do not agree with the validation's, sizes and shapes
    are left out rather than guessed.
    """
    from costmodels.features import rows_by, size_of

    found = {}
    for (name, direction), fitted in model.models.items():
        held_out = model.parity.get(f"{name}_{direction}")
        if held_out is None:
            continue
        operation, size_N, shape_N = fitted.operation, None, None
        parts = [batch.select(op=name, direction=direction, status="ok", flag="").rows for batch in measurements]
        columns = {key: np.concatenate([part[key] for part in parts]) for key in (*operation.features, "time_us")}
        good = np.logical_and.reduce([columns[key] > 0 for key in columns if key not in operation.zero_allowed])
        columns = {key: column[good].astype(np.float64) for key, column in columns.items()}
        if np.array_equal(columns["time_us"], held_out.true_us):
            size_N = size_of(operation, columns)
            short = [feature.removeprefix("num_").replace("_", " ") for feature in operation.family]
            shape_N = np.empty(size_N.size, dtype=object)
            for shape, places in rows_by(columns, operation.family).items():
                shape_N[places] = ", ".join(f"{key} {value}" for key, value in zip(short, shape, strict=True))
        label = operation.features[operation.size[0]]
        found[f"{name}-{direction}"] = HeldOutRows(held_out.true_us, contestants(held_out), label, size_N, shape_N)
    return found


def errors_by_size(rows: HeldOutRows) -> pd.DataFrame:
    """Return every contestant's median error in percent by octave of size; NaN where it answered too few rows."""
    if rows.size_N is None:
        return pd.DataFrame()
    octaves = rows.errors_pct().abs().groupby(np.exp2(np.rint(np.log2(rows.size_N))))
    return octaves.median().where(octaves.count() >= FEWEST_IN_BIN)


def errors_by_shape(rows: HeldOutRows) -> pd.DataFrame:
    """Return every contestant's mean error in percent on the shapes on which the model is worst, the worst first."""
    if rows.shape_N is None:
        return pd.DataFrame()
    return rows.errors_pct().abs().groupby(rows.shape_N).mean().nlargest(MOST_SHAPES, "model")


def gains(model: OperationModel) -> dict[str, float]:
    """Return every tree input's share of the gain of all splits, in percent, the largest first; empty without trees.

    Of trees with linear leaves beside constant ones, the constant ones speak.
    """
    import lightgbm
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    trees = model.known.trees or model.unseen.trees
    if trees is None:
        return {}
    with threadpool_limits(1, user_api="openmp"):
        booster = lightgbm.Booster(model_str=trees.text)
    gain = pd.Series(booster.feature_importance("gain"), booster.feature_name())
    share = 100 * gain / gain.sum()
    return {} if share.isna().any() else share.sort_values(ascending=False, kind="stable").to_dict()


def coverages(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return what share of held-out rows lies inside their interval, percent, by where; ``entry`` is one operation's
    validation."""
    intervals = entry.get("intervals") or {}
    named = {"inside the timed sizes": "inside_pct", "at the largest sizes": "largest_sizes_pct"}
    return {where: float(intervals[key]) for where, key in named.items() if key in intervals}


def fit_pictures(model: CostModel, measurements: Sequence[Measurements]) -> dict[str, Markup]:
    """Return every picture as SVG, by name: ``experts-forward-parity`` and the like."""
    figures, rows = {}, held_out_rows(model, measurements)
    for (name, direction), fitted in model.models.items():
        if held := rows.get(key := f"{name}-{direction}"):
            pairs = {label: (held.true_us, predicted) for label, predicted in held.predicted_us.items()}
            colours = [colour_of(label, place) for place, label in enumerate(pairs)]
            figures[f"{key}-parity"] = parity_figure(pairs, colours)
            inputs = dict(list(gains(fitted).items())[:MOST_INPUTS])
            draws = [partial(draw, held) for draw in (plot_errors_by_size, plot_errors_by_shape, plot_residuals)]
            label = "share of the trees' gain, %" if inputs else "no trees in this model"
            draws.append(partial(plot_bars, inputs, label))
            figures[f"{key}-errors"] = panels(10.4, 6.0, *draws, columns=2)
    inside = {
        f"{operation} {where}": share
        for operation, entry in model.validation.items()
        for where, share in coverages(entry).items()
    }
    if inside:
        figures["coverage"] = panels(7.2, 0.3 * len(inside) + 1.0, partial(plot_coverages, inside))
    return {name: as_svg(figure, name) for name, figure in figures.items()}


def plot_errors_by_size(rows: HeldOutRows, ax: Axes) -> None:
    """Draw every contestant's median error against size."""
    curves = errors_by_size(rows)
    for place, (name, errors) in enumerate(curves.items()):
        ax.semilogx(curves.index, errors, "o-", color=colour_of(name, place), markersize=3, linewidth=1.4, label=name)
    ax.set_ylim(bottom=0)
    ax.set(xlabel=rows.size_label, ylabel="median error, %")
    if len(curves):
        ax.legend()


def plot_errors_by_shape(rows: HeldOutRows, ax: Axes) -> None:
    """Draw mean errors of the shapes that the model knows worst."""
    worst = errors_by_shape(rows)[::-1]
    for place, (name, errors) in enumerate(worst.items()):
        ax.plot(errors, errors.index, "o", color=colour_of(name, place))
    ax.tick_params(axis="y", labelsize=7)
    ax.set_xlim(left=0)
    ax.set_xlabel("mean error by shape, % (worst shapes)")


def plot_residuals(rows: HeldOutRows, ax: Axes) -> None:
    """Draw how predictions of every contestant spread around the truth."""
    for place, (name, errors) in enumerate(rows.errors_pct().items()):
        inside = errors.dropna().clip(-40, 40)
        ax.hist(inside, np.linspace(-40, 40, 81).tolist(), histtype="step", linewidth=1.4, color=colour_of(name, place))
    ax.axvline(0.0, color=INK, linewidth=0.8)
    ax.set(xlabel="predicted over measured - 1, % (ends hold what is beyond)", ylabel="held-out rows")


def plot_coverages(inside_pct: Mapping[str, float], ax: Axes) -> None:
    """Draw how many held-out rows lie inside their 90 % interval."""
    plot_bars(inside_pct, "rows inside their interval, % (line: promised)", ax)
    ax.axvline(90.0, color=INK, linewidth=1)
    ax.set_xlim(0, 100)


def fit_page(model: CostModel, pictures: Mapping[str, Markup]) -> str:
    """Return the page."""
    device = model.fingerprint
    times = f"{device.origin} times"
    operations = [(f"{name} {way}", times, _operation(model, name, way, pictures)) for name, way in model.models]
    sections: list[Section] = [
        ("Errors on rows that were held out", times, _errors(model)),
        *operations,
        ("Intervals", "held out", [pictures.get("coverage", "")]),
        ("Frozen tables against the model", "", [_tables(model)]),
        ("What to keep in mind", "", [model.tables.notes if model.tables else ()]),
        ("Where it comes from", "", [_facts(model)]),
    ]
    subtitle = f"{device.name} ({device.arch}), {model.spec.name}, cap {model.max_tokens} tokens"
    return page("Cost model", subtitle, sections)


def _errors(model: CostModel) -> list[Block]:
    lines = list(error_lines(model.validation))
    rows = [
        (f"{line['operation']}, {line['split']}", line["contestant"], line["rows"],
         *(f"{line[name]:.1f}" for name in QUANTITIES))
        for line in lines
    ]  # fmt: skip
    words = (
        "Rows of one size, or of one shape, are held out together; every contestant is fitted without them. Absolute "
        "relative errors in percent."
    )
    ours = frozenset(place for place, line in enumerate(lines) if line["contestant"] == "model")
    return [words, Table(("task", "contestant", "rows", *QUANTITIES.values()), rows, ours)]


def _operation(model: CostModel, name: str, direction: str, pictures: Mapping[str, Markup]) -> list[Block]:
    fitted = model.models[name, direction]
    said = f"{fitted.rows} rows fitted, {fitted.flagged_rows} left out by the consistency flags; priced by "
    words = " ".join([f"{said}{KINDS.get(fitted.kind, fitted.kind)}.", *(f"{reason}." for reason in fitted.reasons)])
    return [words, *(pictures.get(f"{name}-{direction}-{kind}", "") for kind in ("parity", "errors"))]


def _tables(model: CostModel) -> Table:
    found = {name: errors for name, errors in model.table_errors.items() if isinstance(errors, Mapping)}
    heads = [name.removesuffix("_pct") + ", %" for name in next(iter(found.values()), ())]
    rows = [(name, *(f"{value:.3f}" for value in errors.values())) for name, errors in found.items()]
    return Table(("table", *heads), rows)


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

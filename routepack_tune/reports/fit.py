"""What ``routepack fit`` shows when it is done: a table for the terminal and one self-contained HTML page.

The page lies in the cost model's folder as ``costmodel-report.html``. All errors are of rows that were held out by
group, and every contestant was fitted without them: the fitted baseline, LightGBM alone, interpolation of measured
curves where a validation has it, and the model. Every contestant keeps its colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]

from costmodels.freezing.notes import cores
from costmodels.freezing.pricer import Pricer
from costmodels.learned.validation import SHAPES, SIZES
from routepack_tune.reports.figures import ABOVE, AFTER, ATTENTION, BEFORE, EXPERTS, INK, as_svg, panels, plot_bars
from routepack_tune.reports.page import Block, Section, Table, as_table, page, verdict

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
MEMBERS = ("residual trees", "smooth residual")
"""Parts of the model: shown as contestants nowhere."""
BRIEF = ("fitted baseline", "without prior", "model")
"""Contestants of the short table."""
GOOD_PCT = 10.0
"""A held-out median error up to this is good enough to plan by: see docs/cost-models.md."""
SHAPE_WORDS = {"num_kv_heads": "kv", "qk_head_dim": "qk width", "v_head_dim": "v width"}
INPUT_WORDS = {
    "group": "query heads per kv head", "head_dims": "widths of qk and v heads", "qk_head_dim": "width of qk heads",
    "window_share": "attended share of the length", "log_blocks": "thread blocks", "log_work": "arithmetic",
    "log_reach": "keys of the last query", "padding": "computed rows per row", "log_head_tokens": "tokens x heads",
    "log_kv_tokens": "tokens x kv heads", "mean_share": "mean over longest length", "log_n": "output width",
    "log_k": "inner width", "aspect": "output over inner width", "log_intensity": "arithmetic per byte",
    "rows_per_expert": "rows per active expert", "skew": "hottest expert over the mean", "log_hidden": "hidden width",
    "log_inter": "expert width", "ranks": "expert-parallel ranks", "extra_tiles": "tiles beyond one an expert",
    "log_message": "bytes per peer", "inter_share": "share between nodes", "prior_log_residual": "the prior's residual",
}  # fmt: skip
"""Inputs of trees whose names do not say what they are."""
INTERVALS = {"inside the timed sizes": "inside_pct", "at the largest sizes": "largest_sizes_pct"}
FEWEST_IN_BIN = 5
MOST_SHAPES = 10
MOST_INPUTS = 12
MOST_POINTS = 1500


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


def brief_errors(validation: Mapping[str, Any]) -> pd.DataFrame:
    """Return median / 95th percentile in words: a row per operation and split, columns for physics and the model."""
    cells: dict[str, dict[str, str]] = {}
    for line in error_lines(validation):
        row = cells.setdefault("{operation}, {split}".format_map(line), {})
        row[line["contestant"]] = "{median_pct:.1f} / {p95_pct:.1f}".format_map(line)
    grid = pd.DataFrame.from_dict(cells, orient="index")
    return grid.reindex(columns=[name for name in BRIEF if name in grid]).fillna("-")


def error_table(validation: Mapping[str, Any]) -> list[str]:
    """Return the lines of a plain table of :func:`brief_errors`."""
    grid = brief_errors(validation)
    return grid.rename_axis(columns="held out, median / p95 error in %").to_string().splitlines() if len(grid) else []


def fit_verdict(model: CostModel) -> tuple[str, str]:
    """Say whether a cost model is good enough to plan its own job by, and what that rests on: a lead and a sentence.

    Judged are held-out sizes of every operation of the job, or held-out shapes where the job's own was not timed.
    """
    pricer = Pricer(model, model.spec, model.topology, model.max_tokens)
    shapes = [*cores(pricer), ("experts", pricer.experts_shape), ("router", pricer.router_shape)]
    unseen = {op for op, shape in shapes if pricer.has(op) and pricer.timed(op, shape) is None}
    good: list[str] = []
    bad: list[str] = []
    unknown: list[str] = []
    for op, direction in model.models:
        split = SHAPES if op in unseen else SIZES
        errors = model.validation[f"{op}/{direction}"].get(split, {}).get("model")
        name = f"{op.replace('_', ' ')} {direction}" + f" (its shape was not timed: {split})" * (op in unseen)
        if errors is None:
            unknown.append(name)
        else:
            (good if errors["median_pct"] <= GOOD_PCT else bad).append(f"{name} {errors['median_pct']:.1f}%")
    said = f"held-out median errors: {', '.join([*bad, *good])}" if bad or good else "nothing could be held out"
    said += f"; not validated, too few rows: {', '.join(unknown)}" * bool(unknown)
    if model.doubts:
        return "Do not rely on it:", f"{' '.join(model.doubts)} For the rest, {said}."
    if bad:
        return "Not good enough yet:", f"{said}. Above {GOOD_PCT:g}%: profile more cases of {', '.join(bad)}."
    if not good:
        return "Not known:", f"{said}."
    return "Good enough to plan by:", f"{said}. Errors up to {GOOD_PCT:g}% cost plans less than 1% of a step."


def own_reasons(model: CostModel) -> dict[str, list[str]]:
    """Return every reason that no note says already, with the operations that it holds for."""
    notes = " ".join(model.tables.notes if model.tables else ())
    found: dict[str, list[str]] = {}
    for (op, direction), fitted in model.models.items():
        for reason in fitted.reasons:
            if reason not in notes:
                found.setdefault(reason, []).append(f"{op}/{direction}")
    return found


def input_words(name: str) -> str:
    """Return what an input of the trees is, for people."""
    return INPUT_WORDS.get(name, name.removeprefix("log_").replace("_", " "))


def held_out_rows(model: CostModel, measurements: Sequence[Measurements]) -> dict[tuple[str, str], pd.DataFrame]:
    """Return the validation's rows per operation and direction: a column per contestant, the model last.

    A column holds predictions, microseconds, NaN where there is none. The index is ``true_us``, ``size`` (by which rows
    were held out) and ``shape`` (the model's, in words). The last two are found again in the measurements; where their
    times do not agree with the validation's, both are NaN rather than guessed.
    """
    from costmodels.features import size_of

    found = {}
    for (name, direction), fitted in model.models.items():
        if (held_out := model.parity.get(f"{name}_{direction}")) is None:
            continue
        operation, where = fitted.operation, {"op": name, "direction": direction, "status": "ok", "flag": ""}
        columns = ["time_us", *operation.features]
        parts = [pd.DataFrame(batch.select(**where).rows, columns=columns) for batch in measurements]
        rows = pd.concat(parts).astype(np.float64)
        rows = rows[(rows.drop(columns=list(operation.zero_allowed)) > 0).all(axis=1)]
        index: dict[str, Any] = {"true_us": held_out.true_us, "size": np.nan, "shape": np.nan}
        if np.array_equal(rows["time_us"], held_out.true_us):
            index["size"] = size_of(operation, {key: rows[key].to_numpy() for key in operation.size})
            short = {key: SHAPE_WORDS.get(key, key.removeprefix("num_").replace("_", " ")) for key in operation.family}
            records = rows.to_dict("records")
            index["shape"] = [", ".join(f"{short[key]} {row[key]:.0f}" for key in short) for row in records]
        found[name, direction] = pd.DataFrame(contestants(held_out), pd.MultiIndex.from_frame(pd.DataFrame(index)))
    return found


def errors_pct(rows: pd.DataFrame) -> pd.DataFrame:
    """Return ``|predicted / true - 1|`` in percent of every contestant's predictions."""
    return 100 * (rows.div(rows.index.get_level_values("true_us"), axis=0) - 1).abs()


def errors_by_size(rows: pd.DataFrame) -> pd.DataFrame:
    """Return every contestant's median error in percent by octave of size; NaN where it answered too few rows."""
    octaves = errors_pct(rows).groupby(np.exp2(np.rint(np.log2(rows.index.get_level_values("size")))))
    return octaves.median().where(octaves.count() >= FEWEST_IN_BIN)


def errors_by_shape(rows: pd.DataFrame) -> pd.DataFrame:
    """Return every contestant's mean error in percent on the shapes on which the model is worst, the worst first."""
    return errors_pct(rows).groupby("shape").mean().nlargest(MOST_SHAPES, "model")


def gains(model: OperationModel) -> dict[str, float]:
    """Return every tree input's share of the gain of all splits, in percent, the largest first; empty without trees.

    Of trees with linear leaves beside constant ones, the constant ones speak.
    """
    trees = model.known.trees or model.unseen.trees
    if trees is None:
        return {}
    booster = trees.boosters[0]
    gain = pd.Series(booster.feature_importance("gain"), booster.feature_name())
    share = 100 * gain / gain.sum()
    return {} if share.isna().any() else share.sort_values(ascending=False, kind="stable").to_dict()


def coverages(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return what share of held-out rows lies inside their interval, percent, by where; ``entry`` is one operation's
    validation."""
    intervals = entry.get("intervals") or {}
    return {where: float(intervals[key]) for where, key in INTERVALS.items() if key in intervals}


def fit_pictures(model: CostModel, measurements: Sequence[Measurements]) -> dict[str, Markup]:
    """Return every picture as SVG, by name: ``experts-forward-parity`` and the like."""
    figures = {}
    for (name, direction), rows in held_out_rows(model, measurements).items():
        parities = [partial(plot_parity, rows[label], colour_of(label, k)) for k, label in enumerate(rows)]
        figures[f"{name}-{direction}-parity"] = panels(2.6 * len(parities), 2.7, *parities, sharey=True)
        fitted = model.models[name, direction]
        size = fitted.operation.features[fitted.operation.size[0]]
        errors = partial(plot_errors_by_size, rows, size), partial(plot_errors_by_shape, rows)
        figures[f"{name}-{direction}-errors"] = panels(9.6, 3.4, *errors)
        if inputs := {input_words(key): share for key, share in list(gains(fitted).items())[:MOST_INPUTS]}:
            bars = partial(plot_bars, inputs, "what the trees learn from: share of their gain, %")
            figures[f"{name}-{direction}-inputs"] = panels(6.4, 3.0, bars)
    return {name: as_svg(figure, name) for name, figure in figures.items()}


def plot_parity(predicted_us: pd.Series, colour: str, ax: Axes) -> None:
    """Draw predicted against true times of held-out cases; of many points, some, evenly taken in order of true time."""
    known = predicted_us[np.isfinite(predicted_us)].sort_index(level="true_us")
    true_us = known.index.get_level_values("true_us").to_numpy()
    error = 100 * np.median(np.abs(known / true_us - 1)) if known.size else np.nan
    shown = np.linspace(0, known.size - 1, min(known.size, MOST_POINTS)).astype(np.int64)
    ax.loglog(true_us[shown], known.iloc[shown], ".", color=colour, markersize=3, alpha=0.5, rasterized=True)
    ends = true_us[[0, -1]] if known.size else [1.0, 10.0]
    ax.plot(ends, ends, color=INK, linewidth=1)
    title = f"{predicted_us.name}\n" + (f"median error {error:.1f}%" if known.size else "no answers")
    ax.set(xlabel="held-out time, µs", ylabel="predicted, µs", title=title)
    ax.label_outer()


def plot_errors_by_size(rows: pd.DataFrame, size_label: str, ax: Axes) -> None:
    """Draw every contestant's median error against size."""
    curves = errors_by_size(rows)
    for place, (name, errors) in enumerate(curves.items()):
        ax.semilogx(curves.index, errors, "o-", color=colour_of(name, place), markersize=3, linewidth=1.4, label=name)
    ax.set_ylim(bottom=0)
    ax.set(xlabel=size_label, ylabel="median error, %")
    if len(curves):
        ax.legend(**ABOVE, ncols=2)


def plot_errors_by_shape(rows: pd.DataFrame, ax: Axes) -> None:
    """Draw mean errors of the shapes that the model knows worst."""
    worst = errors_by_shape(rows)[::-1]
    for place, (name, errors) in enumerate(worst.items()):
        ax.plot(errors, errors.index, "o", color=colour_of(name, place))
    ax.tick_params(axis="y", labelsize=8)
    ax.set_xlim(left=0)
    ax.set_xlabel("mean error by shape, % (worst shapes)")


def fit_page(model: CostModel, pictures: Mapping[str, Markup]) -> str:
    """Return the page."""
    device = model.fingerprint
    times = f"{device.origin} times"
    lines = [line for line in error_lines(model.validation) if line["contestant"] not in MEMBERS]
    lead, sentence = fit_verdict(model)
    brief = [{"held out": task, **row} for task, row in brief_errors(model.validation).to_dict("index").items()]
    errors = {"task": "{operation}, {split}", "contestant": "{contestant}", "rows": "{rows}"}
    errors |= {head: f"{{{name}:.1f}}" for name, head in QUANTITIES.items()}
    words = (
        "Rows of one size, or of one shape, are held out together; every contestant is fitted without them. Absolute "
        "relative errors in percent: median / 95th percentile. The fitted baseline is physics alone."
    )
    about = (
        "A member of the model (its trees, its smooth kernel) may do better on one split: off the measured curves the "
        "smooth one is taken up to 1.4x the best error, for a planner would dodge the steps of trees."
    )
    inside = [
        {"operation": operation, "where": where, "rows inside their 90% interval": f"{share:.1f}%"}
        for operation, entry in model.validation.items()
        for where, share in coverages(entry).items()
    ]
    inside += [
        {"operation": f"{name}/{way}", "where": "anywhere", "rows inside their 90% interval": "unknown: too few rows"}
        for (name, way), fitted in model.models.items()
        if fitted.intervals is None
    ]
    frozen = [
        {"table": name, **{f"{key.removesuffix('_pct')}, %": f"{value:.3f}" for key, value in found.items()}}
        for name, found in model.table_errors.items()
        if isinstance(found, Mapping)
    ]
    ours = [place for place, line in enumerate(lines) if line["contestant"] == "model"]
    sections: list[Section] = [
        ("Is it good enough", times, [verdict(sentence, lead), words, as_table(brief)]),
        ("What to keep in mind", "", [model.tables.notes if model.tables else ()]),
        *((f"{name} {way}", times, _operation(model, name, way, pictures)) for name, way in model.models),
        ("Intervals", "held out", [as_table(inside)]),
        ("Frozen tables against the model", "", [as_table(frozen)]),
        ("All contestants on all rows that were held out", times, [about, Table(errors, lines, ours)]),
        ("Where it comes from", "", [_facts(model)]),
    ]
    subtitle = f"{device.name} ({device.arch}), {model.spec.name}, cap {model.max_tokens} tokens"
    return page("Cost model", subtitle, sections)


def _operation(model: CostModel, name: str, direction: str, pictures: Mapping[str, Markup]) -> list[Block]:
    fitted = model.models[name, direction]
    said = f"{fitted.rows} rows fitted, {fitted.flagged_rows} left out by the consistency flags; priced by "
    reasons = (f"{reason}." for reason, where in own_reasons(model).items() if f"{name}/{direction}" in where)
    words = " ".join([f"{said}{KINDS.get(fitted.kind, fitted.kind)}.", *reasons])
    return [words, *(pictures.get(f"{name}-{direction}-{kind}", "") for kind in ("parity", "errors", "inputs"))]


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

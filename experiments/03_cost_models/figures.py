"""Pictures: errors of every contestant against the gates, and what errors do to plans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from gates import GATED, GATES
from matplotlib.figure import Figure
from plans import BASELINE, MODEL, TOKENS
from records import CheckRecord, ErrorRecord
from summary import contestants_of, plan_medians

from routepack_tune.reports.figures import AFTER, BEFORE, EXPERTS, INK, STYLE, save_png
from routepack_tune.reports.fit import colour_of


@matplotlib.rc_context(STYLE)
def draw_errors(records: Sequence[ErrorRecord], path: Path) -> None:
    """Write mean errors of every contestant and task, one panel a GPU; a bar marks the gate."""
    gpus = list(dict.fromkeys(record.gpu for record in records))
    if not gpus:
        return
    tasks = [
        task for task in dict.fromkeys([*GATES, *(r.task for r in records)]) if any(r.task == task for r in records)
    ]
    figure = Figure(figsize=(4.6 + 3.4 * len(gpus), 0.34 * len(tasks) + 1.4))
    axes = figure.subplots(1, len(gpus), squeeze=False, sharey=True)[0]
    names = contestants_of(records)
    by_key = {record.key: record for record in records}
    y = np.arange(len(tasks))[::-1]
    for ax, gpu in zip(axes, gpus, strict=True):
        for place, name in enumerate(names):
            found = [(where, by_key[gpu, task, name].mape_pct) for where, task in zip(y, tasks, strict=True)
                     if (gpu, task, name) in by_key]  # fmt: skip
            if found:
                rows, errors = zip(*found, strict=True)
                ax.plot(errors, rows, "o", color=colour_of(name, place), markersize=5, label=name)
        for where, task in zip(y, tasks, strict=True):
            limit = GATES[task].gate[1] if task in GATES and gpu in GATED else None
            if limit is not None:
                ax.plot([limit, limit], [where - 0.35, where + 0.35], color=INK, linewidth=1.2)
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:g}")
        ax.set_title(gpu, fontsize=10, color=INK)
        ax.set_xlabel("mean error of held-out rows, % (line: gate)")
    axes[0].set_yticks(y, tasks, fontsize=8)
    axes[-1].legend(frameon=False, fontsize=8, labelcolor=INK, loc="best")
    save_png(figure, path)


@matplotlib.rc_context(STYLE)
def draw_plans(checks: Sequence[CheckRecord], path: Path) -> None:
    """Write how much slower plans are that were made with worse times."""
    medians = plan_medians(checks)
    if not medians:
        return
    figure = Figure(figsize=(7.2, 0.9 * len(medians) + 1.2))
    ax = figure.add_subplot()
    y = np.arange(len(medians))[::-1].astype(np.float64)
    for place, (kind, colour) in enumerate(((TOKENS, EXPERTS), (BASELINE, BEFORE), (MODEL, AFTER))):
        values = [of.get(kind, np.nan) for of in medians.values()]
        ax.barh(y + 0.25 * (1 - place), values, height=0.23, color=colour, label=f"planned by {kind}")
    ax.axvline(0.0, color=INK, linewidth=0.8)
    ax.set_yticks(y, list(medians))
    ax.set_xlabel("step time above that of the plan made with measured curves, % (all priced by those curves)")
    ax.legend(frameon=False, fontsize=8, labelcolor=INK)
    save_png(figure, path)

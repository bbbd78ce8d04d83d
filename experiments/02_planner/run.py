"""Every published planner and ours on every regime, at the same cost: the table, the pictures, the targets.

    python experiments/02_planner/run.py [--seeds 10] [--regimes NAME,...] [--quick] [--shared DIR]

Resumable: a row of results.csv or checks.csv that is there is not measured again. ``--redo TEXT`` first drops those of
a method or check whose name contains TEXT; ``--redo RoutePack-Tune`` all that is of our planner. ``--quick`` uses one
batch and short budgets, leaves giant out, and writes to experiments/.cache/quick. Writes results.csv, checks.csv,
table.md, figure.png and checks.png.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import summary
from checks import all_checks
from figures import draw_checks, draw_curves
from methods import OURS, all_methods, measure, warm_up
from records import CheckRecord, PlanRecord, RecordFile
from regimes import CACHE, HERE, SHARED, Regime, all_regimes, load_instance
from rich.console import Console
from rich.table import Table

from routepack_tune import RoutePackError
from routepack_tune.progress import ProgressBars


def run_table(regimes: dict[str, Regime], seeds: int, records: RecordFile, bars: ProgressBars, *, quick: bool) -> None:
    """Run every method on every batch that has no record yet."""
    for regime in regimes.values():
        todo = {}
        for number in regime.instances(seeds):
            methods = all_methods(regime, number, quick=quick)
            todo[number] = [m for m in methods if (regime.name, number, m.name, m.budget_s) not in records.keys]
        if not any(todo.values()):
            continue
        bars.start(regime.name, sum(map(len, todo.values())))
        for number, methods in todo.items():
            instance = load_instance(regime, number) if methods else None
            for method in methods:
                assert instance is not None
                try:
                    warm_up(method, regime.shared)
                    record = measure(method, instance)
                except RoutePackError as error:
                    bars.advance(regime.name)
                    print(f"{regime.name} {number}, {method.name}: {error}", file=sys.stderr)
                else:
                    records.append([record])
                    bars.advance(regime.name, f"{method.name} {record.percent:.2f}%")
        bars.finish(regime.name)


def run_checks(regimes: dict[str, Regime], seeds: int, records: RecordFile, bars: ProgressBars, *, quick: bool) -> None:
    """Run every check that has no record yet."""
    missing = [c for c in all_checks(regimes, seeds, quick=quick) if c.key not in records.keys]
    if not missing:
        return
    bars.start("checks", len(missing))
    for check in missing:
        records.append(check.records())
        bars.advance("checks", f"{check.name} {check.regime.name} {check.instance}")
    bars.finish("checks")


def show(rows: list[list[str]], title: str) -> None:
    """Print a table."""
    table = Table(title=title)
    header, *body = rows
    for k, name in enumerate(header):
        table.add_column(name, justify="right" if k else "left", no_wrap=k == 0)
    for row in body:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 180).print(table)


def main() -> None:
    """Measure what is missing, then write and print the results."""
    given = _arguments()
    seeds = 1 if given.quick else given.seeds
    regimes = all_regimes(given.shared)
    chosen = given.regimes.split(",") if given.regimes else [r for r in regimes if not (given.quick and r == "giant")]
    if unknown := [name for name in chosen if name not in regimes]:
        raise SystemExit(f"Unknown regimes {', '.join(unknown)}; there are {', '.join(regimes)}.")
    regimes = {name: regimes[name] for name in regimes if name in chosen}
    out = CACHE / "quick" if given.quick else HERE
    plans, checks = RecordFile(out / "results.csv", PlanRecord), RecordFile(out / "checks.csv", CheckRecord)
    if given.redo:
        plans.forget(lambda r: given.redo in r.method and r.regime in regimes)
        ours_too = given.redo == OURS  # all checks but the batches' own imbalance are of our planner
        checks.forget(
            lambda r: r.regime in regimes and (given.redo in r.check or (ours_too and r.check != "imbalance"))
        )
    if not given.report:
        with ProgressBars() as bars:
            run_table(regimes, seeds, plans, bars, quick=given.quick)
            run_checks(regimes, seeds, checks, bars, quick=given.quick)
    results = summary.Results(plans.records, checks.records, list(all_regimes(given.shared)))
    (out / "table.md").write_text(summary.report(results))
    draw_curves(plans.records, results.regimes, out / "figure.png")
    draw_checks(checks.records, out / "checks.png")
    show(summary.percent_table(results), "percent of the forced-balanced ideal (V: breaks the token cap)")
    show(summary.targets_table(summary.targets(results)), "targets")
    print(f"Wrote results.csv, checks.csv, table.md, figure.png and checks.png to {out}.")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="batches per regime (real: at most those there are)")
    parser.add_argument("--regimes", default="", help="comma-separated; default all")
    parser.add_argument("--quick", action="store_true", help="one batch, short budgets, no giant")
    parser.add_argument("--redo", default="", help="measure methods and checks again whose name contains this")
    parser.add_argument("--report", action="store_true", help="measure nothing; write tables and pictures again")
    parser.add_argument("--shared", type=Path, default=SHARED, help="folder with gpu-timings and routing")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""What tuning gains over the planner's defaults on unseen batches, how fast a study is, and what a warm start saves.

    python experiments/05_tuning/run.py [--parts gain,speed,transfer] [--regimes NAME,...] [--modes half,same]
        [--trials 30] [--workers 2] [--quick] [--redo TEXT] [--shared DIR]

Resumable: a row of results.csv that is there is not measured again. ``--redo TEXT`` first drops rows whose part, regime
or mode contains TEXT. ``--quick``: few trials on the two smallest regimes, into experiments/.cache/05_quick. Writes
results.csv and table.md.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import studies
from records import RecordFile  # of 02_planner
from regimes import CACHE, SHARED, Regime, all_regimes

from routepack_tune.progress import ProgressBars
from search import TUNABLE

HERE = Path(__file__).parent
BUDGETS = {"half": 0.5, "same": 1.0}
"""Planning time that is free, as a share of the defaults': what exceeds it is charged like step time."""
SPEED, TRANSFER, SECOND = "real-gptoss", "real-gptoss", "h100"
NEAR = 1.002
"""Within 0.2 percent of the best."""


@dataclass(frozen=True, slots=True)
class TuneRecord:
    """Hold what one study brought."""

    part: str
    regime: str
    mode: str
    trials: int
    stopped_early: int
    gain_pct: float
    """In step time and moves on held-out batches; percent, with its 95% interval."""
    low_pct: float
    high_pct: float
    plan_default_s: float
    plan_best_s: float
    export: str
    wall_s: float
    overhead_pct: float
    needed: int
    """Finished trials until within 0.2% of the cold study's best, or of both's (transfer; 0: never), else until the
    best."""
    setting: str

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes a record unique."""
        return self.part, self.regime, self.mode


def record_of(part: str, regime: str, mode: str, outcome: studies.Outcome, best: float | None = None) -> TuneRecord:
    """Return the record of a study."""
    gain, least, counts = outcome.step_gain, outcome.values(), outcome.summary["trials"]
    reached = min(least) if best is None else best * NEAR
    needed = next((k for k, value in enumerate(least, 1) if value <= reached), 0)
    return TuneRecord(
        part, regime, mode, len(least), counts["pruned"], gain.gain_pct, gain.low_pct, gain.high_pct,
        outcome.plan_s("default_settings"), outcome.plan_s("best"), outcome.summary["export"], outcome.wall_s,
        outcome.overhead_pct, needed, json.dumps(outcome.setting),
    )  # fmt: skip


def run_gain(
    regime: Regime, mode: str, trials: int, workers: int, others: list[TuneRecord], bars: ProgressBars
) -> TuneRecord:
    """Tune one regime under a budget of planning time; a slow one tries what others were tuned to first, and little
    else."""
    enqueue: tuple[dict[str, Any], ...] = ()
    if regime.name in studies.FEWER:
        trials = max(4, trials // 2)
        tuned = [json.loads(r.setting) for r in others if (r.part, r.mode, r.export) == ("gain", mode, "best")]
        enqueue = tuple({name: s[name] for name in s if name in TUNABLE} for s in tuned)  # older rows have more knobs
    batches, held_out = studies.step_batches(regime)
    plan_s = studies.default_plan_s(studies.make_task(regime, batches, held_out, 0.0))
    task = studies.make_task(regime, batches, held_out, BUDGETS[mode] * 0.95 * plan_s, enqueue=enqueue)
    return record_of("gain", regime.name, mode, studies.run(task, f"{regime.name}-{mode}", trials, workers, bars))


def run_speed(regime: Regime, trials: int, workers: int, bars: ProgressBars) -> TuneRecord:
    """Time a study of all real batches with no planning time free; one batch more is held out."""
    batches, _ = studies.step_batches(regime)
    task = studies.make_task(regime, [*batches, batches[0]], 1, 0.0)
    return record_of("speed", regime.name, f"{workers} workers", studies.run(task, f"speed-{workers}", trials, workers,
                                                                             bars))  # fmt: skip


def run_transfer(regime: Regime, trials: int, bars: ProgressBars) -> list[TuneRecord]:
    """Tune the first cluster, then a second one from its best and from scratch; one worker, so that trials count."""
    batches, held_out = studies.step_batches(regime)
    plan_s = studies.default_plan_s(studies.make_task(regime, batches, held_out, 0.0))
    first = studies.run(studies.make_task(regime, batches, held_out, plan_s / 2), "transfer-first", trials, 1, bars)
    tables = studies.tables_on(regime, SECOND)
    found = {}
    for mode, enqueue in (("cold", ()), ("warm", (first.setting,))):
        task = studies.make_task(regime, batches, held_out, plan_s / 2, tables=tables, seed=1, enqueue=enqueue)
        found[mode] = studies.run(task, f"transfer-{mode}", trials, 1, bars)
    # Trials until the second cluster's own best, what it finds from scratch; and until the best that either study
    # finds, so that a poor study cannot be quick at its own best.
    own, either = min(found["cold"].values()), min(min(outcome.values()) for outcome in found.values())
    return [
        record_of("transfer", regime.name, "first", first),
        *(record_of("transfer", regime.name, mode, outcome, own) for mode, outcome in found.items()),
        *(record_of("transfer", regime.name, f"{mode}, best of both", outcome, either)
          for mode, outcome in found.items()),
    ]  # fmt: skip


def verdict(row: TuneRecord) -> str:
    """Say which of the two claims a study supports."""
    ratio = row.plan_best_s / row.plan_default_s
    if row.export != "best":
        return "defaults"
    if row.low_pct > 0 and ratio <= 1:
        return "faster" + (", half the planning" if ratio <= 0.5 else "")
    return "equal, half the planning" if row.high_pct >= 0 and row.gain_pct >= -0.1 and ratio <= 0.5 else "neither"


def report(rows: list[TuneRecord]) -> str:
    """Return the results as Markdown."""
    gain = [
        f"| {r.regime} | {r.mode} | {r.trials} ({r.stopped_early}) | {r.gain_pct:+.2f} ({r.low_pct:+.2f} to "
        f"{r.high_pct:+.2f}) | {r.plan_default_s:.2f} | {r.plan_best_s:.2f} | {r.plan_best_s / r.plan_default_s:.2f} | "
        f"{verdict(r)} | {r.wall_s:.0f} | {r.overhead_pct:.1f} |"
        for r in rows
        if r.part == "gain"
    ]
    others = [
        f"| {r.part} | {r.regime} | {r.mode} | {r.trials} ({r.stopped_early}) | {r.wall_s:.0f} | "
        f"{r.overhead_pct:.1f} | {r.needed} |"
        for r in rows
        if r.part != "gain"
    ]
    settings = [f"* {r.regime}, {r.mode}: `{r.setting}`" for r in rows if r.part == "gain"]
    return "\n".join([
        "# Results of 05_tuning", "",
        "Written by run.py. Step times are predicted from published GPU times; planning times are processor seconds "
        "of one thread, measured. Gains are of step time with moves, on held-out batches and seeds no trial has seen, "
        "with the 95% bootstrap interval.", "",
        "| regime | budget | trials (stopped early) | gain, % | planning, defaults, s | tuned, s | ratio | verdict | "
        "study, s | overhead, % |", "|" + " --- |" * 10, *gain, "",
        "| part | regime | mode | trials (stopped early) | study, s | overhead, % | trials needed |",
        "|" + " --- |" * 7, *others, "", "## Tuned settings", "", *settings, "",
    ])  # fmt: skip


def main() -> None:
    """Measure what is missing, then write the results."""
    given = _arguments()
    out, regimes = CACHE / "05_quick" if given.quick else HERE, all_regimes(given.shared)
    names = (
        given.regimes.split(",")
        if given.regimes
        else [n for n in regimes if n not in ("real-v2lite", "giant")] + ["giant"]
    )
    names, trials = (names, given.trials) if not given.quick else (["gsm8k-short", "real-gptoss"], 6)
    modes, parts = given.modes.split(","), given.parts.split(",")
    records = RecordFile(out / "results.csv", TuneRecord)  # type: ignore[arg-type]
    if given.redo is not None:
        records.forget(lambda row: any(given.redo in part for part in row.key))
    with ProgressBars() as bars:
        for name in names if "gain" in parts else ():
            for mode in modes:
                if ("gain", name, mode) not in records.keys:
                    records.append([run_gain(regimes[name], mode, trials, given.workers, records.records, bars)])
        for workers in (1, 2) if "speed" in parts else ():
            if ("speed", SPEED, f"{workers} workers") not in records.keys:
                records.append([run_speed(regimes[SPEED], 6 if given.quick else 100, workers, bars)])
        if "transfer" in parts and ("transfer", TRANSFER, "warm") not in records.keys:
            records.forget(lambda row: row.part == "transfer")
            records.append(run_transfer(regimes[TRANSFER], trials, bars))
    (out / "table.md").write_text(report(records.records))
    print(report(records.records))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="gain,speed,transfer")
    parser.add_argument("--regimes", default="", help="comma-separated; default all but real-v2lite")
    parser.add_argument("--modes", default="half", help="planning time free: half or same as the defaults'")
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--redo", default=None)
    parser.add_argument("--shared", type=Path, default=SHARED)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""How few timed cases price an operation, and how a sweep should choose them.

    python experiments/04_profiler/run.py [--shared DIR]     # published tables as the device
    python experiments/04_profiler/run.py --cpu [--out DIR]  # this CPU: 50 + 50 cases and a held-out set

Resumable: rows of results.csv that are there are not measured again. Writes results.csv, cpu.csv and table.md.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import cpu_device
import numpy as np
import published_device
from published_device import DISAGREEMENT, MOST, ONE_SHOT, PRIOR, RANDOM, ROUNDS

from profiler.files import write_text

HERE = Path(__file__).parent
SHARED = HERE.parents[2] / "shared" / "data"
TARGET_PCT = 5.0
NAMES = ("gpu", "task", "how", "seed", "points", "held_out_pct", "median_pct")


def main() -> None:
    """Measure what is missing and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=SHARED, help="folder with gpu-timings/")
    parser.add_argument("--cpu", action="store_true", help="profile this CPU instead")
    parser.add_argument("--out", type=Path, help="with --cpu: keep the profile here; default: a temporary folder")
    given = parser.parse_args()
    path = HERE / "results.csv"
    found = _read(path)
    if given.cpu:
        _write(HERE / "cpu.csv", cpu_device.rows(given.out), cpu_device.NAMES)
    else:
        done = {(row["gpu"], row["task"], row["how"], int(row["seed"])) for row in found}
        for row in published_device.rows(given.shared / "gpu-timings", done):
            found.append({name: f"{row[name]:.4g}" if isinstance(row[name], float) else str(row[name])
                          for name in NAMES})  # fmt: skip
            _write(path, found, NAMES)
            print(", ".join(found[-1].values()), flush=True)
    write_text(HERE / "table.md", table(found, _read(HERE / "cpu.csv")))


def table(found: list[dict[str, str]], cpu: list[dict[str, str]]) -> str:
    """Return all results as Markdown."""
    lines = ["# Median error of one model's rows that were not timed, percent", ""]
    if found:
        lines += [*_published(found), ""]
    if cpu:
        lines += ["## This CPU", "", "| " + " | ".join(cpu_device.NAMES) + " |", "|---" * len(cpu_device.NAMES) + "|"]
        lines += ["| " + " | ".join(row.values()) + " |" for row in cpu]
    return "\n".join(lines).rstrip() + "\n"


def _published(found: list[dict[str, str]]) -> list[str]:
    columns = [(ROUNDS, MOST), (ONE_SHOT, MOST), (RANDOM, MOST), (DISAGREEMENT, MOST), (PRIOR, 20)]
    heads = [f"{how}, {points}" for how, points in columns]
    lines = ["Published tables as the device, means over seeds; claimed: what the timed points' own hold-out says.", "",
             f"| gpu | rows of | {' | '.join(heads)} | rounds, claimed | rounds stop at {TARGET_PCT:g}% |",
             "|---" * (len(heads) + 4) + "|"]  # fmt: skip
    for gpu, task in dict.fromkeys((row["gpu"], row["task"]) for row in found):
        mine = [row for row in found if (row["gpu"], row["task"]) == (gpu, task)]
        values = [_mean(mine, how, points, "median_pct") for how, points in columns]
        claimed = _mean(mine, ROUNDS, MOST, "held_out_pct")
        lines.append(f"| {gpu} | {task} | {' | '.join(values)} | {claimed} | {_stop(mine)} |")
    return lines


def _mean(rows: list[dict[str, str]], how: str, points: int, name: str) -> str:
    values = [float(row[name]) for row in rows if row["how"] == how and int(row["points"]) == points]
    return f"{np.mean(values):.2f}" if values else ""


def _stop(rows: list[dict[str, str]]) -> str:
    """Return where the rounds end by themselves: points and true error, means over seeds."""
    ends: list[tuple[int, float]] = []
    for seed in sorted({row["seed"] for row in rows}):
        course = [row for row in rows if row["how"] == ROUNDS and row["seed"] == seed]
        course.sort(key=lambda row: int(row["points"]))
        below = [row for row in course if float(row["held_out_pct"]) <= TARGET_PCT]
        if course:
            end = (below or course[-1:])[0]
            ends.append((int(end["points"]), float(end["median_pct"])))
    return f"{np.mean([p for p, _ in ends]):.0f} points, {np.mean([e for _, e in ends]):.2f}" if ends else ""


def _read(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="") as stream:
        return [row for row in csv.DictReader(stream) if all(row.values())]


def _write(path: Path, found: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    lines = [",".join(names), *(",".join(f'"{row[n]}"' if "," in str(row[n]) else str(row[n]) for n in names)
                                for row in found)]  # fmt: skip
    write_text(path, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

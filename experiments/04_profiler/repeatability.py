"""How well does a profile repeat? The whole sweep of a small model twice on this CPU, in fresh folders, row by row.

    python experiments/04_profiler/repeatability.py [--times N]

Prints and writes ``repeatability.csv``: per operation and direction the rows, and over them the median ratio r of the
two times, median and 90th percentile of max(r, 1/r); then busy share and verdict of each sweep.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np

from profiler import Measurements, ModelSpec, ProfileParams, Topology, profile_device

HERE = Path(__file__).parent
CONFIG = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "intermediate_size": 512,
}  # fmt: skip
TOPOLOGY = Topology(data_parallel_size=4, expert_model_parallel_size=4)
CAP = 4096


def profile_into(folder: Path | str, max_points: int) -> float:
    """Profile into a folder; return the wall time."""
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The verdict is printed below.
        params = ProfileParams(max_points=max_points)
        profile_device(ModelSpec.from_config(CONFIG, "small"), TOPOLOGY, CAP, params, folder, "cpu")
    return time.perf_counter() - began


def sweep(max_points: int) -> tuple[Measurements, float]:
    """Profile in a fresh folder and a process of its own, as two commands would; return measurements and wall time."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--into", folder, "--max-points", str(max_points)]
        told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        return Measurements.load(folder), float(told)


def ratios_of(first: Measurements, second: Measurements) -> dict[str, np.ndarray]:
    """Return the ratio of times of every row that both sweeps timed, by operation and direction, and of ``all``."""
    times = dict(zip(second.rows["case_id"].tolist(), second.rows["time_us"].tolist(), strict=True))
    found: dict[str, list[float]] = {"all": []}
    rows = (first.rows[name].tolist() for name in ("case_id", "op", "direction", "time_us"))
    for case, op, direction, time_us in zip(*rows, strict=True):
        ratio = time_us / times.get(case, np.nan)
        if np.isfinite(ratio):
            found.setdefault(f"{op} {direction}", []).append(ratio)
            found["all"].append(ratio)
    return {name: np.array(values) for name, values in found.items()}


def main() -> None:
    """Profile, compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=2, help="sweeps, each compared with the one before")
    parser.add_argument("--max-points", type=int, default=12)
    parser.add_argument("--into", help=argparse.SUPPRESS)  # What a process of its own does.
    asked = parser.parse_args()
    if asked.into:
        print(profile_into(asked.into, asked.max_points))
        return
    sweeps = [sweep(asked.max_points) for _ in range(asked.times)]
    lines: list[tuple[str, str, str]] = []
    for pair, ((first, _), (second, _)) in enumerate(pairwise(sweeps), 1):
        for name, found in ratios_of(first, second).items():
            ratios = np.maximum(found, 1 / found)
            lines += [
                (f"sweep {pair} and {pair + 1}", f"{name}: rows", str(ratios.size)),
                (f"sweep {pair} and {pair + 1}", f"{name}: median ratio", f"{np.median(found):.4f}"),
                (f"sweep {pair} and {pair + 1}", f"{name}: median apart, %", f"{100 * (np.median(ratios) - 1):.2f}"),
                (
                    f"sweep {pair} and {pair + 1}",
                    f"{name}: p90 apart, %",
                    f"{100 * (np.percentile(ratios, 90) - 1):.2f}",
                ),
            ]
    for number, (found, wall_s) in enumerate(sweeps, 1):
        steady, where = found.meta["steadiness"], f"sweep {number}"
        busy = steady["busy_share"] * steady["wall_s"]
        lines += [
            (where, "wall, s", f"{wall_s:.1f}"),
            (where, "busy share of the watched time, %", f"{100 * steady['busy_share']:.1f}"),
            (where, "busy share of the whole call, %", f"{100 * busy / wall_s:.1f}"),
            (where, "anchor drift, %", f"{100 * steady['drift']:.1f}"),
            (where, "CPU used by others, %", f"{100 * (steady['foreign_cpu_share'] or 0):.1f}"),
            (where, "verdict", "steady" if steady["steady"] else "; ".join(steady["problems"])),
        ]
    for line in lines:
        print(f"{line[0]:<16} {line[1]:<42} {line[2]}")
    with (HERE / "repeatability.csv").open("w", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerows([("of", "quantity", "value"), *lines])


if __name__ == "__main__":
    main()

"""The table of doors and outcomes, and the failing mutations by kind."""

from __future__ import annotations

import csv
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

COLUMNS = ("clear", "unclear", "accepted", "wrongly accepted", "traceback", "hung", "died", "attack failed")
BAD = (*COLUMNS[3:], "unclear")
MOST_MB = 300


def markdown(results: list[dict[str, Any]]) -> str:
    """Return a row a door and their sum; memory is the largest peak of any mutation, on top of the worker's own."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    peak: dict[str, float] = defaultdict(float)
    slowest: dict[str, float] = defaultdict(float)
    for one in results:
        for name in (one["door"], "all"):
            rows[name][one["outcome"]] += 1
            peak[name] = max(peak[name], one["peak_mb"])
            slowest[name] = max(slowest[name], one["seconds"])
    lines = [
        f"| door | tried | {' | '.join(COLUMNS)} | peak memory, MB | slowest, s |",
        "|---" * (len(COLUMNS) + 4) + "|",
    ]
    for name in [*(n for n in rows if n != "all"), "all"]:
        counts = rows[name]
        cells = [str(counts[column]) for column in COLUMNS]
        lines.append(
            f"| {name} | {sum(counts.values())} | {' | '.join(cells)} | {peak[name]:.0f} | {slowest[name]:.1f} |"
        )
    return "\n".join(lines)


def write_csv(path: Path, results: list[dict[str, Any]]) -> None:
    """Write how often each door ended how, and every mutation that failed."""
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(("door", "outcome", "count", "seeds"))
        found: dict[tuple[str, str], list[int]] = defaultdict(list)
        for one in results:
            found[one["door"], one["outcome"]].append(one["seed"])
        for (door, outcome), seeds in sorted(found.items()):
            shown = " ".join(map(str, seeds[:50])) if outcome in BAD else ""
            writer.writerow((door, outcome, len(seeds), shown))


def kinds(results: list[dict[str, Any]]) -> list[tuple[str, str, str, list[dict[str, Any]]]]:
    """Return failing mutations grouped by door, outcome and what was seen without its numbers, most harmful first."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for one in results:
        if one["outcome"] in BAD or one["peak_mb"] > MOST_MB:
            outcome = one["outcome"] if one["outcome"] in BAD else "memory"
            seen = re.sub(r"\d+", "N", one["detail"].partition(": ")[0] if outcome == "traceback" else one["detail"])[
                :60
            ]
            found[one["door"], outcome, seen].append(one)
    order = {"died": 0, "hung": 1, "wrongly accepted": 2, "traceback": 3, "memory": 4, "unclear": 5, "attack failed": 6}
    return [(*key, some) for key, some in sorted(found.items(), key=lambda item: (order[item[0][1]], -len(item[1])))]

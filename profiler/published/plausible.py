"""Whether published times can be true, by the arithmetic and memory peaks that the GPU's system file states.

No kernel is faster than the device. Rows of drawn routings carry expected counts, not the drawn ones, so a few come out
above the peak. And large cases of a table that all stay far below it were not timed as the others were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from profiler.cases.case import OPERATIONS, moved_elements

PEAK_SLACK = 1.1
"""Drawn routings are known to about a tenth: above the peak by more than that cannot be."""
CACHED_BYTES = 2**28
"""What is smaller may have stayed in a cache from one run to the next, which is faster than the memory."""
LARGE_FLOPS, FEWEST_LARGE = 1e11, 10
LEAST_EFFICIENCY, USUAL_EFFICIENCY = 0.15, 0.6
"""Nine tenths of a table's large cases below the first share of the peak are implausible; the second is usual."""


def device_peaks(system: Mapping[str, Any]) -> tuple[float, float]:
    """Return 16-bit operations and bytes of memory a second by a system file; 0 where it is silent."""
    gpu = system.get("gpu") or {}
    flops = next((gpu[key] for key in ("float16_tc_flops", "bfloat16_tc_flops") if gpu.get(key)), 0)
    return float(flops), float(gpu.get("mem_bw") or 0)


def faster_than_peak(op: str, rows: Any, system: Mapping[str, Any]) -> np.ndarray:
    """Return a mask of 16-bit rows that compute or move more in their time than the device can."""
    (flops, memory), seconds = device_peaks(system), np.asarray(rows["time_us"]) * 1e-6
    above, asked = np.zeros(seconds.size, dtype=bool), OPERATIONS[op]
    if asked.exchange:
        return above
    if flops:
        above |= np.asarray(asked.flops(rows)) > PEAK_SLACK * flops * seconds
    if memory:
        moved = 2.0 * np.asarray(moved_elements(op, rows))
        above |= (moved > CACHED_BYTES) & (moved > PEAK_SLACK * memory * seconds)
    return above


def slow_table(name: str, op: str, rows: Any, system: Mapping[str, Any]) -> list[str]:
    """Return a warning where large cases of a table are implausibly slow as a whole, else nothing."""
    flops, asked = device_peaks(system)[0], OPERATIONS[op]
    work = np.asarray(asked.flops(rows)) * np.ones(len(rows))
    large = work >= LARGE_FLOPS
    if not flops or asked.exchange or large.sum() < FEWEST_LARGE:
        return []
    best = float(np.quantile(work[large] / np.asarray(rows["time_us"])[large] * 1e6 / flops, 0.9))
    if best >= LEAST_EFFICIENCY:
        return []
    return [
        f"Table {name}: large cases reach {best:.1%} of the device's peak of {flops / 1e12:.0f} TFLOP/s, where about "
        f"{USUAL_EFFICIENCY:.0%} is usual: its times look {USUAL_EFFICIENCY / best:.1f}x too slow. Choose other tables "
        "(--tables), or measure."
    ]


def skipped_words(meta: Mapping[str, Any]) -> Iterator[str]:
    """Yield for every table how many rows of which number types were left out on import."""
    for table, counts in sorted((meta.get("skipped") or {}).items()):
        kinds = ", ".join(f"{kind} {count}" for kind, count in counts.items())
        yield f"{table.removesuffix('_perf').replace('_', ' ')} {sum(counts.values())} rows ({kinds})"

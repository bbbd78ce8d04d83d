"""Are all ranks alike? The same few cases on every rank: identical cards differ by several percent."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from profiler.cases.case import Case, middle_case
from profiler.device.fingerprint import DeviceFingerprint, compare_fingerprints
from profiler.errors import RoutePackError
from profiler.ranks.exchanges import Stage
from profiler.ranks.ranks import Ranks
from profiler.timer import time_case

SPEED_OPS = ("attention", "dense", "experts")
LAPS = 3
"""Every rank times every case this often, and its faster result counts: what disturbs a run only adds time."""
SLOW_LIMIT = {"cpu": 0.25, "cuda": 0.10}
"""A rank that takes this share longer than the others is named; ranks on one CPU disturb one another."""


def time_speeds(stage: Stage, pool: Sequence[Case]) -> list[dict[str, float]]:
    """Return every rank's times of a case of each of ``SPEED_OPS``; GPUs run at the same time, CPUs in turn."""
    cases = [middle_case(pool, op) for op in SPEED_OPS]
    ranks, on_gpu = stage.ranks, stage.backend.kind == "cuda"
    best: dict[str, float] = {}
    for turn in range(LAPS if on_gpu else LAPS * ranks.size):
        with ranks.together():
            if on_gpu or turn % ranks.size == ranks.rank:
                for row in (row for case in cases for row in time_case(case, stage.backend, stage.params)):
                    if row["status"] == "ok":
                        best[row["case_id"]] = min(row["time_us"], best.get(row["case_id"], float("inf")))
    return ranks.gather(best)


def relative_times(times: Sequence[dict[str, float]]) -> list[float]:
    """Return each rank's time over the ranks' median, the median over the cases that all of them timed."""
    shared = sorted(set.intersection(*(set(one) for one in times)))
    # The lower of two middles, so that of two ranks the slower one is the odd one.
    middle = {row_id: statistics.median_low(one[row_id] for one in times) for row_id in shared}
    return [statistics.median(one[row_id] / middle[row_id] for row_id in shared) if shared else 1.0 for one in times]


def warn_of_slow_ranks(described: Sequence[dict[str, Any]]) -> None:
    """Name every rank whose ``speed`` says that it takes longer than the others by more than the limit."""
    for one in described:
        if one["speed"] > 1 + SLOW_LIMIT["cuda" if "gpu" in one else "cpu"]:
            gpu = f", GPU {one['gpu']} {one['pci']}".rstrip() if "gpu" in one else ""
            warnings.warn(
                f"Rank {one['rank']} (host {one['host']}{gpu}) is {one['speed'] - 1:.0%} slower than the others. A "
                "step waits for its slowest rank: check its cooling, power and neighbours, or leave it out.",
                stacklevel=3,
            )


def check_alike(ranks: Ranks, fingerprint: DeviceFingerprint, question: str) -> list[dict[str, Any]]:
    """Return who the ranks are, each with its ``fingerprint``, after seeing that all ask the same of like devices."""
    own: dict[str, Any] = {"rank": ranks.rank, "host": ranks.host, "node": ranks.rank // ranks.per_node, "speed": 1.0}
    own |= {"device": fingerprint.name, "fingerprint": fingerprint.to_dict(), "question": question}
    if fingerprint.kind == "cuda":
        index = torch.cuda.current_device()
        card = torch.cuda.get_device_properties(index)
        # Not every build of torch tells the address.
        parts = [getattr(card, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
        known = "{:04x}:{:02x}:{:02x}".format(*parts) if min(parts) >= 0 else ""
        own |= {"gpu": index, "uuid": str(card.uuid), "pci": known}
    listed = ranks.gather(own)
    first, wanted = listed[0], DeviceFingerprint.from_dict(listed[0]["fingerprint"])
    cards: dict[tuple[str, str], int] = {}
    for one in listed:
        who = f"Rank {one['rank']} (host {one['host']})"
        match = compare_fingerprints(wanted, DeviceFingerprint.from_dict(one["fingerprint"]))
        other = f"rank 0 (host {first['host']}): {'; '.join(match.reasons)}."
        if match.level == "different":
            raise RoutePackError(f"{who} has another device than {other} Profile each kind of node by itself.")
        if match.level == "near" and ranks.rank == 0:
            warnings.warn(f"{who} differs from {other}", stacklevel=3)
        if one.pop("question") != question:
            raise RoutePackError(f"{who} has another configuration than rank {ranks.rank}. Start all alike.")
        if "uuid" in one and cards.setdefault((one["host"], one["uuid"]), one["rank"]) != one["rank"]:
            raise RoutePackError(
                f"{who} runs on the GPU of rank {cards[one['host'], one['uuid']]}. Give every rank one of its own."
            )
    return listed

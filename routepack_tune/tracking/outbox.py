"""The outbox: every trial of a study on this machine's disk before anything is sent to a tracking store.

One JSON object a line in ``trials.jsonl`` of the study's folder. Lines are only appended; of several lines of one trial
the last counts; a line that a kill cut short is skipped, its trial is still in the study's storage.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OUTBOX_FILE = "trials.jsonl"


def trial_record(
    number: int,
    params: Mapping[str, Any],
    metrics: Mapping[str, float],
    state: str,
    reason: str = "",
    names: Sequence[str] = (),
) -> dict[str, Any]:
    """Return what is kept and sent of one trial.

    A metric ``quantity.NAME`` of a batch among ``names`` becomes an element of the series ``quantity``: its step is the
    batch's position. Numbers that are not finite become texts: JSON and metrics know none.
    """
    position = {name: k for k, name in enumerate(names)}
    single: dict[str, float] = {}
    series: dict[str, list[list[float]]] = {}
    broken = {}
    for key, value in metrics.items():
        quantity, _, name = key.partition(".")
        if not math.isfinite(value):
            broken[key] = repr(float(value))
        elif name in position:
            series.setdefault(quantity, []).append([position[name], float(value)])
        else:
            single[key] = float(value)
    return {
        "number": number, "state": state, "reason": reason, "time_ms": int(time.time() * 1000), "params": dict(params),
        "metrics": single, "series": series, "not_finite": broken,
    }  # fmt: skip


class Outbox:
    """Keep a study's trials in its folder."""

    def __init__(self, folder: Path | str) -> None:
        self.path = Path(folder) / OUTBOX_FILE

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record and flush it to disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b") as stream:
            if stream.tell() and not self._ends_whole(stream):
                stream.write(b"\n")
            stream.write(json.dumps(record, allow_nan=False).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())

    @staticmethod
    def _ends_whole(stream: Any) -> bool:
        stream.seek(-1, os.SEEK_END)
        return bool(stream.read(1) == b"\n")

    def records(self) -> dict[int, dict[str, Any]]:
        """Return the last record of every trial by its number."""
        found: dict[int, dict[str, Any]] = {}
        if not self.path.is_file():
            return found
        for line in self.path.read_bytes().splitlines():
            try:
                record = json.loads(line)
                found[int(record["number"])] = record
            except (ValueError, KeyError, TypeError):
                continue
        return found

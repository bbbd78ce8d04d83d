"""Results as CSV that a long run appends to: what is there already is not measured again."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """Hold how wrong one contestant is on one task: absolute relative errors of rows it had not seen, percent."""

    gpu: str
    task: str
    contestant: str
    rows: int
    median_pct: float
    mape_pct: float
    p95_pct: float
    worst_pct: float

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes a record unique."""
        return self.gpu, self.task, self.contestant


@dataclass(frozen=True, slots=True)
class CheckRecord:
    """Hold one other measured number."""

    check: str
    of: str
    """GPU, or regime and batch."""
    quantity: str
    value: float

    @property
    def key(self) -> tuple[Any, ...]:
        """What is measured at once and skipped when present."""
        return self.check, self.of


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """Hold how wrong a model is that saw ``points`` rows of its GPU, and maybe all of another: percent."""

    gpu: str
    task: str
    points: int
    median_pct: float
    mape_pct: float
    p95_pct: float

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes a record unique."""
        return self.gpu, self.task, self.points


Record = ErrorRecord | CheckRecord | TransferRecord


class RecordFile:
    """Append records of one type to a CSV file and know the keys it holds."""

    def __init__(self, path: Path, kind: type[Record]) -> None:
        self.path, self.kind = path, kind
        self.names = [field.name for field in fields(kind)]
        self.records: list[Any] = []
        if path.is_file():
            with path.open(newline="") as stream:
                # A line cut short by a killed run lacks its last fields and is measured again.
                rows = [row for row in csv.DictReader(stream) if all(row.get(name) for name in self.names)]
            self.records = [_typed(kind, row) for row in rows]
        self._write_all()

    @property
    def keys(self) -> set[tuple[Any, ...]]:
        """Keys of the records."""
        return {record.key for record in self.records}

    def forget(self, wanted: Callable[[Any], bool]) -> None:
        """Drop the records that ``wanted`` names, so that they are measured again."""
        self.records = [record for record in self.records if not wanted(record)]
        self._write_all()

    def append(self, records: Iterable[Record]) -> None:
        """Write records at once in place of those with their keys."""
        new = list(records)
        keys = {record.key for record in new}
        self.records = [record for record in self.records if record.key not in keys]
        self.records += new
        self._write_all()

    def _write_all(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, self.names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(map(_plain, self.records))


def _typed(kind: type[Record], row: dict[str, str]) -> Record:
    read = {"int": int, "float": float, "str": str}
    return kind(**{field.name: read[str(field.type)](row[field.name]) for field in fields(kind)})


def _plain(record: Record) -> dict[str, Any]:
    return {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in asdict(record).items()}

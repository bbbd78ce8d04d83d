"""Results as CSV that a long run appends to: what is there already is not measured again."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """Hold what one method made of one batch."""

    regime: str
    instance: int
    method: str
    budget_s: float
    """Time given to a search; 0 for a method that takes none."""
    percent: float
    """Forced-balanced ideal in the least rows over the step time, percent."""
    gap_percent: float
    """Step time above the proven lower bound, percent."""
    over_cap_percent: float
    """Fullest microbatch above the cap, percent; 0 where the cap holds."""
    rows: int
    plan_s: float
    step_s: float

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes a record unique."""
        return self.regime, self.instance, self.method, self.budget_s


@dataclass(frozen=True, slots=True)
class CheckRecord:
    """Hold one other measured quantity."""

    check: str
    regime: str
    instance: int
    variant: str
    quantity: str
    value: float

    @property
    def key(self) -> tuple[Any, ...]:
        """What is measured at once and skipped when present."""
        return self.check, self.regime, self.instance, self.variant


Record = PlanRecord | CheckRecord


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
        self.keys = {record.key for record in self.records}
        self._write_all()

    def forget(self, wanted: Callable[[Any], bool]) -> None:
        """Drop the records that ``wanted`` names, so that they are measured again."""
        self.records = [record for record in self.records if not wanted(record)]
        self.keys = {record.key for record in self.records}
        self._write_all()

    def append(self, records: Iterable[Record]) -> None:
        """Write records at once, in full."""
        records = list(records)
        self.records += records
        self.keys |= {record.key for record in records}
        with self.path.open("a", newline="") as stream:
            csv.DictWriter(stream, self.names, lineterminator="\n").writerows(map(_plain, records))

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

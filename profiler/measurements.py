"""Measurements: one row a case, plain numpy columns, kept as one Parquet file.

Invariants: all columns have one length; feature columns are int64 and 0 where they are not of the row's operation;
``time_us`` is NaN unless ``status`` is ``ok``, and then between :data:`LEAST_US` and :data:`MOST_US`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler.cases.case import DIRECTIONS, FEATURE_COLUMNS, OPERATIONS
from profiler.device.fingerprint import DeviceFingerprint
from profiler.errors import RoutePackError, explained
from profiler.files import canonical_json, write_bytes
from profiler.readers import build, parse_json, read_parquet

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 2
FILE_NAME = "measurements.parquet"
TEXT_COLUMNS = ("case_id", "op", "direction", "status", "message", "source", "kernel", "dtype", "pattern", "flag")
TIME_COLUMNS = ("time_us", "spread_us", "skew_us")
"""Median and interquartile range of the repeats; how late the last rank of a collective began, median."""
WHOLE_COLUMNS = ("rank", *FEATURE_COLUMNS)
"""Integers: the rank that timed the row, of a collective the one that most often took longest; and the features."""
STATUSES = ("ok", "oom", "unsupported", "failed")
LEAST_US, MOST_US = 1e-3, 1e12
"""No kernel takes less than a nanosecond, none that is timed eleven days."""
MOST_SIZE = 2**48
"""Largest feature: sums and products stay far inside the range of a float."""
SHOWN = 4
COLUMNS = (*TEXT_COLUMNS, *TIME_COLUMNS, "repeats_us", *WHOLE_COLUMNS)


@dataclass(frozen=True)
class Measurements:
    """Measured or published times and where they come from.

    ``rows`` maps every name of ``COLUMNS`` to a vector; ``repeats_us`` is a vector of float64 vectors (raw samples,
    empty where only a summary was published). ``meta`` holds ``schema_version``, ``fingerprint``, ``model``,
    ``topology``, ``params``, ``provenance`` and ``backward`` (``measured`` or ``absent``).
    """

    rows: dict[str, np.ndarray]
    meta: dict[str, Any]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows["case_id"])

    def select(self, **equals: str | int) -> Measurements:
        """Return the rows whose columns equal the given values, as ``select(op="experts", status="ok")``."""
        keep = np.ones(len(self), dtype=bool)
        for name, value in equals.items():
            keep &= self.rows[name] == value
        return self.take(keep)

    def take(self, index: np.ndarray) -> Measurements:
        """Return the rows of a boolean mask or of positions."""
        return Measurements({name: column[index] for name, column in self.rows.items()}, self.meta)

    def check(self, where: str = "Measurements") -> None:
        """Raise RoutePackError, in which ``where`` names them, unless all rows can be of a device that was timed."""
        with explained(f"{where}: "):
            DeviceFingerprint.from_dict(build(dict[str, Any], self.meta.get("fingerprint"), "fingerprint"))
            steadiness = build(dict[str, Any], self.meta.get("steadiness") or {}, "steadiness")
            for name, told in (("doubts", self.meta.get("doubts")), ("steadiness", steadiness.get("problems"))):
                build(list[str], told or [], name)
            for name, known in (("op", OPERATIONS), ("direction", DIRECTIONS), ("status", STATUSES)):
                if unknown := set(self.rows[name].tolist()) - set(known):
                    raise RoutePackError(f"{name} {min(unknown)!r:.60} is unknown, expected one of {', '.join(known)}.")
            for name in WHOLE_COLUMNS:
                self._refuse(name, ~((self.rows[name] >= 0) & (self.rows[name] <= MOST_SIZE)), f"0 to {MOST_SIZE}")
            time_us = self.rows["time_us"]
            useless = ~((time_us >= LEAST_US) & (time_us <= MOST_US)) & (self.rows["status"] == "ok")
            self._refuse("time_us", useless, f"{LEAST_US:g} to {MOST_US:g}")
            for name in TIME_COLUMNS[1:]:
                self._refuse(name, np.abs(self.rows[name]) > MOST_US, f"at most {MOST_US:g}")

    def _refuse(self, name: str, wrong: np.ndarray, wanted: str) -> None:
        """Name the cases of rows whose value is not what is wanted."""
        if (places := np.flatnonzero(wrong)).size:
            shown = (f"{self.rows['case_id'][i]} {self.rows['op'][i]} {self.rows[name][i]}" for i in places[:SHOWN])
            more = f" and {places.size - SHOWN} more" if places.size > SHOWN else ""
            raise RoutePackError(
                f"{places.size} of {len(self)} rows have a {name} that is not {wanted} (case, operation, value): "
                f"{', '.join(shown)}{more}. Take them out, or time these cases again."
            )

    @classmethod
    def from_rows(cls, rows: Any, meta: dict[str, Any]) -> Measurements:
        """Build the columns from one mapping a row, or a table; absent features are 0, absent text is empty."""
        import pandas as pd  # type: ignore[import-untyped]

        table = pd.DataFrame(rows if isinstance(rows, pd.DataFrame) else list(rows), columns=COLUMNS)
        columns = {name: np.where(table[name].isna(), "", table[name]).astype(str) for name in TEXT_COLUMNS}
        columns |= {name: table[name].to_numpy(dtype=np.float64) for name in TIME_COLUMNS}
        samples = table["repeats_us"].map(lambda one: np.asarray(one if np.ndim(one) else (), dtype=np.float64))
        columns["repeats_us"] = samples.to_numpy(dtype=object)
        columns |= {name: table[name].fillna(0).to_numpy(dtype=np.int64) for name in WHOLE_COLUMNS}
        return cls(columns, meta)

    def save(self, path: Path | str) -> Path:
        """Write one Parquet file, whole or not at all; a folder gets ``measurements.parquet``. Return its path."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = Path(path)
        if path.is_dir() or path.suffix != ".parquet":
            path = path / FILE_NAME
        arrays = {name: pa.array(self.rows[name]) for name in COLUMNS if name != "repeats_us"}
        arrays["repeats_us"] = pa.array(list(self.rows["repeats_us"]), type=pa.list_(pa.float64()))
        meta = {**self.meta, "schema_version": SCHEMA_VERSION}
        table = pa.table(arrays).replace_schema_metadata({b"routepack": canonical_json(meta).encode()})
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        write_bytes(path, sink.getvalue().to_pybytes())
        return path

    @classmethod
    def load(cls, path: Path | str) -> Measurements:
        """Read a Parquet file, or the ``measurements.parquet`` of a folder.

        RoutePackError if the file is missing, damaged, not of this project, or of another schema.
        """
        path = Path(path, FILE_NAME) if Path(path).is_dir() else Path(path)
        if not path.is_file():
            raise RoutePackError(f"Measurements not found: {path}. Run `routepack profile` first.")
        table, where = read_parquet(path, "Measurements"), f"Measurements {path}"
        stored = (table.schema.metadata or {}).get(b"routepack")
        if stored is None:
            raise RoutePackError(
                f"{path} is a Parquet file, but not of measurements. Give the --out of `routepack profile`."
            )
        meta = build(dict[str, Any], parse_json(stored, f"{where}: what they say of themselves"), where)
        if (version := meta.get("schema_version")) != SCHEMA_VERSION:
            raise RoutePackError(
                f"{where} have schema_version {version!r:.40}, this version reads {SCHEMA_VERSION}. "
                "Update routepack-tune, or run `routepack profile` again."
            )
        with explained(after=" Run `routepack profile` again."):
            _check_columns(table, where)
            found = cls.from_rows(table.to_pandas(), meta)
            found.check(where)
        return found


def check_row(row: dict[str, Any], where: str) -> None:
    """Raise RoutePackError unless a row, as a journal holds it, has the types and ranges of a measurement."""
    kinds: dict[str, Any] = dict.fromkeys(TEXT_COLUMNS, str) | dict.fromkeys(TIME_COLUMNS, float)
    kinds |= dict.fromkeys(WHOLE_COLUMNS, int)
    kinds |= {"repeats_us": list[float], "looks": int}
    for name, value in row.items():
        build(kinds.get(name, str), value, f"{where}, {name}")
    if lacking := {"case_id", "op", "direction", "status"} - row.keys():
        raise RoutePackError(f"{where}: a row without {min(lacking)}.")
    if row["op"] not in OPERATIONS or row["direction"] not in DIRECTIONS or row["status"] not in STATUSES:
        raise RoutePackError(f"{where}: an unknown operation, direction or status.")
    if not all(0 <= row.get(name, 0) <= MOST_SIZE for name in WHOLE_COLUMNS):
        raise RoutePackError(f"{where}: a size that is not 0 to {MOST_SIZE}.")
    if row["status"] == "ok" and not LEAST_US <= row.get("time_us", 0.0) <= MOST_US:
        raise RoutePackError(f"{where}: a time that is not {LEAST_US:g} to {MOST_US:g}.")


def _check_columns(table: pa.Table, where: str) -> None:
    """Refuse columns that are missing, of another type, or have gaps."""
    from pyarrow import types

    if missing := [name for name in COLUMNS if name not in table.column_names]:
        raise RoutePackError(f"{where} lack the columns {', '.join(missing)}.")
    if len(table.column_names) != len(set(table.column_names)):
        raise RoutePackError(f"{where} have a column twice.")
    text, times = ("text", types.is_string, types.is_large_string), ("floating-point", types.is_floating)
    wanted: dict[str, tuple[Any, ...]] = dict.fromkeys(TEXT_COLUMNS, text) | dict.fromkeys(TIME_COLUMNS, times)
    wanted |= dict.fromkeys(WHOLE_COLUMNS, ("whole", types.is_signed_integer))
    for name, (kind, *tests) in wanted.items():
        column = table[name]
        if not any(test(column.type) for test in tests):
            raise RoutePackError(f"{where}: column {name} is of the type {column.type}, expected {kind} values.")
        if column.null_count:
            raise RoutePackError(f"{where}: column {name} has {column.null_count} rows without a value.")
    samples = table["repeats_us"]
    if not types.is_list(samples.type) or not types.is_floating(samples.type.value_type) or samples.null_count:
        raise RoutePackError(f"{where}: column repeats_us is of the type {samples.type}, expected lists of numbers.")

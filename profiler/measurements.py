"""Measurements: one row a case, plain numpy columns, kept as one Parquet file.

Invariants: all columns have one length; feature columns are int64 and 0 where they are not of the row's operation;
``time_us`` is NaN unless ``status`` is ``ok``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from profiler.cases.case import FEATURE_COLUMNS
from profiler.errors import RoutePackError
from profiler.files import canonical_json, write_bytes

SCHEMA_VERSION = 2
FILE_NAME = "measurements.parquet"
TEXT_COLUMNS = ("case_id", "op", "direction", "status", "message", "source", "kernel", "dtype", "pattern", "flag")
TIME_COLUMNS = ("time_us", "spread_us", "skew_us")
"""Median and interquartile range of the repeats; how late the last rank of a collective began, median."""
WHOLE_COLUMNS = ("rank", *FEATURE_COLUMNS)
"""Integers: the rank that timed the row, of a collective the one that most often took longest; and the features."""
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
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = Path(path, FILE_NAME) if Path(path).is_dir() else Path(path)
        if not path.is_file():
            raise RoutePackError(f"Measurements not found: {path}. Run `routepack profile` first.")
        try:
            table = pq.read_table(path)
            meta = json.loads((table.schema.metadata or {})[b"routepack"])
        except KeyError:
            raise RoutePackError(
                f"{path} is a Parquet file, but not of measurements. Give the --out of `routepack profile`."
            ) from None
        except (pa.ArrowException, OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise RoutePackError(f"Measurements {path} are damaged ({reason}). Profile again.") from None
        if (version := meta.get("schema_version")) != SCHEMA_VERSION:
            raise RoutePackError(
                f"Measurements {path} have schema_version {version}, this version reads {SCHEMA_VERSION}. "
                "Update routepack-tune, or run `routepack profile` again."
            )
        if missing := [name for name in COLUMNS if name not in table.column_names]:
            raise RoutePackError(
                f"Measurements {path} lack the columns {', '.join(missing)}. Run `routepack profile` again."
            )
        return cls.from_rows(table.to_pandas(), meta)

"""Parquet judged by its footer before any column is read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from profiler.errors import RoutePackError
from profiler.readers.raw import checked_size, reason, shown

if TYPE_CHECKING:
    import pyarrow as pa

MAX_BYTES = 256 << 20
MAX_COLUMNS = 512
MAX_VALUES = 1 << 24
"""Of all columns, entries of lists included: measurements of 20,000 cases have three million."""


def read_parquet(path: Path | str, what: str, most: int = MAX_BYTES) -> pa.Table:
    """Read a table; RoutePackError, in which ``what`` names it, if it is missing, damaged or above ``most`` bytes."""
    import pyarrow as pa
    from pyarrow import parquet

    size = checked_size(path, what, most)
    try:
        limits = {"thrift_string_size_limit": size + 1, "thrift_container_size_limit": size + 1}
        with parquet.ParquetFile(path, **limits) as file:
            footer = file.metadata
            if footer.num_columns > MAX_COLUMNS:
                raise ValueError(f"it has {footer.num_columns:,} columns, at most {MAX_COLUMNS} are read")
            groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
            parts = [group.column(j) for group in groups for j in range(group.num_columns)]
            if (
                any(part.total_uncompressed_size < 0 for part in parts)
                or min(footer.num_rows, *(group.num_rows for group in groups), 0) < 0
            ):
                raise ValueError("its footer states negative sizes")
            values = max(footer.num_rows * footer.num_columns, sum(part.num_values for part in parts))
            if values > MAX_VALUES:
                raise ValueError(f"it holds {values:,} values, at most {MAX_VALUES:,} are read")
            total = sum(part.total_uncompressed_size for part in parts)
            if total > most:
                raise ValueError(f"it unpacks to {total:,} bytes, at most {most:,} are read")
            return file.read(use_threads=False)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise RoutePackError(f"{what} {shown(path)} cannot be read: {reason(error)}. Write it again.") from None

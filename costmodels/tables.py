"""Frozen integer-nanosecond tables: all that a planner needs to know of time.

A table holds a time at equally spaced nodes ``0, 1 << shift, 2 << shift ...``; between nodes it is linear, in integer
arithmetic, so that a look-up costs a few instructions, equals itself on every machine, and differences are exact.
Tables never fall (falling stretches are pooled when they are frozen).

Shape suffixes: C attention classes, K nodes of a table (each table has its own number).

Invariants: every table is int64, non-negative, non-decreasing; its nodes cover every value the search can ask (cells
never exceed ``max_tokens_per_microbatch``), so a look-up never leaves the table.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from profiler.errors import RoutePackError
from profiler.files import arrays_hash, canonical_json, write_bytes

TABLES_SCHEMA_VERSION = 1


@njit(cache=True, nogil=True, inline="always")
def lookup_ns(table, shift, x):
    """Return the time at ``x`` of a table with nodes every ``1 << shift``, integer nanoseconds."""
    node = x >> shift
    place = np.uint64(node)  # unsigned: no negative index to provide for, so that loops of look-ups become vectors
    low = table[place]
    return low + (((table[place + np.uint64(1)] - low) * (x - (node << shift))) >> shift)


def lookup_many_ns(table: np.ndarray, shift: int, x: np.ndarray) -> np.ndarray:
    """Return :func:`lookup_ns` for an array of any shape."""
    x = np.asarray(x, dtype=np.int64)
    node = x >> shift
    low = table[node]
    return low + (((table[node + 1] - low) * (x - (node << shift))) >> shift)


def node_shift(largest: int, max_nodes: int = 4096) -> int:
    """Return the least node spacing (as a shift) with which a table up to ``largest`` has at most ``max_nodes``."""
    shift = 0
    while (largest >> shift) + 2 > max_nodes:
        shift += 1
    return shift


def table_nodes(largest: int, shift: int) -> np.ndarray:
    """Return the positions of a table's nodes: 0 to the first one beyond ``largest``, [K] int64."""
    return np.arange((largest >> shift) + 2, dtype=np.int64) << shift


@dataclass(frozen=True, slots=True)
class StepTables:
    """Hold the time of every part of a training step, for one model, topology and token cap.

    An *attention class* c is one kind of layer work that has its own barrier: (window, MoE or dense layer, forward or
    backward). In a cell (one microbatch on one DP slot) every layer of class c takes
    ``cell_ns[c](tokens) + sum over samples of sequence_ns[c](length)``.
    One MoE layer of one row in one EP block adds ``expert_rank_ns(w) + exchange_ns(max(w, s))`` where w is the largest
    number of routed rows (token, expert pairs) of any EP rank and s the largest number any rank sends. Forward,
    backward and both directions of the exchange are already inside.
    """

    sequence_ns: tuple[np.ndarray, ...]
    """Per class, [K] over sequence length: the attention core time one sequence adds to its cell, one layer."""
    cell_ns: tuple[np.ndarray, ...]
    """Per class, [K] over a cell's tokens: launch floors, projections, shared expert or dense FFN, one layer."""
    class_layers: np.ndarray
    """[C] int64: number of hidden layers priced by each class."""
    class_names: tuple[str, ...]
    expert_rank_ns: np.ndarray
    """[K] over routed rows of the slowest EP rank: grouped expert GEMMs of one layer, forward + backward."""
    exchange_ns: np.ndarray
    """[K] over rows sent or received by the busiest rank: dispatch + combine of one layer, forward + backward."""
    row_fixed_ns: int
    """Fixed cost of one row (micro-step), all layers together."""
    length_shift: int
    tokens_shift: int
    rows_shift: int
    max_tokens: int
    """The token cap of a cell that these tables were frozen for."""
    num_moe_layers: int
    top_k: int
    slots_per_block: int
    pipeline_stages: int
    """Layers are spread over this many stages: a step's wall time is the sum over layers divided by it."""
    measured_length_max: int
    """Longest sequence within the measured range; longer ones are extrapolated."""
    measured_rows_max: int
    """Most routed rows of one EP rank within the measured range."""
    notes: tuple[str, ...]
    """What a reader must know: assumed, extrapolated or unpriced parts, one sentence each."""
    key: str
    """Hash of the model, topology and cap these tables are for."""
    expert_move_ns: int = 0
    """Measured time of one expert's parameters and optimizer state from rank to rank; 0 where none was measured."""

    def __post_init__(self) -> None:
        for name in ("sequence_ns", "cell_ns"):
            if len(getattr(self, name)) != len(self.class_layers):
                raise ValueError(f"Expected one {name} table per class ({len(self.class_layers)}).")
        for name, table in self._tables():
            if table.dtype != np.int64 or table.ndim != 1 or table.size < 2:
                raise ValueError(f"Expected table {name} to be a vector of int64, got {table.dtype} {table.shape}.")
            if table[0] < 0 or (np.diff(table) < 0).any():
                raise ValueError(f"Table {name} falls or is negative: times must never fall with size.")

    def _tables(self) -> list[tuple[str, np.ndarray]]:
        named = [(f"sequence_ns_{c}", table) for c, table in enumerate(self.sequence_ns)]
        named += [(f"cell_ns_{c}", table) for c, table in enumerate(self.cell_ns)]
        return [*named, ("expert_rank_ns", self.expert_rank_ns), ("exchange_ns", self.exchange_ns)]

    @property
    def max_rows(self) -> int:
        """Most routed rows that one EP rank can be asked to price."""
        return self.max_tokens * self.slots_per_block * self.top_k

    @property
    def tables_hash(self) -> str:
        """SHA-256 over every table and number."""
        return arrays_hash(
            **dict(self._tables()), class_layers=self.class_layers,
            scalars=np.frombuffer(canonical_json(self._scalars()).encode(), dtype=np.uint8),
        )  # fmt: skip

    def _scalars(self) -> dict[str, Any]:
        skipped = {"sequence_ns", "cell_ns", "class_layers", "expert_rank_ns", "exchange_ns"}
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in skipped}
        # Tables without it keep the hash that they had before it existed.
        return named if self.expert_move_ns else {k: v for k, v in named.items() if k != "expert_move_ns"}

    def save(self, path: Path | str) -> None:
        """Write one ``.npz`` (no pickle; the same bytes for the same tables)."""
        header = {"schema_version": TABLES_SCHEMA_VERSION, "classes": len(self.class_layers), **self._scalars()}
        arrays = dict(self._tables())
        arrays["class_layers"] = self.class_layers
        arrays["header"] = np.frombuffer(canonical_json(header).encode(), dtype=np.uint8)
        write_bytes(path, npz_bytes(arrays))

    @classmethod
    def load(cls, path: Path | str) -> StepTables:
        """Read what :meth:`save` wrote.

        Raises
        ------
        RoutePackError
            If the file is missing, damaged, or of a newer schema.
        """
        import json

        arrays = read_npz(path, "Frozen tables")
        try:
            header = json.loads(arrays["header"].tobytes())
            version = header.pop("schema_version")
            if version != TABLES_SCHEMA_VERSION:
                raise RoutePackError(
                    f"Frozen tables {path} have schema_version {version}, this version reads {TABLES_SCHEMA_VERSION}. "
                    "Run `routepack fit` again, or update routepack-tune."
                )
            classes = range(header.pop("classes"))
            header["class_names"] = tuple(header["class_names"])
            header["notes"] = tuple(header["notes"])
            return cls(
                sequence_ns=tuple(arrays[f"sequence_ns_{c}"] for c in classes),
                cell_ns=tuple(arrays[f"cell_ns_{c}"] for c in classes),
                class_layers=arrays["class_layers"],
                expert_rank_ns=arrays["expert_rank_ns"],
                exchange_ns=arrays["exchange_ns"],
                **header,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RoutePackError(f"Frozen tables {path} are damaged: {error}. Run `routepack fit` again.") from None


def npz_bytes(arrays: dict[str, np.ndarray]) -> bytes:
    """Return an ``.npz`` archive with fixed time stamps, names in order: equal arrays give equal bytes."""
    import io
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(arrays):
            member = io.BytesIO()
            np.lib.format.write_array(member, np.ascontiguousarray(arrays[name]), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0)), member.getvalue(),
                             zipfile.ZIP_DEFLATED)  # fmt: skip
    return buffer.getvalue()


def read_npz(path: Path | str, what: str, names: Container[str] | None = None) -> dict[str, np.ndarray]:
    """Read the arrays of an ``.npz``, or those of them in ``names``, without pickle.

    Raises
    ------
    RoutePackError
        If the file is missing, truncated, or holds objects.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files if names is None or name in names}
    except FileNotFoundError:
        raise RoutePackError(f"{what} not found: {path}.") from None
    except Exception as error:  # whatever damaged bytes make numpy, zipfile or zlib raise
        raise RoutePackError(
            f"{what} {path} cannot be read ({error}): truncated or not an .npz. Write it again."
        ) from None

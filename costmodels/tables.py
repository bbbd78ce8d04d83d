"""Frozen integer-nanosecond tables: all that a planner needs to know of time.

A table holds a time at equally spaced nodes ``0, 1 << shift, 2 << shift ...``; between nodes it is linear, in integer
arithmetic, so that a look-up costs a few instructions, equals itself on every machine, and differences are exact.
Tables never fall (falling stretches are pooled when they are frozen).

Shapes: C attention classes, K nodes (as many as the table's own range needs).

Invariants: every table is int64, non-negative, non-decreasing; its nodes cover every value the search can ask (cells
never exceed ``max_tokens_per_microbatch``), so a look-up never leaves the table: kernels check no index. Made or read,
tables pass the same checks.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from costmodels.compiled import compiled
from profiler.errors import RoutePackError, explained
from profiler.files import arrays_hash, canonical_json, write_bytes
from profiler.readers import build, parse_json, read_npz

TABLES_SCHEMA_VERSION = 2
PRICED = "priced: "
"""How the note begins that says which parts of a step tables price, and which not."""
TABLES = ("sequence_ns", "cell_ns", "expert_rank_ns", "exchange_ns")
MOST_LAYERS, MOST_NODE_NS, MOST_NS = 1 << 20, 1 << 53, (1 << 62) - 1
"""Layers of a class; time of a node (a hundred days); products inside a look-up."""
MOST = dict.fromkeys(("num_moe_layers", "top_k", "slots_per_block", "pipeline_stages"), MOST_LAYERS)
MOST |= dict.fromkeys(("length_shift", "tokens_shift", "rows_shift"), 40)
MOST |= dict.fromkeys(("row_fixed_ns", "expert_move_ns"), MOST_NODE_NS)
MOST |= {"max_tokens": (1 << 31) - 1, "max_rows": 1 << 40, "measured_length_max": MOST_NS, "measured_rows_max": MOST_NS}
MOST |= {"link_gbytes_per_s": 1 << 20}
MAY_BE_ZERO = (
    "length_shift",
    "tokens_shift",
    "rows_shift",
    "row_fixed_ns",
    "expert_move_ns",
    "measured_length_max",
    "measured_rows_max",
    "link_gbytes_per_s",
)
MOST_TEXTS, MOST_CHARACTERS = 4096, 4096


@compiled(inline="always")
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
    return (largest // (max_nodes - 1)).bit_length()


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

    sequence_ns: np.ndarray
    """[C, K] over sequence length: the attention core time one sequence adds to its cell, one layer."""
    cell_ns: np.ndarray
    """[C, K] over a cell's tokens: launch floors, projections, shared expert or dense FFN, one layer."""
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
    link_gbytes_per_s: float = 0.0
    """Bandwidth of one rank to the others of its block, 1e9 bytes a second, as the device's facts state it (nobody
    measured it); 0 where they do not."""

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            least, value = int(name not in MAY_BE_ZERO), getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"Expected {name} of {least} to {most}, got {value}.")
        for name, texts in {"class_names": self.class_names, "notes": self.notes, "key": (self.key,)}.items():
            if len(texts) > MOST_TEXTS or not all(len(text) <= MOST_CHARACTERS for text in texts):
                raise ValueError(f"Expected {name} of at most {MOST_TEXTS} texts of {MOST_CHARACTERS} characters.")
        classes, tokens = len(self.class_names), (self.max_tokens >> self.tokens_shift) + 2
        lengths, rows = (self.max_tokens >> self.length_shift) + 2, (self.max_rows >> self.rows_shift) + 2
        shapes = {"class_layers": (classes,), "sequence_ns": (classes, lengths), "cell_ns": (classes, tokens)}
        shapes |= {"expert_rank_ns": (rows,), "exchange_ns": (rows,)}
        for name, shape in shapes.items():
            array = getattr(self, name)
            if array.dtype != np.int64 or array.shape != shape:
                raise ValueError(f"Expected {name} of int64 {list(shape)}, got {array.dtype} {list(array.shape)}.")
        if not classes or not ((self.class_layers >= 1) & (self.class_layers <= MOST_LAYERS)).all():
            raise ValueError(f"Expected classes of 1 to {MOST_LAYERS} layers, got {self.class_layers.tolist()!s:.80}.")
        for name in TABLES:
            self._check_times(name)

    def _check_times(self, name: str) -> None:
        """Refuse a table that falls, is zero where work costs time, or leaves 64 bits between two nodes."""
        table = getattr(self, name)
        if (table[..., 0] < 0).any() or (table[..., 1:] < table[..., :-1]).any():
            raise ValueError(f"Table {name} falls or is negative: times must never fall with size.")
        if table.max() > MOST_NODE_NS:
            raise ValueError(
                f"Table {name} holds {table.max()} ns, above {MOST_NODE_NS}: no part of a layer takes that."
            )
        if name in ("sequence_ns", "expert_rank_ns") and not table[..., -1].all():
            raise ValueError(f"Table {name} is zero: less than a nanosecond at every size.")
        shift = {"sequence_ns": self.length_shift, "cell_ns": self.tokens_shift}.get(name, self.rows_shift)
        layers = int(self.class_layers.max()) if table.ndim == 2 else self.num_moe_layers
        if (int(np.diff(table).max()) * layers) << shift > MOST_NS:
            raise ValueError(f"Table {name} rises by {np.diff(table).max()} ns from node to node: beyond 64 bits.")

    @property
    def max_rows(self) -> int:
        """Most routed rows that one EP rank can be asked to price."""
        return self.max_tokens * self.slots_per_block * self.top_k

    @property
    def priced(self) -> str:
        """The note ``priced: ...; not priced: ...``; empty where these tables were not frozen from a cost model."""
        return next((note for note in self.notes if note.startswith(PRICED)), "")

    @property
    def tables_hash(self) -> str:
        """SHA-256 over every table and number."""
        return arrays_hash(**self._arrays())

    def _arrays(self) -> dict[str, np.ndarray]:
        """Return what a file of tables holds: the arrays, and everything else as the JSON of one more."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
        header = {name: value for name, value in values.items() if name not in arrays}
        text = canonical_json({"schema_version": TABLES_SCHEMA_VERSION, **header})
        return {**arrays, "header": np.frombuffer(text.encode(), dtype=np.uint8)}

    def save(self, path: Path | str) -> None:
        """Write one ``.npz`` (no pickle; the same bytes for the same tables)."""
        write_bytes(path, npz_bytes(self._arrays()))

    @classmethod
    def load(cls, path: Path | str) -> StepTables:
        """Read what :meth:`save` wrote.

        Raises
        ------
        RoutePackError
            If the file is missing, damaged, or of another schema.
        """
        arrays, damaged = read_npz(path, "Frozen tables"), f"Frozen tables {path} are damaged"
        header = parse_json(arrays.pop("header", np.empty(0)).tobytes(), f"The header of {path}")
        version = header.pop("schema_version", None) if isinstance(header, dict) else None
        if version != TABLES_SCHEMA_VERSION:
            raise RoutePackError(
                f"Frozen tables {path} have schema_version {version!r:.80}, this version reads "
                f"{TABLES_SCHEMA_VERSION}. Run `routepack fit` again, or update routepack-tune."
            )
        with explained(after=" Run `routepack fit` again."):
            if both := header.keys() & arrays.keys():
                raise RoutePackError(f"{damaged}: {min(both)!r:.80} is in their header and an array.")
            return build(cls, {**header, **arrays}, damaged)


def npz_bytes(arrays: dict[str, np.ndarray]) -> bytes:
    """Return an ``.npz`` archive, names in order: equal arrays give equal bytes (numpy states no time)."""
    # numpy would pickle objects.
    if pickled := [name for name, array in arrays.items() if array.dtype.hasobject]:
        raise RoutePackError(
            f"Array {pickled[0]} holds Python objects, which are never written. Convert it to numbers."
        )
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **dict(sorted(arrays.items())))  # type: ignore[arg-type]
    return buffer.getvalue()

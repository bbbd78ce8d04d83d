"""What the user's own step batches look like: cells as they are packed, loads as EP ranks meet them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seen:
    """A few dozen cells and rank loads of real steps, so that what will be planned is what is timed."""

    cells: tuple[tuple[int, ...], ...] = ()
    """Sequence lengths of every cell."""
    rank_rows: tuple[tuple[int, ...], ...] = ()
    """Rows per local expert of one EP rank in one layer, for every load."""

"""What a user's step batches look like to a device: packed first-fit, experts in place, a few dozen of each drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from routepack_tune.config import Config
from routepack_tune.steps.traces import list_step_files, load_step_batch

if TYPE_CHECKING:
    from profiler.cases.case import Seen
    from search import StepBatch

MOST = 32
"""Cells, and loads of a rank, that are kept of all batches together."""
Tuples = set[tuple[int, ...]]


def seen_of_steps(steps: Sequence[Path | str], settings: Config) -> Seen | None:
    """Return cells and rank loads of step batches as the planner's plainest seed would make them; None without any.

    Tokens without a known route are in the cells, but in no load.
    """
    from profiler.cases.case import Seen

    if not steps:
        return None
    rng = np.random.default_rng(settings.profile.seed)
    cells: Tuples = set()
    loads: Tuples = set()
    for path in list_step_files(steps):
        batch = load_step_batch(path, settings.model, settings.max_tokens_per_microbatch)
        _add_cells_and_loads(batch, settings, rng, cells, loads)
    return Seen(_drawn(cells, rng), _drawn(loads, rng))


def _add_cells_and_loads(
    batch: StepBatch, settings: Config, rng: np.random.Generator, cells: Tuples, loads: Tuples
) -> None:
    """Add every cell's lengths, and rank loads of a few blocks: layers and ranks drawn, for there are thousands."""
    from search.packing.bins import fill_bins, first_fit_decreasing
    from search.problem import padded_lengths

    topology = settings.topology
    lengths = padded_lengths(batch.lengths, settings.planner.sequence_alignment)
    bins = first_fit_decreasing(lengths, settings.max_tokens_per_microbatch)
    bins = fill_bins(bins, lengths, topology.data_parallel_size * topology.row_multiple)
    cells.update(tuple(sorted(lengths[members].tolist(), reverse=True)) for members in bins)
    # Bin k is on slot k % D of row k // D: slots of one block lie side by side.
    blocks = [bins[k : k + topology.slots_per_block] for k in range(0, len(bins), topology.slots_per_block)]
    for _ in range(MOST):
        members = [i for members in blocks[rng.integers(len(blocks))] for i in members]
        layer = rng.integers(batch.expert_counts.shape[1])
        counts = batch.expert_counts[members, layer].sum(axis=0, dtype=np.int64) // topology.blocks_per_slot
        ranks = counts.reshape(topology.expert_model_parallel_size, -1)
        loads.add(tuple(ranks[rng.integers(len(ranks))].tolist()))


def _drawn(distinct: Tuples, rng: np.random.Generator) -> tuple[tuple[int, ...], ...]:
    chosen = rng.choice(len(distinct), min(MOST, len(distinct)), replace=False)
    return tuple(sorted(distinct)[i] for i in sorted(chosen))

"""Arrays of the packing kernels: what stays while packing, one packing, and one proposal.

Shape suffixes as in ``search/packing/kernels.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class PackCosts(NamedTuple):
    """Hold what does not change while packing: samples, their loads under the placement, and tables."""

    order: np.ndarray  # [N] int64, the problem's samples from short to long: a sample's number here is its place
    lengths: np.ndarray  # [N] int64, ascending
    loads: np.ndarray  # [N + 1, P, L] uint16 or int32, routed rows of each sample on each EP rank; zeros last
    sequence_ns: np.ndarray  # [N + 1, C] int64; zeros last: sample -1 is none
    cell_ns: np.ndarray  # [C, K] int64
    exchange_ns: np.ndarray  # [K] int64, dispatch and combine of one MoE layer
    layer_ns: np.ndarray  # [2 K] int64, experts and exchange, then experts alone
    tokens_shift: int  # tokens between two nodes of the tables, as a power of two; likewise rows
    rows_shift: int
    sent_num: int  # a rank of a slot sends tokens * sent_num // sent_den rows
    sent_den: int
    group_cells: int  # cells of a group
    unit_groups: int  # groups of a unit
    blocks: int  # what meets at the end of the step
    fixed_ns: int  # cost of a row
    cap: int  # rows that a rank may receive
    over_cap_ns: int  # the search's charge for each row above the cap; 0 for no cap


class PackState(NamedTuple):
    """Hold one packing and everything derived from it."""

    cell_of: np.ndarray  # [N] int64
    members: np.ndarray  # [D, N'] int64, first cell_count[d] entries valid
    place_of: np.ndarray  # [N] int64, index inside members
    cell_count: np.ndarray  # [D] int64
    cell_tokens: np.ndarray  # [D] int64
    core_ns: np.ndarray  # [D, C] int64, sum of sequence_ns
    cell_ns: np.ndarray  # [C, D] int64, attention of each cell: core and dense work
    group_rows: np.ndarray  # [G, P, L] int32
    group_peak: np.ndarray  # [G, L] int32, rows of the hottest rank
    group_hot: np.ndarray  # [G, L] int32, the hottest rank
    unit_ns: np.ndarray  # [U] int64
    unit_experts: np.ndarray  # [U, 3] int64: experts' time, rows sent, rows of the least hot layer's slowest rank
    block_ns: np.ndarray  # [B] int64


class Move(NamedTuple):
    """Hold a proposal: samples that leave two cells for one another, and what cell a gains (and b loses) by it."""

    cells: np.ndarray  # [2] int64: cells a and b; a is -1 where the draw does not fit
    samples: np.ndarray  # [4] int64: two that leave a, two that leave b, -1 for none; -2 first: whole cells
    diff: np.ndarray  # [P, L] int32, rows
    core: np.ndarray  # [C] int64, core time
    tokens: np.ndarray  # [1] int64
    peak: np.ndarray  # [L] int32, scratch

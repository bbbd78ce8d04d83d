"""open-instruct's bounded sample swaps, written from their description: a fixed number of proposals, improvements only.

Experts stay in place. A first-fit decreasing packing is improved by swapping samples between microbatches while three
proxies of equal weight, summed over rows, fall: the most tokens of a rank, the most squared tokens of a rank
(attention) and the most routed rows of an EP rank, averaged over layers; each relative to its mean.
"""

from __future__ import annotations

import numpy as np

from search.baselines.frameworks import Packing
from search.baselines.routepack import SwapChain, proxy_costs
from search.packing.bins import pack_ffd
from search.placement.lpt import identity_placement
from search.problem import Problem
from search.random_bits import seed_state

PROPOSALS = 1024


def solve_open_instruct(problem: Problem, *, seed: int = 0, proposals: int = PROPOSALS) -> tuple[Packing, np.ndarray]:
    """Return the packing after ``proposals`` random swaps of which only improvements were made, and identity, [L,
    E]."""
    row_N, slot_N, num_rows = pack_ffd(problem)
    placement_LE = identity_placement(problem)
    rank_LE = placement_LE // (problem.num_experts // problem.num_ranks)
    works_NC = np.column_stack([problem.lengths, problem.lengths**2])
    costs = proxy_costs(problem, rank_LE, num_rows, works_NC, shares=(1 / 3, 1 / 3, 1 / 3), similar=0.0)
    chain = SwapChain(problem, costs, row_N * problem.num_slots + slot_N, num_rows, seed_state(seed))
    chain.run(0, proposals)
    slots = problem.num_slots
    return (chain.best_cell_of // slots, chain.best_cell_of % slots, num_rows), placement_LE

"""Pack samples into rows and slots under a fixed placement: state for the kernels and annealing.

A *cell* number here is ``unit * S + slot in block`` with ``unit = row * B + block``, which equals ``row * D + slot``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from search.kernels import sample_rank_rows
from search.packing.kernels import PackCosts, PackState, fill_state, objective
from search.packing.moves import anneal
from search.problem import Problem

LEG_PROPOSALS = 4096
"""Proposals at one temperature between two looks at the budget."""
AMPLE = 200
"""Proposals a sample from which on a chain starts as hot as it is told; with fewer it could not cool what it stirs."""
HOTTEST_NS = 2**50
"""A temperature at which everything is accepted, and whose product with a random number fits 64 bits."""


def pack_costs(problem: Problem, rank_LE: np.ndarray) -> PackCosts:
    """Return the kernels' constants for a placement (rank of each expert, [L, E])."""
    topology, tables, (cap, over_cap_ns) = problem.topology, problem.tables, problem.receive_wall
    order = np.argsort(problem.lengths, kind="stable")
    loads = sample_rank_rows(problem.counts, order, rank_LE, problem.num_ranks)
    narrow = loads.max(initial=0) < 1 << 16  # half the memory to read per proposal
    nothing = np.zeros((1, problem.sequence_ns.shape[1]), np.int64)
    return PackCosts(
        order=order,
        lengths=problem.lengths[order],
        loads=loads.astype(np.uint16) if narrow else loads,
        sequence_ns=np.append(problem.sequence_ns[order], nothing, axis=0),
        cell_ns=problem.cell_ns,
        exchange_ns=problem.exchange_ns,
        layer_ns=np.concatenate([problem.expert_ns + problem.exchange_ns, problem.expert_ns]),
        tokens_shift=tables.tokens_shift,
        rows_shift=tables.rows_shift,
        sent_num=problem.spec.top_k * topology.blocks_per_slot,
        sent_den=topology.ranks_per_slot,
        group_cells=topology.slots_per_block,
        unit_groups=problem.blocks_per_unit,
        blocks=problem.num_blocks // problem.blocks_per_unit,
        fixed_ns=tables.row_fixed_ns,
        cap=cap,
        over_cap_ns=over_cap_ns,
    )


def pack_state(problem: Problem, costs: PackCosts, cell_of: np.ndarray, num_rows: int) -> PackState:
    """Return the state of a packing given by the cell of each sample, [N]."""
    cells, groups, layers = num_rows * problem.num_slots, num_rows * problem.num_blocks, problem.num_layers
    (samples, classes), units = problem.sequence_ns.shape, groups // problem.blocks_per_unit
    per_cell = min(samples, problem.max_tokens // max(1, int(problem.lengths.min())))
    state = PackState(
        cell_of=cell_of[costs.order].astype(np.int64),
        members=np.zeros((cells, per_cell + 1), np.int64),
        place_of=np.zeros(samples, np.int64),
        cell_count=np.zeros(cells, np.int64),
        cell_tokens=np.zeros(cells, np.int64),
        core_ns=np.zeros((cells, classes), np.int64),
        cell_ns=np.zeros((classes, cells), np.int64),
        group_rows=np.zeros((groups, problem.num_ranks, layers), np.int32),
        group_peak=np.zeros((groups, layers), np.int32),
        group_hot=np.zeros((groups, layers), np.int32),
        unit_ns=np.zeros(units, np.int64),
        unit_experts=np.zeros((units, 3), np.int64),
        block_ns=np.zeros(problem.num_blocks // problem.blocks_per_unit, np.int64),
    )
    fill_state(costs, state)
    return state


class PackChain:
    """Anneal one packing; ``best_cell_of`` is always the best packing seen and always feasible."""

    def __init__(
        self, problem: Problem, costs: PackCosts, cell_of: np.ndarray, num_rows: int, rng: np.ndarray, bound_ns: int = 0
    ) -> None:
        self.problem, self.num_rows, self.rng, self.bound_ns = problem, num_rows, rng, bound_ns
        self.best_cell_of = cell_of
        self.proposals = self.idle = self.priced = 0
        self._refused = np.zeros(LEG_PROPOSALS // 2, np.int64)
        params, same_slot = problem.params, problem.num_slots if problem.params.equal_samples else 0
        shares = [getattr(params, f"{kind}_share") for kind in ("relocate", "similar", "within", "two", "cell")]
        self._limits = np.array([problem.max_tokens, *(round(1024 * share) for share in shares), same_slot], np.int64)
        self._load(costs)

    def _load(self, costs: PackCosts) -> None:
        self.costs = costs
        self.state = pack_state(self.problem, costs, self.best_cell_of, self.num_rows)
        self._best_cells = self.state.cell_of.copy()
        self.best = np.array([objective(costs, self.state)], np.int64)

    def load_if_better(self, costs: PackCosts) -> bool:
        """Take another placement's costs if the best packing is no slower under them; tell whether it was."""
        before, old = int(self.best[0]), self.costs
        self._load(costs)
        if self.best[0] <= before:
            return True
        self._load(old)
        return False

    def roughness(self) -> float:
        """Make a cold leg; return the lowest decile of the prices it refused, as a share of a unit's mean time.

        That is how high the steps are that annealing must climb: it differs tenfold between workloads.
        """
        self._anneal(int(2 * self._mean_ns() * self.problem.params.cold_temperature))
        prices = np.sort(self._refused[self._refused > 0])
        return float(prices[len(prices) // 10]) / (2 * self._mean_ns()) if len(prices) else 0.0

    def run(self, hot: float, until: float, progress: Callable[..., float]) -> None:
        """Anneal from ``hot`` to the cold temperature (shares of a unit's mean time) until that progress."""
        mean_ns, begin = self._mean_ns(), self._gone(progress)
        cold = min(hot, self.problem.params.cold_temperature) or 1e-12
        legs = 0
        while (now := self._gone(progress)) < until:
            if legs == 1 and now > begin:  # the first leg, cold, shows how many proposals the budget holds
                planned = LEG_PROPOSALS * (until - begin) / (now - begin)
                hot = max(cold, hot * min(1.0, planned / (AMPLE * self.problem.num_samples)) ** 2)
            legs += 1
            share = (now - begin) / (until - begin) if legs > 1 else 1.0
            self._anneal(int(mean_ns * 2 * hot * (cold / hot) ** share) if hot > 0 else 0)
        self.best_cell_of = np.empty_like(self._best_cells)
        self.best_cell_of[self.costs.order] = self._best_cells
        self.state.cell_of[:] = self._best_cells
        fill_state(self.costs, self.state)

    def _gone(self, progress: Callable[..., float]) -> float:
        """Return what ``progress`` says; the gap is the best time above the bound as a share of it, blocks averaged."""
        gap = float(self.best[0]) / (2 * len(self.state.block_ns) * self.bound_ns) - 1.0 if self.bound_ns else math.inf
        return progress(self.proposals, self.idle, gap)

    def _anneal(self, temperature_ns: int) -> None:
        """Make a leg of proposals at one temperature."""
        before = int(self.best[0])
        draws = (self.rng, min(temperature_ns, HOTTEST_NS), LEG_PROPOSALS, self._limits)
        priced, _ = anneal(self.costs, self.state, self._best_cells, *draws, self.best, self._refused)
        self.proposals += LEG_PROPOSALS
        self.priced += priced
        self.idle = 0 if self.best[0] < before else self.idle + LEG_PROPOSALS

    def _mean_ns(self) -> int:
        units_ns = self.state.unit_ns
        return int(units_ns.sum()) // len(units_ns) * (1 + (self.problem.num_blocks > 1))

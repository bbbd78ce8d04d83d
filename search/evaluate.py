"""Price a whole plan from scratch: the truth that every delta of the search must agree with.

A row r in block b takes the sum over layers of two maxima (dispatch and combine are barriers): the slowest cell's
attention, then the slowest EP rank's experts between the exchanges. Rows of a block follow one another; blocks meet at
the end of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodels import lookup_many_ns
from profiler import RoutePackError
from search.checks import check_packing, check_placement
from search.kernels import unit_expert_rows
from search.plan import StepTime
from search.problem import Problem


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Hold the cost of a plan per row and block (one where they are coupled), int64 nanoseconds over all layers."""

    attention_RB: np.ndarray
    experts_RB: np.ndarray
    exchange_RB: np.ndarray
    fixed_ns: int
    stages: int
    rank_rows_RBPL: np.ndarray
    """Routed rows (token, expert pairs) of every EP rank."""

    @property
    def block_ns(self) -> np.ndarray:
        """Time of each block, [B] int64."""
        return (self.attention_RB + self.experts_RB + self.exchange_RB + self.fixed_ns).sum(axis=0)

    @property
    def step_ns(self) -> int:
        """Time of the slowest block over all layers."""
        return int(self.block_ns.max())

    def step_time(self) -> StepTime:
        """Return seconds of wall time with the parts of the slowest block."""
        block, scale = int(np.argmax(self.block_ns)), 1e-9 / self.stages
        attention, experts = int(self.attention_RB[:, block].sum()), int(self.experts_RB[:, block].sum())
        return StepTime(
            step_time_s=self.step_ns * scale,
            attention_s=attention * scale,
            experts_s=experts * scale,
            rest_s=(self.step_ns - attention - experts) * scale,
        )


def evaluate(
    problem: Problem, row_N: np.ndarray, slot_N: np.ndarray, placement_LE: np.ndarray, num_rows: int
) -> Evaluation:
    """Return the cost of a packing and placement, computed from scratch; RoutePackError where they are not such."""
    slots, blocks = problem.num_slots, problem.num_blocks
    check_packing(row_N, slot_N, problem.num_samples, num_rows, slots)
    cell, cells = row_N * slots + slot_N, num_rows * slots
    tokens = problem.cell_tokens(cell, num_rows)
    priced = (problem.cell_ns.shape[1] - 1 << problem.tables.tokens_shift) - 1
    if tokens.max() > priced:
        raise RoutePackError(f"A cell holds {tokens.max()} tokens; the tables price up to {priced}.")
    core = np.zeros((cells, problem.sequence_ns.shape[1]), np.int64)
    np.add.at(core, cell, problem.sequence_ns)
    per_cell = core + np.stack([lookup_many_ns(t, problem.tables.tokens_shift, tokens) for t in problem.cell_ns], 1)
    ends = blocks // problem.blocks_per_unit
    attention = per_cell.reshape(num_rows, ends, slots // ends, -1).max(axis=2).sum(axis=2)
    loads = rank_loads(problem, cell // (slots // blocks), placement_LE, num_rows * blocks)
    hottest = loads.max(axis=1).reshape(num_rows * ends, problem.blocks_per_unit, -1).max(axis=1)
    sent = problem.sent_rows(tokens).reshape(num_rows * ends, -1).max(axis=1)
    shift = problem.tables.rows_shift
    experts = lookup_many_ns(problem.expert_ns, shift, hottest)
    sent_more = experts + lookup_many_ns(problem.exchange_ns, shift, np.maximum(hottest, sent[:, None]))
    # Where the hottest receiver is also the busiest sender (nearly always) the tables are added first: rounded once.
    both = lookup_many_ns(problem.expert_ns + problem.exchange_ns, shift, hottest)
    exchange = (np.where(hottest >= sent[:, None], both, sent_more) - experts).sum(axis=1)
    experts = experts.sum(axis=1)
    return Evaluation(
        attention_RB=attention,
        experts_RB=experts.reshape(num_rows, ends),
        exchange_RB=exchange.reshape(num_rows, ends),
        fixed_ns=problem.tables.row_fixed_ns,
        stages=problem.tables.pipeline_stages,
        rank_rows_RBPL=loads.reshape(num_rows, blocks, problem.num_ranks, -1),
    )


def rank_loads(problem: Problem, unit_N: np.ndarray, placement_LE: np.ndarray, num_units: int) -> np.ndarray:
    """Return the routed rows per unit, EP rank and layer, [U, P, L] int64."""
    check_placement(placement_LE, problem.num_layers, problem.num_experts)
    experts = unit_expert_rows(problem.counts, unit_N, num_units)
    slots_LE = np.argsort(placement_LE, axis=1, kind="stable")
    by_slot = np.take_along_axis(experts, slots_LE[None], axis=2)
    ranks = by_slot.reshape(*by_slot.shape[:2], problem.num_ranks, -1).sum(axis=3, dtype=np.int64)
    return np.ascontiguousarray(ranks.transpose(0, 2, 1))


def balanced_ns(problem: Problem, num_rows: int) -> int:
    """Return the forced-balanced ideal: every cell and every EP rank at its mean in ``num_rows`` rows."""
    units, cells = num_rows * problem.num_blocks, num_rows * problem.num_slots
    tokens = -(-int(problem.lengths.sum()) // cells)
    core = problem.sequence_ns.sum(axis=0) // cells
    cell = np.array([int(lookup_many_ns(t, problem.tables.tokens_shift, np.array(tokens))) for t in problem.cell_ns])
    mean = problem.counts.sum(axis=(0, 2), dtype=np.int64) // (units * problem.num_ranks)
    shift = problem.tables.rows_shift
    sent = np.maximum(mean, problem.sent_rows(np.array(tokens)))
    layers = lookup_many_ns(problem.expert_ns, shift, mean) + lookup_many_ns(problem.exchange_ns, shift, sent)
    return int(num_rows * (core.sum() + cell.sum() + layers.sum() + problem.tables.row_fixed_ns))

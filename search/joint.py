"""The whole algorithm: check, seed, choose the number of rows, then place and pack in turn, and certify.

One chain: least-loaded packing under an LPT (or the previous) placement -> row-aware placement -> annealing of the
packing -> row-aware placement ... Only improvements are kept. Chains differ by seed and run side by side; the best plan
wins, ties by chain number, so that threads change nothing but the time it takes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from costmodels import StepTables
from profiler import ModelSpec, Observer, RoutePackError, Topology
from search.bounds import lower_bound_ns
from search.checks import check_ranks
from search.evaluate import evaluate
from search.kernels import seed_state
from search.packing.bins import equalised, pack_balanced, pack_ffd, pack_staircase
from search.packing.packer import LEG_PROPOSALS, PackChain, pack_costs
from search.params import PlannerParams, StopCriterion
from search.placement.lpt import first_ranks, identity_placement, placement_of_ranks
from search.placement.placer import (
    PLACEMENT_SHARE,
    Residence,
    improved,
    layer_costs,
    list_moves,
    nearer_home,
    place_rows,
    relabelled,
    residence_of,
)
from search.plan import Plan, PlannedModel, check_plan
from search.problem import Problem, StepBatch, build_problem, no_packing, row_range

SEEDS = (pack_balanced, pack_staircase)
START_SPREAD = 4.0
"""Every further chain starts so many times hotter: rugged instances want heat, smooth ones do not."""
LATE = 1.1
"""Progress beyond which a chain takes no further placement: a wall-clock budget is long spent."""
FIRST_SWAPS = 0.2
"""Share of ``placement_swaps`` proposed before the first packing: annealing it stirs what they are fitted to."""
PROBE_LEGS = 2
"""Legs of annealing spent on each candidate number of rows before one is chosen."""


class _Solution(NamedTuple):
    """What a chain found: slowest block and sum of blocks in ns, then how."""

    objective: tuple[int, int]
    num_rows: int
    cell_of: np.ndarray
    rank_LE: np.ndarray


def plan_step(
    batch: StepBatch,
    tables: StepTables,
    spec: ModelSpec,
    topology: Topology,
    max_tokens: int,
    params: PlannerParams | None = None,
    *,
    seed: int = 0,
    stop: StopCriterion | None = None,
    previous: Plan | None = None,
    start: np.ndarray | None = None,
    num_threads: int | None = None,
    observer: Observer | None = None,
    origin: Mapping[str, Any] | None = None,
) -> Plan:
    """Plan one optimizer step.

    Under an iteration budget (the default) the plan is a pure function of batch, tables, parameters and seed. From
    ``start``, ranks of experts [L, E], the search starts in place of LPT or ``previous``; leaving it costs nothing.
    ``origin``, where tables and parameters come from, joins the plan's provenance.

    Raises
    ------
    RoutePackError
        If a stated policy is violated (see :func:`search.problem.build_problem`) or no capped packing is found.
    """
    params, stop, observer = params or PlannerParams(), stop or StopCriterion(), observer or Observer()
    if stop.max_iterations is None and stop.max_runtime is None:
        stop = replace(stop, max_iterations=params.max_iterations)
    stop.reset()
    problem = build_problem(batch, tables, spec, topology, max_tokens, params)
    bound_ns = lower_bound_ns(problem)
    home = None if previous is None else residence_of(previous, problem)
    if start is not None:
        check_ranks(start, problem.num_layers, problem.num_experts, problem.num_ranks)
    starts = [] if start is None else [start]
    if home is not None:
        fresh_LE = relabelled(first_ranks(problem, params.ranks_per_node), home.rank_LE, problem.num_ranks)
        starts += [home.rank_LE, fresh_LE]
    starts = starts or [first_ranks(problem, params.ranks_per_node)]
    with ThreadPoolExecutor(num_threads or os.cpu_count() or 1) as pool:
        packings = _seed_packings(problem, starts[0], seed, pool)
        observer.start("plan", params.starts)
        chain = _Chain(problem, starts, home, stop, bound_ns)
        solutions = []
        for solution in pool.map(lambda k: chain.solve(packings[k % len(packings)], seed, k), range(params.starts)):
            solutions.append(solution)
            observer.advance("plan")
        observer.finish("plan")
    best = min(solutions, key=lambda solution: solution.objective)
    if home is not None and not params.ranks_per_node:  # ranks of one node are alike: names may change, times do not
        best = best._replace(rank_LE=nearer_home(best.rank_LE, home.rank_LE, problem.num_ranks))
    searched = {"planner": "routepack-tune", "seed": seed, "params": asdict(params), "stopped_by": stop.name}
    searched |= origin or {}
    return _certified(problem, batch, best, bound_ns, previous, searched)


def _certified(
    problem: Problem, batch: StepBatch, found: _Solution, bound_ns: int, previous: Plan | None, searched: dict
) -> Plan:
    """Return a solution as a plan, priced from scratch, beside the default and checked."""
    tables, old_LE = problem.tables, None if previous is None else previous.placement_LE
    row_N, slot_N = np.divmod(found.cell_of, problem.num_slots)
    placement_LE = placement_of_ranks(found.rank_LE, problem.num_ranks, old_LE)
    moves, assumed = list_moves(old_LE, placement_LE, problem)
    priced = evaluate(problem, row_N, slot_N, placement_LE, found.num_rows)
    default_row_N, default_slot_N, default_rows = pack_ffd(problem)
    default = evaluate(problem, default_row_N, default_slot_N, identity_placement(problem), default_rows)
    beyond = {
        "extrapolated_lengths": int((problem.lengths > tables.measured_length_max).sum()),
        "extrapolated_rank_loads": int((priced.rank_rows_RBPL.max(axis=2) > tables.measured_rows_max).sum()),
    }
    plan = Plan(
        row_N=row_N,
        slot_N=slot_N,
        placement_LE=placement_LE,
        num_rows=found.num_rows,
        topology=problem.topology,
        max_tokens=problem.max_tokens,
        sample_ids=tuple(map(str, batch.sample_ids)),
        model=PlannedModel.of(problem.spec),
        total_tokens=int(batch.lengths.sum()),
        predicted=priced.step_time(),
        default=default.step_time(),
        lower_bound_s=bound_ns * 1e-9 / tables.pipeline_stages,
        counters=problem.counters | beyond,
        notes=(*tables.notes, *problem.notes, *assumed),
        moves=moves,
        provenance={
            "batch_hash": batch.data_hash,
            "tables_hash": tables.tables_hash,
            "previous_placement_id": None if previous is None else previous.placement_id,
            **searched,
        },
    )
    check_plan(plan, problem.lengths, problem.num_experts)
    _check_job(problem, plan, priced.rank_rows_RBPL)
    return plan


def _check_job(problem: Problem, plan: Plan, rank_rows_RBPL: np.ndarray) -> None:
    """Raise :class:`RoutePackError` if the plan breaks what this job asks beyond the general constraints."""
    counts, most_rows = np.bincount(plan.slot_N, minlength=problem.num_slots), problem.params.max_received_rows
    if problem.params.equal_samples and np.ptp(counts) > 1:
        raise RoutePackError(f"DP slots hold {counts.min()} to {counts.max()} samples, equal_samples asks the same.")
    if most_rows and rank_rows_RBPL.max() > most_rows:
        row, block, rank, layer = np.unravel_index(rank_rows_RBPL.argmax(), rank_rows_RBPL.shape)
        raise RoutePackError(
            f"EP rank {rank} of block {block} receives {rank_rows_RBPL.max()} rows in row {row}, "
            f"{plan.model.layer_words(int(layer))}, "
            f"above max_received_rows = {most_rows}, and no plan found avoids it. Raise it, lower the token cap, or "
            "allow more rows (extra_rows)."
        )


def row_candidates(problem: Problem, extra_rows: int) -> list[int]:
    """Return the numbers of rows worth trying: the least one, its neighbours and a few further off, ascending."""
    rows = row_range(problem)
    if not rows:
        raise RoutePackError(
            f"{problem.num_samples} samples cannot give each of {problem.num_slots} DP slots one sample in each of "
            f"{rows.start} rows. Collect more samples a step, or lower data_parallel_size."
        )
    return sorted({rows[min(k, len(rows) - 1)] for k in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24) if k <= extra_rows})


def _seed_packings(
    problem: Problem, rank_LE: np.ndarray, seed: int, pool: ThreadPoolExecutor
) -> list[tuple[int, np.ndarray]]:
    """Return (number of rows, packing) from best to worst after a short anneal, for each number of rows that works."""
    costs, params = pack_costs(problem, rank_LE), problem.params

    def probe(rows: int) -> tuple[int, int, np.ndarray] | None:
        packings = [cell_of for pack in SEEDS if (cell_of := pack(problem, rows)) is not None]
        if params.equal_samples:
            packings = [equal for p in packings if (equal := equalised(problem, p, rows)) is not None]
        chains = [PackChain(problem, costs, cell_of, rows, seed_state(seed, rows)) for cell_of in packings]
        budget = PROBE_LEGS * LEG_PROPOSALS
        for chain in chains:
            chain.run(params.cold_temperature, 1.0, lambda proposals, *_: proposals / budget)
        best = min(chains, key=lambda chain: int(chain.best[0]), default=None)
        return None if best is None else (int(best.best[0]), rows, best.best_cell_of)

    candidates = row_candidates(problem, params.extra_rows)
    found = [result for result in pool.map(probe, candidates) if result is not None]
    for rows in row_range(problem):
        if not found and rows > candidates[-1] and (result := probe(rows)) is not None:
            found = [result]
    if not found:
        raise no_packing(problem)
    return [(rows, cell_of) for _, rows, cell_of in sorted(found, key=lambda result: result[:2])]


@dataclass(frozen=True, slots=True)
class _Chain:
    """One chain of the search; ``solve`` may run in several threads at once."""

    problem: Problem
    starts: list[np.ndarray]
    home: Residence | None
    stop: StopCriterion
    bound_ns: int

    def solve(self, packing: tuple[int, np.ndarray], seed: int, number: int) -> _Solution:
        """Alternate placement and packing until the budget is spent; return the best pair seen."""
        problem, params, home, (num_rows, cell_of) = self.problem, self.problem.params, self.home, packing
        few = math.ceil(FIRST_SWAPS * params.placement_swaps)
        rank_LE = self._place(num_rows, cell_of, self.starts, few, seed_state(seed, number, 0))
        rng = seed_state(seed, number, 1)
        chain = PackChain(problem, pack_costs(problem, rank_LE), cell_of, num_rows, rng, self.bound_ns)
        hot = params.hot_temperature * START_SPREAD**number * chain.roughness()
        for turn in range(params.alternations):
            last = turn == params.alternations - 1
            share = params.first_share + (1 - params.first_share) * turn / max(1, params.alternations - 1)
            chain.run(hot, 1.0 if last else share, self._progress)
            hot *= 0.1
            if self.stop.progress(chain.proposals) > LATE:
                break
            rng, swaps = seed_state(seed, number, 2 + turn), params.placement_swaps
            placed_LE = self._place(num_rows, chain.best_cell_of, [rank_LE], swaps, rng, chain.proposals)
            if chain.load_if_better(pack_costs(problem, placed_LE)):
                rank_LE = placed_LE
        blocks = chain.state.block_ns
        # Layers were priced as sums over blocks; the step waits for one.
        away_ns = 0 if home is None else home.move_ns * int((rank_LE != home.rank_LE).sum()) // problem.num_blocks
        return _Solution((int(blocks.max()) + away_ns, int(blocks.sum())), num_rows, chain.best_cell_of, rank_LE)

    def _progress(self, proposals: int, idle: int = 0, gap: float = math.inf) -> float:
        """Return how far packing has come: under a budget of wall time its last placement must fit in too."""
        return max(self.stop.progress(proposals, idle, gap), self.stop.progress(0) * (1 + PLACEMENT_SHARE))

    def _place(
        self, num_rows: int, cell_of: np.ndarray, starts: list[np.ndarray], swaps: int, rng: np.ndarray, made: int = 0
    ) -> np.ndarray:
        """Place for a packing that took ``made`` proposals, with more swaps under a wall time that has been long."""
        costs, gone = layer_costs(self.problem, cell_of, num_rows), self.stop.progress(made)
        time_gone = self.stop.progress(0)  # looked at last: under wall time alone it is no less
        room = PLACEMENT_SHARE * time_gone if made and time_gone >= gone else 0.0
        given = (self.problem, self.home, int(rng[0] >> np.uint64(1)))

        def improve(layer: int, ranks: np.ndarray, swaps: int) -> tuple[int, np.ndarray]:
            return improved(costs[layer], *given, layer, ranks, swaps)

        return place_rows(improve, starts, swaps, lambda: self.stop.progress(0), room)

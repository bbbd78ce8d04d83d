"""The whole algorithm: check, seed, choose the number of rows, then place and pack in turn, and certify.

One chain: least-loaded packing under an LPT (or the previous) placement -> row-aware placement -> annealing of the
packing
-> row-aware placement ... Only improvements are kept. Chains differ by seed and run side by side; the best plan wins,
ties by chain number, so that threads change nothing but the time it takes.

Shape suffixes: N samples, L MoE layers, E experts.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

import numpy as np

from costmodels import StepTables
from profiler import ModelSpec, Observer, RoutePackError, Topology
from search.bounds import lower_bound_ns
from search.evaluate import Evaluation, evaluate
from search.packing.bins import pack_ffd
from search.packing.packer import LEG_PROPOSALS, PackChain, pack_costs
from search.packing.seeds import equalised, pack_balanced, pack_staircase
from search.params import PlannerParams
from search.placement.lpt import identity_placement
from search.placement.movement import (
    ASSUMED_GBYTES_PER_S,
    Residence,
    expert_bytes,
    expert_move_ns,
    is_assumed,
    list_moves,
    nearer_home,
    placement_of_ranks,
    relabelled,
    residence_of,
    stage_of_layers,
)
from search.placement.placer import PLACEMENT_SHARE, LayerLoads, first_ranks, place_rows
from search.plan import Plan, StepTime, check_plan
from search.problem import Problem, StepBatch, build_problem, least_rows
from search.random_bits import seed_state
from search.stop import StopCriterion, with_budget

SEEDS = (pack_balanced, pack_staircase)
START_SPREAD = 4.0
"""Every further chain starts so many times hotter: rugged instances want heat, smooth ones do not."""
LATE = 1.1
"""Progress beyond which a chain takes no further placement: a wall-clock budget is long spent."""
FIRST_SWAPS = 0.2
"""Share of ``placement_swaps`` proposed before the first packing: annealing it stirs what they are fitted to."""
PROBE_LEGS = 2
"""Legs of annealing spent on each candidate number of rows before one is chosen."""


@dataclass(frozen=True, slots=True)
class _Solution:
    """Hold one finished chain."""

    objective: tuple[int, int]
    cell_of: np.ndarray
    rank_LE: np.ndarray
    num_rows: int


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
) -> Plan:
    """Plan one optimizer step.

    Under an iteration budget (the default) the plan is a pure function of batch, tables, parameters and seed.
    ``start`` is the rank of every expert, [L, E], from which the search starts in place of LPT or ``previous``; unlike
    moves away from ``previous``, those away from ``start`` cost nothing.

    Raises
    ------
    RoutePackError
        If a stated policy is violated (see :func:`search.problem.build_problem`) or no capped packing is found.
    """
    params, observer = params or PlannerParams(), observer or Observer()
    stop = with_budget(stop, params.max_iterations)
    stop.reset()
    problem = build_problem(batch, tables, spec, topology, max_tokens, params)
    bound_ns = lower_bound_ns(problem)
    home = None if previous is None else residence_of(previous, problem, spec, params)
    with ThreadPoolExecutor(num_threads or os.cpu_count() or 1) as pool:
        if start is not None:
            start_LE = start
        else:
            start_LE = first_ranks(problem, params.ranks_per_node) if home is None else home.rank_LE
        packings = _seed_packings(problem, start_LE, params, seed, pool)
        observer.start("plan", params.starts)
        chain = _Chain(problem, start_LE, home, params, stop, bound_ns)
        solutions = list(pool.map(lambda k: chain.solve(packings[k % len(packings)], seed, k), range(params.starts)))
        observer.finish("plan")
    best = min(solutions, key=lambda s: s.objective)
    old_LE, rank_LE = None if previous is None else previous.placement_LE, best.rank_LE
    if home is not None and not params.ranks_per_node:  # ranks of one node are alike: names may change, times do not
        rank_LE = nearer_home(rank_LE, home.rank_LE, problem.num_ranks)
    plan = _as_plan(
        problem, batch, best.cell_of, placement_of_ranks(rank_LE, problem.num_ranks, old_LE), best.num_rows,
        bound_ns,
        {"planner": "routepack-tune", "seed": seed, "params": asdict(params), "stopped_by": stop.name},
    )  # fmt: skip
    if old_LE is not None:
        seconds = expert_move_ns(spec, topology, tables, params) * 1e-9
        moves = list_moves(
            old_LE,
            plan.placement_LE,
            problem.experts_per_rank,
            expert_bytes(spec, topology),
            seconds,
            stage_of_layers(spec, topology),
        )
        assumed = (
            f"Moves of experts are priced at an assumed {ASSUMED_GBYTES_PER_S:g} GB/s; link_gbytes_per_s states it."
        )
        notes = (*plan.notes, assumed) if is_assumed(tables, params) else plan.notes
        plan = replace(plan, moves=moves, notes=notes)
    check_plan(plan, problem.lengths, problem.num_experts)
    _check_job(problem, plan)
    return plan


def _check_job(problem: Problem, plan: Plan) -> None:
    """Raise :class:`RoutePackError` if the plan breaks what this job asks beyond the general constraints."""
    if problem.equal_samples:
        counts = np.bincount(plan.slot_N, minlength=problem.num_slots)
        if counts.max() - counts.min() > 1:
            raise RoutePackError(
                f"DP slots hold {counts.min()} to {counts.max()} samples, equal_samples asks the same."
            )
    if problem.max_received_rows:
        priced = evaluate(problem, plan.row_N, plan.slot_N, plan.placement_LE, plan.num_rows)
        row, block, rank, layer = np.unravel_index(priced.rank_rows_RBPL.argmax(), priced.rank_rows_RBPL.shape)
        received = int(priced.rank_rows_RBPL.max())
        if received > problem.max_received_rows:
            raise RoutePackError(
                f"EP rank {rank} of block {block} receives {received} rows in row {row}, MoE layer {layer}, above "
                f"max_received_rows = {problem.max_received_rows}, and no plan found avoids it. Raise it, lower the "
                "token cap, or allow more rows (extra_rows)."
            )


def row_candidates(problem: Problem, extra_rows: int) -> list[int]:
    """Return the numbers of rows worth trying: the least one, its neighbours and a few further off, ascending."""
    least, multiple = least_rows(problem), problem.topology.row_multiple
    most = problem.num_samples // problem.num_slots // multiple * multiple
    if least > most:
        raise RoutePackError(
            f"{problem.num_samples} samples cannot give each of {problem.num_slots} DP slots one sample in each of "
            f"{least} rows. Collect more samples a step, or lower data_parallel_size."
        )
    steps = [k for k in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24) if k <= extra_rows]
    return sorted({min(least + k * multiple, most) for k in steps})


def _seed_packings(
    problem: Problem, rank_LE: np.ndarray, params: PlannerParams, seed: int, pool: ThreadPoolExecutor
) -> list[tuple[int, np.ndarray]]:
    """Return (number of rows, packing) from best to worst after a short anneal, one for each number of rows that
    works."""
    costs = pack_costs(problem, rank_LE)

    def probe(rows: int) -> tuple[int, int, np.ndarray] | None:
        packings = [cell_of for pack in SEEDS if (cell_of := pack(problem, rows)) is not None]
        if problem.equal_samples:
            packings = [equal for p in packings if (equal := equalised(problem, p, rows)) is not None]
        chains = [PackChain(problem, costs, cell_of, rows, seed_state(seed, rows)) for cell_of in packings]
        budget = PROBE_LEGS * LEG_PROPOSALS
        for chain in chains:
            chain.run(params, params.cold_temperature, 1.0, lambda proposals, *_: proposals / budget)
        best = min(chains, key=lambda chain: int(chain.best[0]), default=None)
        return None if best is None else (int(best.best[0]), rows, best.best_cell_of)

    candidates = row_candidates(problem, params.extra_rows)
    found = [result for result in pool.map(probe, candidates) if result is not None]
    rows = candidates[-1]
    while not found:
        rows += problem.topology.row_multiple
        if rows * problem.num_slots > problem.num_samples:
            raise RoutePackError(
                f"No packing under max_tokens_per_microbatch = {problem.max_tokens} without empty cells was found "
                f"up to {rows} rows x {problem.num_slots} slots. Raise the cap or lower data_parallel_size."
            )
        found = [result for result in (probe(rows),) if result is not None]
    return [(rows, cell_of) for _, rows, cell_of in sorted(found, key=lambda result: result[:2])]


@dataclass(frozen=True, slots=True)
class _Chain:
    """One chain of the search; ``solve`` may run in several threads at once."""

    problem: Problem
    start_LE: np.ndarray
    home: Residence | None
    params: PlannerParams
    stop: StopCriterion
    bound_ns: int

    def solve(self, packing: tuple[int, np.ndarray], seed: int, number: int) -> _Solution:
        """Alternate placement and packing until the budget is spent; return the best pair seen."""
        num_rows, cell_of = packing
        params, rank_LE = self.params, self.start_LE
        starts = [rank_LE]
        if self.home is not None:
            if self.start_LE is not self.home.rank_LE:
                starts.append(self.home.rank_LE)
            fresh_LE = first_ranks(self.problem, params.ranks_per_node)
            starts.append(relabelled(fresh_LE, self.home.rank_LE, self.problem.num_ranks))
        few = replace(params, placement_swaps=math.ceil(FIRST_SWAPS * params.placement_swaps))
        rank_LE = self._place(num_rows, cell_of, starts, few, seed_state(seed, number, 0))
        chain = PackChain(
            self.problem, pack_costs(self.problem, rank_LE), cell_of, num_rows, seed_state(seed, number, 1),
            self.bound_ns,
        )  # fmt: skip
        hot = params.hot_temperature * START_SPREAD**number * chain.roughness(params)
        for turn in range(params.alternations):
            last = turn == params.alternations - 1
            share = params.first_share + (1 - params.first_share) * turn / max(1, params.alternations - 1)
            chain.run(params, hot, 1.0 if last else share, self._progress)
            hot *= 0.1
            if self.stop.progress(chain.proposals) > LATE:
                break
            rng = seed_state(seed, number, 2 + turn)
            placed_LE = self._place(num_rows, chain.best_cell_of, [rank_LE], params, rng, chain.proposals)
            if chain.load_if_better(pack_costs(self.problem, placed_LE)):
                rank_LE = placed_LE
        blocks = chain.state.block_ns
        # Layers were priced as sums over blocks; the step waits for one.
        price_ns = 0 if self.home is None else self.home.price_ns(rank_LE) // self.problem.num_blocks
        return _Solution((int(blocks.max()) + price_ns, int(blocks.sum())), chain.best_cell_of, rank_LE, num_rows)

    def _progress(self, proposals: int, idle: int = 0, gap: float = math.inf) -> float:
        """Return how far packing has come: under a budget of wall time its last placement must fit in too."""
        return max(self.stop.progress(proposals, idle, gap), self.stop.progress(0) * (1 + PLACEMENT_SHARE))

    def _place(
        self,
        num_rows: int,
        cell_of: np.ndarray,
        starts: list[np.ndarray],
        params: PlannerParams,
        rng: np.ndarray,
        proposals: int = 0,
    ) -> np.ndarray:
        """Place for a packing, with more swaps where wall time is what ends the search and has been long."""
        problem, slots = self.problem, self.problem.num_slots
        tokens = np.bincount(cell_of, weights=problem.lengths, minlength=num_rows * slots).astype(np.int64)
        sent = problem.sent_rows(tokens).reshape(num_rows * problem.num_blocks, -1).max(axis=1)
        loads = LayerLoads(problem, cell_of // (slots // problem.num_blocks), sent)
        seed, gone = int(rng[0] >> np.uint64(1)), self.stop.progress(proposals)
        time_gone = self.stop.progress(0)  # looked at last: under wall time alone it is no less
        room = PLACEMENT_SHARE * time_gone if proposals and time_gone >= gone else 0.0
        return place_rows(loads, starts, self.home, params, seed, lambda: self.stop.progress(0), room)


def _as_plan(
    problem: Problem,
    batch: StepBatch,
    cell_of: np.ndarray,
    placement_LE: np.ndarray,
    num_rows: int,
    bound_ns: int,
    provenance: dict,
) -> Plan:
    """Price, count and certify a packing (cell = row * D + slot) and placement."""
    row_N, slot_N = cell_of // problem.num_slots, cell_of % problem.num_slots
    priced = evaluate(problem, row_N, slot_N, placement_LE, num_rows)
    tables = problem.tables
    counters = {
        "unknown_tokens": problem.unknown_tokens,
        "unknown_samples": problem.unknown_samples,
        "padding_tokens": problem.padding_tokens,
        "extrapolated_lengths": int((problem.lengths > tables.measured_length_max).sum()),
        "extrapolated_rank_loads": int((priced.rank_rows_RBPL.max(axis=2) > tables.measured_rows_max).sum()),
    }
    return Plan(
        row_N=row_N, slot_N=slot_N, placement_LE=placement_LE, num_rows=num_rows, topology=problem.topology,
        max_tokens=problem.max_tokens, sample_ids=tuple(str(s) for s in batch.sample_ids),
        total_tokens=int(problem.lengths.sum()), predicted=priced.step_time(), default=default_time(problem),
        lower_bound_s=bound_ns * 1e-9 / tables.pipeline_stages,
        counters=counters, notes=tables.notes,
        provenance={"batch_hash": batch.data_hash, "tables_hash": tables.tables_hash, **provenance},
    )  # fmt: skip


def price_default(problem: Problem) -> Evaluation:
    """Price what a job without a planner does: first-fit decreasing, experts in place."""
    row_N, slot_N, rows = pack_ffd(problem)
    return evaluate(problem, row_N, slot_N, identity_placement(problem), rows)


def default_time(problem: Problem) -> StepTime:
    """Return the predicted time of :func:`price_default`."""
    return price_default(problem).step_time()

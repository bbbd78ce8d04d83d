"""Place experts for the rows of a given packing, layer by layer; what moving them costs, and which to move.

A moved expert takes its weights and optimizer state along; the price is spread over the steps until the next move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from costmodels import StepTables
from profiler import ModelSpec, RoutePackError, Topology
from profiler.errors import explained
from search.kernels import seed_state, unit_expert_rows
from search.params import PlannerParams
from search.placement.kernels import LayerCosts, improve_layer
from search.placement.lpt import ranks_of_slots
from search.plan import ExpertMoves, Plan, PlannedModel, check_form
from search.problem import Problem

PLACEMENT_SHARE = 0.1
"""Most of a wall-clock budget that one placement pass may take."""
ASSUMED_GBYTES_PER_S = 25.0
"""Bandwidth of one rank where neither settings nor measurements nor the device's facts say it."""
DEAREST_MOVE_NS = 2**45
"""Price of moving one expert above which nobody moves, so that sums of prices fit 64 bits."""


class Residence(NamedTuple):
    """Hold where experts' weights lie now and what moving one costs."""

    rank_LE: np.ndarray  # EP rank of every expert
    move_ns: int  # price of one expert away from home, in the objective's nanoseconds a step


def residence_of(previous: Plan, problem: Problem) -> Residence:
    """Return where experts lie and the price of moving one, spread over the horizon; prices add up over blocks.

    Stages move at the same time, and the objective adds up their layers: an expert costs its own move in it.
    """
    check_previous(previous, problem.spec, problem.topology)
    params = problem.params
    move_ns = expert_move_ns(problem.spec, problem.topology, problem.tables, params)
    price = params.stickiness * move_ns * problem.num_blocks / max(1.0, params.horizon_steps)
    return Residence(ranks_of_slots(previous.placement_LE, problem.num_ranks), min(round(price), DEAREST_MOVE_NS))


def check_previous(previous: Plan, spec: ModelSpec, topology: Topology) -> None:
    """Refuse what is no sound plan, whoever made it, or is one of another model or number of EP ranks."""
    with explained("Previous plan: "):
        check_form(previous)
    old, new = previous.model, PlannedModel.of(spec)
    had = (old.spec_hash, *previous.placement_LE.shape, previous.topology.expert_model_parallel_size)
    has = (new.spec_hash, len(new.moe_layers), spec.num_experts, topology.expert_model_parallel_size)
    if had != has:
        words = [
            f"{model.name} (shape {shape[0][:8]}: {shape[1]} MoE layers of {shape[2]} experts; "
            f"expert_model_parallel_size {shape[3]})"
            for model, shape in ((old, had), (new, has))
        ]
        raise RoutePackError(
            f"Previous plan is of {words[0]}, this job is of {words[1]}. Give the last plan of the same job, or none."
        )


def expert_move_ns(spec: ModelSpec, topology: Topology, tables: StepTables, params: PlannerParams) -> float:
    """Return the time of moving one expert: by the settings' bandwidth, else as measured, else by the stated links."""
    if params.link_gbytes_per_s == 0 and tables.expert_move_ns:
        return float(tables.expert_move_ns)
    moved_bytes = spec.expert_bytes(topology.expert_tensor_parallel_size)
    return moved_bytes / (params.link_gbytes_per_s or tables.link_gbytes_per_s or ASSUMED_GBYTES_PER_S)


def move_price_note(tables: StepTables, params: PlannerParams) -> list[str]:
    """Say what stands for a measured price of moves; nothing where the settings or measurements give one."""
    if params.link_gbytes_per_s or tables.expert_move_ns:
        return []
    how = f"an assumed {ASSUMED_GBYTES_PER_S:g} GB/s"
    if tables.link_gbytes_per_s:
        how = f"{tables.link_gbytes_per_s:g} GB/s, stated by the device's facts and not measured"
    return [f"Moves of experts are priced at {how}; link_gbytes_per_s gives another."]


def stage_of_layers(spec: ModelSpec, topology: Topology) -> np.ndarray:
    """Return the pipeline stage of every MoE layer, [L]: chunks of layers dealt evenly to the stages in turn."""
    stages = topology.pipeline_model_parallel_size
    chunks = stages * topology.virtual_pipeline_model_parallel_size
    return np.flatnonzero(spec.moe_layers) * chunks // spec.num_layers % stages


def list_moves(old_LE: np.ndarray | None, new_LE: np.ndarray, problem: Problem) -> tuple[ExpertMoves, list[str]]:
    """Return what changes its slot and what a reader must know of its price.

    Layers of a stage move one after another, each as long as its busiest receiving rank; stages at the same time.
    """
    if old_LE is None:
        return ExpertMoves(), []
    spec, topology, params = problem.spec, problem.topology, problem.params
    places = np.nonzero(old_LE != new_LE)
    listed = np.stack([*places, old_LE[places], new_LE[places]], axis=1)
    ranks_LE = ranks_of_slots(new_LE, problem.num_ranks)
    away = np.nonzero(ranks_of_slots(old_LE, problem.num_ranks) != ranks_LE)
    received = np.zeros((len(new_LE), problem.num_ranks), np.int64)
    np.add.at(received, (away[0], ranks_LE[away]), 1)
    busiest = np.bincount(stage_of_layers(spec, topology), weights=received.max(axis=1)).max()
    seconds = float(busiest) * (expert_move_ns(spec, topology, problem.tables, params) * 1e-9)
    moved_bytes = len(away[0]) * spec.expert_bytes(topology.expert_tensor_parallel_size)
    moves = ExpertMoves(tuple(map(tuple, listed.tolist())), moved_bytes, seconds)
    return moves, move_price_note(problem.tables, params)


def relabelled(rank_LE: np.ndarray, home_LE: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return the same groups of experts under rank numbers that keep most of them at home, [L, E].

    Largest overlaps are matched first, then pairs of ranks change numbers while that helps.
    """
    result = np.empty_like(rank_LE)
    for layer, (ranks, home) in enumerate(zip(rank_LE, home_LE, strict=True)):
        overlap = np.zeros((num_ranks, num_ranks), np.int64)
        np.add.at(overlap, (ranks, home), 1)
        name = np.full(num_ranks, -1)
        free = np.ones(num_ranks, bool)
        for place in np.argsort(-overlap, axis=None, kind="stable"):
            old, new = divmod(int(place), num_ranks)
            if name[old] < 0 and free[new]:
                name[old], free[new] = new, False
        improved = True
        while improved:
            kept = overlap[np.arange(num_ranks)[:, None], name[None, :]]  # [a, b]: a under b's number
            gain = kept + kept.T - np.diag(kept)[:, None] - np.diag(kept)[None, :]
            a, b = np.unravel_index(int(np.argmax(gain)), gain.shape)
            improved = gain[a, b] > 0
            if improved:
                name[a], name[b] = name[b], name[a]
        result[layer] = name[ranks]
    return result


def nearer_home(rank_LE: np.ndarray, home_LE: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return a placement [L, E] with the ranks of a layer renamed where that keeps more of its experts at home."""
    renamed = relabelled(rank_LE, home_LE, num_ranks)
    fewer = (renamed != home_LE).sum(axis=1) < (rank_LE != home_LE).sum(axis=1)
    return np.where(fewer[:, None], renamed, rank_LE)


def layer_costs(problem: Problem, cell_of: np.ndarray, num_rows: int) -> list[LayerCosts]:
    """Return what the placement of every layer depends on, for one packing (the cell of each sample, [N])."""
    (cap, row_ns), units = problem.receive_wall, num_rows * problem.num_blocks
    sent = problem.sent_rows(problem.cell_tokens(cell_of, num_rows)).reshape(units, -1).max(axis=1)
    rows = unit_expert_rows(problem.counts, cell_of // (problem.num_slots // problem.num_blocks), units)
    common = LayerCosts(
        counts=np.empty((0, 0), np.int32),
        sent=sent.astype(np.int32),
        layer_ns=np.concatenate([problem.expert_ns + problem.exchange_ns, problem.expert_ns]),
        exchange_ns=problem.exchange_ns,
        shift=problem.tables.rows_shift,
        cap=cap,
        over_cap_ns=row_ns,
    )
    return [common._replace(counts=counts) for counts in np.ascontiguousarray(rows.transpose(1, 2, 0))]


def improved(
    costs: LayerCosts, problem: Problem, home: Residence | None, seed: int, layer: int, ranks: np.ndarray, swaps: int
) -> tuple[int, np.ndarray]:
    """Return the price and ranks of a layer after swap search from ``ranks`` [E]; never worse than it.

    The price is the layer's time plus the price of every expert away from home.
    """
    better = ranks.copy()
    home_E, move_ns = (better, 0) if home is None else (home.rank_LE[layer], home.move_ns)
    schedule = (problem.num_ranks, swaps, problem.params.placement_temperature, move_ns)
    return int(improve_layer(costs, better, home_E, seed_state(seed, layer), schedule)), better


def place_rows(
    improve: Callable[[int, np.ndarray, int], tuple[int, np.ndarray]],
    starts: Iterable[np.ndarray],
    swaps: int,
    spent: Callable[[], float] = lambda: 0.0,
    room: float = 0.0,
) -> np.ndarray:
    """Return the best rank of every expert, [L, E], by ``swaps`` proposals a layer from each placement of ``starts``.

    Layers are independent: ``improve(layer, ranks, swaps)`` returns price and ranks. ``spent`` tells the share of the
    search's wall time gone by: where the first layer shows that all would take less than ``room`` of it, or more than
    ``PLACEMENT_SHARE``, each proposes more or fewer swaps. Under a budget of iterations no such time passes.
    """

    def best_of(layer: int, starts: Iterable[np.ndarray]) -> np.ndarray:
        return min((improve(layer, ranks, swaps) for ranks in starts), key=lambda result: result[0])[1]

    layers = list(zip(*starts, strict=True))
    began = spent()
    first = best_of(0, layers[0])
    whole = len(layers) * (spent() - began)
    wanted = min(max(whole, room), PLACEMENT_SHARE)
    if wanted != whole and whole > 0:
        swaps = max(1, int(swaps * wanted / whole))
    if 0 < whole < wanted:
        first = best_of(0, [first])
    return np.stack([first, *(best_of(layer, layers[layer]) for layer in range(1, len(layers)))])

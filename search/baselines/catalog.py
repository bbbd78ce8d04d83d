"""Published planners under one name each, priced by the same tables as ours: what a plan is compared with.

``BASELINES`` are rules, ``packing + placement``: every packing of ``PACKINGS`` with every placement of ``PLACEMENTS``.
``SEARCH_BASELINES`` are searches: they draw random numbers, and RoutePack uses all the budget it is given.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from search.baselines.frameworks import (
    beyond_cap,
    largest_cell_tokens,
    mindspeed_placement,
    pack_areal,
    pack_mffd,
    pack_slime,
    pack_verl,
    relibra_placement,
)
from search.baselines.routepack import solve_open_instruct, solve_routepack
from search.checks import check_packing, check_placement
from search.evaluate import Evaluation, evaluate
from search.packing.bins import Packing, pack_ffd, pack_karmarkar_karp, sample_flops
from search.placement.lpt import identity_placement, lpt_placement, placement_of_ranks, ranks_of_slots
from search.placement.placer import nearer_home
from search.problem import Problem

PACKINGS: dict[str, Callable[[Problem], Packing]] = {
    "first-fit decreasing": pack_ffd,
    "modified first-fit decreasing": pack_mffd,
    "AReaL first-fit": pack_areal,
    "Karmarkar-Karp on tokens": lambda p: pack_karmarkar_karp(p, p.lengths),
    "Karmarkar-Karp on FLOPs": lambda p: pack_karmarkar_karp(p, sample_flops(p)),
    "verl on tokens": lambda p: pack_verl(p, p.lengths),
    "verl on FLOPs": lambda p: pack_verl(p, sample_flops(p)),
    "slime on FLOPs": lambda p: pack_slime(p, sample_flops(p)),
}
"""slime's alone may exceed the cap: compare :func:`search.baselines.frameworks.largest_cell_tokens` with it."""
PLACEMENTS: dict[str, Callable[[Problem], np.ndarray]] = {
    "identity": identity_placement,
    "LPT": lpt_placement,
    "MindSpeed": mindspeed_placement,
}

DEFAULT_BASELINE = "first-fit decreasing + identity"
BASELINES = tuple(f"{packing} + {placement}" for placement in PLACEMENTS for packing in PACKINGS)
SHOWN_BASELINES = (
    DEFAULT_BASELINE,
    "Karmarkar-Karp on tokens + identity",
    "Karmarkar-Karp on FLOPs + identity",
    "first-fit decreasing + LPT",
    "modified first-fit decreasing + LPT",
    "AReaL first-fit + LPT",
    "Karmarkar-Karp on tokens + LPT",
    "Karmarkar-Karp on FLOPs + LPT",
    "verl on FLOPs + LPT",
)
"""Those a report has room for; all of them keep the cap."""

SEARCH_BASELINES: dict[str, Callable[..., tuple[Packing, np.ndarray]]] = {
    "RoutePack": solve_routepack,
    "first-fit decreasing + ReLibra": lambda p, _, seed=0: (pack_ffd(p), relibra_placement(p, seed=seed)),
    "AReaL first-fit + ReLibra": lambda p, _, seed=0: (pack_areal(p), relibra_placement(p, seed=seed)),
    "open-instruct swaps + identity": lambda p, _, seed=0: solve_open_instruct(p, seed=seed),
}
"""Called with (problem, stop, seed=...) they return (packing, placement [L, E]). ReLibra and open-instruct stop after
their published number of swaps, whatever the budget."""


def price_baseline(problem: Problem, name: str) -> tuple[Evaluation, int]:
    """Return the cost and the number of rows of a baseline named in ``BASELINES``."""
    packing, placement = name.rsplit(" + ", 1)
    packed = PACKINGS[packing](problem)
    return price_packing(problem, packed, PLACEMENTS[placement](problem)), packed[2]


def place_baseline(problem: Problem, name: str, old_LE: np.ndarray | None = None) -> np.ndarray:
    """Return a baseline's placement [L, E]; from an earlier one, ranks are renamed so that few experts move."""
    found_LE = PLACEMENTS[name.rsplit(" + ", 1)[1]](problem)
    if old_LE is None:
        return found_LE
    check_placement(old_LE, problem.num_layers, problem.num_experts)
    ranks_LE, old_ranks_LE = (ranks_of_slots(placement_LE, problem.num_ranks) for placement_LE in (found_LE, old_LE))
    return placement_of_ranks(nearer_home(ranks_LE, old_ranks_LE, problem.num_ranks), problem.num_ranks, old_LE)


def price_packing(problem: Problem, packing: Packing, placement_LE: np.ndarray) -> Evaluation:
    """Price a packing; one that exceeds the cap by continued tables."""
    check_packing(*packing[:2], problem.num_samples, packing[2], problem.num_slots)
    largest = largest_cell_tokens(problem, packing)
    if largest > problem.max_tokens:
        problem = beyond_cap(problem, largest)
    row_N, slot_N, num_rows = packing
    return evaluate(problem, row_N, slot_N, placement_LE, num_rows)

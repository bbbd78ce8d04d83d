"""Published planners under one name each, priced by the same tables as ours: what a plan is compared with.

A name is ``packing + placement``. Every packing of ``PACKINGS`` goes with every placement of ``PLACEMENTS``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from search.construct import (
    identity_placement,
    lpt_placement,
    pack_ffd,
    pack_karmarkar_karp,
    sample_flops,
)
from search.evaluate import Evaluation, evaluate
from search.problem import Problem
from search.published import (
    Packing,
    beyond_cap,
    largest_cell_tokens,
    mindspeed_placement,
    pack_areal,
    pack_mffd,
    pack_slime,
    pack_verl,
)

PACKINGS: dict[str, Callable[[Problem], Packing]] = {
    "first-fit decreasing": pack_ffd,
    "modified first-fit decreasing": pack_mffd,
    "AReaL first-fit": pack_areal,
    "Karmarkar-Karp on tokens": lambda problem: pack_karmarkar_karp(problem, problem.lengths),
    "Karmarkar-Karp on FLOPs": lambda problem: pack_karmarkar_karp(problem, sample_flops(problem)),
    "verl on tokens": lambda problem: pack_verl(problem, problem.lengths),
    "verl on FLOPs": lambda problem: pack_verl(problem, sample_flops(problem)),
    "slime on FLOPs": lambda problem: pack_slime(problem, sample_flops(problem)),
}
PLACEMENTS: dict[str, Callable[[Problem], np.ndarray]] = {
    "identity": identity_placement,
    "LPT": lpt_placement,
    "MindSpeed": mindspeed_placement,
}

DEFAULT_BASELINE = "first-fit decreasing + identity"
BASELINES = tuple(f"{packing} + {placement}" for placement in PLACEMENTS for packing in PACKINGS)


def price_baseline(problem: Problem, name: str) -> tuple[Evaluation, int]:
    """Return the cost and the number of rows of a baseline named in ``BASELINES``."""
    packing, placement = name.rsplit(" + ", 1)
    packed = PACKINGS[packing](problem)
    return price_packing(problem, packed, PLACEMENTS[placement](problem)), packed[2]


def price_packing(problem: Problem, packing: Packing, placement_LE: np.ndarray) -> Evaluation:
    """Price a packing that may exceed the cap, then by continued tables."""
    largest = largest_cell_tokens(problem, packing)
    if largest > problem.max_tokens:
        problem = beyond_cap(problem, largest)
    row_N, slot_N, num_rows = packing
    return evaluate(problem, row_N, slot_N, placement_LE, num_rows)

"""Published planners under one name each, priced by the same tables as ours: what a plan is compared with."""

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

Packing = tuple[np.ndarray, np.ndarray, int]

PACKINGS: dict[str, Callable[[Problem], Packing]] = {
    "first-fit decreasing": pack_ffd,
    "Karmarkar-Karp on tokens": lambda problem: pack_karmarkar_karp(problem, problem.lengths),
    "Karmarkar-Karp on FLOPs": lambda problem: pack_karmarkar_karp(problem, sample_flops(problem)),
}
PLACEMENTS: dict[str, Callable[[Problem], np.ndarray]] = {"identity": identity_placement, "LPT": lpt_placement}

DEFAULT_BASELINE = "first-fit decreasing + identity"
BASELINES = tuple(f"{packing} + {placement}" for placement in PLACEMENTS for packing in PACKINGS)


def price_baseline(problem: Problem, name: str) -> tuple[Evaluation, int]:
    """Return the cost and the number of rows of a baseline named in ``BASELINES``."""
    packing, placement = name.rsplit(" + ", 1)
    row_N, slot_N, rows = PACKINGS[packing](problem)
    return evaluate(problem, row_N, slot_N, PLACEMENTS[placement](problem), rows), rows

"""The knobs of fitting, one frozen set for the whole package."""

from __future__ import annotations

from dataclasses import dataclass

from profiler.params import MOST_SEED, check_settings

MOST_TREES, MOST_LEAVES = 10_000, 4096
RANGES = {
    "seed": (0, MOST_SEED),
    "folds": (2, 100),
    "attention_backward_factor": (0, 100),
    "gemm_backward_factor": (0.01, 100),
    "num_trees": (1, MOST_TREES),
    "num_leaves": (2, MOST_LEAVES),
    "learning_rate": (1e-4, 1),
    "min_rows": (10, 1_000_000),
    "small_rows": (0, 1_000_000),
    "baseline_pull": (1e-6, 10),
}
"""Least and most of each number, both allowed."""


@dataclass(frozen=True, slots=True)
class FitParams:
    """Hold the knobs of :func:`costmodels.fit_cost_model`."""

    seed: int = 0
    """Seed of the trees (their fit is deterministic all the same)."""
    folds: int = 5
    """Parts of the grouped validation."""
    attention_backward_factor: float = 0.0
    """Backward over forward time of attention cores, used only where backward was not measured; 0: by length, head
    width and kind, as others measured it (``costmodels/operations/backward.py``)."""
    gemm_backward_factor: float = 2.0
    """The same for GEMMs, dense and of experts, and routers: two products of the forward's size."""
    recompute_activations: bool = False
    """Price every layer's forward a second time, in the backward pass (full activation recomputation)."""
    num_trees: int = 300
    num_leaves: int = 31
    learning_rate: float = 0.1
    min_rows: int = 20
    """Fewer measured rows than this are priced by the physics baseline alone."""
    small_rows: int = 300
    """Below this the trees have 8 leaves, and a Gaussian process stands beside or in place of them."""
    baseline_pull: float = 0.02
    """Weight of the pull to the scaled defaults, per unit of log; one row's log error of this size weighs the same."""

    def __post_init__(self) -> None:
        check_settings(self, RANGES)

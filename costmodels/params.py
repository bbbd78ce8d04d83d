"""The knobs of fitting, one frozen set for the whole package."""

from __future__ import annotations

from dataclasses import dataclass


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
        whole = {"seed": 0, "folds": 2, "num_trees": 1, "num_leaves": 2, "min_rows": 10, "small_rows": 0}
        for name, least in whole.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not value >= least:
                raise ValueError(f"Expected {name} to be an integer >= {least}, got {value!r}.")
        most = {"attention_backward_factor": 100, "gemm_backward_factor": 100, "learning_rate": 1, "baseline_pull": 10}
        for name, limit in most.items():
            value, or_zero = getattr(self, name), name == "attention_backward_factor"
            if not (0 < value <= limit or (or_zero and value == 0)):
                raise ValueError(f"Expected 0 <{'=' * or_zero} {name} <= {limit}, got {value!r}.")

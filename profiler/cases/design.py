"""Lay out the pool of a sweep: every case that is worth timing, of which rounds choose a few.

Sizes are spaced in log between small and the largest that the job can meet, both ends included; where the device
cannot finish the largest in the time or memory given, the range ends at the largest that it can, and says so. Cells and
loads of the user's own steps join with the pattern ``seen``.

A *class* is what is chosen from as one: an operation, for attention each window, for dense each shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from profiler.cases.case import Case, attention_features, experts_features, linear_attention_features, router_features
from profiler.cases.estimates import Rates, case_bytes, case_seconds
from profiler.cases.operations import OPERATIONS
from profiler.cases.seen import Seen
from profiler.errors import RoutePackError
from profiler.model_spec import ModelSpec
from profiler.params import FLOAT8, ProfileParams
from profiler.topology import Topology

SEEN = "seen"
"""Pattern of cases taken from the user's own steps."""
MIN_LENGTH = 32
MIN_ROWS = 4
LENGTH_SIGMA = 0.9
"""Spread of drawn lengths: real rollouts are about log-normal."""
SIZES, FINE_SIZES = 12, 32
"""Sizes of a range where other things vary too, and where the size is all there is."""
FILLS = (1, 2, 4, 8, 16)
"""Cells of equal sequences are full, half full and so on: full ones are priced most, the others show the floor."""
MEDIAN_SHARES = (4, 8, 16, 32, 64)
"""Median of mixed lengths, as parts of the cell."""
SKEWS = (0.25, 0.5, 0.8, 1.2, 1.8)
"""Spreads of drawn expert loads: what a step shows, and hot batches."""
HOT_SHARES = (0.3, 0.6, 1.0)
"""Share of all rows that goes to one expert."""
EMPTY_PARTS = (2, 4)
"""Of partly empty ranks, one expert in so many has rows."""
RUNS_OUTSIDE_REPEATS = 2
"""Warm-up runs that a case must afford besides its least repeats."""


@dataclass(frozen=True)
class Design:
    """The pool of a sweep and what was left out."""

    cases: tuple[Case, ...]
    limits: tuple[dict[str, Any], ...]
    """One entry per range that the device cannot finish: ``op``, ``what``, ``wanted``, ``designed``, ``reason``."""


def class_of(case: Case) -> tuple[str, int, int, int]:
    """Return what a case is chosen among: operation, window, n and k (0 where there is none)."""
    window, n, k = (case.features.get(name, 0) for name in ("window", "n", "k"))
    return case.op, window, n, k


class _Budget:
    """Decide whether the device affords a case, and remember where it did not."""

    def __init__(self, params: ProfileParams, rates: Rates, item_bytes: int) -> None:
        self.rates, self.item_bytes = rates, item_bytes
        self.run_seconds = params.max_case_seconds / (params.min_repeats + RUNS_OUTSIDE_REPEATS)
        self.limits: list[dict[str, Any]] = []

    def refusal(self, case: Case) -> str:
        """Return why a case cannot run, or an empty string."""
        needed = case_bytes(case, self.item_bytes)
        if needed > self.rates.memory_bytes:
            return f"needs {needed / 2**30:.1f} GiB, {self.rates.memory_bytes / 2**30:.1f} are allowed (max_memory_gib)"
        seconds = case_seconds(case, self.rates, self.item_bytes)
        if seconds > self.run_seconds:
            return f"one run would take {seconds:.2f} s, {self.run_seconds:.2f} are allowed (max_case_seconds)"
        return ""

    def largest(self, what: str, wanted: int, build: Callable[[int], Case]) -> int:
        """Return the largest size up to ``wanted`` that the device affords, 0 if none; note a cut under ``what``."""
        if not self.refusal(build(wanted)):
            return wanted
        low, high = 0, wanted
        while high - low > max(1, low // 16):
            middle = (low + high) // 2
            low, high = (low, middle) if self.refusal(build(middle)) else (middle, high)
        if what:
            op, reason = build(wanted).op, self.refusal(build(high))
            self.limits.append({"op": op, "what": what, "wanted": wanted, "designed": low, "reason": reason})
        return low


def design_cases(
    spec: ModelSpec,
    topology: Topology,
    max_tokens: int,
    params: ProfileParams,
    rates: Rates,
    item_bytes: int,
    seen: Seen | None = None,
) -> Design:
    """Return the pool for one model, topology and token cap, in a seeded order.

    Raises
    ------
    RoutePackError
        If the experts do not divide over the ranks, or the device affords no case at all of some operation.
    """
    if spec.num_experts % topology.expert_model_parallel_size:
        raise RoutePackError(
            f"{spec.name} has {spec.num_experts} experts; expert_model_parallel_size "
            f"{topology.expert_model_parallel_size} must divide them."
        )
    rng = np.random.default_rng(params.seed)
    budget, seen = _Budget(params, rates, item_bytes), seen or Seen()
    largest = max(1, round(max_tokens * params.size_fraction))
    cases = _cell_cases(spec, topology, largest, budget, seen)
    cases += _dense_cases(spec, topology, largest, budget)
    cases += _router_cases(spec, topology, largest, budget)
    cases += _experts_cases(spec, topology, largest, params, budget, rng, seen)
    _check_every_operation(cases, spec, budget)
    distinct: dict[str, Case] = {}
    for case in cases:
        distinct.setdefault(case.case_id("forward", ""), case)
    listed = list(distinct.values())
    return Design(tuple(listed[i] for i in rng.permutation(len(listed))), tuple(budget.limits))


def _check_every_operation(cases: list[Case], spec: ModelSpec, budget: _Budget) -> None:
    found = {case.op for case in cases}
    for op, asked in OPERATIONS.items():
        if op in found or asked.exchange or (asked.optional and not any(spec.linear_layers)):
            continue
        reason = next((limit["reason"] for limit in budget.limits if limit["op"] == op), "no size fits")
        raise RoutePackError(
            f"This device affords no case of {op} for {spec.name}: {reason}. Raise that limit in the profile "
            "section, use larger parallel sizes or a larger device, or import --published timings."
        )


def log_sizes(low: int, high: int, points: int) -> list[int]:
    """Return at most ``points`` distinct integers, even in log, ``low`` and ``high`` included."""
    low = min(low, high)
    return sorted({round(float(size)) for size in np.geomspace(low, high, max(2, points))})


CellCase = Callable[[str, tuple[int, ...]], Case]
"""From a pattern and sequence lengths to the case of one cell."""


def _cell_cases(spec: ModelSpec, topology: Topology, largest: int, budget: _Budget, seen: Seen) -> list[Case]:
    tensor = topology.tensor_model_parallel_size
    heads, linear_heads = spec.attention_heads(tensor), spec.attention_heads(tensor, linear=True)

    def attention(window: int) -> CellCase:
        return lambda pattern, lengths: Case("attention", pattern, attention_features(lengths, heads, window), lengths)

    def linear(pattern: str, lengths: tuple[int, ...]) -> Case:
        return Case("linear_attention", pattern, linear_attention_features(lengths, linear_heads), lengths)

    cases: list[Case] = []
    for window in spec.attention_windows:
        label = f"window {window}" if window else "full attention"
        cases += _cells(attention(window), label, largest, budget, seen)
    return cases + (_cells(linear, "linear attention", largest, budget, seen) if any(spec.linear_layers) else [])


def _cells(cell: CellCase, label: str, largest: int, budget: _Budget, seen: Seen) -> list[Case]:
    """Return cells as the user's steps hold them, of one sequence, of equal sequences and of mixed lengths."""

    def mixed(total: int) -> Case:
        return cell("mixed", mixed_lengths(total, total / MEDIAN_SHARES[0]))

    def even(length: int) -> Callable[[int], Case]:
        return lambda count: cell("even", (length,) * count)

    longest = budget.largest(f"{label}, tokens of one sequence", largest, lambda length: cell("single", (length,)))
    most = budget.largest(f"{label}, tokens of mixed lengths", largest, mixed)
    if not longest or not most:
        return []
    cases = [cell(SEEN, lengths) for lengths in seen.cells]
    cases += [cell("single", (length,)) for length in log_sizes(MIN_LENGTH, longest, FINE_SIZES)]
    for length in log_sizes(MIN_LENGTH, max(1, longest // 2), SIZES):
        full = budget.largest("", max(1, largest // length), even(length))
        cases += [even(length)(max(1, full // part)) for part in FILLS]
    for total in log_sizes(8 * MIN_LENGTH, most, SIZES):
        cases += [cell("mixed", mixed_lengths(total, total / part)) for part in MEDIAN_SHARES]
    return [case for case in cases if not budget.refusal(case)]


def mixed_lengths(total: int, median: float) -> tuple[int, ...]:
    """Return log-normal sequence lengths, taken at even quantiles, that sum to ``total``."""
    count = max(1, round(total / (median * float(np.exp(LENGTH_SIGMA**2 / 2)))))
    normal = NormalDist()
    weights = np.array([np.exp(LENGTH_SIGMA * normal.inv_cdf((i + 0.5) / count)) for i in range(count)])
    return tuple(int(length) for length in split_exactly(total, weights) if length > 0)


def split_exactly(total: int, weights: np.ndarray) -> np.ndarray:
    """Return integers in proportion to ``weights`` that sum to ``total`` (largest remainders)."""
    shares = total * weights / weights.sum()
    parts = np.floor(shares).astype(np.int64)
    parts[np.argsort(parts - shares, kind="stable")[: total - int(parts.sum())]] += 1
    return parts


def _dense_cases(spec: ModelSpec, topology: Topology, largest: int, budget: _Budget) -> list[Case]:
    tensor = topology.tensor_model_parallel_size
    shapes = [*spec.attention_projections(tensor), *spec.feed_forward(spec.shared_intermediate_size, tensor)]
    if any(spec.linear_layers):
        shapes += spec.attention_projections(tensor, linear=True)
    if not all(spec.moe_layers):
        shapes += spec.feed_forward(spec.dense_intermediate_size, tensor)
    most = max(1, largest // topology.context_parallel_size)
    cases = []
    for n, k in sorted(set(shapes)):

        def gemm(tokens: int, n: int = n, k: int = k) -> Case:
            return Case("dense", "", {"tokens": tokens, "n": n, "k": k})

        afforded = budget.largest(f"{n} x {k}, tokens", most, gemm)
        cases += [gemm(tokens) for tokens in log_sizes(1, afforded, FINE_SIZES)] if afforded else []
    return cases


def _router_cases(spec: ModelSpec, topology: Topology, largest: int, budget: _Budget) -> list[Case]:
    def route(tokens: int) -> Case:
        return Case("router", "", router_features(tokens, spec.hidden_size, spec.num_experts, spec.top_k))

    # Tensor-parallel ranks share a slot's tokens by sequence parallelism, context-parallel ones by position.
    afforded = budget.largest("tokens of one rank", max(1, largest // topology.ranks_per_slot), route)
    return [route(tokens) for tokens in log_sizes(1, afforded, FINE_SIZES)] if afforded else []


def _experts_cases(
    spec: ModelSpec,
    topology: Topology,
    largest: int,
    params: ProfileParams,
    budget: _Budget,
    rng: np.random.Generator,
    seen: Seen,
) -> list[Case]:
    """Return grouped GEMMs of one rank: no rows, one row, and loads of many sizes and splits."""
    local = spec.num_experts // topology.expert_model_parallel_size
    inter = max(1, spec.moe_intermediate_size // topology.expert_tensor_parallel_size)

    def rank(pattern: str, counts: np.ndarray) -> Case:
        parts = tuple(int(count) for count in counts)
        features = experts_features(parts, spec.hidden_size, inter, spec.num_experts)
        return Case("experts", pattern, features, parts, FLOAT8 if params.dtype == FLOAT8 else "")

    block_rows = largest * topology.slots_per_block * spec.top_k // topology.blocks_per_slot
    mean_rows = block_rows / topology.expert_model_parallel_size
    wanted = max(1, min(block_rows, round(mean_rows * params.load_factor)))
    afforded = budget.largest(
        "rows of one rank", wanted, lambda rows: rank("even", split_exactly(rows, np.ones(local)))
    )
    if not afforded:
        return []
    cases = [rank("empty", np.zeros(local, dtype=np.int64)), rank("sparse", split_exactly(1, np.eye(1, local)[0]))]
    cases += [rank(SEEN, np.array(rows)) for rows in seen.rank_rows if sum(rows)]
    for rows in log_sizes(MIN_ROWS, afforded, SIZES):
        cases += [rank(pattern, split_exactly(rows, weights)) for pattern, weights in _splits(local, rng)]
    return [case for case in cases if not budget.refusal(case)]


def _splits(local: int, rng: np.random.Generator) -> list[tuple[str, np.ndarray]]:
    """Return patterns and weights of the local experts: even, skewed, partly empty, one hot."""
    skewed = [np.exp(skew * rng.standard_normal(local)) for skew in SKEWS]
    keep = [rng.permutation(local) < max(1, local // part) for part in EMPTY_PARTS for _ in range(2)]
    sparse = [weights * kept for weights, kept in zip((skewed[0], skewed[-1]) * len(EMPTY_PARTS), keep, strict=True)]
    others = np.arange(local) > 0
    hot = [np.where(others, (1.0 - share) / max(1, local - 1), share) for share in HOT_SHARES]
    named = {"even": [np.ones(local)], "skewed": skewed, "sparse": sparse, "hot": hot}
    return [(pattern, weights) for pattern, listed in named.items() for weights in listed]

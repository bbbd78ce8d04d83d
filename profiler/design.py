"""Choose the cases of a sweep: which sizes, spread how, as many as the device affords.

Sizes are spaced in log between small and the largest that the job can meet, both ends included; where the device
cannot finish the largest in the time or memory given, the range ends at the largest that it can, and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from profiler.cases import Case, attention_features, experts_features
from profiler.errors import RoutePackError
from profiler.model_spec import ModelSpec
from profiler.params import ProfileParams
from profiler.topology import Topology
from profiler.work import Rates, case_bytes, case_seconds

MIN_LENGTH = 32
MIN_ROWS = 4
LENGTH_SIGMA = 0.9
"""Spread of drawn lengths: real rollouts are about log-normal."""
SKEWS = (0.5, 1.2)
"""Spreads of drawn expert loads: what a step shows, and a hot batch."""
RUNS_OUTSIDE_REPEATS = 2
"""Warm-up runs that a case must afford besides its least repeats."""


@dataclass(frozen=True)
class Design:
    """Hold the cases of a sweep and what was left out."""

    cases: tuple[Case, ...]
    limits: tuple[dict[str, Any], ...]
    """One entry per range that the device cannot finish: ``op``, ``what``, ``wanted``, ``designed``, ``reason``."""


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
    spec: ModelSpec, topology: Topology, max_tokens: int, params: ProfileParams, rates: Rates, item_bytes: int
) -> Design:
    """Return the cases for one model, topology and token cap, in a seeded order.

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
    budget = _Budget(params, rates, item_bytes)
    largest_cell = max(1, round(max_tokens * params.size_fraction))
    cases: list[Case] = []
    for window in sorted(set(spec.windows)):
        cases += _attention_cases(spec, topology, largest_cell, window, params.max_points, budget, rng)
    cases += _dense_cases(spec, topology, largest_cell, params.max_points, budget)
    cases += _experts_cases(spec, topology, largest_cell, params, budget, rng)
    for op in ("attention", "dense", "experts"):
        if not any(case.op == op for case in cases):
            reason = next((limit["reason"] for limit in budget.limits if limit["op"] == op), "no size fits")
            raise RoutePackError(
                f"This device affords no case of {op} for {spec.name}: {reason}. Raise that limit in the profile "
                "section, use larger parallel sizes or a larger device, or import --published timings."
            )
    distinct: dict[str, Case] = {}
    for case in cases:
        distinct.setdefault(case.case_id("forward", ""), case)
    order = rng.permutation(len(distinct))
    listed = list(distinct.values())
    return Design(tuple(listed[i] for i in order), tuple(budget.limits))


def log_sizes(low: int, high: int, points: int) -> list[int]:
    """Return at most ``points`` distinct integers, even in log, ``low`` and ``high`` included."""
    low = min(low, high)
    return sorted({round(float(size)) for size in np.geomspace(low, high, max(2, points))})


def _attention_cases(
    spec: ModelSpec, topology: Topology, largest: int, window: int, points: int, budget: _Budget,
    rng: np.random.Generator,
) -> list[Case]:  # fmt: skip
    """Return cells of one sequence, of equal sequences, and of mixed lengths, a third of the points each."""
    tensor = topology.tensor_model_parallel_size
    heads = (
        max(1, spec.num_attention_heads // tensor), max(1, spec.num_key_value_heads // tensor),
        spec.qk_head_dim, spec.v_head_dim,
    )  # fmt: skip

    def cell(pattern: str, lengths: tuple[int, ...]) -> Case:
        return Case("attention", pattern, attention_features(lengths, heads, window), lengths)

    def mixed(total: int) -> Case:
        return cell("mixed", mixed_lengths(total, total / 4))

    def even(length: int) -> Callable[[int], Case]:
        return lambda count: cell("even", (length,) * count)

    label = f"window {window}" if window else "full attention"
    longest = budget.largest(f"{label}, tokens of one sequence", largest, lambda length: even(length)(1))
    most = budget.largest(f"{label}, tokens of mixed lengths", largest, mixed)
    if not longest or not most:
        return []
    share = points // 3
    cases = [cell("single", (length,)) for length in log_sizes(MIN_LENGTH, longest, share)]
    for i, length in enumerate(log_sizes(MIN_LENGTH, max(1, longest // 2), points - 2 * share)):
        full = budget.largest("", max(1, largest // length), even(length))
        # Full cells are what a planner prices; a part-full one tells the floor from the slope.
        cases.append(even(length)(max(1, full if i % 2 == 0 else full // 4)))
    for total in log_sizes(8 * MIN_LENGTH, most, share):
        median = total * float(np.exp(rng.uniform(np.log(1 / 32), np.log(1 / 4))))
        drawn = cell("mixed", mixed_lengths(total, median))
        cases += [] if budget.refusal(drawn) else [drawn]
    return cases


def mixed_lengths(total: int, median: float) -> tuple[int, ...]:
    """Return log-normal sequence lengths, taken at even quantiles, that sum to ``total``."""
    count = max(1, round(total / (median * float(np.exp(LENGTH_SIGMA**2 / 2)))))
    normal = NormalDist()
    weights = np.array([np.exp(LENGTH_SIGMA * normal.inv_cdf((i + 0.5) / count)) for i in range(count)])
    lengths = split_exactly(total, weights)
    return tuple(int(length) for length in lengths if length > 0)


def split_exactly(total: int, weights: np.ndarray) -> np.ndarray:
    """Return integers in proportion to ``weights`` that sum to ``total`` (largest remainders)."""
    shares = total * weights / weights.sum()
    parts = np.floor(shares).astype(np.int64)
    parts[np.argsort(parts - shares, kind="stable")[: total - int(parts.sum())]] += 1
    return parts


def _dense_cases(spec: ModelSpec, topology: Topology, largest: int, points: int, budget: _Budget) -> list[Case]:
    tensor = topology.tensor_model_parallel_size
    shapes = [*spec.attention_projections(tensor), *spec.feed_forward(spec.shared_intermediate_size, tensor)]
    if not all(spec.moe_layers):
        shapes += spec.feed_forward(spec.dense_intermediate_size, tensor)
    shapes = sorted(set(shapes))
    most = max(1, largest // topology.context_parallel_size)
    cases = []
    for n, k in shapes:

        def gemm(tokens: int, n: int = n, k: int = k) -> Case:
            return Case("dense", "", {"tokens": tokens, "n": n, "k": k})

        afforded = budget.largest(f"{n} x {k}, tokens", most, gemm)
        cases += [gemm(tokens) for tokens in log_sizes(1, afforded, max(4, points // len(shapes)))] if afforded else []
    return cases


def _experts_cases(
    spec: ModelSpec, topology: Topology, largest: int, params: ProfileParams, budget: _Budget, rng: np.random.Generator
) -> list[Case]:
    """Return grouped GEMMs of one rank: no rows at all, and even, skewed and partly empty splits of many sizes."""
    local = spec.num_experts // topology.expert_model_parallel_size
    inter = max(1, spec.moe_intermediate_size // topology.expert_tensor_parallel_size)

    def rank(pattern: str, counts: np.ndarray) -> Case:
        parts = tuple(int(count) for count in counts)
        return Case("experts", pattern, experts_features(parts, spec.hidden_size, inter, spec.num_experts), parts)

    block_rows = largest * topology.slots_per_block * spec.top_k // topology.blocks_per_slot
    mean_rows = block_rows / topology.expert_model_parallel_size
    wanted = max(1, min(block_rows, round(mean_rows * params.load_factor)))
    afforded = budget.largest(
        "rows of one rank", wanted, lambda rows: rank("even", split_exactly(rows, np.ones(local)))
    )
    if not afforded:
        return []
    cases = [rank("empty", np.zeros(local, dtype=np.int64)), rank("sparse", split_exactly(1, np.eye(1, local)[0]))]
    third = max(2, (params.max_points - len(cases)) // 3)
    for i, rows in enumerate(log_sizes(MIN_ROWS, afforded, third)):
        even = np.ones(local)
        skewed = np.exp(SKEWS[i % len(SKEWS)] * rng.standard_normal(local))
        sparse = skewed * (rng.permutation(local) < max(1, local // 2))
        for pattern, weights in (("even", even), ("skewed", skewed), ("sparse", sparse)):
            drawn = rank(pattern, split_exactly(rows, weights))
            cases += [] if budget.refusal(drawn) else [drawn]
    return cases

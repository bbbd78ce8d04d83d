"""Lay out the pool of a sweep: every case that is worth timing, of which rounds choose a few.

Sizes are spaced in log between small and the largest that the job can meet, both ends included, or the largest that the
device can finish in the time and memory given. Cells and loads of the user's own steps join with the pattern ``seen``.

A *class* is what is chosen from as one: an operation, for attention each window, for dense each shape. What is timed
next is decided in rounds, by a chooser of a floor above or evenly. Invariant: a round is a function of the pool, of
which cases were timed, of their rows and of the seed, so that a killed sweep goes on with the same cases.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np

from profiler.cases.case import Case, Rates, Seen, case_bytes, case_seconds, cell_case, experts_case
from profiler.errors import RoutePackError, explained
from profiler.model_spec import ModelSpec
from profiler.params import FLOAT8, ProfileParams, Topology, check_sizes

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
LOAD_FACTOR = 2.0
"""Most routed rows of an expert rank, as a multiple of its mean load at a full cap."""
LEAST_POINTS = 4
"""Of an operation with many classes (dense shapes), each gets at least so many cases."""
SIZE_FEATURES = ("tokens", "rows", "num_sequences", "active_experts")
RUNS_OUTSIDE_REPEATS = 2
"""Warm-up runs that a case or an exchange must afford besides its least repeats."""


def class_of(case: Case) -> tuple[str, int, int, int]:
    """Return what a case is chosen among: operation, window, n and k (0 where there is none)."""
    window, n, k = (case.features.get(name, 0) for name in ("window", "n", "k"))
    return case.op, window, n, k


@dataclass(frozen=True)
class Design:
    """The pool of a sweep for one model, topology and token cap, and what was left out."""

    spec: ModelSpec
    topology: Topology
    max_tokens: int
    params: ProfileParams
    rates: Rates
    item_bytes: int
    seen: Seen = field(default_factory=Seen)
    cases: list[Case] = field(init=False, default_factory=list)
    """In a seeded order."""
    limits: list[dict[str, Any]] = field(init=False, default_factory=list)
    """One entry per range that the device cannot finish: ``op``, ``what``, ``wanted``, ``designed``, ``reason``."""

    def __post_init__(self) -> None:
        spec = self.spec
        with explained(of=ValueError):
            check_sizes(spec, self.topology)
        rng = np.random.default_rng(self.params.seed)
        found = {"attention": [case for window in spec.attention_windows for case in self._cells("attention", window)]}
        if any(spec.linear_layers):
            found["linear_attention"] = self._cells("linear_attention")
        routed = {name: getattr(spec, name) for name in ("hidden_size", "num_experts", "top_k")}
        # Tensor-parallel ranks share a slot's tokens by sequence parallelism, context-parallel ones by position.
        share = self.max_tokens // self.topology.ranks_per_slot
        found |= {"dense": self._dense(), "router": self._fine("tokens of one rank", share, "router", routed)}
        found["experts"] = self._experts(rng)
        distinct: dict[str, Case] = {}
        for op, cases in found.items():
            if not cases:
                reason = next((limit["reason"] for limit in self.limits if limit["op"] == op), "no size fits")
                raise RoutePackError(
                    f"This device affords no case of {op} for {spec.name}: {reason}. Raise that limit in the profile "
                    "section, use larger parallel sizes or a larger device, or import --published timings."
                )
            for case in cases:
                distinct.setdefault(case.case_id("forward", ""), case)
        listed = list(distinct.values())
        self.cases.extend(listed[i] for i in rng.permutation(len(listed)))

    @property
    def longest_s(self) -> float:
        """Seconds that one run of a case or an exchange may take."""
        return self.params.max_case_seconds / (self.params.min_repeats + RUNS_OUTSIDE_REPEATS)

    def _refusal(self, case: Case) -> str:
        """Return why a case cannot run, or an empty string."""
        needed, allowed = case_bytes(case, self.item_bytes), self.rates.memory_bytes
        if needed > allowed:
            return f"needs {needed / 2**30:.1f} GiB, {allowed / 2**30:.1f} are allowed (max_memory_gib)"
        seconds = case_seconds(case, self.rates, self.item_bytes)
        if seconds > self.longest_s:
            return f"one run would take {seconds:.2f} s, {self.longest_s:.2f} are allowed (max_case_seconds)"
        return ""

    def _largest(self, what: str, wanted: int, build: Callable[[int], Case]) -> int:
        """Return the largest size up to ``wanted`` that the device affords, 0 if none; note a cut under ``what``."""
        afforded = bisect_left(range(1, wanted + 1), True, key=lambda size: bool(self._refusal(build(size))))
        if what and afforded < wanted:
            limit = build(afforded + 1)
            about = {"op": limit.op, "what": what, "wanted": wanted, "designed": afforded}
            self.limits.append(about | {"reason": self._refusal(limit)})
        return afforded

    def _cells(self, op: str, window: int = 0) -> list[Case]:
        """Return cells as the user's steps hold them, of one sequence, of equal sequences and of mixed lengths."""
        heads = self.spec.attention_heads(self.topology.tensor_model_parallel_size, op == "linear_attention")
        cell = partial(cell_case, op, heads=heads, window=window)

        def mixed(total: int, part: int = MEDIAN_SHARES[0]) -> Case:
            return cell("mixed", mixed_lengths(total, total / part))

        label = f"window {window}" if window else "full attention" if op == "attention" else "linear attention"
        longest = self._largest(f"{label}, tokens of one sequence", self.max_tokens, lambda n: cell("single", (n,)))
        most = self._largest(f"{label}, tokens of mixed lengths", self.max_tokens, mixed)
        if not longest or not most:
            return []
        cases = [cell(SEEN, lengths) for lengths in self.seen.cells]
        cases += [cell("single", (length,)) for length in log_sizes(MIN_LENGTH, longest, FINE_SIZES)]
        for length in log_sizes(MIN_LENGTH, max(1, longest // 2), SIZES):

            def even(count: int, length: int = length) -> Case:
                return cell("even", (length,) * count)

            full = self._largest("", max(1, self.max_tokens // length), even)
            cases += [even(max(1, full // part)) for part in FILLS]
        for total in log_sizes(8 * MIN_LENGTH, most, SIZES):
            cases += [mixed(total, part) for part in MEDIAN_SHARES]
        return [case for case in cases if not self._refusal(case)]

    def _dense(self) -> list[Case]:
        spec, tensor = self.spec, self.topology.tensor_model_parallel_size
        shapes = {*spec.attention_projections(tensor), *spec.feed_forward(spec.shared_intermediate_size, tensor)}
        if any(spec.linear_layers):
            shapes |= {*spec.attention_projections(tensor, linear=True)}
        if not all(spec.moe_layers):
            shapes |= {*spec.feed_forward(spec.dense_intermediate_size, tensor)}
        most, cases = self.max_tokens // self.topology.context_parallel_size, []
        for n, k in sorted(shapes):
            cases += self._fine(f"{n} x {k}, tokens", most, "dense", {"n": n, "k": k})
        return cases

    def _fine(self, what: str, most: int, op: str, shape: dict[str, int]) -> list[Case]:
        def build(tokens: int) -> Case:
            return Case(op, "", {"tokens": tokens, **shape})

        afforded = self._largest(what, max(1, most), build)
        return [build(tokens) for tokens in log_sizes(1, afforded, FINE_SIZES)] if afforded else []

    def _experts(self, rng: np.random.Generator) -> list[Case]:
        """Return grouped GEMMs of one rank: no rows, one row, and loads of many sizes and splits."""
        spec, topology = self.spec, self.topology
        ranks = topology.expert_model_parallel_size
        local, inter = spec.num_experts // ranks, spec.moe_intermediate_size // topology.expert_tensor_parallel_size
        dtype = FLOAT8 if self.params.dtype == FLOAT8 else ""
        hidden, experts = spec.hidden_size, spec.num_experts
        rank = partial(experts_case, hidden=hidden, inter=max(1, inter), num_experts=experts, dtype=dtype)
        block_rows = self.max_tokens * topology.slots_per_block * spec.top_k // topology.blocks_per_slot
        wanted = max(1, min(block_rows, round(block_rows / ranks * LOAD_FACTOR)))
        afforded = self._largest("rows of one rank", wanted, lambda n: rank("even", split_exactly(n, np.ones(local))))
        if not afforded:
            return []
        cases = [rank("empty", [0] * local), rank("sparse", [1] + [0] * (local - 1))]
        cases += [rank(SEEN, rows) for rows in self.seen.rank_rows if sum(rows)]
        for rows in log_sizes(MIN_ROWS, afforded, SIZES):
            cases += [rank(pattern, split_exactly(rows, weights)) for pattern, weights in _splits(local, rng)]
        return [case for case in cases if not self._refusal(case)]


def log_sizes(low: int, high: int, points: int) -> list[int]:
    """Return at most ``points`` distinct integers, even in log, ``low`` and ``high`` included."""
    low = min(low, high)
    return sorted({round(float(size)) for size in np.geomspace(low, high, max(2, points))})


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


def _splits(local: int, rng: np.random.Generator) -> list[tuple[str, np.ndarray]]:
    """Return patterns and weights of the local experts: even, skewed, partly empty, one hot."""
    skewed = [np.exp(skew * rng.standard_normal(local)) for skew in SKEWS]
    few = [max(1, local // part) for part in EMPTY_PARTS]
    sparse = [weights * (rng.permutation(local) < count) for count in few for weights in (skewed[0], skewed[-1])]
    others = np.arange(local) > 0
    hot = [np.where(others, (1.0 - share) / max(1, local - 1), share) for share in HOT_SHARES]
    named = {"even": [np.ones(local)], "skewed": skewed, "sparse": sparse, "hot": hot}
    return [(pattern, weights) for pattern, listed in named.items() for weights in listed]


@dataclass(frozen=True)
class Round:
    """What to time next, or why nothing more is timed, and how wrong predictions are so far."""

    cases: tuple[Case, ...] = ()
    errors_pct: Mapping[str, float] = field(default_factory=dict)
    """Median error of held-out rows per operation, percent; operations that cannot be judged yet are absent."""
    stopped_by: str = ""
    """``target_error``, ``max_points``, or empty while there is something to time."""


Chooser = Callable[[Sequence[Case], Collection[Case], Iterable[Mapping[str, Any]], ProfileParams], Round]
"""From the pool, the finished ones among its own objects, all rows so far and the settings to the next round."""


def even_round(pool: Sequence[Case], timed: Collection[Case], _: Any, params: ProfileParams) -> Round:
    """Return what is not timed yet of ``max_points`` cases of every class, even over each pattern's sizes."""
    caps = points_by_class(pool, params.max_points)
    wanted = {id(case) for key, cases in by_class(pool).items() for case in even_choice(cases, caps[key])}
    wanted -= {id(case) for case in timed}
    cases = tuple(case for case in pool if id(case) in wanted)
    return Round(cases, stopped_by="" if cases else "max_points")


def by_class(pool: Sequence[Case]) -> dict[tuple[str, int, int, int], list[Case]]:
    """Return the cases of every class, classes and cases in an order that the pool's does not touch."""
    classes: dict[tuple[str, int, int, int], list[Case]] = {}
    for case in sorted(pool, key=lambda case: (class_of(case), case.case_id("forward", ""))):
        classes.setdefault(class_of(case), []).append(case)
    return classes


def points_by_class(pool: Sequence[Case], max_points: int) -> dict[tuple[str, int, int, int], int]:
    """Return the most cases of every class: ``max_points``, which the shapes of dense share."""
    keys = {class_of(case) for case in pool}
    shapes = sum(key[0] == "dense" for key in keys)
    return {key: max(LEAST_POINTS, max_points // shapes) if key[0] == "dense" else max_points for key in keys}


def even_choice(cases: Sequence[Case], count: int) -> list[Case]:
    """Return at most ``count`` cases: every pattern its share, from its least to its largest case."""
    patterns: dict[str, list[Case]] = {}
    for case in sorted(cases, key=lambda case: tuple(case.features.get(name, 0) for name in SIZE_FEATURES)):
        patterns.setdefault(case.pattern, []).append(case)
    chosen: list[Case] = []
    # Small patterns first: what they leave goes to the others.
    for left, members in zip(range(len(patterns), 0, -1), sorted(patterns.values(), key=len), strict=True):
        share = min((count - len(chosen)) // left, len(members))
        # A single place is the largest: it costs most of a step.
        last = len(members) - 1
        chosen += [members[i] for i in np.linspace(last if share == 1 else 0, last, share).round().astype(np.int64)]
    return chosen

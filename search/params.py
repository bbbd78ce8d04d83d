"""Knobs of the planner, its budget, and the ranges the tuner may search."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, fields, replace

from profiler.params import MOST_RANKS, MOST_TOKENS, check_settings

AVERAGE, NO_ROUTES, CONSTANT = "average", "none", "constant"
"""Where a trainer may send padding; see ``PlannerParams.padding_routes``."""


@dataclass(frozen=True, slots=True)
class PlannerParams:
    """Hold the planner's settings; defaults are good for a few seconds of planning on two cores."""

    max_iterations: int = 300_000
    """Packing proposals per chain when no other budget is given."""
    starts: int = 2
    """Independent chains; the best one's plan is returned."""
    alternations: int = 1
    """Times a chain goes through packing and then placement."""
    first_share: float = 0.6
    """Share of a chain's budget spent before its first row-aware placement."""
    extra_rows: int = 6
    """Rows above the least number that are tried."""
    hot_temperature: float = 30.0
    """First temperature of packing, in units of the lowest decile of the prices a cold leg refuses."""
    cold_temperature: float = 2e-5
    """Last temperature of packing, as a share of the mean time of a (row, block)."""
    relocate_share: float = 0.15
    """Share of proposals that move one sample instead of swapping two."""
    similar_share: float = 0.5
    """Share of proposals that swap samples of similar length."""
    within_share: float = 0.15
    """Share of proposals between cells of one row and block, which are cheap; drawn before the others."""
    two_share: float = 0.2
    """Share of proposals that exchange one sample for two, likewise."""
    cell_share: float = 0.04
    """Share of proposals that swap whole cells between rows or blocks, likewise."""
    placement_swaps: int = 50_000
    """Expert swaps proposed per layer after packing (before it a fifth); wall time lowers or raises them."""
    placement_temperature: float = 2e-3
    """First temperature of the placement, as a share of a layer's mean time in one (row, block)."""
    horizon_steps: float = 10.0
    """Steps over which a new placement must pay for moving its experts."""
    stickiness: float = 2.5
    """Factor on the price of moving experts: 0 moves them for free, larger keeps the old placement longer."""
    link_gbytes_per_s: float = 0.0
    """Bandwidth of one rank for moving experts, in 1e9 bytes a second; 0: as measured, else as the
    device states it, else 25."""
    sequence_alignment: int = 1
    """Tokens every sequence is padded to a multiple of (Megatron: tp x cp x 2)."""
    padding_routes: str = AVERAGE
    """Where the trainer sends that padding: ``average``, like average tokens; ``none``, to no expert; ``constant``,
    each token to experts 0 to top_k - 1 (NeMo-RL, SkyRL), or to those named, as in ``constant 0`` (rows of zeros)."""
    equal_samples: bool = False
    """Give every DP slot the same number of samples, or one more (verl, ROLL, SkyRL)."""
    max_received_rows: int = 0
    """Most routed rows an EP rank may receive in one row and layer (activation memory); 0 for no limit."""
    receive_slack: float = 0.0
    """Share of ``max_received_rows`` that the search keeps free, so that it rarely touches the limit."""
    couple_blocks: bool = False
    """All EP blocks wait for one another layer by layer (FSDP gathers dense weights over the whole island)."""
    ranks_per_node: int = 0
    """EP ranks of one node: the first placement balances nodes before ranks; 0 where it does not matter."""

    def __post_init__(self) -> None:
        check_settings(self, RANGES)
        if 0 < self.link_gbytes_per_s < 1e-3:
            raise ValueError(f"Expected link_gbytes_per_s to be 0 or at least 0.001, got {self.link_gbytes_per_s}.")
        padding_experts(self.padding_routes)
        for names in (("within_share", "two_share", "cell_share"), ("relocate_share", "similar_share")):
            shares = [getattr(self, name) for name in names]
            if sum(shares) > 1:
                raise ValueError(f"Expected {' + '.join(names)} <= 1, got {' + '.join(map(str, shares))}.")


RANGES: dict[str, tuple[float, float]] = {
    "max_iterations": (1, 10**9),
    "starts": (1, 64),
    "alternations": (1, 100),
    "extra_rows": (0, 4096),
    "hot_temperature": (0, 1e6),
    "cold_temperature": (0, 1e3),
    "placement_swaps": (0, 10**8),
    "placement_temperature": (0, 1e3),
    "horizon_steps": (0, 1e12),
    "stickiness": (0, 1e12),
    "link_gbytes_per_s": (0, 1e6),
    "sequence_alignment": (1, MOST_TOKENS),
    "max_received_rows": (0, 2**40),
    "receive_slack": (0, 0.99),
    "ranks_per_node": (0, MOST_RANKS),
    **{name: (0, 1) for name in PlannerParams.__dataclass_fields__ if name.endswith("_share")},
}
"""Least and most of each setting, both allowed."""


def padding_experts(routes: str, top_k: int = 1) -> list[int]:
    """Return the experts to which every token of padding goes; none where it is spread or sent nowhere.

    ValueError unless ``routes`` is a legal ``padding_routes``.
    """
    kind, *named = routes.split() or [""]
    plain = all(re.fullmatch("[0-9]{1,7}", one) for one in named) and len(set(map(int, named))) == len(named)
    if not (plain and kind == CONSTANT) and routes not in (AVERAGE, NO_ROUTES):
        legal = f"'{AVERAGE}', '{NO_ROUTES}', '{CONSTANT}' or '{CONSTANT} 0 1 ...' (distinct experts)"
        raise ValueError(f"Expected padding_routes {legal}, got {routes!r:.80}.")
    return [] if kind != CONSTANT else [int(one) for one in named] or list(range(top_k))


@dataclass
class StopCriterion:
    """Tell a search how much of its budget is spent: the largest share of the limits given. Only here is wall time.

    One that only says yes or no (the last two) cools nothing: iterations or wall time beside it drive the temperature.
    """

    max_iterations: float | None = None
    """Packing proposals per chain: the same plan on every run and machine."""
    max_runtime: float | None = None
    """Seconds of wall time since ``reset``."""
    no_improvement: float | None = None
    """Proposals of a chain without a better packing."""
    gap_below: float | None = None
    """Share above the lower bound within which the best packing is near enough to the optimum."""

    def __post_init__(self) -> None:
        for name, least in {
            "max_iterations": 1,
            "max_runtime": math.ulp(0.0),
            "no_improvement": 1,
            "gap_below": 0,
        }.items():
            value, wanted = getattr(self, name), "> 0" if name == "max_runtime" else f">= {least:g}"
            if value is not None and not least <= value < math.inf:
                raise ValueError(f"Expected {name.replace('_', ' ')} {wanted}, got {value}.")
        self.reset()

    @property
    def name(self) -> str:
        """What the plan reports as ``stopped_by``."""
        return "|".join(field.name for field in fields(self) if getattr(self, field.name) is not None)

    def reset(self) -> None:
        """Start the clock."""
        self._start_s = time.monotonic()

    def progress(self, iterations: int, idle: int = 0, gap: float = math.inf) -> float:
        """Return the share of the budget spent; 1 or more means stop.

        ``iterations`` counts a chain's packing proposals, ``idle`` those since its last improvement, ``gap`` is its
        best time above the lower bound as a share of it (mean over blocks).
        """
        spent = 0.0
        if self.max_iterations is not None:
            spent = iterations / self.max_iterations
        if self.max_runtime is not None:
            spent = max(spent, (time.monotonic() - self._start_s) / self.max_runtime)
        enough = self.no_improvement is not None and idle >= self.no_improvement
        near = self.gap_below is not None and gap <= self.gap_below
        return max(spent, 1.0) if enough or near else spent


@dataclass(frozen=True, slots=True)
class Range:
    """Values a tuner may give to one knob."""

    low: float
    high: float
    log: bool = False
    integer: bool = False


TUNABLE: dict[str, Range] = {
    "max_iterations": Range(10_000, 4_000_000, log=True, integer=True),
    "starts": Range(1, 4, integer=True),
    "extra_rows": Range(0, 8, integer=True),
    "first_share": Range(0.2, 0.9),
    "placement_swaps": Range(1_000, 200_000, log=True, integer=True),
    "stickiness": Range(0.25, 10.0, log=True),
}
"""The knobs that buy step time with planning time or moves. The others are settings: shares of moves, temperatures and
alternations change a plan by 0.03 % (experiments/LOG.md), the rest are facts of the job."""


def tunable_ranges(base: PlannerParams) -> dict[str, Range]:
    """Return what a tuner may vary around ``base``: every range reaches its value, so that a study can start from it.

    A knob that ``base`` sets to 0 on a logarithmic range is switched off and stays so.
    """
    given = {name: (knob, getattr(base, name)) for name, knob in TUNABLE.items()}
    return {
        name: replace(knob, low=min(knob.low, value), high=max(knob.high, value))
        for name, (knob, value) in given.items()
        if value > 0 or not knob.log
    }

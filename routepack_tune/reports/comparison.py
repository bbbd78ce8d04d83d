"""Put a plan beside the default and the published planners, on the same batches and by the same frozen times.

*Share lost to imbalance* is the part of a predicted step time that a forced-balanced step in the same number of rows
(every cell and every EP rank at its mean) would not need.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from profiler.errors import RoutePackError

if TYPE_CHECKING:
    from routepack_tune.planner import Planner
    from search import Plan, Problem, StepBatch, StepTime

TUNED = "RoutePack-Tune (tuned plan)"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one planner makes of one step batch; times are predicted seconds but for ``plan_s``."""

    planner: str
    step_s: float
    attention_s: float
    experts_s: float
    rest_s: float
    lost_share: float
    """Share of the step time lost to imbalance."""
    rows: int
    plan_s: float
    """Measured wall time of planning on this machine (for baselines with pricing the plan)."""


def compare_planners(planner: Planner, batches: Sequence[StepBatch], seed: int = 0) -> list[Outcome]:
    """Return the mean outcome of each planner over ``batches``: default, published baselines, tuned.

    A baseline that finds no packing under the cap for a batch is left out.
    """
    import pandas as pd  # type: ignore[import-untyped]

    found = pd.DataFrame([asdict(one) for batch in batches for one in _outcomes(planner, batch, seed)])
    planners = found.groupby("planner", sort=False)
    means = planners.mean()[planners.size() == len(batches)].reset_index()
    return [Outcome(**one) for one in means.round({"rows": 0}).astype({"rows": int}).to_dict("records")]


def _outcomes(planner: Planner, batch: StepBatch, seed: int) -> Iterator[Outcome]:
    from search import SHOWN_BASELINES, build_problem, price_baseline

    problem = build_problem(batch, *planner.job)  # every contestant pays the planner's own alignment and coupling

    def outcome(name: str, begin: float, of: StepTime, rows: int) -> Outcome:
        plan_s, lost = time.perf_counter() - begin, lost_share(problem, of.step_time_s, rows)
        return Outcome(name, of.step_time_s, of.attention_s, of.experts_s, of.rest_s, lost, rows, plan_s)

    for name in SHOWN_BASELINES:
        begin = time.perf_counter()
        with contextlib.suppress(RoutePackError):  # Karmarkar-Karp knows no cap: some batches it cannot pack
            priced, rows = price_baseline(problem, name)
            yield outcome(name, begin, priced.step_time(), rows)
    begin = time.perf_counter()
    plan = planner.plan(batch, seed=seed)
    yield outcome(TUNED, begin, plan.predicted, plan.num_rows)


def lost_share(problem: Problem, step_time_s: float, rows: int) -> float:
    """Return the share of a step time that perfect balance in the same number of rows would save."""
    from search import balanced_ns

    return max(0.0, 1.0 - balanced_ns(problem, rows) * 1e-9 / problem.tables.pipeline_stages / step_time_s)


@dataclass(frozen=True, slots=True)
class RankLoad:
    """How evenly a plan loads the EP ranks."""

    relative_LP: np.ndarray
    """[L, P]: routed rows of each rank over its row's mean, averaged over rows and blocks; 1 is even."""
    hottest: np.ndarray
    """[rows x blocks x L]: the hottest rank over the mean, one value per barrier."""


def rank_load(rank_rows_RBPL: np.ndarray) -> RankLoad:
    """Return the relative load of EP ranks; barriers without any routed row are left out."""
    loads = rank_rows_RBPL.astype(np.float64)
    mean = loads.mean(axis=2, keepdims=True)
    relative = np.divide(loads, mean, out=np.ones_like(loads), where=mean > 0)
    hottest = relative.max(axis=2)[mean[:, :, 0] > 0]
    return RankLoad(relative.mean(axis=(0, 1)).T, hottest.ravel())


def loads_before_and_after(planner: Planner, batch: StepBatch, plan: Plan) -> tuple[RankLoad, RankLoad]:
    """Return the EP ranks' load under the default plan and under ``plan``."""
    from search import DEFAULT_BASELINE, build_problem, evaluate, price_baseline

    problem = build_problem(batch, *planner.job)
    before, _ = price_baseline(problem, DEFAULT_BASELINE)
    after = evaluate(problem, plan.row_N, plan.slot_N, plan.placement_LE, plan.num_rows)
    return rank_load(before.rank_rows_RBPL), rank_load(after.rank_rows_RBPL)

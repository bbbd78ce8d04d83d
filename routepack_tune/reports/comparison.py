"""Put a plan beside the default and the published planners, on the same batches and by the same frozen times.

Batches are consecutive steps of one job, so that moving experts counts. *Share lost to imbalance* is the part of a
predicted step time that a forced-balanced step in the same number of rows (every cell and every EP rank at its mean)
would not need.
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one planner makes of consecutive step batches: means, in predicted seconds but for ``plan_s``."""

    planner: str
    step_s: float
    """Step time; moves come on top."""
    attention_s: float
    experts_s: float
    rest_s: float
    move_s: float
    """Moving experts from where the step before left them."""
    free_s: float
    """Step time where moves are free: of a plan that knows no step before."""
    lost_share: float
    """Share of the step time lost to imbalance."""
    rows: int
    plan_s: float
    """Measured wall time of planning on this machine (for baselines with pricing the plan)."""

    @property
    def total_s(self) -> float:
        """What a job waits for: step and moves."""
        return self.step_s + self.move_s


def our_name(planner: Planner) -> str:
    """Return what our plans are called: a bundle may hold the default settings."""
    tuned = planner.provenance.get("export") == "best"
    return f"RoutePack-Tune ({'tuned' if tuned else 'default'} settings)"


def compare_planners(
    planner: Planner, batches: Sequence[StepBatch], before: StepBatch | None = None, seed: int = 0
) -> list[Outcome]:
    """Return the mean outcome of each planner over consecutive ``batches``: default, published baselines, ours.

    Every planner goes on from its own placement of the batch before (that of ``before``, for the first one), and pays
    for the experts that it moves. A baseline that finds no packing under the cap for a batch is left out.
    """
    import pandas as pd  # type: ignore[import-untyped]

    chain = [batches[0] if before is None else before, *batches]
    found = pd.DataFrame([asdict(one) for one in (*_baselines(planner, chain), *_ours(planner, chain, seed))])
    planners = found.groupby("planner", sort=False)
    means = planners.mean()[planners.size() == len(batches)].reset_index()
    return [Outcome(**one) for one in means.round({"rows": 0}).astype({"rows": int}).to_dict("records")]


def _baselines(planner: Planner, chain: Sequence[StepBatch]) -> Iterator[Outcome]:
    """Price every baseline on all batches but the first, from where it leaves the experts on the batch before."""
    from search import SHOWN_BASELINES, build_problem, place_baseline, price_baseline
    from search.placement.placer import list_moves

    problems = [build_problem(batch, *planner.job) for batch in chain]  # all pay the planner's alignment and coupling
    for name in SHOWN_BASELINES:
        placement_LE = place_baseline(problems[0], name)
        for problem in problems[1:]:
            with contextlib.suppress(RoutePackError):  # Karmarkar-Karp knows no cap: some batches it cannot pack
                begin = time.perf_counter()
                priced, rows = price_baseline(problem, name)
                plan_s, old_LE = time.perf_counter() - begin, placement_LE
                placement_LE = place_baseline(problem, name, old_LE)
                moves, _ = list_moves(old_LE, placement_LE, problem)
                yield _outcome(name, problem, priced.step_time(), rows, plan_s, moves.seconds)


def _ours(planner: Planner, chain: Sequence[StepBatch], seed: int) -> Iterator[Outcome]:
    from search import build_problem

    previous = planner.plan(chain[0], seed=seed)
    for batch in chain[1:]:
        fresh, begin = planner.plan(batch, seed=seed), time.perf_counter()
        previous = planner.plan(batch, seed=seed, previous=previous)
        plan_s, problem = time.perf_counter() - begin, build_problem(batch, *planner.job)
        costs = previous.predicted, previous.num_rows, plan_s, previous.moves.seconds, fresh.predicted.step_time_s
        yield _outcome(our_name(planner), problem, *costs)


def _outcome(
    name: str, problem: Problem, of: StepTime, rows: int, plan_s: float, move_s: float, free_s: float | None = None
) -> Outcome:
    parts = of.step_time_s, of.attention_s, of.experts_s, of.rest_s, move_s, free_s or of.step_time_s
    return Outcome(name, *parts, lost_share(problem, of.step_time_s, rows), rows, plan_s)


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

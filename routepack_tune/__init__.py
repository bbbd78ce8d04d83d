"""RoutePack-Tune: plan MoE reinforcement-learning steps from learned times.

Training jobs use ``load_planner(bundle).plan(batch)``; importing this package needs numpy and numba alone.
"""

from typing import TYPE_CHECKING, Any

from profiler.errors import RoutePackError
from routepack_tune.api import deploy, fit, plan, profile, tune
from routepack_tune.bundle import load_planner
from routepack_tune.planner import Planner
from routepack_tune.steps.traces import list_step_files, load_step_batch, save_step_batch
from routepack_tune.trainers import relayout

if TYPE_CHECKING:
    from search import Plan, StepBatch

__all__ = [
    "Plan",
    "Planner",
    "RoutePackError",
    "StepBatch",
    "deploy",
    "fit",
    "list_step_files",
    "load_planner",
    "load_step_batch",
    "plan",
    "profile",
    "relayout",
    "save_step_batch",
    "tune",
]


def __getattr__(name: str) -> Any:
    # The search compiles with numba, whose import takes longer than all else here.
    if name in ("Plan", "StepBatch"):
        import search

        return getattr(search, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

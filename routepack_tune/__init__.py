"""RoutePack-Tune: plan MoE reinforcement-learning steps from learned times.

In a training job, with numpy and numba alone::

    import routepack_tune

    planner = routepack_tune.load_planner("bundle")  # compiles what plans run
    last_plan = None
    for step in range(2):
        batch = f"steps/step{step:02d}.npz"  # or planner.batch(lengths=..., expert_counts=...)
        last_plan = planner.plan(batch, previous=last_plan)
        print(last_plan.num_rows, last_plan.predicted.step_time_s, last_plan.moves.seconds)

The verbs ``profile``, ``fit``, ``tune``, ``deploy``, ``plan``, ``check`` and ``rollback`` are those of the command
``routepack``. They need the extra ``tune``; to take times, the extra ``profile``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import routepack_tune.shadowed  # noqa: F401

# isort: split
from profiler.errors import RoutePackError
from routepack_tune.api import check, deploy, fit, plan, profile, rollback, tune
from routepack_tune.bundle import load_planner
from routepack_tune.config import Config, load_config
from routepack_tune.job import Job
from routepack_tune.planner import Planner
from routepack_tune.steps.traces import batch_from_arrays, list_step_files, load_step_batch, save_step_batch
from routepack_tune.trainers import relayout

if TYPE_CHECKING:
    from search import Plan, StepBatch, StopCriterion, StreamingPlanner

__all__ = [
    "Config",
    "Job",
    "Plan",
    "Planner",
    "RoutePackError",
    "StepBatch",
    "StopCriterion",
    "StreamingPlanner",
    "batch_from_arrays",
    "check",
    "deploy",
    "fit",
    "list_step_files",
    "load_config",
    "load_planner",
    "load_step_batch",
    "plan",
    "profile",
    "relayout",
    "rollback",
    "save_step_batch",
    "tune",
]
_OF_THE_SEARCH = ("Plan", "StepBatch", "StopCriterion", "StreamingPlanner")
"""Names that come when asked for: the search compiles with numba, whose import takes longer than all else here."""


def __getattr__(name: str) -> Any:
    if name in _OF_THE_SEARCH:
        return getattr(import_module("search"), name)
    if name == "__version__":
        return import_module("routepack_tune.environment").version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

"""RoutePack-Tune: plan MoE reinforcement-learning steps from learned times.

Training jobs use ``load_planner(bundle).plan(batch)``; importing this package needs numpy and numba alone.
"""

from profiler.errors import RoutePackError
from routepack_tune.api import deploy, fit, plan, profile, tune
from routepack_tune.bundle import Planner, load_planner
from routepack_tune.steps.traces import list_step_files, load_step_batch, save_step_batch

__all__ = [
    "Planner",
    "RoutePackError",
    "deploy",
    "fit",
    "list_step_files",
    "load_planner",
    "load_step_batch",
    "plan",
    "profile",
    "save_step_batch",
    "tune",
]

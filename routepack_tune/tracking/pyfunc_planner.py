"""The model that MLflow's registry loads: a bundle's planner (models from code: no pickle is involved).

MLflow runs this file when a registered planner is loaded with ``mlflow.pyfunc.load_model``. ``predict`` plans the step
batches named by paths; training jobs call ``routepack_tune.load_planner`` on the downloaded bundle instead.
"""

from __future__ import annotations

from typing import Any

from mlflow.models import set_model
from mlflow.pyfunc import PythonModel


class PlannerModel(PythonModel):
    """Plan step batches with the bundle logged beside this file."""

    def load_context(self, context: Any) -> None:
        """Load the bundle; a device that differs is a warning here, since a registry host rarely is the cluster."""
        from routepack_tune import load_planner

        self.planner = load_planner(context.artifacts["bundle"], allow_mismatch=True)

    def predict(self, context: Any, model_input: list[str], params: dict[str, Any] | None = None) -> list[dict]:
        """Return what ``plan.json`` holds for each path of a step batch."""
        return [self.planner.plan(path).to_dict() for path in model_input]


set_model(PlannerModel())

"""The cost model that MLflow's registry loads: times by feature name (models from code: no pickle is involved).

MLflow runs this file when a registered cost model is loaded with ``mlflow.pyfunc.load_model``; the folder that
``routepack fit`` wrote is logged beside it. Its input has one row per question: ``op``, ``direction``, and the
features of that operation; features of other operations stay empty.
"""

# MLflow reads the hints of ``predict`` as they stand: no postponed annotations here.
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel


class TimesModel(PythonModel):
    """Answer microseconds and whether they are extrapolated."""

    def load_context(self, context: Any) -> None:
        """Load the cost model's folder."""
        from costmodels import CostModel

        self.model = CostModel.load(context.artifacts["costmodel"])

    def predict(self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Return ``time_us`` and ``extrapolated`` for every row of ``model_input``."""
        from routepack_tune.tracking.fit_tracking import predict_frame

        return predict_frame(self.model, model_input)


set_model(TimesModel())

"""Floor 2, learn it: measurements to predictors of time, and to the frozen tables that a planner looks up."""

from __future__ import annotations

from costmodels.cost_model import CostModel, tables_for, tables_key
from costmodels.fit import fit_cost_model
from costmodels.params import FitParams
from costmodels.tables import StepTables, lookup_many_ns, lookup_ns

__all__ = [
    "CostModel",
    "FitParams",
    "StepTables",
    "fit_cost_model",
    "lookup_many_ns",
    "lookup_ns",
    "tables_for",
    "tables_key",
]

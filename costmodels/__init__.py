"""Floor 2, learn it: measurements to predictors of time, and to the frozen tables that a planner looks up."""

from __future__ import annotations

from costmodels.compiled import compiled
from costmodels.cost_model import COST_MODEL_FILE, CostModel, tables_for, tables_key
from costmodels.fit import fit_cost_model
from costmodels.freezing.freeze import freeze_tables
from costmodels.params import FitParams
from costmodels.tables import StepTables, lookup_many_ns, lookup_ns

__all__ = [
    "COST_MODEL_FILE",
    "CostModel",
    "FitParams",
    "StepTables",
    "compiled",
    "fit_cost_model",
    "freeze_tables",
    "lookup_many_ns",
    "lookup_ns",
    "tables_for",
    "tables_key",
]

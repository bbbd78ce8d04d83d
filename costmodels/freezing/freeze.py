"""Freeze a cost model into integer-nanosecond tables for one model, topology and token cap.

What every table means is said once, in :class:`costmodels.tables.StepTables`. Each is evaluated at all its nodes in one
batch, the tile steps of the baseline included, then made non-decreasing: trees have steps, and a planner must never
gain by adding work. Where times fall, they are pooled (isotonic regression of their logs): a running maximum would
carry every upward error of the trees to all larger sizes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from costmodels.cost_model import CostModel, tables_key
from costmodels.freezing.notes import measured_length_max, measured_rows_max, table_notes
from costmodels.freezing.pricer import Pricer
from costmodels.tables import StepTables, lookup_many_ns, node_shift, table_nodes
from profiler import ModelSpec, Topology


def never_falling(time_ns: np.ndarray) -> np.ndarray:
    """Return the nearest non-decreasing times: stretches that fall are pooled to their geometric mean (of 1 + time)."""
    from scipy.optimize import isotonic_regression

    pooled = isotonic_regression(np.log1p(time_ns))
    starts = pooled.blocks[:-1]
    alike = np.minimum.reduceat(time_ns, starts) == np.maximum.reduceat(time_ns, starts)
    # Times that were not pooled with others keep their exact value.
    return np.where(np.repeat(alike, np.diff(pooled.blocks)), time_ns, np.expm1(pooled.x))


def _integer_table(time_ns: np.ndarray) -> np.ndarray:
    # The last rounding of a logarithm must not make a pooled block fall short of the time before it.
    return np.maximum.accumulate(np.rint(never_falling(time_ns)).astype(np.int64))


def freeze_tables(model: CostModel, spec: ModelSpec, topology: Topology, max_tokens: int) -> StepTables:
    """Evaluate every table at its nodes; they cover every cell up to the cap and every routing of a full block."""
    pricer = Pricer(model, spec, topology, max_tokens)
    classes = pricer.classes()
    max_rows = max_tokens * topology.slots_per_block * spec.top_k
    tokens_shift, rows_shift = node_shift(max_tokens), node_shift(max_rows)
    tokens, rows = table_nodes(max_tokens, tokens_shift), table_nodes(max_rows, rows_shift)
    return StepTables(
        sequence_ns=tuple(_integer_table(pricer.sequence_ns(tokens, kind)) for kind in classes),
        cell_ns=tuple(_integer_table(pricer.cell_ns(tokens, kind)) for kind in classes),
        class_layers=np.array([kind.layers for kind in classes], dtype=np.int64),
        class_names=tuple(kind.name for kind in classes),
        expert_rank_ns=_integer_table(pricer.expert_rank_ns(rows)),
        exchange_ns=_integer_table(pricer.exchange_ns(rows)),
        row_fixed_ns=0,
        length_shift=tokens_shift,
        tokens_shift=tokens_shift,
        rows_shift=rows_shift,
        max_tokens=max_tokens,
        num_moe_layers=spec.num_moe_layers,
        top_k=spec.top_k,
        slots_per_block=topology.slots_per_block,
        pipeline_stages=topology.pipeline_model_parallel_size,
        measured_length_max=measured_length_max(pricer),
        measured_rows_max=measured_rows_max(pricer),
        notes=tuple(table_notes(pricer)),
        key=tables_key(spec, topology, max_tokens),
        expert_move_ns=round(pricer.expert_move_ns()),
    )


def table_errors(
    model: CostModel, tables: StepTables, spec: ModelSpec, topology: Topology, seed: int, samples: int = 500
) -> dict[str, Any]:
    """Return how far look-ups lie from the model on random sizes, percent, per table."""
    pricer = Pricer(model, spec, topology, tables.max_tokens)
    rng = np.random.default_rng(seed)
    lengths = np.unique(rng.integers(1, tables.max_tokens, samples, endpoint=True))
    rows = np.unique(rng.integers(1, tables.max_rows, samples, endpoint=True))
    errors = {}
    for name, table, price in (
        ("expert_rank_ns", tables.expert_rank_ns, pricer.expert_rank_ns),
        ("exchange_ns", tables.exchange_ns, pricer.exchange_ns),
    ):
        errors[name] = _difference(lookup_many_ns(table, tables.rows_shift, rows), price(rows))
    for c, kind in enumerate(pricer.classes()):
        found = lookup_many_ns(tables.sequence_ns[c], tables.length_shift, lengths)
        errors[f"sequence_ns/{kind.name}"] = _difference(found, pricer.sequence_ns(lengths, kind))
        found = lookup_many_ns(tables.cell_ns[c], tables.tokens_shift, lengths)
        errors[f"cell_ns/{kind.name}"] = _difference(found, pricer.cell_ns(lengths, kind))
    return errors


def _difference(found_ns: np.ndarray, exact_ns: np.ndarray) -> dict[str, float]:
    error = 100.0 * np.abs(found_ns - exact_ns) / np.maximum(exact_ns, 1.0)
    return {
        "mean_pct": round(float(error.mean()), 3),
        "p95_pct": round(float(np.percentile(error, 95)), 3),
        "worst_pct": round(float(error.max()), 3),
    }

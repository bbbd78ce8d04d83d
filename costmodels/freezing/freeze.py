"""Freeze a cost model into integer-nanosecond tables for one model, topology and token cap.

What every table means is said once, in :class:`costmodels.tables.StepTables`. Each is evaluated at all its nodes in one
batch, the tile steps of the baseline included, then made non-decreasing: trees have steps, and a planner must never
gain by adding work. Where times fall, they are pooled (isotonic regression of their logs): a running maximum would
carry every upward error of the trees to all larger sizes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from costmodels.cost_model import CostModel, tables_key
from costmodels.freezing.notes import cores, table_notes
from costmodels.freezing.pricer import Pricer
from costmodels.tables import StepTables, lookup_many_ns, node_shift, table_nodes
from profiler import ModelSpec, RoutePackError, Topology
from profiler.errors import explained
from profiler.params import check_sizes

MOST_NODE_NS = 1e15
"""Longest time of a node, eleven days: sums over layers, samples and rows of a step stay inside 64 bits."""


def never_falling(time_ns: np.ndarray) -> np.ndarray:
    """Return the nearest non-decreasing whole times: stretches that fall get their geometric mean (of 1 + time)."""
    from scipy.optimize import isotonic_regression

    if not ((time_ns >= 0) & (time_ns <= MOST_NODE_NS)).all():
        raise RoutePackError(
            f"The cost model prices a part of one layer at up to {float(np.max(time_ns)):g} ns: its measurements are "
            "damaged, or the token cap is far beyond them. Profile again, or lower max_tokens_per_microbatch."
        )
    pooled = np.rint(np.expm1(isotonic_regression(np.log1p(time_ns)).x)).astype(np.int64)
    # The last rounding of a logarithm must not make a pooled block fall short of the time before it.
    return np.maximum.accumulate(pooled)


def freeze_tables(model: CostModel, spec: ModelSpec, topology: Topology, max_tokens: int) -> StepTables:
    """Evaluate every table at its nodes; they cover every cell up to the cap and every routing of a full block."""
    with explained(of=ValueError):
        check_sizes(spec, topology)
    pricer = Pricer(model, spec, topology, max_tokens)
    classes = pricer.classes()
    max_rows = max_tokens * topology.slots_per_block * spec.top_k
    tokens_shift, rows_shift = node_shift(max_tokens), node_shift(max_rows)
    tokens, rows = table_nodes(max_tokens, tokens_shift), table_nodes(max_rows, rows_shift)
    lengths = [ranges["max_length"][1] if (ranges := pricer.timed(op, shape)) else 0 for op, shape in cores(pricer)]
    experts, length_max = pricer.timed("experts", pricer.experts_shape), int(min(lengths))
    rows_max = int(experts["rows"][1]) * topology.blocks_per_slot if experts else 0
    make = partial(
        StepTables,
        sequence_ns=np.stack([never_falling(pricer.sequence_ns(tokens, kind)) for kind in classes]),
        cell_ns=np.stack([never_falling(pricer.cell_ns(tokens, kind)) for kind in classes]),
        class_layers=np.array([kind.layers for kind in classes], dtype=np.int64),
        class_names=tuple(kind.name for kind in classes),
        expert_rank_ns=never_falling(pricer.expert_rank_ns(rows)),
        exchange_ns=never_falling(pricer.exchange_ns(rows)),
        row_fixed_ns=0,
        length_shift=tokens_shift,
        tokens_shift=tokens_shift,
        rows_shift=rows_shift,
        max_tokens=max_tokens,
        num_moe_layers=spec.num_moe_layers,
        top_k=spec.top_k,
        slots_per_block=topology.slots_per_block,
        pipeline_stages=topology.pipeline_model_parallel_size,
        measured_length_max=length_max,
        measured_rows_max=rows_max,
        notes=table_notes(pricer, length_max, rows_max, max_rows),
        key=tables_key(spec, topology, max_tokens),
        expert_move_ns=round(pricer.expert_move_ns()),
        link_gbytes_per_s=pricer.stated_link_gbytes_per_s(),
    )
    with explained("The cost model's times cannot be used: ", " Profile again.", of=ValueError):
        return make()


def table_errors(model: CostModel, tables: StepTables, samples: int = 500) -> dict[str, Any]:
    """Return how far look-ups in the model's own tables lie from it on random sizes, percent, per table."""
    pricer = Pricer(model, model.spec, model.topology, tables.max_tokens)
    rng, largest = np.random.default_rng(model.params.seed), (tables.max_tokens, tables.max_rows)
    tokens, rows = (np.unique(rng.integers(1, most, samples, endpoint=True)) for most in largest)

    def errors(table: np.ndarray, shift: int, x: np.ndarray, exact_ns: np.ndarray) -> dict[str, float]:
        error = 100.0 * np.abs(lookup_many_ns(table, shift, x) - exact_ns) / np.maximum(exact_ns, 1.0)
        found = {"mean_pct": error.mean(), "p95_pct": np.percentile(error, 95), "worst_pct": error.max()}
        return {name: round(float(value), 3) for name, value in found.items()}

    found = {}
    for name in ("expert_rank_ns", "exchange_ns"):
        found[name] = errors(getattr(tables, name), tables.rows_shift, rows, getattr(pricer, name)(rows))
    for c, kind in enumerate(pricer.classes()):
        for name in ("sequence_ns", "cell_ns"):
            exact_ns = getattr(pricer, name)(tokens, kind)
            found[f"{name}/{kind.name}"] = errors(getattr(tables, name)[c], tables.tokens_shift, tokens, exact_ns)
    return found

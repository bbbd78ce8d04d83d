"""Freeze a cost model into integer-nanosecond tables for one model, topology and token cap.

What every table means is said once, in :class:`costmodels.tables.StepTables`. Each is evaluated at all its nodes in one
batch, the tile steps of the baseline included, then made non-decreasing: trees have steps, and a planner must never
gain by adding work. Where times fall, they are pooled (isotonic regression of their logs): a running maximum would
carry every upward error of the trees to all larger sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from costmodels.cost_model import CostModel, tables_key
from costmodels.freezing.pricer import Pricer
from costmodels.tables import StepTables, lookup_many_ns, node_shift, table_nodes
from profiler import ModelSpec, Topology


def never_falling(time_ns: np.ndarray) -> np.ndarray:
    """Return the nearest non-decreasing whole times: stretches that fall get their geometric mean (of 1 + time)."""
    from scipy.optimize import isotonic_regression

    pooled = np.rint(np.expm1(isotonic_regression(np.log1p(time_ns)).x)).astype(np.int64)
    # The last rounding of a logarithm must not make a pooled block fall short of the time before it.
    return np.maximum.accumulate(pooled)


def freeze_tables(model: CostModel, spec: ModelSpec, topology: Topology, max_tokens: int) -> StepTables:
    """Evaluate every table at its nodes; they cover every cell up to the cap and every routing of a full block."""
    pricer = Pricer(model, spec, topology, max_tokens)
    classes = pricer.classes()
    max_rows = max_tokens * topology.slots_per_block * spec.top_k
    tokens_shift, rows_shift = node_shift(max_tokens), node_shift(max_rows)
    tokens, rows = table_nodes(max_tokens, tokens_shift), table_nodes(max_rows, rows_shift)
    sequence_ns = np.stack([never_falling(pricer.sequence_ns(tokens, kind)) for kind in classes])
    length_max, rows_max = _measured_length_max(pricer), _measured_rows_max(pricer)
    return StepTables(
        sequence_ns=sequence_ns,
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
        notes=(*_assumed(pricer), *_extrapolated(pricer, length_max, rows_max, max_rows), *_exchanges(pricer)),
        key=tables_key(spec, topology, max_tokens),
        expert_move_ns=round(pricer.expert_move_ns()),
    )


def table_errors(
    model: CostModel, tables: StepTables, spec: ModelSpec, topology: Topology, seed: int, samples: int = 500
) -> dict[str, Any]:
    """Return how far look-ups lie from the model on random sizes, percent, per table."""
    pricer = Pricer(model, spec, topology, tables.max_tokens)
    rng = np.random.default_rng(seed)
    tokens, rows = (
        np.unique(rng.integers(1, largest, samples, endpoint=True)) for largest in (tables.max_tokens, tables.max_rows)
    )

    def errors(table: np.ndarray, shift: int, x: np.ndarray, price: Callable[..., np.ndarray], *kind: Any) -> Any:
        exact_ns = price(x, *kind)
        error = 100.0 * np.abs(lookup_many_ns(table, shift, x) - exact_ns) / np.maximum(exact_ns, 1.0)
        found = {"mean_pct": error.mean(), "p95_pct": np.percentile(error, 95), "worst_pct": error.max()}
        return {name: round(float(value), 3) for name, value in found.items()}

    found = {
        "expert_rank_ns": errors(tables.expert_rank_ns, tables.rows_shift, rows, pricer.expert_rank_ns),
        "exchange_ns": errors(tables.exchange_ns, tables.rows_shift, rows, pricer.exchange_ns),
    }
    for c, kind in enumerate(pricer.classes()):
        sequence_ns, cell_ns = tables.sequence_ns[c], tables.cell_ns[c]
        found[f"sequence_ns/{kind.name}"] = errors(sequence_ns, tables.length_shift, tokens, pricer.sequence_ns, kind)
        found[f"cell_ns/{kind.name}"] = errors(cell_ns, tables.tokens_shift, tokens, pricer.cell_ns, kind)
    return found


def _cores(pricer: Pricer) -> list[tuple[str, dict[str, int]]]:
    """Return the operation and shape of every attention core of the model."""
    cores = [("attention", pricer.core_shape(window)) for window in pricer.spec.attention_windows]
    return cores + ([("linear_attention", pricer.core_shape(0, linear=True))] if pricer.spec.linear_layers else [])


def _measured_length_max(pricer: Pricer) -> int:
    """Return the longest sequence inside what was timed for every attention core; 0 if one was not timed."""
    found = [pricer.timed(op, shape) for op, shape in _cores(pricer)]
    return min(int(ranges["max_length"][1]) if ranges else 0 for ranges in found)


def _measured_rows_max(pricer: Pricer) -> int:
    """Return the most rows on one rank inside what was timed; 0 if the shape was not timed."""
    ranges = pricer.timed("experts", pricer.experts_shape)
    return int(ranges["rows"][1]) * pricer.topology.blocks_per_slot if ranges else 0


def _assumed(pricer: Pricer) -> Iterator[str]:
    """Say what stands for times that were not measured."""
    if pricer.passes("forward") > 1:
        yield "every layer's forward is priced twice: activations are recomputed"
    for op in ("attention", "linear_attention", "dense", "router", "experts"):
        factor = pricer.model.backward_factor(op)
        if pricer.has(op) and factor is not None:
            yield f"backward of {op} is assumed {factor:g}x forward: only forward times were measured"
    for op, shape in [*_cores(pricer), ("experts", pricer.experts_shape), ("router", pricer.router_shape)]:
        if pricer.has(op) and pricer.timed(op, shape) is None:
            named = ", ".join(f"{name} {value}" for name, value in shape.items())
            alone = pricer.model.models[op, "forward"].unseen.trees is None
            how = "the physics baseline alone" if alone else "the learned model of other shapes"
            yield f"{op}: shape ({named}) has no measured rows: extrapolated by {how}"
    for (op, direction), fitted in sorted(pricer.model.models.items()):
        if fitted.kind == "baseline":
            yield f"{op} {direction}: priced by the physics baseline alone ({fitted.reasons[0]})"


def _extrapolated(pricer: Pricer, length_max: int, rows_max: int, most_rows: int) -> Iterator[str]:
    """Say what lies beyond the timed sizes, or is not priced."""
    if 0 < length_max < pricer.max_tokens:
        yield f"attention: sequences of more than {length_max} tokens are extrapolated"
    if 0 < rows_max < most_rows:
        yield f"experts: more than {rows_max} rows on one rank are extrapolated"
    if not pricer.has("router"):
        yield "routers are not priced: none was measured"
    if pricer.spec.linear_conv_kernel_dim:
        yield "short convolutions of linear attention layers are not priced"
    if not pricer.has("dense"):
        yield "projections are not priced: no dense GEMM was measured"
    elif ranges := pricer.timed("dense"):
        tokens = int(ranges["tokens"][1]) * pricer.topology.context_parallel_size
        if tokens < pricer.max_tokens:
            yield f"dense: cells of more than {tokens} tokens are extrapolated"


def _exchanges(pricer: Pricer) -> Iterator[str]:
    """Say how far exchanges lie from those that were timed."""
    ranks = pricer.topology.expert_model_parallel_size
    if ranks == 1:
        return
    ranges = pricer.timed("alltoall") if pricer.has("alltoall") else None
    if ranges is None:
        yield "dispatch and combine are not priced: no all-to-all was measured"
        return
    most, among = int(ranges["ranks"][1]), f"dispatch and combine among {ranks} ranks are extrapolated from"
    slower = "links between nodes are slower than priced"
    if ranks > most:
        one_node = "" if pricer.knows_network("alltoall") else f" of one node: {slower}"
        yield f"{among} at most {most} ranks{one_node}"
    elif pricer.outside_share() > 0 and not pricer.knows_network("alltoall"):
        yield f"{among} exchanges of one node: {slower}"

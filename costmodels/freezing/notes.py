"""What a reader of frozen tables must know: how far measurements reach, and what is assumed or not priced."""

from __future__ import annotations

from costmodels.freezing.pricer import Pricer


def asked_cores(pricer: Pricer) -> list[tuple[str, dict[str, int]]]:
    """Return the operation and shape of every attention core of the model."""
    cores = [("attention", pricer.attention_shape(window)) for window in pricer.spec.attention_windows]
    return cores + ([("linear_attention", pricer.attention_shape(0, True))] if pricer.spec.linear_layers else [])


def measured_length_max(pricer: Pricer) -> int:
    """Return the longest sequence inside what was timed for every attention core; 0 if one was not timed."""
    found = [pricer.model.model_of(op, "forward")[0].knows(shape) for op, shape in asked_cores(pricer)]
    return 0 if None in found else min(int(ranges["max_length"][1]) for ranges in found if ranges)


def measured_rows_max(pricer: Pricer) -> int:
    """Return the most rows on one rank inside what was timed; 0 if the shape was not timed."""
    ranges = pricer.model.model_of("experts", "forward")[0].knows(pricer.experts_shape())
    return int(ranges["rows"][1]) * pricer.topology.blocks_per_slot if ranges else 0


def table_notes(pricer: Pricer) -> list[str]:
    """Say in one sentence each what is assumed, extrapolated or not priced."""
    recomputed = ["every layer's forward is priced twice: activations are recomputed"] * (pricer.passes("forward") - 1)
    return [
        *recomputed,
        *_backward_notes(pricer),
        *_shape_notes(pricer),
        *_size_notes(pricer),
        *_exchange_notes(pricer),
    ]


def _backward_notes(pricer: Pricer) -> list[str]:
    notes = []
    for op in ("attention", "linear_attention", "dense", "router", "experts"):
        factor = pricer.model.backward_factor(op) if op in pricer.has else None
        if factor is not None:
            notes.append(f"backward of {op} is assumed {factor:g}x forward: only forward times were measured")
    return notes


def _shape_notes(pricer: Pricer) -> list[str]:
    notes = []
    router = [("router", pricer.router_shape())] if "router" in pricer.has else []
    for op, shape in [*asked_cores(pricer), ("experts", pricer.experts_shape()), *router]:
        model = pricer.model.model_of(op, "forward")[0]
        if model.knows(shape) is None:
            named = ", ".join(f"{name} {value}" for name, value in shape.items())
            how = "the physics baseline alone" if model.own.unseen is None else "the learned model of other shapes"
            notes.append(f"{op}: shape ({named}) has no measured rows: extrapolated by {how}")
    for (op, direction), fitted in sorted(pricer.model.models.items()):
        if fitted.kind == "baseline":
            notes.append(f"{op} {direction}: priced by the physics baseline alone ({fitted.reasons[0]})")
    return notes


def _size_notes(pricer: Pricer) -> list[str]:
    notes = []
    length, rows = measured_length_max(pricer), measured_rows_max(pricer)
    if 0 < length < pricer.max_tokens:
        notes.append(f"attention: sequences of more than {length} tokens are extrapolated")
    most = pricer.max_tokens * pricer.topology.slots_per_block * pricer.spec.top_k
    if 0 < rows < most:
        notes.append(f"experts: more than {rows} rows on one rank are extrapolated")
    if "router" not in pricer.has:
        notes.append("routers are not priced: none was measured")
    if pricer.spec.linear_conv_kernel_dim:
        notes.append("short convolutions of linear attention layers are not priced")
    if "dense" not in pricer.has:
        return [*notes, "projections are not priced: no dense GEMM was measured"]
    ranges = pricer.model.model_of("dense", "forward")[0].knows({})
    tokens = int(ranges["tokens"][1]) * pricer.topology.context_parallel_size if ranges else 0
    if tokens < pricer.max_tokens:
        notes.append(f"dense: cells of more than {tokens} tokens are extrapolated")
    return notes


def _exchange_notes(pricer: Pricer) -> list[str]:
    ranks = pricer.topology.expert_model_parallel_size
    if ranks == 1:
        return []
    if "alltoall" not in pricer.has:
        return ["dispatch and combine are not priced: no all-to-all was measured"]
    ranges = pricer.model.model_of("alltoall", "forward")[0].knows({})
    most = int(ranges["ranks"][1]) if ranges else 0
    among = f"dispatch and combine among {ranks} ranks are extrapolated from"
    if pricer.knows_network("alltoall"):
        return [] if ranks <= most else [f"{among} at most {most} ranks"]
    slower = "links between nodes are slower than priced"
    if ranks > most:
        return [f"{among} at most {most} ranks of one node: {slower}"]
    return [f"{among} exchanges of one node: {slower}"] if pricer.outside_share() > 0 else []

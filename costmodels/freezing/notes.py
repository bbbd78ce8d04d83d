"""What a reader of frozen tables must know: what a price holds and what not, what is assumed, what is extrapolated."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from costmodels.freezing.pricer import Pricer
from costmodels.operations.backward import BACKWARD, source_of
from costmodels.tables import PRICED

PARTS = {
    "attention": "attention cores",
    "linear_attention": "linear attention cores",
    "dense": "projections and dense layers",
    "experts": "experts",
    "router": "router and permute",
}
"""Operations of one rank in words."""
NEVER = (
    "fixed cost of a row",
    "LM head and loss",
    "norms and rope",
    "optimizer and gradient reduce",
    "overlap of exchange and work",
    "log-probability passes",
)
"""Parts of a real step that no table holds."""


def table_notes(pricer: Pricer, length_max: int, rows_max: int, most_rows: int) -> tuple[str, ...]:
    """Return all notes of a cost model's tables; the first is the one line of what they price."""
    said = (
        *pricer.model.doubts,
        *_assumed(pricer),
        *_extrapolated(pricer, length_max, rows_max, most_rows),
        *_exchanges(pricer),
    )
    return priced_line(pricer), *said


def priced_line(pricer: Pricer) -> str:
    """Return ``priced: ...; not priced: ...``: by what was measured, and by what a step of this job holds."""
    spec, topology = pricer.spec, pricer.topology
    held = {"attention": spec.attention_windows, "linear_attention": spec.linear_layers}
    priced, missing = _parts(pricer.model.models, [op for op in PARTS if held.get(op, True)])
    if topology.expert_model_parallel_size > 1:
        if not pricer.has("alltoall"):
            missing.append("dispatch and combine (not measured)")
        elif pricer.knows_network("alltoall"):
            priced.append("dispatch and combine")
        else:
            priced.append("dispatch and combine as within a node")
            missing += ["what links between nodes add"] * (pricer.outside_share() > 0)
    (priced if pricer.passes("forward") > 1 else missing).append("recomputation")
    beside = {
        "tensor- and sequence-parallel collectives": topology.tensor_model_parallel_size,
        "context-parallel traffic": topology.context_parallel_size,
        "expert-tensor-parallel collectives": topology.expert_tensor_parallel_size,
        "pipeline bubbles and sends": topology.pipeline_model_parallel_size,
        "short convolutions": 1 + bool(spec.linear_conv_kernel_dim),
    }
    missing += [*(what for what, size in beside.items() if size > 1), *spec.unpriced, *NEVER]
    return f"{PRICED}{', '.join(priced)}; not priced: {', '.join(missing)}"


def priced_of(timed: Collection[tuple[str, str]]) -> str:
    """Return the same in a sentence for measurements of these (operation, direction), whatever the job."""
    ops = {op for op, _ in timed}
    priced, missing = _parts(timed, [op for op in PARTS if op in ops or op != "linear_attention"])
    (priced if "alltoall" in ops else missing).append("dispatch and combine")
    return f"From these times plans price: {', '.join(priced)}; they do not price: {', '.join([*missing, *NEVER])}."


def _parts(timed: Collection[tuple[str, str]], wanted: Collection[str]) -> tuple[list[str], list[str]]:
    """Return which operations are priced, marked where backward is assumed, and which were not measured."""
    there = [op for op in wanted if (op, "forward") in timed]
    assumed = {op: " (backward assumed)" * ((op, "backward") not in timed) for op in there}
    missing = [f"{PARTS[op]} (not measured)" for op in wanted if op not in there]
    return [PARTS[op] + assumed[op] for op in there], missing


def cores(pricer: Pricer) -> list[tuple[str, dict[str, int]]]:
    """Return the operation and shape of every attention core of the model."""
    cores = [("attention", pricer.core_shape(window)) for window in pricer.spec.attention_windows]
    return cores + ([("linear_attention", pricer.core_shape(0, linear=True))] if pricer.spec.linear_layers else [])


def _assumed(pricer: Pricer) -> Iterator[str]:
    """Say what stands for times that were not measured."""
    if pricer.passes("forward") > 1:
        yield "every layer's forward is priced twice: activations are recomputed"
    for op in ("attention", "linear_attention", "dense", "router", "experts"):
        if pricer.has(op) and (op, "backward") not in pricer.model.models:
            yield f"backward of {op} is assumed {_ratio_words(pricer, op)}: only forward times were measured"
    for op, shape in [*cores(pricer), ("experts", pricer.experts_shape), ("router", pricer.router_shape)]:
        if pricer.has(op) and pricer.timed(op, shape) is None:
            named = ", ".join(f"{name} {value}" for name, value in shape.items())
            fitted = pricer.model.models[op, "forward"]
            learned = fitted.mixes.get("unseen") or (fitted.prior and fitted.prior.unseen_share > 0)
            how = "the learned model of other shapes" if learned else "the physics baseline alone"
            yield f"{op}: shape ({named}) has no measured rows: extrapolated by {how}"
    for (op, direction), fitted in sorted(pricer.model.models.items()):
        if fitted.kind == "baseline":
            yield f"{op} {direction}: priced by the physics baseline alone ({fitted.reasons[0]})"


def _ratio_words(pricer: Pricer, op: str) -> str:
    """Return the ratio that stands for a backward time, with its source."""
    shape = dict(cores(pricer)).get(op, {})
    sizes = ({"tokens": n, "pairs": n * (n + 1) // 2, "num_sequences": 1, "max_length": n} for n in (1024, 16384))
    short, long = (float(pricer.model.backward_ratio(op, shape | size)) for size in sizes)
    if op not in BACKWARD or pricer.model.params.attention_backward_factor:
        return f"{long:g}x forward"
    falls = "" if short == long else f"{short:.2g}x forward (up to 1024 attended tokens) to "
    return f"{falls}{long:.2g}x forward{' (from 16384)' * (short != long)}, as measured in public ({source_of(shape)})"


def _extrapolated(pricer: Pricer, length_max: int, rows_max: int, most_rows: int) -> Iterator[str]:
    """Say what lies beyond the timed sizes."""
    if 0 < length_max < pricer.max_tokens:
        yield f"attention: sequences of more than {length_max} tokens are extrapolated"
    if 0 < rows_max < most_rows:
        yield f"experts: more than {rows_max} rows on one rank are extrapolated"
    if ranges := pricer.timed("dense"):
        tokens = int(ranges["tokens"][1]) * pricer.topology.context_parallel_size
        if tokens < pricer.max_tokens:
            yield f"dense: cells of more than {tokens} tokens are extrapolated"


def _exchanges(pricer: Pricer) -> Iterator[str]:
    """Say how far exchanges lie from those that were timed."""
    ranks = pricer.topology.expert_model_parallel_size
    if ranks == 1 or (ranges := pricer.timed("alltoall")) is None:
        return
    most, among = int(ranges["ranks"][1]), f"dispatch and combine among {ranks} ranks are extrapolated from"
    slower = "links between nodes are slower than priced"
    if ranks > most:
        one_node = "" if pricer.knows_network("alltoall") else f" of one node: {slower}"
        yield f"{among} at most {most} ranks{one_node}"
    elif pricer.outside_share() > 0 and not pricer.knows_network("alltoall"):
        yield f"{among} exchanges of one node: {slower}"

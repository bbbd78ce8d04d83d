"""One optimizer step to plan: the sealed batch, its costs as integer arrays, and what is checked before any search."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from costmodels import StepTables, lookup_many_ns
from profiler import ModelSpec, RoutePackError, Topology
from profiler.files import arrays_hash
from profiler.params import divisors, nearest
from search.checks import MOST_TOKENS, check_array, check_tables, check_times
from search.params import AVERAGE, NO_ROUTES, PlannerParams, padding_experts

OVER_CAP_NS = 10**9
"""What the search charges for a row above the receive cap, at most: far more than any row costs."""
MOST_NS = 2**61
"""Most that all such charges of a step may add up to, so that the objective fits int64."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Hold all samples of one optimizer step as the rollout left them."""

    lengths: np.ndarray
    """[N] int64: tokens of each sample (prompt and response)."""
    expert_counts: np.ndarray
    """[N, L, E] integer: tokens of the sample that use each expert; tokens without a known route are not in it."""
    sample_ids: np.ndarray
    """[N] text: the caller's name of each sample."""
    known_tokens: np.ndarray
    """[N] int64: tokens with known routes; every layer's counts sum to ``top_k * known_tokens``."""
    prompt_ids: np.ndarray | None = None
    """[N] int64: which prompt a sample answers, where known."""

    @property
    def num_samples(self) -> int:
        """Samples in the step (N)."""
        return len(self.lengths)

    @property
    def data_hash(self) -> str:
        """SHA-256 of lengths, counts and ids."""
        types = {"lengths": np.int64, "expert_counts": np.int32, "known_tokens": np.int64, "sample_ids": np.str_}
        return arrays_hash(**{name: np.asarray(getattr(self, name), dtype) for name, dtype in types.items()})


def prompt_numbers(prompts: Sequence[Hashable]) -> np.ndarray:
    """Return the prompts of samples as [N] int64: whole numbers as they are, anything else by order of appearance."""
    if all(isinstance(prompt, (int, np.integer)) and abs(int(prompt)) < 2**63 for prompt in prompts):
        return np.array(prompts, dtype=np.int64)
    try:
        number = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    except TypeError as error:
        raise RoutePackError(f"prompt_ids must be told apart ({error}): give numbers or text.") from None
    return np.array([number[prompt] for prompt in prompts], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Problem:
    """Hold one step as the search sees it: integer loads and integer nanoseconds.

    ``ns`` here means nanoseconds summed over all layers of all pipeline stages; divide by the stages for wall time.
    """

    lengths: np.ndarray
    """[N] int64, padded to the alignment."""
    counts: np.ndarray
    """[N, L, E] int32: expert loads with unknown tokens filled in as the sample's average token."""
    sequence_ns: np.ndarray
    """[N, C] int64: what a sample adds to its cell, all layers of the class."""
    cell_ns: np.ndarray
    """[C, K] int64: what a cell costs by its tokens, all layers of the class."""
    expert_ns: np.ndarray
    """[K] int64: one layer by the rows of its slowest rank."""
    exchange_ns: np.ndarray
    """[K] int64: one layer by the rows of its busiest sender or receiver."""
    tables: StepTables
    topology: Topology
    spec: ModelSpec
    max_tokens: int
    params: PlannerParams
    blocks_per_unit: int
    """Blocks that wait for one another layer by layer: 1, or all of them under FSDP."""
    counters: dict[str, int]
    """Tokens and whole samples without a known route, which cost like average tokens, and tokens added by alignment."""
    notes: tuple[str, ...] = ()
    """What was taken for facts of the job."""

    @property
    def num_samples(self) -> int:
        """Samples (N)."""
        return len(self.lengths)

    @property
    def num_slots(self) -> int:
        """DP slots (D)."""
        return self.topology.data_parallel_size

    @property
    def num_blocks(self) -> int:
        """Groups of slots that share barriers inside a row (B)."""
        return self.topology.num_blocks

    @property
    def num_ranks(self) -> int:
        """EP ranks of a block (P)."""
        return self.topology.expert_model_parallel_size

    @property
    def num_layers(self) -> int:
        """MoE layers (L)."""
        return self.counts.shape[1]

    @property
    def num_experts(self) -> int:
        """Logical experts of a layer (E)."""
        return self.counts.shape[2]

    @property
    def receive_wall(self) -> tuple[int, int]:
        """Rows that an EP rank may receive for nothing, and what the *search* charges for each one above them, ns.

        In one layer the peaks of all (row, block) add up to at most all routed rows: so do all charges to ``MOST_NS``.
        """
        if self.params.max_received_rows == 0:
            return 0, 0
        weights = (self.num_blocks + 1) * max(1, int(self.counts.sum(dtype=np.int64)))
        searched = self.params.max_received_rows * (1 - self.params.receive_slack)
        return max(1, round(searched)), min(OVER_CAP_NS, MOST_NS // weights)

    def cell_tokens(self, cell_of: np.ndarray, num_rows: int) -> np.ndarray:
        """Return the tokens of every cell of a packing (cell = row * D + slot of each sample, [N]), [R D] int64."""
        return np.bincount(cell_of, weights=self.lengths, minlength=num_rows * self.num_slots).astype(np.int64)

    def sent_rows(self, cell_tokens: np.ndarray) -> np.ndarray:
        """Return the routed rows that one rank of a slot sends, given the tokens of its cell."""
        return cell_tokens * self.spec.top_k * self.topology.blocks_per_slot // self.topology.ranks_per_slot


def build_problem(
    batch: StepBatch,
    tables: StepTables,
    spec: ModelSpec,
    topology: Topology,
    max_tokens: int,
    params: PlannerParams | None = None,
) -> Problem:
    """Check the stated policies and turn a batch into integer costs."""
    params = params or PlannerParams()
    check_tables(tables, spec, topology, max_tokens)
    check_padding(params, spec)
    _check_policies(batch, spec, topology)
    check_batch(batch, spec)
    check_lengths(batch, max_tokens, params.sequence_alignment)
    check_times(tables, spec.num_moe_layers, batch.num_samples, topology)
    lengths = padded_lengths(batch.lengths, params.sequence_alignment)
    padding = lengths - batch.lengths.astype(np.int64)
    layers = tables.class_layers[:, None]
    sequence = np.stack([lookup_many_ns(t, tables.length_shift, lengths) for t in tables.sequence_ns])
    return Problem(
        lengths=lengths,
        counts=_routed_counts(batch, lengths, padding, spec, params.padding_routes),
        sequence_ns=np.ascontiguousarray((sequence * layers).T),
        cell_ns=tables.cell_ns * layers,
        expert_ns=tables.expert_rank_ns,
        exchange_ns=tables.exchange_ns,
        tables=tables,
        topology=topology,
        spec=spec,
        max_tokens=max_tokens,
        params=params,
        blocks_per_unit=topology.num_blocks if params.couple_blocks else 1,
        counters={
            "unknown_tokens": int((batch.lengths - batch.known_tokens).sum()),
            "unknown_samples": int((batch.known_tokens == 0).sum()),
            "padding_tokens": int(padding.sum()),
        },
        notes=_padding_note(int(padding.sum()), params.padding_routes, spec.top_k),
    )


def padded_lengths(lengths: np.ndarray, alignment: int) -> np.ndarray:
    """Return lengths rounded up to a multiple of ``alignment``, int64."""
    return -(-np.asarray(lengths, dtype=np.int64) // alignment) * alignment


def _check_policies(batch: StepBatch, spec: ModelSpec, topology: Topology) -> None:
    if not isinstance(batch, StepBatch):
        raise RoutePackError(f"Expected a StepBatch, got {type(batch).__name__}. planner.batch(...) makes one.")
    count, slots, ranks = np.size(batch.lengths), topology.data_parallel_size, topology.expert_model_parallel_size
    shape = np.shape(batch.expert_counts)
    layers, experts = shape[1:] if len(shape) == 3 else (0, 0)
    for wrong, message in (
        (count == 0, "The step is empty: 0 samples. Skip the step, or check what dropped them."),
        (
            (layers, experts) != (spec.num_moe_layers, spec.num_experts),
            f"expert_counts has {layers} layers x {experts} experts, {spec.name} has {spec.num_moe_layers} MoE layers "
            f"x {spec.num_experts} experts. Use the batch's own model.",
        ),
        (
            experts % ranks > 0,
            f"expert_model_parallel_size = {ranks} cannot divide the {experts} experts of {spec.name}. Nearest: "
            f"{nearest(ranks, divisors(experts))}.",
        ),
        (
            count < slots,
            f"{count} samples cannot fill {slots} DP slots: every slot needs at least one sample a row. "
            f"Collect at least {slots} samples a step, or lower data_parallel_size.",
        ),
        (
            not np.any(batch.known_tokens),
            "No sample of the step carries routes, so experts cannot be placed. Enable routing replay in the rollout.",
        ),
    ):
        if wrong:
            raise RoutePackError(message)


def check_padding(params: PlannerParams, spec: ModelSpec) -> None:
    """Refuse experts for padding that the model has not, or more of them than a token is sent to."""
    experts = padding_experts(params.padding_routes, spec.top_k)
    if len(experts) > spec.top_k or max(experts, default=0) >= spec.num_experts:
        raise RoutePackError(
            f"padding_routes = {params.padding_routes!r:.80} must name at most top_k = {spec.top_k} of {spec.name}'s "
            f"experts 0 to {spec.num_experts - 1}."
        )


def check_batch(batch: StepBatch, spec: ModelSpec) -> None:
    """Refuse a batch whose arrays contradict one another or the model: those of files passed here, others may not."""
    N = np.size(batch.lengths)
    check_array("the batch's lengths", batch.lengths, (N,))
    check_array("the batch's known_tokens", batch.known_tokens, (N,))
    check_array("the batch's sample_ids", batch.sample_ids, (N,), whole=False)
    check_array("the batch's expert_counts", batch.expert_counts, (N, spec.num_moe_layers, spec.num_experts))
    names = list(map(str, batch.sample_ids.tolist()))
    if len(set(names)) < N:
        twice = next(name for name in names if names.count(name) > 1)
        raise RoutePackError(f"Sample id {twice!r} occurs twice; ids must be distinct within a step.")
    if batch.lengths.min() < 1:
        i = int(batch.lengths.argmin())
        raise RoutePackError(
            f"Sample {names[i]} has length {batch.lengths[i]}; lengths are at least 1. Drop the sample."
        )
    lengths, known = _in_64_bits(batch.lengths), _in_64_bits(batch.known_tokens)
    known_tokens(batch.expert_counts, lengths, batch.sample_ids, spec.top_k, known, "Sample")


def _in_64_bits(tokens: np.ndarray) -> np.ndarray:
    """Return whole numbers as int64, those beyond any cap cut off: narrow types would wrap when they are multiplied."""
    wide = tokens.astype(np.uint64 if tokens.dtype.kind == "u" else np.int64)
    return np.minimum(wide, MOST_TOKENS).astype(np.int64)


def check_lengths(batch: StepBatch, max_tokens: int, alignment: int = 1) -> None:
    """Raise :class:`RoutePackError` naming the longest sample if any, padded, exceeds the cap."""
    lengths = padded_lengths(_in_64_bits(batch.lengths), alignment)
    longest = int(np.argmax(lengths))
    if lengths[longest] > max_tokens:
        over = int((lengths > max_tokens).sum())
        padded = f" (padded to {lengths[longest]})" if alignment > 1 else ""
        raise RoutePackError(
            f"Sample {batch.sample_ids[longest]} has {batch.lengths[longest]} tokens{padded}, above "
            f"max_tokens_per_microbatch = {max_tokens} ({over} of {batch.num_samples} samples are). Samples cannot be "
            f"split: raise the cap to at least {lengths[longest]} or truncate the rollout."
        )
    if (total := int(lengths.sum())) > MOST_TOKENS:
        raise RoutePackError(f"The step holds {total} tokens, above {MOST_TOKENS}. Check the lengths, or split it.")


def known_tokens(
    counts: np.ndarray, lengths: np.ndarray, names: np.ndarray, top_k: int, given: np.ndarray | None, who: str
) -> np.ndarray:
    """Return the tokens with known routes, [N] int64, after checking that every layer of counts [N, L, E] adds up.

    Where none are ``given`` they are all tokens, or all but the last sampled one, which engines never route.
    """
    where = [f"{who} {name!r}" for name in names.tolist()]
    for i, layer, expert in np.argwhere(counts < 0) if counts.min(initial=0) < 0 else ():
        raise RoutePackError(
            f"{where[i]} MoE layer {layer}: expert {expert} has the negative count {counts[i, layer, expert]}. Check "
            "the array's type where it is written."
        )
    sums = counts.sum(axis=2, dtype=np.int64)
    known = np.where(sums[:, 0] == top_k * (lengths - 1), lengths - 1, lengths) if given is None else given
    for (i,) in np.argwhere((known < 0) | (known > lengths)):
        raise RoutePackError(f"{where[i]} has known_tokens {known[i]}, outside 0..{lengths[i]} (its length).")
    for i, layer in np.argwhere(sums != top_k * known[:, None]):
        wanted, n = f"{top_k * known[i]} = top_k {top_k} x known_tokens {known[i]}", lengths[i]
        if given is None:
            wanted = f"{top_k * n} = top_k {top_k} x length {n} (or {top_k * (n - 1)} without the last token)"
        raise RoutePackError(
            f"{where[i]} MoE layer {layer}: counts add up to {sums[i, layer]}, expected {wanted}, the same in every "
            "layer. Give `known_tokens` where routes are partly unknown."
        )
    above = (counts.max(axis=2) > known[:, None]).any()
    for i, layer, expert in np.argwhere(counts > known[:, None, None]) if above else ():
        raise RoutePackError(
            f"{where[i]} MoE layer {layer}: expert {expert} has {counts[i, layer, expert]} tokens of {known[i]}: a "
            "token picks an expert at most once. Check the layout [samples, layers, experts], or whether routes were "
            "captured."
        )
    return known


def row_range(problem: Problem) -> range:
    """Return the numbers of rows that a capped packing may have; the least is a bound, not always reachable."""
    by_tokens = -(-int(problem.lengths.sum()) // (problem.max_tokens * problem.num_slots))
    big = int((problem.lengths > problem.max_tokens // 2).sum())
    multiple = problem.topology.row_multiple
    least = -(-max(1, by_tokens, -(-big // problem.num_slots)) // multiple) * multiple
    return range(least, problem.num_samples // problem.num_slots + 1, multiple)


def no_packing(problem: Problem) -> RoutePackError:
    """Return the error of a packer that found nothing in any number of rows."""
    return RoutePackError(
        f"No packing of {problem.num_samples} samples on {problem.num_slots} DP slots was found under "
        f"max_tokens_per_microbatch = {problem.max_tokens} without empty cells, in any number of rows. Raise the cap "
        "or lower data_parallel_size."
    )


def _routed_counts(
    batch: StepBatch, lengths: np.ndarray, padding: np.ndarray, spec: ModelSpec, routes: str
) -> np.ndarray:
    """Return what the trainer sends to each expert, [N, L, E] int32: known routes, estimates of the others, padding."""
    if routes == AVERAGE:
        return _fill_unknown(batch, lengths, spec.top_k)
    counts = _fill_unknown(batch, lengths - padding, spec.top_k)
    counts[:, :, padding_experts(routes, spec.top_k)] += padding[:, None, None].astype(np.int32)
    return counts


def _padding_note(tokens: int, routes: str, top_k: int) -> tuple[str, ...]:
    """Say where the padding is taken to go, if there is any."""
    experts = [] if routes in (AVERAGE, NO_ROUTES) else padding_experts(routes, top_k)
    where = f"sent to experts {', '.join(map(str, experts))}"
    said = {AVERAGE: "routed like average tokens", NO_ROUTES: "sent to no expert"}.get(routes, where)
    return (f"{tokens} padding tokens are taken as {said} (planner.padding_routes).",) if tokens else ()


def _fill_unknown(batch: StepBatch, lengths: np.ndarray, top_k: int) -> np.ndarray:
    """Return counts for ``lengths`` tokens, those without a route spread like the sample's (or batch's) average token.

    Sums stay exact (largest remainder, ties by expert id).
    """
    counts = np.array(batch.expert_counts, dtype=np.int32, order="C")
    partial = np.flatnonzero(batch.known_tokens < lengths)
    known = batch.known_tokens[partial].astype(np.int64)
    basis = counts[partial].astype(np.int64)
    basis[known == 0] = counts.sum(axis=0, dtype=np.int64)
    known[known == 0] = int(batch.known_tokens.sum())
    filled, remainder = np.divmod(basis * lengths[partial, None, None], known[:, None, None])
    missing = top_k * lengths[partial, None] - filled.sum(axis=2)
    rank = np.argsort(np.argsort(-remainder, axis=2, kind="stable"), axis=2, kind="stable")
    counts[partial] = filled + (rank < missing[:, :, None])
    return counts

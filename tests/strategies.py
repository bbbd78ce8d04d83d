"""Hypothesis strategies and small makers: random problems with random (valid) tables. All of it is synthetic."""

from __future__ import annotations

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from costmodels import StepTables
from costmodels.tables import node_shift, table_nodes
from profiler import ModelSpec, Topology
from search.params import PlannerParams
from search.problem import StepBatch, build_problem, row_range


def make_spec(layers=2, experts=8, top_k=2):
    """A small GQA model with every layer MoE."""
    return ModelSpec(
        name="tiny", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, qk_head_dim=16, v_head_dim=16,
        attention="gqa", q_lora_rank=0, kv_lora_rank=0, qk_rope_head_dim=0, num_experts=experts, top_k=top_k,
        moe_intermediate_size=32, shared_intermediate_size=0, dense_intermediate_size=128,
        windows=(0,) * layers, moe_layers=(True,) * layers,
    )  # fmt: skip


def rising(rng, nodes, floor, slope):
    """A table that starts at ``floor`` and rises by uneven steps."""
    return np.concatenate([[floor], floor + np.cumsum(rng.integers(0, 2 * slope + 1, nodes - 1))]).astype(np.int64)


def make_tables(rng, spec, topology, max_tokens, max_nodes=64, fixed_ns=100):
    """Random tables with two attention classes."""
    rows = max_tokens * topology.slots_per_block * spec.top_k
    length_shift, rows_shift = node_shift(max_tokens, max_nodes), node_shift(rows, max_nodes)
    lengths, width = table_nodes(max_tokens, length_shift), table_nodes(rows, rows_shift)
    return StepTables(
        sequence_ns=np.stack([lengths * int(rng.integers(1, 20)) + lengths**2 // 7 for _ in range(2)]),
        cell_ns=np.stack([rising(rng, len(lengths), int(rng.integers(0, 500)), 80 << length_shift) for _ in range(2)]),
        class_layers=np.array([spec.num_layers, spec.num_layers], np.int64),
        class_names=("full/moe/forward", "full/moe/backward"),
        expert_rank_ns=rising(rng, len(width), int(rng.integers(1, 500)), 30 << rows_shift),
        exchange_ns=rising(rng, len(width), int(rng.integers(0, 300)), 10 << rows_shift),
        row_fixed_ns=fixed_ns, length_shift=length_shift, tokens_shift=length_shift, rows_shift=rows_shift,
        max_tokens=max_tokens, num_moe_layers=spec.num_moe_layers, top_k=spec.top_k,
        slots_per_block=topology.slots_per_block, pipeline_stages=topology.pipeline_model_parallel_size,
        measured_length_max=max_tokens, measured_rows_max=rows, notes=("synthetic tables",), key="synthetic",
    )  # fmt: skip


def make_batch(rng, spec, lengths, skew=1.0, unknown=0):
    """Random routes with popularity tilted by ``skew``; the last ``unknown`` tokens of each sample have no route."""
    lengths = np.asarray(lengths, np.int64)
    known = np.maximum(lengths - unknown, 0)
    counts = np.zeros((len(lengths), spec.num_moe_layers, spec.num_experts), np.int64)
    for i, layer in np.ndindex(len(lengths), spec.num_moe_layers):
        shares = np.exp(skew * rng.standard_normal(spec.num_experts))
        for _ in range(known[i]):
            chosen = rng.choice(spec.num_experts, spec.top_k, replace=False, p=shares / shares.sum())
            counts[i, layer, chosen] += 1
    return StepBatch(
        lengths=lengths, expert_counts=counts.astype(np.int32),
        sample_ids=np.array([f"s{i}" for i in range(len(lengths))]),
        known_tokens=known,
    )  # fmt: skip


TOPOLOGIES = (
    Topology(data_parallel_size=2, expert_model_parallel_size=2),
    Topology(data_parallel_size=4, expert_model_parallel_size=2),
    Topology(data_parallel_size=4, expert_model_parallel_size=4),
    Topology(data_parallel_size=2, tensor_model_parallel_size=2, expert_model_parallel_size=4),
    Topology(data_parallel_size=2, tensor_model_parallel_size=2, context_parallel_size=2, expert_model_parallel_size=2),
    Topology(data_parallel_size=2, expert_model_parallel_size=2, pipeline_model_parallel_size=2),
)
VIRTUAL_PIPELINE = Topology(
    data_parallel_size=2,
    expert_model_parallel_size=2,
    pipeline_model_parallel_size=2,
    virtual_pipeline_model_parallel_size=2,
)


@st.composite
def jobs(draw, max_samples=14):
    """What ``plan_step`` takes (batch, tables, model, topology, token cap, settings) and the generator it is from.

    Either cap may bind: cells hold 32 tokens, or two samples and more; a rank may receive what a few samples send.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    topology = draw(st.sampled_from((*TOPOLOGIES, VIRTUAL_PIPELINE)))
    spec = make_spec(layers=draw(st.integers(1, 3)), experts=8, top_k=2)
    lengths = rng.integers(1, 30, draw(st.integers(2 * topology.data_parallel_size, max_samples)))
    batch = make_batch(rng, spec, lengths, skew=float(rng.uniform(0, 2)), unknown=int(rng.integers(0, 3)))
    if not batch.known_tokens.any():
        batch = make_batch(rng, spec, lengths)
    params = PlannerParams(
        couple_blocks=draw(st.booleans()),
        sequence_alignment=draw(st.sampled_from((1, 4))),
        max_received_rows=draw(st.sampled_from((0, 40, 100))),
    )
    return (
        batch,
        make_tables(rng, spec, topology, 512),
        spec,
        topology,
        draw(st.sampled_from((32, 64, 512))),
        params,
    ), rng


@st.composite
def problems(draw, max_samples=14):
    """A random problem whose least number of rows has a sample for every cell, and the generator it is from."""
    job, rng = draw(jobs(max_samples))
    problem = build_problem(*job)
    assume(row_range(problem))
    return problem, rng


def random_rows(rng, problem):
    """A number of rows that a plan may have."""
    return int(rng.choice(possible_rows(problem)))


def possible_rows(problem):
    """Every number of rows that a plan may have, as far as samples and tokens say."""
    return row_range(problem)


def capped_packing(rng, problem, num_rows):
    """A packing into ``num_rows`` rows under the token cap without empty cells; None if ten tries found none."""
    cells = num_rows * problem.num_slots
    for _ in range(10):
        cell, order = np.empty(problem.num_samples, np.int64), rng.permutation(problem.num_samples)
        cell[order[:cells]] = rng.permutation(cells)
        tokens = np.bincount(cell[order[:cells]], weights=problem.lengths[order[:cells]], minlength=cells)
        for i in order[cells:]:
            room = np.flatnonzero(tokens + problem.lengths[i] <= problem.max_tokens)
            if room.size == 0:
                break
            cell[i] = rng.choice(room)
            tokens[cell[i]] += problem.lengths[i]
        else:
            return cell
    return None


def random_packing(rng, problem, num_rows):
    """A packing as above; examples without one are not looked at."""
    cell = capped_packing(rng, problem, num_rows)
    assume(cell is not None)
    return cell


def random_placement(rng, problem):
    """A random bijection per layer, [L, E]."""
    return np.stack([rng.permutation(problem.num_experts) for _ in range(problem.num_layers)])

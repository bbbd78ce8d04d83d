"""The whole-plan price equals its definition, and unknown routes are filled as stated."""

import numpy as np
import pytest
from hypothesis import given, settings
from oracles import lookup_slow, step_ns_slow
from strategies import (
    TOPOLOGIES,
    make_batch,
    make_spec,
    make_tables,
    problems,
    random_packing,
    random_placement,
    random_rows,
)

from costmodels import lookup_many_ns, lookup_ns
from profiler import RoutePackError, Topology
from search import StepBatch, balanced_ns, build_problem, evaluate


@given(problems())
@settings(max_examples=40)
def test_evaluate_equals_definition(drawn):
    problem, rng = drawn
    rows = random_rows(rng, problem)
    cell = random_packing(rng, problem, rows)
    row_N, slot_N = cell // problem.num_slots, cell % problem.num_slots
    placement = random_placement(rng, problem)
    priced = evaluate(problem, row_N, slot_N, placement, rows)
    slow_ns, blocks = step_ns_slow(problem, row_N, slot_N, placement, rows)
    assert priced.step_ns == slow_ns
    assert priced.block_ns.tolist() == blocks
    parts = priced.step_time()
    assert parts.step_time_s == pytest.approx(parts.attention_s + parts.experts_s + parts.rest_s)


def test_lookup_equals_definition():
    rng = np.random.default_rng(0)
    table = np.cumsum(rng.integers(0, 1000, 20)).astype(np.int64)
    x = np.arange(19 << 3)
    expected = [lookup_slow(table, 3, v) for v in x]
    assert lookup_many_ns(table, 3, x).tolist() == expected
    assert [lookup_ns(table, 3, v) for v in x] == expected


def test_unknown_tokens_are_the_samples_average_token():
    spec = make_spec(layers=1, experts=4, top_k=2)
    topology = Topology(data_parallel_size=2, expert_model_parallel_size=2)
    batch = StepBatch(
        lengths=np.array([4, 3, 6]),
        expert_counts=np.array([[[3, 3, 0, 0]], [[1, 1, 1, 1]], [[0, 0, 0, 0]]], np.uint8),
        sample_ids=np.array(["a", "b", "c"]),
        known_tokens=np.array([3, 2, 0]),
    )
    problem = build_problem(batch, make_tables(np.random.default_rng(0), spec, topology, 64), spec, topology, 64)
    assert problem.counts[0, 0].tolist() == [4, 4, 0, 0]
    assert problem.counts[1, 0].tolist() == [2, 2, 1, 1]  # 1.5 each: the remainder goes to the lowest ids
    assert problem.counts[2, 0].sum() == 12  # no route at all: the batch's average token
    assert problem.counts[2, 0, 0] > problem.counts[2, 0, 2]
    assert problem.counters == {"unknown_tokens": 8, "unknown_samples": 1, "padding_tokens": 0}


def test_balanced_ideal_is_what_a_balanced_plan_costs():
    # Equal samples, every expert of each as often as any other: any even packing is balanced, in any placement.
    spec, topology = make_spec(), TOPOLOGIES[1]
    rng = np.random.default_rng(1)
    lengths = np.full(24, 8)
    batch = StepBatch(lengths, np.full((24, 2, 8), 2), np.arange(24).astype(str), lengths)
    problem = build_problem(batch, make_tables(rng, spec, topology, 64), spec, topology, 64)
    cell = np.arange(24) % 12
    placement = random_placement(rng, problem)
    assert evaluate(problem, cell // 4, cell % 4, placement, 3).step_ns == balanced_ns(problem, 3)
    uneven = np.where(cell == 0, 1, cell)
    uneven[0] = 0
    assert evaluate(problem, uneven // 4, uneven % 4, placement, 3).step_ns > balanced_ns(problem, 3)


@pytest.mark.parametrize(
    ("lengths", "unknown", "message"),
    [
        ([], 0, "step is empty"),
        ([5, 6, 7], 0, "3 samples cannot fill 4 DP slots"),
        ([5, 65, 6, 7], 0, "Sample s1 has 65 tokens"),
        ([5, 6, 7, 8], 99, "No sample of the step carries routes"),
    ],
)
def test_policies_come_first(lengths, unknown, message):
    spec, topology = make_spec(), Topology(data_parallel_size=4, expert_model_parallel_size=4)
    rng = np.random.default_rng(0)
    batch = make_batch(rng, spec, lengths, unknown=unknown)
    with pytest.raises(RoutePackError, match=message):
        build_problem(batch, make_tables(rng, spec, topology, 64), spec, topology, 64)

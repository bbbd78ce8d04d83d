"""Frozen tables: exact integer look-ups, whole domain, never falling, true to the model."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import lookup_slow

from costmodels import freeze_tables, lookup_many_ns, lookup_ns
from costmodels.freezing.freeze import never_falling
from costmodels.freezing.pricer import Pricer, skewed_counts
from costmodels.learned.residual import Residual
from costmodels.tables import node_shift, table_nodes
from profiler import RoutePackError, Topology

TOPOLOGIES = [
    Topology(),
    Topology(data_parallel_size=8, expert_model_parallel_size=8),
    Topology(data_parallel_size=4, tensor_model_parallel_size=2, expert_model_parallel_size=4),
    Topology(
        data_parallel_size=2, context_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=2
    ),
    Topology(data_parallel_size=2, tensor_model_parallel_size=4, expert_model_parallel_size=2),
    Topology(data_parallel_size=16, pipeline_model_parallel_size=2, expert_model_parallel_size=16),
]


def named_tables(tables):
    yield from ((f"sequence {c}", table, tables.length_shift) for c, table in enumerate(tables.sequence_ns))
    yield from ((f"cell {c}", table, tables.tokens_shift) for c, table in enumerate(tables.cell_ns))
    yield "experts", tables.expert_rank_ns, tables.rows_shift
    yield "exchange", tables.exchange_ns, tables.rows_shift


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("cap", [100, 5000, 40000])
def test_tables_never_fall_and_cover_the_domain(fitted, topology, cap):
    tables = freeze_tables(fitted, fitted.spec, topology, cap)
    assert tables.max_rows == cap * topology.slots_per_block * fitted.spec.top_k
    for name, table, shift in named_tables(tables):
        largest = tables.max_rows if name in ("experts", "exchange") else cap
        assert table.dtype == np.int64
        assert (np.diff(table) >= 0).all()
        assert table[0] >= 0
        assert table.size <= 4096
        assert lookup_ns(table, shift, largest) >= lookup_ns(table, shift, 0)
        assert (table.size - 1) << shift >= largest
    assert tables.expert_rank_ns[0] > 0
    assert all(table[0] == 0 for table in tables.sequence_ns)
    assert all(table[0] > 0 for table in tables.cell_ns)


def test_classes_are_every_window_layer_kind_and_direction(fitted):
    tables = fitted.tables
    assert tables.class_names == (
        "full/dense/forward", "full/dense/backward", "full/moe/forward", "full/moe/backward", "window128/moe/forward",
        "window128/moe/backward",
    )  # fmt: skip
    assert tables.class_layers.tolist() == [1, 1, 2, 2, 1, 1]
    assert tables.num_moe_layers == 3


@given(st.integers(0, 10**7), st.integers(1, 200))
def test_nodes_reach_past_the_largest_value(largest, most):
    shift = node_shift(largest, most + 2)
    nodes = table_nodes(largest, shift)
    assert nodes[-1] > largest
    assert nodes.size <= most + 2
    assert shift == 0 or (largest >> (shift - 1)) + 2 > most + 2


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=40), st.integers(0, 6), st.data())
def test_lookups_equal_the_slow_version(steps, shift, data):
    table = np.cumsum(np.array(steps, dtype=np.int64))
    x = data.draw(st.lists(st.integers(0, ((len(steps) - 1) << shift) - 1), min_size=1, max_size=20))
    expected = [lookup_slow(table, shift, value) for value in x]
    assert lookup_many_ns(table, shift, np.array(x)).tolist() == expected
    assert [int(lookup_ns(table, shift, value)) for value in x] == expected


def never_falling_slow(time_ns):
    """Isotonic regression by its minimax formula: the largest, over starts, of the least mean to an end."""
    logs = np.log1p(np.asarray(time_ns, dtype=np.float64))
    sums = np.concatenate([[0.0], np.cumsum(logs)])
    result = np.full(logs.size, -np.inf)
    for start in range(logs.size):
        means = (sums[start + 1 :] - sums[start]) / np.arange(1, logs.size - start + 1)
        least = np.minimum.accumulate(means[::-1])[::-1]
        result[start:] = np.maximum(result[start:], least)
    return np.expm1(result)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=60))
def test_falling_times_are_pooled_as_the_slow_version_says(times):
    found = never_falling(np.array(times))
    assert (np.diff(found) >= 0).all()
    assert found == pytest.approx(never_falling_slow(times), abs=0.51)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=60))
def test_times_that_rise_are_kept_exactly(times):
    assert never_falling(np.sort(np.array(times, dtype=np.float64))).tolist() == sorted(times)


def test_nodes_equal_the_model_asked_one_by_one(fitted):
    """Batched evaluation, pooling and rounding against a slow loop over single sizes, on whole small tables."""
    tables = freeze_tables(fitted, fitted.spec, fitted.topology, 60)
    pricer = Pricer(fitted, fitted.spec, fitted.topology, 60)
    rows = table_nodes(tables.max_rows, tables.rows_shift)
    lengths = table_nodes(60, tables.length_shift)
    for table, nodes, price in (
        (tables.expert_rank_ns, rows, pricer.expert_rank_ns),
        (tables.exchange_ns, rows, pricer.exchange_ns),
        (tables.sequence_ns[2], lengths, lambda x: pricer.sequence_ns(x, pricer.classes()[2])),
        (tables.cell_ns[3], lengths, lambda x: pricer.cell_ns(x, pricer.classes()[3])),
    ):
        single = [float(price(nodes[node : node + 1])[0]) for node in range(nodes.size)]
        assert np.abs(table - never_falling_slow(single)).max() <= 1


def test_a_full_cell_costs_what_the_model_says(fitted):
    """Floor + count x marginal time of equal sequences is the core's time of that cell."""
    cap, tables = fitted.max_tokens, fitted.tables
    pricer = Pricer(fitted, fitted.spec, fitted.topology, cap)
    for length in (256, 1024, 4096):
        features = pricer.full_cell(np.array([length]), pricer.classes()[2])
        time_us, _ = fitted.predict_us("attention", "forward", features)
        floor_us = fitted.floor_us("attention", "forward", features)
        found = floor_us + cap // length * lookup_ns(tables.sequence_ns[2], tables.length_shift, length) / 1e3
        assert found == pytest.approx(float(time_us[0]), rel=0.05)


def test_table_errors_are_stated_and_small(fitted):
    errors = fitted.validation["tables"]
    assert {"expert_rank_ns", "exchange_ns", "sequence_ns/full/moe/forward", "cell_ns/window128/moe/backward"} <= set(
        errors
    )
    assert all(error["mean_pct"] < 1.0 for error in errors.values())


def test_parallel_sizes_divide_the_work(fitted):
    one = freeze_tables(fitted, fitted.spec, Topology(data_parallel_size=4, expert_model_parallel_size=4), 4096)
    context = freeze_tables(
        fitted, fitted.spec, Topology(data_parallel_size=4, context_parallel_size=2, expert_model_parallel_size=4), 4096
    )
    assert context.sequence_ns[2][-1] == pytest.approx(one.sequence_ns[2][-1] / 2, rel=0.01)
    assert context.cell_ns[2][-1] < 0.75 * one.cell_ns[2][-1]
    tensor = freeze_tables(
        fitted,
        fitted.spec,
        Topology(data_parallel_size=4, tensor_model_parallel_size=2, expert_model_parallel_size=4),
        4096,
    )
    assert tensor.sequence_ns[2][-1] < 0.75 * one.sequence_ns[2][-1]


def test_a_slot_spread_over_blocks_asks_for_its_share(fitted):
    whole = Topology(data_parallel_size=2, expert_model_parallel_size=2)
    spread = Topology(data_parallel_size=2, tensor_model_parallel_size=4, expert_model_parallel_size=2)
    assert spread.blocks_per_slot == 2
    rows = np.array([0, 2, 1000, 20000])
    apart = Pricer(fitted, fitted.spec, spread, 4096)
    together = Pricer(fitted, fitted.spec, whole, 4096)
    assert np.array_equal(apart.expert_rank_ns(rows), together.expert_rank_ns(rows // 2))
    assert np.array_equal(apart.exchange_ns(rows), together.exchange_ns(rows // 2))


def test_exchange_is_zero_without_ranks_or_measurements_and_says_so(fitted, synthetic):
    alone = freeze_tables(fitted, fitted.spec, Topology(), 4096)
    assert not alone.exchange_ns.any()
    assert not any("dispatch" in note for note in alone.notes)
    assert "dispatch and combine as within a node" in fitted.tables.priced.split("; not priced: ")[0]
    models = {key: model for key, model in fitted.models.items() if key[0] != "alltoall"}
    unpriced = freeze_tables(type(fitted)(**{**vars(fitted), "models": models}), fitted.spec, fitted.topology, 4096)
    assert not unpriced.exchange_ns.any()
    assert "dispatch and combine (not measured)" in unpriced.priced.split("; not priced: ")[1]


def test_notes_tell_what_lies_outside_the_measurements(fitted, synthetic):
    topology = Topology(data_parallel_size=32, expert_model_parallel_size=32)
    tables = freeze_tables(fitted, synthetic.spec(num_experts=96, hidden_size=1280), topology, 20000)
    notes = " | ".join(tables.notes)
    assert (
        "experts: shape (local_experts 3, hidden_size 1280, inter_size 512, num_experts 96) has no measured rows"
        in notes
    )
    assert "sequences of more than 4096 tokens are extrapolated" in notes
    assert "dense: cells of more than 4096 tokens are extrapolated" in notes
    assert "among 32 ranks are extrapolated from at most 8 ranks" in notes
    assert (tables.measured_length_max, tables.measured_rows_max) == (4096, 0)
    known = freeze_tables(fitted, fitted.spec, Topology(data_parallel_size=4, expert_model_parallel_size=4), 4096)
    assert (known.measured_length_max, known.measured_rows_max) == (4096, 32768)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=10), st.integers(1, 64))
def test_skewed_counts_add_up(rows, experts):
    counts = skewed_counts(np.array(rows), experts)
    assert (counts >= 0).all()
    assert counts.sum(axis=1).tolist() == rows
    assert counts.shape == (len(rows), experts)


def test_skewed_counts_are_as_skewed_as_stated():
    counts = skewed_counts(np.array([10**7]), 64)[0]
    assert np.log(counts).std() == pytest.approx(0.5, rel=0.05)
    assert counts[0] == counts.max()


def test_recomputation_prices_the_forward_twice(fitted):
    again = replace(fitted, params=replace(fitted.params, recompute_activations=True), tables=None)
    once = freeze_tables(fitted, fitted.spec, fitted.topology, 5000)
    twice = freeze_tables(again, fitted.spec, fitted.topology, 5000)
    forward = np.array([name.endswith("/forward") for name in once.class_names])
    assert (twice.class_layers == once.class_layers * (1 + forward)).all()
    rows = np.array([1000])
    pricers = [Pricer(model, fitted.spec, fitted.topology, 5000) for model in (fitted, again)]
    experts = [float(pricer.expert_rank_ns(rows)[0]) for pricer in pricers]
    alone = fitted.predict_us("experts", "forward", pricers[0].experts_features(rows))[0][0] * 1e3
    assert experts[1] - experts[0] == pytest.approx(alone)
    assert pricers[1].exchange_ns(rows) == pytest.approx(1.5 * pricers[0].exchange_ns(rows))
    assert any("priced twice" in note for note in twice.notes)
    assert not any("priced twice" in note for note in once.notes)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1e300, -1.0])
def test_times_that_no_layer_takes_are_never_frozen(wrong):
    with pytest.raises(RoutePackError, match="prices a part of one layer at"):
        never_falling(np.array([1.0, wrong]))


@pytest.mark.parametrize("op", ["experts", "attention"])
def test_times_too_short_for_a_nanosecond_are_no_tables(fitted, op):
    model = fitted.models[op, "forward"]
    faster = {
        name: value * 1e-12 ** model.operation.parameters[name].device_power for name, value in model.parameters.items()
    }
    bare = replace(model, parameters=faster, known=Residual(), unseen=Residual(), mixes={}, reasons=("none",))
    models = fitted.models | {(op, "forward"): bare}
    with pytest.raises(RoutePackError, match="less than a nanosecond"):
        freeze_tables(replace(fitted, models=models), fitted.spec, fitted.topology, 100)

"""Router, linear attention, transfers, links between nodes: few rows and parameters, and what plans make of them."""

from dataclasses import replace

import numpy as np
import pytest

from costmodels import CostModel, FitParams, fit_cost_model, freeze_tables
from costmodels.features import checked_columns
from costmodels.fit import fit_operation
from costmodels.freezing.pricer import Pricer
from costmodels.learned.baseline import fit_baseline, scaled_defaults
from costmodels.operations import OPERATIONS
from profiler import RoutePackError, Topology
from search import PlannerParams, StepBatch, plan_step
from search.placement.placer import expert_move_ns

TOPOLOGY = Topology(data_parallel_size=4, expert_model_parallel_size=4)
LINEAR = {
    "linear_layers": (True, True, False, True), "linear_num_value_heads": 8, "linear_num_key_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 64, "windows": (0, 0, 0, 0),
}  # fmt: skip
ALL = ("attention", "linear_attention", "dense", "router", "experts", "alltoall", "transfer")


def rows_of(synthetic, op, keep=None):
    rows = [row for row in synthetic.rows[op]() if keep is None or keep(row)]
    columns = {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}
    time_us = np.array([synthetic.true_us[op]({name: float(value) for name, value in row.items()}) for row in rows])
    return columns, time_us


@pytest.fixture(scope="module")
def hybrid(synthetic):
    """A model of which three in four layers have linear attention, every operation measured."""
    return fit_cost_model(
        synthetic.measurements(ops=ALL, backward=True), synthetic.spec(**LINEAR), TOPOLOGY, 2048, synthetic.fast
    )


@pytest.mark.parametrize(("op", "worst_pct"), [("router", 3), ("transfer", 3), ("linear_attention", 6)])
def test_formulas_alone_follow_few_rows(synthetic, op, worst_pct):
    columns, time_us = rows_of(synthetic, op)
    parameters = fit_baseline(OPERATIONS[op], columns, time_us, FitParams())
    error = 100.0 * np.abs(OPERATIONS[op].baseline(columns, parameters) / time_us - 1.0)
    assert np.median(error) < worst_pct


@pytest.mark.parametrize("op", ["router", "transfer", "linear_attention", "alltoall"])
def test_formulas_never_fall_with_any_size(synthetic, op):
    operation = OPERATIONS[op]
    columns, _ = rows_of(synthetic, op)
    p = {name: parameter.default for name, parameter in operation.parameters.items()}
    before = operation.baseline(columns, p)
    for name in operation.features:
        if name not in ("ranks", "num_kv_heads"):
            more = columns["bytes"] / 4 if name == "inter_bytes" else columns[name]
            # Bytes between nodes are some of all bytes.
            grown = {**columns, name: np.minimum(columns[name] + more, columns.get("bytes", np.inf))}
            grown |= {"bytes": 2.0 * columns["bytes"]} if name == "bytes" else {}
            assert (operation.baseline(grown, p) >= before * (1 - 1e-12)).all(), name


@pytest.mark.parametrize("op", ["alltoall", "transfer"])
def test_parameters_that_no_row_depends_on_stay_at_their_defaults(synthetic, op):
    """Rows of one node say nothing of links between nodes, whatever else is fitted to them."""
    columns, time_us = rows_of(synthetic, op, lambda row: row["inter_bytes"] == 0)
    operation = OPERATIONS[op]
    fitted = fit_baseline(operation, columns, time_us * 3.0, FitParams())
    centre = scaled_defaults(operation, columns, time_us * 3.0)
    for name in ("inter_us", "nic_gbps"):
        assert fitted[name] == float(f"{centre[name]:.6g}")


def test_links_between_nodes_are_learned_where_they_were_timed(synthetic):
    sizes = np.geomspace(2**16, 2**26, 14)
    bytes_, inter = np.concatenate([sizes, sizes]), np.concatenate([0 * sizes, sizes / 2])
    columns = {"bytes": bytes_, "inter_bytes": inter, "ranks": np.full(bytes_.size, 4.0)}
    time_us = 20.0 + np.maximum(bytes_ * 0.75 / 3e5, inter / 4e4) + 30.0 * (inter > 0)
    operation = OPERATIONS["alltoall"]
    model, _ = fit_operation(operation, "forward", {**columns, "time_us": time_us}, FitParams())
    assert 30 < model.parameters["nic_gbps"] < 55
    asked = {"bytes": np.full(2, 3e7), "inter_bytes": np.array([0.0, 1.5e7]), "ranks": np.full(2, 4.0)}
    found, _ = model.predict_us(asked)
    assert found == pytest.approx([20 + 75.0, 50 + 375.0], rel=0.1)


def test_linear_layers_are_classes_of_their_own(hybrid, synthetic):
    tables = hybrid.tables
    assert tables.class_names == (
        "linear/dense/forward", "linear/dense/backward", "linear/moe/forward", "linear/moe/backward",
        "full/moe/forward", "full/moe/backward",
    )  # fmt: skip
    assert tables.class_layers.tolist() == [1, 1, 2, 2, 1, 1]
    assert set(hybrid.validation["tables"]) >= {"sequence_ns/linear/moe/forward", "cell_ns/linear/moe/forward"}
    # Four sequences of 512 fill a cell: each adds a quarter of what the core takes beyond its floor.
    cell = {"tokens": 2048.0, "max_length": 512.0, "num_heads": 8.0, "qk_head_dim": 32.0, "v_head_dim": 64.0}
    each_ns = (synthetic.true_us["linear_attention"](cell) - 30.0) / 4 * 1e3
    assert tables.sequence_ns[2][512] == pytest.approx(each_ns, rel=0.1)
    assert tables.sequence_ns[3][512] == pytest.approx(3 * each_ns, rel=0.1)


def test_a_full_cell_of_a_linear_layer_costs_what_the_model_says(hybrid):
    pricer = Pricer(hybrid, hybrid.spec, TOPOLOGY, 2048)
    kind = pricer.classes()[2]
    for length in (128, 1024):
        features = pricer.full_cell(np.array([length]), kind)
        time_us = hybrid.predict_us("linear_attention", "forward", features)[0][0]
        floor_us = hybrid.floor_us("linear_attention", "forward", features)
        each = float(pricer.sequence_ns(np.array([length]), kind)[0]) / 1e3
        assert floor_us + 2048 // length * each == pytest.approx(time_us, rel=1e-6)


def test_routers_are_priced_in_moe_layers_where_they_were_measured(hybrid):
    without = replace(hybrid, models={key: m for key, m in hybrid.models.items() if key[0] != "router"}, tables=None)
    tokens = np.array([0, 100, 2000])
    for topology in (TOPOLOGY, Topology(data_parallel_size=4, context_parallel_size=2, expert_model_parallel_size=4)):
        pricer, other = (Pricer(model, hybrid.spec, topology, 2048) for model in (hybrid, without))
        for kind in pricer.classes():
            more = pricer.cell_ns(tokens, kind) - other.cell_ns(tokens, kind)
            local = np.maximum(tokens / topology.ranks_per_slot, 1.0)
            shape = {name: np.full(3, value) for name, value in pricer.router_shape.items()}
            alone, _ = hybrid.predict_us("router", kind.direction, {"tokens": local, **shape})
            assert more[1:] == pytest.approx((1e3 * alone * kind.moe)[1:])
    for tables, place in ((freeze_tables(without, hybrid.spec, TOPOLOGY, 2048), 1), (hybrid.tables, 0)):
        assert "router and permute" in tables.priced.split("; not priced: ")[place]


def nodes_of(model, per_node):
    return replace(model, fingerprint=replace(model.fingerprint, ranks_per_node=per_node), tables=None)


def test_exchanges_cross_nodes_only_where_that_was_timed(hybrid, synthetic):
    """Unknown or untimed: all ranks in one node, and the note says so."""
    sixteen = Topology(data_parallel_size=16, expert_model_parallel_size=16)
    rows = np.array([1000, 50000])
    for per_node, share in ((0, 0.0), (1, 0.9375), (4, 0.75), (8, 0.5), (16, 0.0), (32, 0.0)):
        # Transfers between nodes were timed, so that one rank a node is no accident.
        assert Pricer(nodes_of(hybrid, per_node), hybrid.spec, sixteen, 2048).outside_share() == share
    alone, many = (freeze_tables(nodes_of(hybrid, n), hybrid.spec, sixteen, 2048) for n in (16, 4))
    assert np.array_equal(alone.exchange_ns, many.exchange_ns)
    assert any("16 ranks are extrapolated from at most 8 ranks of one node" in note for note in many.notes)
    eight = Topology(data_parallel_size=8, expert_model_parallel_size=8)
    notes = freeze_tables(nodes_of(hybrid, 4), hybrid.spec, eight, 2048).notes
    assert any("extrapolated from exchanges of one node: links between nodes are slower" in note for note in notes)
    columns, time_us = rows_of(synthetic, "alltoall")
    slow = {**columns, "inter_bytes": columns["bytes"] // 2, "ranks": np.full(time_us.size, 16.0)}
    both = {name: np.concatenate([columns[name], slow[name]]) for name in columns}
    both["time_us"] = np.concatenate([time_us, 4.0 * time_us])
    exchange, _ = fit_operation(OPERATIONS["alltoall"], "forward", both, synthetic.fast)
    model = replace(hybrid, models={**hybrid.models, ("alltoall", "forward"): exchange})
    inside, across = (Pricer(nodes_of(model, n), hybrid.spec, sixteen, 2048).exchange_ns(rows) for n in (16, 8))
    assert (across > 1.5 * inside).all()
    notes = freeze_tables(model, hybrid.spec, TOPOLOGY, 2048).notes
    assert not any("extrapolated from" in note and "ranks" in note for note in notes)


def test_one_rank_a_node_tells_nothing_unless_links_between_nodes_were_timed(fitted):
    sixteen = Topology(data_parallel_size=16, expert_model_parallel_size=16)
    assert Pricer(nodes_of(fitted, 1), fitted.spec, sixteen, 4096).outside_share() == 0.0


def test_moves_take_the_measured_time_of_a_transfer(hybrid, synthetic, fitted):
    spec, size = hybrid.spec, hybrid.spec.expert_bytes(TOPOLOGY.expert_tensor_parallel_size)
    inside = synthetic.true_us["transfer"]({"bytes": float(size), "inter_bytes": 0.0}) * 1e3
    between = synthetic.true_us["transfer"]({"bytes": float(size), "inter_bytes": float(size)}) * 1e3
    assert hybrid.tables.expert_move_ns == pytest.approx(inside, rel=0.05)
    two_nodes = freeze_tables(nodes_of(hybrid, 2), spec, TOPOLOGY, 2048).expert_move_ns
    assert two_nodes == pytest.approx(inside / 3 + between * 2 / 3, rel=0.05)
    free, stated = PlannerParams(), PlannerParams(link_gbytes_per_s=10.0)
    assert expert_move_ns(spec, TOPOLOGY, hybrid.tables, free) == hybrid.tables.expert_move_ns
    assert expert_move_ns(spec, TOPOLOGY, hybrid.tables, stated) == size / 10.0
    assert fitted.tables.expert_move_ns == 0
    assert expert_move_ns(spec, TOPOLOGY, fitted.tables, free) == size / 25.0


def test_a_hybrid_model_is_saved_loaded_and_planned_with(hybrid, tmp_path):
    hybrid.save(tmp_path / "model")
    loaded = CostModel.load(tmp_path / "model")
    assert loaded.spec == hybrid.spec
    features = checked_columns(
        OPERATIONS["transfer"], {"bytes": np.array([1e6, 1e6]), "inter_bytes": np.array([0, 1e6])}
    )
    for direction in ("forward", "backward"):
        before, after = (model.predict_us("transfer", direction, features)[0] for model in (hybrid, loaded))
        assert before.tobytes() == after.tobytes()
    rng, spec = np.random.default_rng(0), hybrid.spec
    lengths = rng.integers(50, 1500, 24)
    counts = np.stack([
        [rng.multinomial(spec.top_k * n, rng.dirichlet(np.ones(spec.num_experts))) for _ in range(spec.num_moe_layers)]
        for n in lengths
    ])  # fmt: skip
    batch = StepBatch(lengths, counts.astype(np.int32), np.array([f"s{i}" for i in range(24)]), lengths)
    plan = plan_step(batch, loaded.tables, spec, TOPOLOGY, 2048, PlannerParams(max_iterations=2000, starts=1))
    assert plan.predicted.step_time_s > 0
    again = plan_step(batch, loaded.tables, spec, TOPOLOGY, 2048, PlannerParams(max_iterations=2000, starts=1))
    assert plan.placement_LE.tobytes() == again.placement_LE.tobytes()


def test_a_hybrid_model_without_times_of_its_linear_layers_is_refused(synthetic):
    with pytest.raises(RoutePackError, match="no times of 'linear_attention'"):
        fit_cost_model(
            synthetic.measurements(ops=("attention", "experts"), keep=0.3), synthetic.spec(**LINEAR), TOPOLOGY, 2048,
            synthetic.fast,
        )  # fmt: skip

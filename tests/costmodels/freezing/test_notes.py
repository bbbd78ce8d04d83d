"""The one line of what a price holds, and the stated price of a link: derived from what was measured and the job."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest

from costmodels import StepTables, fit_cost_model, freeze_tables
from profiler import Topology
from search import Plan, PlannerParams, StepBatch, plan_step

ALWAYS = ("fixed cost of a row", "LM head and loss", "norms and rope", "optimizer and gradient reduce",
          "overlap of exchange and work", "log-probability passes")  # fmt: skip


def parts(tables):
    """Return what a line of tables says is priced, and what is not."""
    priced, missing = tables.priced.removeprefix("priced: ").split("; not priced: ")
    return priced.split(", "), missing.split(", ")


def frozen(model, spec=None, **sizes):
    topology = Topology(**{"data_parallel_size": 16, "expert_model_parallel_size": 4} | sizes)
    return freeze_tables(model, spec or model.spec, topology, 2048)


def test_the_line_is_the_first_note_and_survives_the_file(fitted, saved):
    priced, missing = parts(fitted.tables)
    assert priced == [
        "attention cores (backward assumed)", "projections and dense layers (backward assumed)",
        "experts (backward assumed)", "dispatch and combine as within a node",
    ]  # fmt: skip
    assert missing == ["router and permute (not measured)", "recomputation", *ALWAYS]
    assert fitted.tables.notes[0] == fitted.tables.priced == StepTables.load(saved / "tables.npz").priced


def test_what_a_model_has_beside_its_layers_is_named_as_not_priced(fitted):
    spec = replace(fitted.spec, unpriced=("draft (MTP) layers (num_nextn_predict_layers = 1)",))
    assert "draft (MTP) layers (num_nextn_predict_layers = 1)" in parts(frozen(fitted, spec))[1]


def test_every_plan_carries_the_line_through_its_file(fitted, tmp_path):
    rng, spec = np.random.default_rng(0), fitted.spec
    lengths = rng.integers(20, 400, 24)
    counts = np.zeros((24, spec.num_moe_layers, spec.num_experts), np.int64)
    counts[:, :, : spec.top_k] = lengths[:, None, None]
    batch = StepBatch(lengths, counts, np.arange(24).astype(str), lengths)
    plan = plan_step(batch, fitted.tables, spec, fitted.topology, 4096, PlannerParams(max_iterations=200, starts=1))
    assert plan.notes[0] == fitted.tables.priced
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert (again.notes, again.plan_hash) == (plan.notes, plan.plan_hash)
    assert replace(plan, notes=()).plan_hash == plan.plan_hash


@pytest.mark.parametrize(
    ("sizes", "part"),
    [({"tensor_model_parallel_size": 2}, "tensor- and sequence-parallel collectives"),
     ({"context_parallel_size": 2}, "context-parallel traffic"),
     ({"expert_tensor_parallel_size": 2}, "expert-tensor-parallel collectives"),
     ({"pipeline_model_parallel_size": 2}, "pipeline bubbles and sends"),
     ({"expert_model_parallel_size": 16}, "what links between nodes add")],
)  # fmt: skip
def test_what_a_job_adds_is_named_where_it_is_so(fitted, sizes, part):
    assert part not in parts(frozen(fitted))[1]
    assert part in parts(frozen(fitted, **sizes))[1]


def test_one_rank_exchanges_nothing_and_recomputation_is_priced_where_asked(fitted):
    alone = frozen(fitted, expert_model_parallel_size=1)
    assert "dispatch" not in alone.priced
    again = replace(fitted, params=replace(fitted.params, recompute_activations=True), tables=None)
    priced, missing = parts(frozen(again))
    assert "recomputation" in priced
    assert "recomputation" not in missing


def test_measured_backward_routers_and_networks_are_priced_and_unmarked(synthetic):
    measured = synthetic.measurements(ops=("attention", "experts", "router", "linear_attention"), backward=True)
    linear = {"linear_layers": (True, False, False, False), "linear_num_value_heads": 8, "linear_num_key_heads": 4,
              "linear_key_head_dim": 32, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4}  # fmt: skip
    model = fit_cost_model(measured, synthetic.spec(**linear), Topology(), 2048, synthetic.fast)
    priced, missing = parts(model.tables)
    assert priced == ["attention cores", "linear attention cores", "experts", "router and permute"]
    assert missing[:3] == ["projections and dense layers (not measured)", "recomputation", "short convolutions"]


def test_measurements_that_are_not_to_be_trusted_say_so_in_every_plan(synthetic):
    measured = synthetic.measurements(ops=("attention", "experts"), keep=0.3)
    shaky = replace(measured, meta=measured.meta | {
        "steadiness": {"problems": ["the anchor drifted by 40%"]}, "doubts": ["Table x is slow."],
    })  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fit_cost_model(shaky, synthetic.spec(), Topology(), 2048, synthetic.fast)
    assert [str(one.message) for one in caught] == list(model.doubts)
    assert model.tables.notes[1:3] == model.doubts
    assert "not steady: the anchor drifted by 40%" in model.doubts[0]
    assert model.doubts[1] == "Table x is slow."


def test_shapes_extrapolated_by_a_smooth_residual_are_not_called_physics_alone(fitted, synthetic):
    model = fitted.models["experts", "forward"]
    spec = synthetic.spec(hidden_size=1280)
    for mix, how in (((), "the physics baseline alone"), (("smooth",), "the learned model of other shapes")):
        models = fitted.models | {("experts", "forward"): replace(model, mixes=model.mixes | {"unseen": mix})}
        notes = frozen(replace(fitted, models=models, tables=None), spec).notes
        assert any("experts: shape (local_experts 16, hidden_size 1280" in note and how in note for note in notes)


@pytest.mark.parametrize(
    ("interconnect", "network", "per_node", "ranks", "gbytes_per_s"),
    [("450 GB/s", "8 x 200 Gb/s", 8, 8, 450.0), ("NVLink 478 GB/s", "", 8, 4, 478.0),
     ("450 GB/s", "8 x 200 Gb/s", 8, 16, 25.0), ("450 GB/s", "4 x 400 Gb/s InfiniBand, 2 x 200 Gb/s IB", 8, 16, 31.25),
     ("450 GB/s", "", 8, 16, 0.0), ("", "8 x 200 Gb/s", 8, 8, 0.0), ("450 GB/s", "1 x 200 Gb/s", 1, 8, 0.0)],
)  # fmt: skip
def test_the_stated_link_is_the_nodes_own_where_the_block_fits(
    fitted, tmp_path, interconnect, network, per_node, ranks, gbytes_per_s
):
    device = replace(fitted.fingerprint, interconnect=interconnect, network=network, ranks_per_node=per_node)
    tables = frozen(replace(fitted, fingerprint=device, tables=None), expert_model_parallel_size=ranks)
    assert tables.link_gbytes_per_s == pytest.approx(gbytes_per_s)
    tables.save(tmp_path / "tables.npz")
    assert StepTables.load(tmp_path / "tables.npz").tables_hash == tables.tables_hash
    assert np.isfinite(tables.link_gbytes_per_s)


def test_ranks_that_share_an_expert_count_as_ranks_of_the_block(fitted):
    device = replace(fitted.fingerprint, interconnect="450 GB/s", network="8 x 200 Gb/s", ranks_per_node=8)
    model = replace(fitted, fingerprint=device, tables=None)
    sizes = {"expert_model_parallel_size": 8, "expert_tensor_parallel_size": 2}
    assert frozen(model, **sizes).link_gbytes_per_s == 25.0

"""Experts and their optimizer state follow the placement and come back; another placement's state is refused."""

import numpy as np
import pytest
from strategies import TOPOLOGIES, make_batch, make_spec, make_tables

from profiler import RoutePackError
from routepack_tune.trainers.relayout import LOGICAL, ExpertState, to_logical, to_physical
from search import PlannerParams, plan_step


def make_plan(seed):
    rng = np.random.default_rng(seed)
    spec, topology = make_spec(), TOPOLOGIES[2]
    batch = make_batch(rng, spec, rng.integers(5, 30, 20), skew=1.5)
    params = PlannerParams(max_iterations=4096, placement_swaps=200)
    return plan_step(batch, make_tables(rng, spec, topology, 64), spec, topology, 64, params, seed=seed)


def layer_of(name):
    return int(name.split(".")[1])


def make_state():
    return ExpertState(
        {f"layer.{layer}.{kind}": 100.0 * layer + np.arange(8)[:, None] + np.zeros((8, 3))
         for layer in range(2) for kind in ("weight", "exp_avg")}
    )  # fmt: skip


def test_each_slot_holds_the_expert_that_routing_sends_there():
    plan, state = make_plan(0), make_state()
    laid_out = to_physical(state, plan, layer_of)
    assert laid_out.placement_id == plan.placement_id
    for name, tensor in laid_out.tensors.items():
        for expert in range(8):
            slot = plan.placement_LE[layer_of(name), expert]
            assert (tensor[slot] == state.tensors[name][expert]).all()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_round_trip_is_exact(kind):
    plan, state = make_plan(1), make_state()
    if kind == "torch":
        torch = pytest.importorskip("torch")
        state = ExpertState({name: torch.from_numpy(tensor) for name, tensor in state.tensors.items()})
    back = to_logical(to_physical(state, plan, layer_of), plan, layer_of)
    assert back.placement_id == LOGICAL
    for name, tensor in back.tensors.items():
        assert (tensor == state.tensors[name]).all()


def test_state_of_another_placement_is_refused_never_reinterpreted():
    first, second, state = make_plan(0), make_plan(5), make_state()
    assert first.placement_id != second.placement_id
    laid_out = to_physical(state, first, layer_of)
    with pytest.raises(RoutePackError, match="each other's weights"):
        to_logical(laid_out, second, layer_of)
    with pytest.raises(RoutePackError, match="logical order"):
        to_physical(laid_out, second, layer_of)


def test_tensor_of_another_model_is_refused():
    with pytest.raises(RoutePackError, match="has 4 experts in MoE layer 0; the plan places 8"):
        to_physical(ExpertState({"layer.0.weight": np.zeros((4, 2))}), make_plan(0), layer_of)
    with pytest.raises(RoutePackError, match="MoE layer 7"):
        to_physical(ExpertState({"layer.7.weight": np.zeros((8, 2))}), make_plan(0), layer_of)

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler import ModelSpec, ProfileParams, RoutePackError, Topology, load_model
from profiler.cases.case import Rates, Seen, case_bytes, case_seconds
from profiler.cases.design import (
    Design,
    by_class,
    class_of,
    even_choice,
    even_round,
    log_sizes,
    mixed_lengths,
    split_exactly,
)

FAST = Rates(1e15, 1e15, 1e13, 1e-6, 1 << 40)
SLOW = Rates(2e11, 6e10, 1e10, 5e-6, 12 << 30)
EIGHT = Topology(data_parallel_size=8, expert_model_parallel_size=8)


def design(model="gpt-oss-20b", topology=EIGHT, cap=4096, rates=FAST, seen=None, **params):
    return Design(load_model(model), topology, cap, ProfileParams(**params), rates, 2, seen or Seen())


def of(cases, op, **features):
    return [case for case in cases if case.op == op and all(case.features[k] == v for k, v in features.items())]


@given(st.integers(0, 1000), st.lists(st.floats(0.01, 100), min_size=1, max_size=20))
def test_a_split_is_exact_and_proportional(total, weights):
    parts = split_exactly(total, np.array(weights))
    assert parts.sum() == total
    assert np.abs(parts - total * np.array(weights) / sum(weights)).max() <= 1


@given(st.integers(1, 5000), st.floats(1, 3000))
def test_mixed_lengths_sum_to_their_total(total, median):
    lengths = mixed_lengths(total, median)
    assert sum(lengths) == total
    assert min(lengths) >= 1


def test_sizes_are_even_in_log_and_hold_both_ends():
    assert log_sizes(1, 1000, 4) == [1, 10, 100, 1000]
    assert log_sizes(8, 4, 3) == [4]


def test_every_window_class_is_timed_alone_in_many_and_mixed():
    cases = design().cases
    for window in (0, 128):
        cells = of(cases, "attention", window=window)
        assert {case.pattern for case in cells} == {"single", "even", "mixed"}
        assert max(case.features["tokens"] for case in cells) == 4096
        assert any(case.features["num_sequences"] == 1 and case.features["tokens"] == 4096 for case in cells)
        assert any(case.features["num_sequences"] == 4096 // 32 for case in cells)


def test_experts_hold_empty_groups_and_an_empty_rank():
    experts = of(design().cases, "experts")
    assert {case.pattern for case in experts} == {"empty", "even", "skewed", "sparse", "hot"}
    assert any(case.features["max_rows"] == case.features["rows"] > 1000 for case in experts)
    assert of(experts, "experts", rows=0)
    assert any(0 < case.features["active_experts"] < case.features["local_experts"] for case in experts)
    # Twice the mean load of a full cap: 4096 tokens x 8 slots x 4 choices / 8 ranks.
    assert max(case.features["rows"] for case in experts) == 2 * 4096 * 4


def test_load_never_exceeds_what_the_block_routes():
    experts = of(design(topology=Topology(data_parallel_size=2)).cases, "experts")
    assert max(case.features["rows"] for case in experts) == 4096 * 4


def test_parallel_sizes_cut_the_shapes():
    sizes = {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "expert_tensor_parallel_size": 2}
    cases = design(topology=Topology(data_parallel_size=4, expert_model_parallel_size=4, **sizes)).cases
    assert {(case.features["n"], case.features["k"]) for case in of(cases, "dense")} == {(2560, 2880), (2880, 2048)}
    assert max(case.features["tokens"] for case in of(cases, "dense")) == 2048
    assert {case.features["num_heads"] for case in of(cases, "attention")} == {32}
    assert {case.features["inter_size"] for case in of(cases, "experts")} == {1440}
    assert {case.features["local_experts"] for case in of(cases, "experts")} == {8}


def test_dense_layers_and_shared_experts_are_timed_where_the_model_has_them():
    shapes = {(case.features["n"], case.features["k"]) for case in of(design("DeepSeek-V3").cases, "dense")}
    assert {(4096, 7168), (7168, 2048), (36864, 7168), (7168, 18432), (32768, 512)} <= shapes
    # Qwen3 names a dense width that none of its layers uses.
    shapes = {(case.features["n"], case.features["k"]) for case in of(design("Qwen3-30B-A3B").cases, "dense")}
    assert shapes == {(5120, 2048), (2048, 4096)}


def test_a_design_is_a_function_of_its_seed():
    first, again, other = design(seed=1), design(seed=1), design(seed=2)
    assert first == again
    assert [case.features for case in first.cases] != [case.features for case in other.cases]


def test_cases_are_distinct_and_their_parts_agree_with_their_features():
    cases = design().cases
    assert len({case.case_id("forward", "x") for case in cases}) == len(cases)
    assert all(sum(case.parts) == case.features["tokens"] for case in of(cases, "attention"))
    assert all(sum(case.parts) == case.features["rows"] for case in of(cases, "experts"))


def test_a_pool_holds_a_few_hundred_cases_of_an_operation():
    sizes = [len(cases) for cases in by_class(design().cases).values()]
    assert min(sizes) >= 20
    assert 100 < max(sizes) < 400


def test_an_even_choice_is_bounded_and_holds_every_pattern_and_the_largest():
    pool = design().cases
    for key, cases in by_class(pool).items():
        for count in (6, 9, 50):
            chosen = even_choice(cases, count)
            assert len({id(case) for case in chosen}) == len(chosen) <= count
            assert {case.pattern for case in chosen} == {case.pattern for case in cases}
            size = "rows" if key[0] == "experts" else "tokens"
            assert max(c.features[size] for c in chosen) == max(c.features[size] for c in cases)
    chosen = even_round(pool, (), (), ProfileParams(max_points=9)).cases
    assert len(of(chosen, "attention", window=0)) <= 9
    assert len(of(chosen, "experts")) <= 9
    assert {class_of(case) for case in chosen} == {class_of(case) for case in pool}


def test_the_users_own_steps_are_candidates_of_every_class_they_concern():
    seen = Seen(cells=((700, 301, 11),), rank_rows=((5, 0, 77, 3), (0, 0, 0, 0)))
    cases = [case for case in design(seen=seen).cases if case.pattern == "seen"]
    assert sorted(class_of(case)[:2] for case in cases) == [("attention", 0), ("attention", 128), ("experts", 0)]
    assert {case.parts for case in cases} == {(700, 301, 11), (5, 0, 77, 3)}


def test_hybrid_models_time_linear_attention_and_full_attention_apart():
    cases = design("Qwen3-Next-80B-A3B").cases
    assert {case.pattern for case in of(cases, "linear_attention")} == {"single", "even", "mixed"}
    assert of(cases, "attention", window=0)


def test_the_router_sees_the_tokens_of_one_rank():
    cases = design(topology=Topology(tensor_model_parallel_size=2, context_parallel_size=2)).cases
    assert {case.features["tokens"] for case in of(cases, "router")} >= {1, 1024}
    assert max(case.features["tokens"] for case in of(cases, "router")) == 1024


def test_a_slow_device_gets_smaller_sizes_and_a_reason():
    params = ProfileParams()
    slow = design(cap=32768, rates=SLOW)
    assert all(case_bytes(case, 2) <= SLOW.memory_bytes for case in slow.cases)
    assert max(case_seconds(case, SLOW, 2) for case in slow.cases) < params.max_case_seconds
    single = next(limit for limit in slow.limits if limit["what"] == "full attention, tokens of one sequence")
    assert single["op"] == "attention"
    assert single["designed"] < single["wanted"] == 32768
    assert "max_case_seconds" in single["reason"]
    assert not design().limits


def test_a_device_that_affords_nothing_is_a_clear_error():
    with pytest.raises(RoutePackError, match=r"no case of experts for DeepSeek-V3: needs .* GiB"):
        design("DeepSeek-V3", topology=Topology(), rates=SLOW)


def test_experts_must_divide_over_the_ranks():
    with pytest.raises(RoutePackError, match="= 5 cannot divide the 32 experts of gpt-oss-20b"):
        design(topology=Topology(data_parallel_size=5, expert_model_parallel_size=5))


@pytest.mark.parametrize("cap", [1, 7, 40])
def test_tiny_caps_are_fine(cap):
    cases = design(cap=cap).cases
    assert max(case.features["tokens"] for case in of(cases, "attention")) == cap


def test_a_model_with_one_expert_a_rank_is_fine():
    spec = load_model("Mixtral-8x7B")
    assert isinstance(spec, ModelSpec)
    experts = of(design("Mixtral-8x7B").cases, "experts")
    assert {case.features["local_experts"] for case in experts} == {1}
    assert len(experts) > 5


def test_eight_bit_profiles_time_the_experts_alone_in_eight_bits():
    pytest.importorskip("torch", reason="torch is not installed")
    from profiler.device.backend import TorchBackend

    cases = design(dtype="float8_e4m3fn").cases
    assert {case.dtype for case in of(cases, "experts")} == {"float8_e4m3fn"}
    assert {case.dtype for case in cases if case.op != "experts"} == {""}
    plain = {case.case_id("forward", "bfloat16") for case in of(design().cases, "experts")}
    assert plain.isdisjoint(case.case_id("forward", "bfloat16") for case in of(cases, "experts"))
    assert TorchBackend("cpu", ProfileParams(dtype="float8_e4m3fn")).dtype_name == "bfloat16"

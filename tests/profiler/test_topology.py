import pytest

from profiler import Topology, load_model
from profiler.params import check_sizes, divisors, nearest


@pytest.mark.parametrize("size", [0, -1, 1.0, float("nan"), True, "2"])
def test_sizes_are_positive_integers(size):
    with pytest.raises(ValueError, match="data_parallel_size"):
        Topology(data_parallel_size=size)


def test_experts_must_divide_the_ranks_of_a_stage():
    with pytest.raises(ValueError, match="must divide"):
        Topology(data_parallel_size=6, expert_model_parallel_size=4)


def test_a_block_may_not_straddle_slots():
    with pytest.raises(ValueError, match="straddles"):
        Topology(data_parallel_size=2, tensor_model_parallel_size=6, expert_model_parallel_size=4)


@pytest.mark.parametrize(
    ("sizes", "slots_per_block", "blocks_per_slot", "num_blocks"),
    [
        ({"data_parallel_size": 8, "expert_model_parallel_size": 8}, 8, 1, 1),
        ({"data_parallel_size": 16, "expert_model_parallel_size": 8}, 8, 1, 2),
        ({"data_parallel_size": 8, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 8}, 4, 1, 2),
        ({"data_parallel_size": 4, "tensor_model_parallel_size": 4, "expert_model_parallel_size": 2}, 1, 2, 4),
        ({"data_parallel_size": 4, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}, 4, 1, 1),
    ],
)
def test_slots_and_blocks(sizes, slots_per_block, blocks_per_slot, num_blocks):
    topology = Topology(**sizes)
    assert (topology.slots_per_block, topology.blocks_per_slot, topology.num_blocks) == (
        slots_per_block,
        blocks_per_slot,
        num_blocks,
    )


def test_rows_are_a_multiple_of_the_pipeline_only_with_virtual_stages():
    assert Topology(pipeline_model_parallel_size=4).row_multiple == 1
    assert Topology(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2).row_multiple == 4


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"data_parallel_size": 7, "expert_model_parallel_size": 7}, "= 7 cannot divide the 512 experts .* Nearest: 1"),
        (
            {"tensor_model_parallel_size": 32},
            r"16 attention heads \(2 of keys and values\) and 16 linear .* Nearest: 16",
        ),
        ({"pipeline_model_parallel_size": 24, "virtual_pipeline_model_parallel_size": 3}, "= 72 stages .* 48 layers"),
    ],
)
def test_a_model_must_divide_into_the_parts_of_a_topology(sizes, said):
    with pytest.raises(ValueError, match=said):
        check_sizes(load_model("Qwen3-Next-80B-A3B"), Topology(**sizes))


def test_heads_copied_over_ranks_and_uneven_stages_are_legal():
    check_sizes(load_model("Qwen3-30B-A3B"), Topology(tensor_model_parallel_size=8))  # 4 key-value heads
    check_sizes(load_model("DeepSeek-V3"), Topology(pipeline_model_parallel_size=16))  # 61 layers


def test_divisors_and_the_nearest():
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert (nearest(5, divisors(36)), nearest(37, divisors(36)), nearest(0, [3])) == ("4 or 6", "36", "3")

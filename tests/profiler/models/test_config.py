from dataclasses import asdict

import pytest

from profiler import ModelSpec, RoutePackError

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 128,
}
FOUR = SMALL | {"num_hidden_layers": 4}
OF_FOUR = ["full_attention"] * 3


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({"layer_types": ["mamba"] * 3 + ["attention"]}, "layer_types = mamba"),
        ({"layer_types": [*OF_FOUR, "conv"]}, "layer_types = conv"),
        ({"layer_types": [*OF_FOUR, "chunked_attention"]}, "layer_types = chunked_attention"),
        ({"layer_types": [*OF_FOUR, "hybrid"]}, "layer_types = hybrid"),
        ({"layer_types": [*OF_FOUR, 7]}, "layer_types = 7"),
        ({"layer_types": [*OF_FOUR, ["conv"]]}, "layer_types = ['conv']"),
        ({"layer_types": OF_FOUR}, "has 3 entries for num_hidden_layers = 4"),
        ({"layer_types": "mamba"}, "layer_types = 'mamba' is wrong: expected a list"),
        ({"layer_types": ["linear_attention", *OF_FOUR]}, "linear_num_value_heads"),
        ({"layers_block_type": ["mamba", "moe", "attention", "moe"]}, "layers_block_type = mamba"),
        ({"attn_type_list": [0, 1, 1, 1]}, "attn_type_list = 0"),
        ({"hybrid_layer_pattern": [0, 1, 1, 1]}, "hybrid_layer_pattern = [0, 1, 1, 1]"),
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern = M-M*"),
        ({"attn_layer_period": 2, "attn_layer_offset": 1}, "attn_layer_period = 2"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size = 8192"),
        ({"linear_attn_config": {"kda_layers": [1, 2, 3]}}, "linear_attn_config = {'kda_layers'"),
        ({"layer_group_size": 2}, "layer_group_size = 2"),
        ({"full_attn_idxs": [3]}, "full_attn_idxs = [3]"),
        ({"mamba_d_state": 16}, "mamba_d_state = 16"),
        ({"use_cla": True, "cla_share_factor": 2}, "use_cla = True"),
        ({"per_layer_config": {"0": {"head_dim": 512}}}, "per_layer_config = {'0'"),
        ({"num_attention_heads_per_layer": [4, 8, 4, 8]}, "num_attention_heads_per_layer = [4, 8, 4, 8]"),
        ({"swa_num_key_value_heads": 4}, "swa_num_key_value_heads = 4"),
        ({"global_head_dim": 512}, "global_head_dim = 512"),
        ({"moe_latent_size": 16}, "moe_latent_size = 16"),
        ({"zero_expert_num": 4}, "zero_expert_num = 4"),
        ({"hidden_act": "relu2"}, "hidden_act = relu2"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder = True"),
        ({"use_moe": False}, "use_moe = False"),
        ({"model_type": "jamba"}, "model_type = jamba"),
        ({"kv_lora_rank": 16, "attn_output_gate": True}, "attn_output_gate = True"),
        ({"moe_layer_pattern": "DEDE"}, "moe_layer_pattern = DEDE"),
        ({"attention_windows": [4, 0, 4, 0]}, "attention_windows = [4, 0, 4, 0]"),
        ({"num_expertz": 8}, "Did you mean num_experts?"),
        ({"expert\x1b[31m\nlayers": 2}, r"expert\x1b[31m\nlayers = 2"),
    ],
)
def test_layers_that_cannot_be_priced_and_unknown_layout_are_refused_by_key_and_value(said, shown):
    with pytest.raises(RoutePackError) as refused:
        ModelSpec.from_config(FOUR | said, "mine")
    assert shown in str(refused.value)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    "said",
    [
        {"attn_type_list": [1] * 4},
        {"layers_block_type": ["attention"] * 4, "mamba_d_state": 16},
        {"moe_latent_size": None},
        {"swa_num_key_value_heads": 2, "swa_head_dim": 16},
        {"num_attention_heads_per_layer": [4] * 4},
        {"use_cla": False},
        {"num_experts": [8] * 4, "num_experts_per_tok": [2] * 4, "moe_intermediate_size": [32] * 4},
        {"top_k": 50},
        {"router_layer_norm": True, "moe_router_bias": True, "expert_dropout": 0.1},
        {"attn_layer_period": 0},
        {"num_local_experts": 8},
    ],
    ids=lambda said: "-".join(said),
)
def test_what_changes_no_shape_is_read(said):
    assert ModelSpec.from_config(FOUR | said, "a").spec_hash == ModelSpec.from_config(FOUR, "a").spec_hash


@pytest.mark.parametrize(
    ("said", "width"),
    [
        ({"num_shared_experts": 1}, 32),
        ({"n_shared_experts": 2}, 64),
        ({"moe_num_shared_experts": 2}, 64),
        ({"num_shared_expert": [1, 1]}, 32),
        ({"shared_intermediate_size": 96}, 96),
        ({"share_expert_dim": 48}, 48),
        ({"shared_expert_intermediate_size": 40}, 40),
        ({"n_shared_experts": None}, 0),
        ({"n_shared_experts": 1, "moe_shared_expert_intermediate_size": 64}, 64),
        ({"num_shared_experts": 2, "moe_shared_expert_intermediate_size": 64}, 64),
        ({"model_type": "bailing_moe", "num_shared_experts": 2, "moe_shared_expert_intermediate_size": 32}, 64),
        ({"model_type": "glm4_moe", "first_k_dense_replace": 0}, 32),  # its code has one where the file is silent
    ],
)
def test_shared_experts_count_under_every_key(said, width):
    assert ModelSpec.from_config(SMALL | said, "shared").shared_intermediate_size == width


@pytest.mark.parametrize(
    ("said", "marks"),
    [
        ({"first_k_dense_replace": 1}, "0111"),
        ({"num_dense_layers": 2}, "0011"),
        ({"moe_layer_num_skipped": 1}, "0111"),
        ({"moe_layer_freq": 2}, "1010"),
        ({"moe_layer_freq": [0, 1, 0, 1]}, "0101"),
        ({"decoder_sparse_step": 2}, "0101"),
        ({"interleave_moe_layer_step": 2}, "0101"),
        ({"mlp_only_layers": [3]}, "1110"),
        ({"moe_layers": [1, 2]}, "0110"),
        ({"moe_layers_enum": "2,3"}, "0011"),
        ({"is_moe_layer": [False, True, True, True]}, "0111"),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "dense"]}, "0110"),
        ({"moe_layer_layout": [1, 1, 0, 1]}, "1101"),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 2}, "0110"),
        ({"moe_layer_end_index": -1}, "1111"),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, "0101"),
        ({"moe_layer_interval": 2}, "0101"),
        ({"mlp_layer_types": ["dense", *["sparse"] * 3, "sparse"], "num_nextn_predict_layers": 1}, "0111"),
        ({"model_type": "ernie4_5_moe"}, "0111"),
    ],
)
def test_layers_with_experts_are_read_under_every_key(said, marks):
    spec = ModelSpec.from_config(FOUR | said, "layers")
    assert "".join(str(int(mark)) for mark in spec.moe_layers) == marks


@pytest.mark.parametrize(
    ("said", "windows"),
    [
        ({}, [0, 0, 0, 0]),
        ({"sliding_window": 9}, [9, 9, 9, 9]),
        ({"sliding_window": 9, "max_window_layers": 3}, [0, 0, 0, 9]),
        ({"sliding_window": 9, "use_sliding_window": False}, [0, 0, 0, 0]),
        ({"sliding_window": None}, [0, 0, 0, 0]),
        ({"sliding_window": 9, "sliding_window_pattern": 2}, [9, 0, 9, 0]),
        ({"sliding_window": 9, "sliding_window_pattern": "LLG"}, [9, 9, 0, 9]),
        ({"sliding_window_size": 9, "sliding_window_layout": [1, 0, 0, 1]}, [9, 0, 0, 9]),
        ({"sliding_window": 9, "global_attn_every_n_layers": 4}, [9, 9, 9, 0]),
        (
            {"sliding_window": 9, "layer_types": ["sliding_attention", *OF_FOUR], "sliding_window_pattern": 2},
            [9, 0, 0, 0],
        ),
        ({"sliding_window": 9, "model_type": "gpt_oss"}, [9, 0, 9, 0]),
        ({"sliding_window": 9, "model_type": "qwen3_moe"}, [0, 0, 0, 0]),
    ],
)
def test_windows_are_read_layer_by_layer(said, windows):
    assert list(ModelSpec.from_config(FOUR | said, "windows").windows) == windows


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"sliding_window": 9, "model_type": "unheard_of"}, "sliding_window = 9 does not say for which layers"),
        ({"layer_types": ["sliding_attention", *OF_FOUR]}, "sliding_window"),
        ({"num_local_experts": 16}, "num_local_experts = 16 contradicts num_experts = 8"),
        ({"num_experts": [8, 8, 8, 4]}, "num_experts = [8, 8, 8, 4] differs by layer"),
        ({"num_experts": [8, 8]}, "num_experts = [8, 8] has 2 entries"),
        ({"n_shared_experts": 2, "shared_expert_intermediate_size": 48}, "shared_expert_intermediate_size = 48 may be"),
        ({"first_k_dense_replace": 2, "mlp_layer_types": ["dense", *["sparse"] * 3]}, "first_k_dense_replace = 2 and"),
        ({"moe_layers": [1, 9]}, "moe_layers = 9 is none of the layers 0 to 3"),
        ({"moe_layers": [0], "moe_layer_freq": [0, 1, 1, 1]}, "say different things"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 is no multiple of num_key_value_heads = 3"),
        ({"hidden_size": 66}, "hidden_size = 66 is no multiple"),
    ],
)
def test_contradictions_are_named(said, message):
    with pytest.raises(RoutePackError) as refused:
        ModelSpec.from_config(FOUR | said, "mine")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "value",
    [-1, 0, 2**31, 2**63, pytest.param(10**4000, id="4001 digits"), "8", [], {}, True, 1.5, float("nan"), float("inf")],
)
@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
    ],
)
def test_impossible_values_of_every_fact_are_refused_at_once(key, value):
    with pytest.raises(RoutePackError) as refused:
        ModelSpec.from_config(FOUR | {key: value}, "mine")
    assert key in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("value", [-2, 2**31 + 1, "8", [1], {"a": 1}, True, 0.0, float("nan")])
@pytest.mark.parametrize("key", ["expert_layer_offset", "linear_key_head_dim", "max_window_layers", "qk_head_dim"])
def test_keys_that_this_model_does_not_use_are_checked_too(key, value):
    with pytest.raises(RoutePackError, match=f"{key} = .* is wrong: expected a whole number"):
        ModelSpec.from_config(FOUR | {key: value}, "mine")


def test_specs_that_are_made_pass_the_checks_of_those_that_are_read():
    facts = asdict(ModelSpec.from_config(SMALL, "a"))
    for change in (
        {"hidden_size": 2**40},
        {"num_experts": "8"},
        {"top_k": True},
        {"kv_lora_rank": -1},
        {"windows": [-4, 0]},
        {"windows": [True, 0]},
        {"windows": ["4", 0]},
        {"moe_layers": [1, 0]},
        {"windows": "00"},
        {"moe_layers": 3},
        {"dense_intermediate_size": 0, "moe_layers": [True, False]},
        {"num_key_value_heads": 3},
        {"name": "a\nb"},
        {"unpriced": [3]},
        {"unpriced": ["\n"]},
        {"windows": [0] * 5000, "moe_layers": [True] * 5000},
    ):
        with pytest.raises(ValueError, match="Expected"):
            ModelSpec(**facts | change)


@pytest.mark.parametrize(
    "key", ["num_experts_per_token", "top_k_experts", "moe_k", "moe_topk", "moe_top_k", "experts_per_token"]
)
def test_top_k_and_experts_are_read_under_every_key(key):
    renamed = {k: v for k, v in SMALL.items() if k not in ("num_experts", "num_experts_per_tok")}
    for experts in ("moe_num_experts", "n_routed_experts", "num_local_experts"):
        spec = ModelSpec.from_config({**renamed, key: 2, experts: 8}, "a")
        assert (spec.num_experts, spec.top_k) == (8, 2)


@pytest.mark.parametrize(
    ("said", "width"),
    [({}, 128), ({"model_type": "mixtral"}, 128), ({"model_type": "unheard_of"}, 128), ({"ffn_hidden_size": 128}, 128)],
)
def test_the_width_of_feed_forwards_is_that_of_experts_where_all_layers_have_them(said, width):
    bare = {key: value for key, value in SMALL.items() if key != "moe_intermediate_size"}
    assert ModelSpec.from_config(bare | said, "a").moe_intermediate_size == width


@pytest.mark.parametrize("said", [{"model_type": "qwen3_moe"}, {"model_type": "new", "first_k_dense_replace": 1}])
def test_a_width_that_is_another_one_is_not_taken_for_that_of_experts(said):
    bare = {key: value for key, value in SMALL.items() if key != "moe_intermediate_size"}
    with pytest.raises(RoutePackError, match="has no moe_intermediate_size"):
        ModelSpec.from_config(bare | said, "a")


@pytest.mark.parametrize(
    "said",
    [
        {"model_type": "qwen3_next"},
        {"architectures": ["Qwen3NextForCausalLM"]},
        {"model_type": "mine", "architectures": ["Qwen3NextForCausalLM"]},
        {"model_type": "qwen3_5_moe_text"},
        {"architectures": ["Qwen3_5MoeForConditionalGeneration"]},
    ],
)
def test_what_a_file_leaves_out_is_that_of_its_family(said):
    spec = ModelSpec.from_config({k: v for k, v in FOUR.items() if k != "num_key_value_heads"} | said, "a")
    assert (spec.attention_output_gate, spec.num_key_value_heads, spec.qk_head_dim) == (True, 2, 256)
    assert spec.linear_layers == (True, True, True, False)


def test_latent_attention_without_its_rank_is_no_grouped_query_attention():
    with pytest.raises(RoutePackError, match="has no kv_lora_rank"):
        ModelSpec.from_config(SMALL | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}, "a")
    with pytest.raises(RoutePackError, match="has no kv_lora_rank"):
        ModelSpec.from_config(
            SMALL | {"use_mla": True, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}, "a"
        )


@pytest.mark.parametrize("key", ["use_swiglu", "gated_linear_unit", "gated_mlp", "glu"])
def test_feed_forwards_without_a_gate_are_refused(key):
    with pytest.raises(RoutePackError, match=f"{key} = False means feed-forwards with one up-projection"):
        ModelSpec.from_config(SMALL | {key: False}, "a")


def test_the_nested_part_with_experts_is_read_and_what_stands_beside_it_is_told():
    beside = {
        "model_type": "omni",
        "vision_config": {"num_experts": 3},
        "talker_config": {"text_config": SMALL | {"top_k": 1}},
    }
    spec = ModelSpec.from_config({**beside, "thinker_config": {"text_config": SMALL}}, "a")
    assert spec.unpriced == ("vision encoder (vision_config)", "speech decoder (talker_config)")
    assert spec.spec_hash == ModelSpec.from_config(SMALL, "a").spec_hash
    assert ModelSpec.from_config(SMALL | {"num_nextn_predict_layers": 1}, "a").unpriced == (
        "draft (MTP) layers (num_nextn_predict_layers = 1)",
    )
    with pytest.raises(RoutePackError, match="experts are stated by a_config, b_config"):
        ModelSpec.from_config({"a_config": SMALL, "b_config": SMALL}, "a")
    with pytest.raises(RoutePackError, match="of model_type llama states no routed experts"):
        ModelSpec.from_config({"model_type": "llama", "hidden_size": 64}, "a")

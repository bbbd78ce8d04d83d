import json
from dataclasses import asdict
from pathlib import Path

import pytest

from profiler import SHIPPED_MODELS, ModelSpec, RoutePackError, load_model

# name: (hidden, layers, MoE layers, heads, kv heads, qk dim, v dim, experts, top-k, expert width, shared, projections)
SHIPPED = {
    "Qwen3-30B-A3B": (2048, 48, 48, 32, 4, 128, 128, 128, 8, 768, 0, ((5120, 2048), (2048, 4096))),
    "Qwen3-235B-A22B": (4096, 94, 94, 64, 4, 128, 128, 128, 8, 1536, 0, ((9216, 4096), (4096, 8192))),
    "DeepSeek-V3": (
        7168, 61, 58, 128, 128, 192, 128, 256, 8, 2048, 2048,
        ((1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384)),
    ),
    "gpt-oss-20b": (2880, 24, 24, 64, 8, 64, 64, 32, 4, 2880, 0, ((5120, 2880), (2880, 4096))),
    "gpt-oss-120b": (2880, 36, 36, 64, 8, 64, 64, 128, 4, 2880, 0, ((5120, 2880), (2880, 4096))),
    "Mixtral-8x7B": (4096, 32, 32, 32, 8, 128, 128, 8, 2, 14336, 0, ((6144, 4096), (4096, 4096))),
    "Qwen3-Coder-480B-A35B": (6144, 62, 62, 96, 8, 128, 128, 160, 8, 2560, 0, ((14336, 6144), (6144, 12288))),
    "DeepSeek-V2-Lite": (
        2048, 27, 26, 16, 16, 192, 128, 64, 6, 1408, 2816, ((3072, 2048), (576, 2048), (4096, 512), (2048, 2048)),
    ),
    "Moonlight-16B-A3B": (
        2048, 27, 26, 16, 16, 192, 128, 64, 6, 1408, 2816, ((3072, 2048), (576, 2048), (4096, 512), (2048, 2048)),
    ),
    "Kimi-K2": (
        7168, 61, 60, 64, 64, 192, 128, 384, 8, 2048, 2048,
        ((1536, 7168), (12288, 1536), (576, 7168), (16384, 512), (7168, 8192)),
    ),
    "GLM-4.5-Air": (4096, 46, 45, 96, 8, 128, 128, 128, 8, 1408, 1408, ((14336, 4096), (4096, 12288))),
    "OLMoE-1B-7B": (2048, 16, 16, 16, 16, 128, 128, 64, 8, 1024, 0, ((6144, 2048), (2048, 2048))),
    # Queries come with a gate: 2 x 16 x 256, and two key-value heads twice.
    "Qwen3-Next-80B-A3B": (2048, 48, 48, 16, 2, 256, 256, 512, 10, 512, 512, ((9216, 2048), (2048, 4096))),
}  # fmt: skip
QWEN3_30B_HASH = "c227c829a0de432b07075352b96ced25714c981b561de961b5b248ce00711d6b"
"""Bundles and tables are found by it."""
SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 128,
}  # fmt: skip


def test_every_shipped_model_is_listed_here_and_in_the_readme():
    assert set(SHIPPED) == set(SHIPPED_MODELS)
    said = (
        (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").split("Shipped: ")[1].split(", under")[0]
    )
    assert set(" ".join(said.split()).replace(" and ", ", ").split(", ")) == set(SHIPPED_MODELS)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_models_hold_the_published_shapes(name):
    spec = load_model(name)
    assert (
        spec.hidden_size, spec.num_layers, spec.num_moe_layers, spec.num_attention_heads, spec.num_key_value_heads,
        spec.qk_head_dim, spec.v_head_dim, spec.num_experts, spec.top_k, spec.moe_intermediate_size,
        spec.shared_intermediate_size, spec.attention_projections(),
    ) == SHIPPED[name]  # fmt: skip
    assert spec.name == name


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("qwen3-30b-a3b", "Qwen3-30B-A3B"),
        ("Qwen/Qwen3-30B-A3B", "Qwen3-30B-A3B"),
        ("qwen3_30b_a3b", "Qwen3-30B-A3B"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen3-30B-A3B"),
        ("models--Qwen--Qwen3-235B-A22B", "Qwen3-235B-A22B"),
        (
            "/nowhere/hub/models--openai--gpt-oss-120b/snapshots/8b193b0ef83bd41b40eb71fee8f1432315e02a3e",
            "gpt-oss-120b",
        ),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B"),
        ("deepseek-ai/DeepSeek-V3-0324", "DeepSeek-V3"),
        ("GPT-OSS 20B", "gpt-oss-20b"),
        ("https://huggingface.co/Qwen/Qwen3-30B-A3B/tree/main", "Qwen3-30B-A3B"),
        ("Qwen/Qwen3-30B-A3B-FP8@main", "Qwen3-30B-A3B"),
        (" unsloth/gpt-oss-20b-BF16:latest ", "gpt-oss-20b"),
        ("nvidia/Kimi-K2-Instruct-0905-NVFP4", "Kimi-K2"),
        ("allenai/OLMoE-1B-7B-0924", "OLMoE-1B-7B"),
    ],
)
def test_shipped_models_are_found_under_the_names_of_a_hub(given, meant):
    assert load_model(given) == load_model(meant)


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("Qwen3-30B-A3", "Qwen3-30B-A3B"),
        ("DeepSeek-V3.2", "DeepSeek-V3"),
        ("gpt-oss-12b", "gpt-oss-"),
        ("a" * 5000 + "/Qwen3-30B-A3", "Qwen3-30B-A3B"),
        ("Qwen3-30B\0-A3", "Qwen3-30B-A3B"),
    ],
)
def test_an_unknown_model_names_the_nearest_and_all_shipped_ones(given, near):
    with pytest.raises(RoutePackError, match=f"Did you mean {near}") as caught:
        load_model(given)
    assert all(name in str(caught.value) for name in SHIPPED_MODELS)
    assert str(caught.value).isprintable()


def test_a_file_goes_before_a_name_that_is_only_alike(tmp_path):
    (tmp_path / "gpt_oss_20b").mkdir()
    (tmp_path / "gpt_oss_20b" / "config.json").write_text(json.dumps(SMALL))
    assert load_model("gpt_oss_20b", tmp_path).num_experts == 8


def test_layer_kinds_of_shipped_models():
    oss, deepseek, qwen = (load_model(name) for name in ("gpt-oss-20b", "DeepSeek-V3", "Qwen3-30B-A3B"))
    assert oss.windows == (128, 0) * 12
    assert load_model("gpt-oss-120b").windows == (128, 0) * 18
    assert deepseek.moe_layers == (False,) * 3 + (True,) * 58
    assert deepseek.feed_forward(deepseek.dense_intermediate_size) == ((36864, 7168), (7168, 18432))
    assert set(qwen.windows) == {0}
    assert all(qwen.moe_layers)


def test_hybrid_models_have_linear_layers_with_projections_of_their_own():
    spec = load_model("Qwen3-Next-80B-A3B")
    assert spec.linear_layers == (True, True, True, False) * 12
    assert spec.attention_heads(linear=True) == (32, 16, 128, 128)
    assert spec.attention_windows == (0,)
    assert spec.attention_projections(linear=True) == ((12288, 2048), (64, 2048), (2048, 4096))
    assert spec.attention_projections(2, linear=True) == ((6144, 2048), (32, 2048), (2048, 2048))
    assert spec.expert_bytes() == 3 * 2048 * 512 * 16


def test_layer_types_say_which_layers_are_linear():
    facts = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
             "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
    spec = ModelSpec.from_config({**SMALL, **facts}, "hybrid")
    assert spec.linear_layers == (True, False)
    assert ModelSpec(**json.loads(json.dumps(asdict(spec)))) == spec
    for change, message in (
        ({"linear_num_value_heads": 3}, "multiple of linear_num_key_heads"), ({"linear_key_head_dim": 0}, ">= 1"),
        ({"layer_types": ["linear_attention"] * 2}, "some true and some false"),
        ({"linear_num_key_heads": None}, "linear_num_key_heads"),
    ):  # fmt: skip
        with pytest.raises(RoutePackError, match=message):
            ModelSpec.from_config({**SMALL, **facts, **change}, "hybrid")


def test_models_without_linear_layers_keep_the_hash_they_always_had():
    assert load_model("Qwen3-30B-A3B").spec_hash == QWEN3_30B_HASH
    hybrid = {"full_attention_interval": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
              "linear_key_head_dim": 8, "linear_value_head_dim": 16}  # fmt: skip
    assert ModelSpec.from_config(SMALL, "a").spec_hash != ModelSpec.from_config({**SMALL, **hybrid}, "a").spec_hash


def test_projections_are_cut_by_tensor_parallelism():
    spec = load_model("Qwen3-30B-A3B")
    assert spec.attention_projections(8) == ((768, 2048), (2048, 512))
    assert spec.feed_forward(0) == ()


def test_equal_shapes_have_equal_hashes_whatever_their_names():
    first, second = ModelSpec.from_config(SMALL, "a"), ModelSpec.from_config(SMALL, "b")
    assert first.spec_hash == second.spec_hash
    assert first.spec_hash != ModelSpec.from_config({**SMALL, "hidden_size": 128}, "a").spec_hash


@pytest.mark.parametrize("field", ["hidden_size", "num_attention_heads", "num_experts", "num_experts_per_tok"])
def test_a_missing_field_is_named(field):
    config = {key: value for key, value in SMALL.items() if key != field}
    with pytest.raises(RoutePackError, match=field):
        ModelSpec.from_config(config, "small")


@pytest.mark.parametrize(("field", "value"), [("hidden_size", "64"), ("hidden_size", 64.0), ("num_experts", True)])
def test_a_field_of_another_type_is_named(field, value):
    with pytest.raises(RoutePackError, match=field):
        ModelSpec.from_config({**SMALL, field: value}, "small")


def test_impossible_values_are_errors():
    with pytest.raises(RoutePackError, match="top_k"):
        ModelSpec.from_config({**SMALL, "num_experts_per_tok": 9}, "small")
    with pytest.raises(RoutePackError, match="MoE layer"):
        ModelSpec.from_config({**SMALL, "mlp_only_layers": [0, 1]}, "small")


def test_models_are_read_from_a_path_relative_to_a_folder(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(SMALL))
    assert load_model("mine", tmp_path) == load_model("mine/config.json", tmp_path)
    assert load_model("mine", tmp_path).name == "mine"


def test_a_model_is_named_by_its_folder_on_one_line(tmp_path, monkeypatch):
    folder = tmp_path / "mine\nor not"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    monkeypatch.chdir(folder)
    assert load_model("config.json").name == load_model(".").name == r"mine\nor not"
    snapshot = tmp_path / "models--org--Mine-8x1B" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to(folder / "config.json")
    assert load_model(str(snapshot)).name == "Mine-8x1B"


def test_a_mamba_model_whose_configuration_holds_an_infinity_is_refused_for_its_layers(tmp_path):
    text = json.dumps(SMALL | {"model_type": "nemotron_h", "time_step_limit": [0.0, float("inf")]})
    assert "Infinity" in text
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RoutePackError, match="nemotron_h means layers of one block each, Mamba among them"):
        load_model("config.json", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"rope_theta": float("nan")}))
    with pytest.raises(RoutePackError, match="NaN"):
        load_model("config.json", tmp_path)


def test_unknown_and_broken_models_are_errors(tmp_path):
    with pytest.raises(RoutePackError, match="neither shipped"):
        load_model("Qwen3-31B", tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(RoutePackError, match="not a JSON object"):
        load_model("config.json", tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": ')
    with pytest.raises(RoutePackError, match="cannot be read"):
        load_model("config.json", tmp_path)


@pytest.mark.parametrize(
    "said",
    [{"index_topk": 2048}, {"index_n_heads": 64}, {"index_head_dim": 128}, {"indexer_types": ["full", "shared"]},
     {"model_type": "deepseek_v32"}, {"architectures": ["DeepseekV32ForCausalLM"]}, {"model_type": "glm_moe_dsa"},
     {"sparse_attention": True}, {"use_sparse_indexer": True}, {"use_nsa": True}, {"nsa_config": {"block_size": 64}},
     {"dsa_topk": 512}, {"lightning_indexer": {"heads": 4}}, {"text_config": {"index_topk": 2048}},
     {"layer_types": ["full_attention", "compressed_sparse_attention"]}, {"compress_ratios": [4, 128]},
     {"sparse_config": {"topk": 64}}, {"attention_type": "block_sparse_attention"}, {"blocksparse_block_size": 64},
     {"moba_chunk_size": 512}],
    ids=lambda said: "-".join(said),
)  # fmt: skip
def test_sparse_attention_is_refused_by_name_and_value(said):
    with pytest.raises(RoutePackError, match="means sparse attention") as refused:
        ModelSpec.from_config(SMALL | said, "sparse")
    ((key, value),) = (said.get("text_config") or said).items()
    assert f"{key} = {str(value)[:20]}" in str(refused.value)


@pytest.mark.parametrize(
    "said",
    [{"index_topk": None}, {"index_topk": 0}, {"use_nsa": False}, {"sparse_attention": {"enabled": False, "size": 4}},
     {"decoder_sparse_step": 1}, {"mlp_layer_types": ["dense", "sparse"]}, {"pad_token_index": 5},
     {"quantization_config": {"ignored_layers": ["self_attn.indexer"], "sparse_attention": 1}},
     {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}, {"output_router_logits": True},
     {"block_sparse_moe": True}, {"vision_config": {"fullatt_block_indexes": [7, 15]}}],
    ids=lambda said: "-".join(said),
)  # fmt: skip
def test_what_only_sounds_sparse_is_read(said):
    assert ModelSpec.from_config(SMALL | said, "dense").num_experts == 8

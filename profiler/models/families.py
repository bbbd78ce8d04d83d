"""Families of models by ``model_type``: what a silent ``config.json`` means, and which cannot be priced.

Values are the defaults of the configuration classes in Hugging Face transformers 5.25; a stated key goes before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from profiler.errors import RoutePackError
from profiler.models.keys import SPELLINGS, WAY, shown
from profiler.models.layers import EXPERT_LISTS

ALL_WINDOWED = ("", "mixtral", "phimoe", "minimax", "qwen2_moe", "qwen3_moe", "qwen3_omni_moe_text")
"""Families in which a bare ``sliding_window`` holds for every layer; without a family too, as in Mistral's code."""

_QWEN_HYBRID = {
    "full_attention_interval": 4,
    "attn_output_gate": True,
    "head_dim": 256,
    "shared_expert_intermediate_size": 512,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "afmoe": {
        "num_dense_layers": 1,
        "num_shared_experts": 2,
        "global_attn_every_n_layers": 4,
        "head_dim": 128,
        "attn_output_gate": True,
    },
    "aria_text": {"moe_num_shared_experts": 2},
    "axk1": {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "beam": {
        "first_k_dense_replace": 3,
        "sliding_window_pattern": 6,
        "head_dim": 128,
        "attn_output_gate": True,
    },
    "cohere2_moe": {"sliding_window_pattern": 4, "head_dim": 128},
    "deepseek_v2": {"n_shared_experts": 2, "q_lora_rank": 1536},
    "deepseek_v3": {"n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536},
    "ernie4_5_moe": {"moe_num_shared_experts": 2, "moe_layer_start_index": 1},
    "exaone_moe": {"num_shared_experts": 1, "first_k_dense_replace": 1, "sliding_window_pattern": 4},
    "glm4_moe": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "glm4v_moe_text": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "glm4_moe_lite": {"n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 768},
    "gpt_oss": {"sliding_window_pattern": 2, "head_dim": 64},
    "hy_v3": {"num_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 128},
    "hunyuan_v1_moe": {"num_shared_expert": 1},
    "kolibri1": {"sliding_window_pattern": 5, "head_dim": 128, "shared_expert_intermediate_size": 512},
    "llama4_text": {"n_shared_experts": 1, "attention_chunk_size": 8192, "head_dim": 128},
    "minicpm5_moe": {"n_shared_experts": 1, "first_k_dense_replace": 1, "attn_output_gate": True},
    "minimax_m2": {"head_dim": 128},
    "mistral4": {"n_shared_experts": 1, "q_lora_rank": 1024},
    "param2moe": {"n_shared_experts": 2, "first_k_dense_replace": 1, "head_dim": 64},
    "qwen2_moe": {"use_sliding_window": False, "shared_expert_intermediate_size": 5632},
    "qwen3_moe": {"use_sliding_window": False},
    "qwen3_next": _QWEN_HYBRID,
    "qwen3_5_moe_text": _QWEN_HYBRID,
    "sarvam_moe": {"n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 64},
    "sarvam_mla": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "solar_open": {"n_shared_experts": 1, "head_dim": 128},
}
"""Optional keys that decide shapes or layers, with the value that a silent configuration means."""

_MAMBA = "Mamba layers"
REFUSED = {
    "bailing_hybrid": "Kimi delta attention",
    "bailing_moe_linear": "lightning attention",
    "bailing_moe_v2_linear": "lightning attention",
    "doge": "attention under a learned mask and experts found by product keys",
    "ergo": "experts with one up-projection",
    "gemma4_text": "full attention with heads of another size than windowed attention",
    "granitemoehybrid": _MAMBA,
    "inkling_text": "layers that mix attention and convolutions",
    "inkling2_text": "layers that mix attention and convolutions",
    "jamba": _MAMBA,
    "jetmoe": "attention whose heads are routed experts",
    "kimi_linear": "Kimi delta attention",
    "laguna": "heads of one kind of layer unlike those of others",
    "lfm2_moe": "convolution layers",
    "longcat_flash": "two attention blocks a layer and experts that compute nothing",
    "longcat_flash_ngram": "two attention blocks a layer and experts that compute nothing",
    "minimax": "lightning attention",
    "minimax_text_01": "lightning attention",
    "mimo_v2_flash": "windowed attention with other heads than full attention",
    "muse_spark_text": "experts behind projections to another width",
    "nemotron_h": "layers of one block each, Mamba among them",
    "nllb-moe": "an encoder and a decoder",
    "step3p5": "windowed attention with other heads than full attention",
    "step3p7": "windowed attention with other heads than full attention",
    "switch_transformers": "an encoder and a decoder",
    "zaya": "layers that mix attention and convolutions",
}
"""Families whose layers no table prices whatever their keys say."""
BY_LIST = ("granitemoehybrid", "lfm2_moe", "nemotron_h")
"""Families among these that state the kind of every layer in a list: where they do, it decides."""


def family_of(*model_types: object) -> str:
    """Return the first of several ``model_type`` that is known, else the first stated."""
    stated = [kind for kind in model_types if isinstance(kind, str) and kind]
    known = [kind for kind in stated for kind in (kind, f"{kind}_text") if kind in DEFAULTS or kind in REFUSED]
    return (known or stated or [""])[0]


def refuse_family(part: Mapping[str, Any], family: str, name: str) -> None:
    """Raise RoutePackError for a family whose layers no table prices, unless a list names the kind of every layer."""
    listed = isinstance(part.get("layer_types") or part.get("layers_block_type"), list)
    if family in REFUSED and not (listed and family in BY_LIST):
        raise RoutePackError(
            f"Model {name}: model_type = {shown(family)} means {REFUSED[family]}: it cannot be priced yet. {WAY}"
        )


def with_defaults(part: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return a configuration with its family's defaults where it states no spelling of them."""
    defaults = dict(DEFAULTS.get(family, {}))
    for key in DEFAULTS.get(family, {}):
        alike = next((keys for keys in SPELLINGS.values() if key in keys), (key,))
        lists = EXPERT_LISTS if key in SPELLINGS["first_k_dense_replace"] else ()
        if any(other in part for other in (*alike, *lists)):
            del defaults[key]
    return {**defaults, **part}

"""Families of models by ``model_type``: what a silent ``config.json`` means, and which cannot be priced.

Values are the defaults of the configuration classes in Hugging Face transformers 5.25; a stated key goes before them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from profiler.errors import RoutePackError
from profiler.models.checks import shown
from profiler.models.keys import SPELLINGS, WAY
from profiler.models.layers import EXPERT_LISTS

EXPERTS_ARE_INTERMEDIATE = (
    *("", "aria_text", "cohere2_moe", "dbrx", "flex_olmo", "gpt_oss", "granitemoe", "granitemoe_swa"),
    *("granitemoehybrid", "granitemoeshared", "hunyuan", "hunyuan_v1_moe", "llama4_text", "minimax_m2", "mixtral"),
    *("olmoe", "phimoe"),
)
"""Families whose ``intermediate_size`` is the width of an expert."""
ALL_WINDOWED = ("", "mixtral", "phimoe", "minimax", "qwen2_moe", "qwen3_moe", "qwen3_omni_moe_text")
"""Families in which a bare ``sliding_window`` holds for every layer; without a family too, as in Mistral's code."""

_QWEN_HYBRID = {
    "num_key_value_heads": 2,
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
        "sliding_window": 1024,
        "num_dense_layers": 1,
        "num_shared_experts": 2,
        "global_attn_every_n_layers": 4,
        "head_dim": 128,
        "attn_output_gate": True,
    },
    "aria_text": {"moe_num_shared_experts": 2},
    "axk1": {"first_k_dense_replace": 1, "n_shared_experts": 1, "q_lora_rank": 1536},
    "beam": {
        "num_key_value_heads": 8,
        "first_k_dense_replace": 3,
        "sliding_window": 512,
        "head_dim": 128,
        "attn_output_gate": True,
    },
    "cohere2_moe": {"sliding_window": 4096, "head_dim": 128},
    "dbrx": {"kv_n_heads": 1},
    "deepseek_v2": {"n_shared_experts": 2, "q_lora_rank": 1536},
    "deepseek_v3": {"n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536},
    "ernie4_5_moe": {"num_key_value_heads": 4, "moe_num_shared_experts": 2, "moe_layer_start_index": 1},
    "exaone_moe": {
        "num_key_value_heads": 32,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    "flint": {
        "num_key_value_heads": 4,
        "sliding_window": 513,
        "mlp_only_layers": [0, 1],
        "shared_expert_intermediate_size": 1024,
    },
    "glm4_moe": {"num_key_value_heads": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "glm4_moe_lite": {"n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 768},
    "glm4v_moe_text": {"num_key_value_heads": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "gpt_oss": {"num_key_value_heads": 8, "sliding_window": 128, "sliding_window_pattern": 2, "head_dim": 64},
    "granitemoe_swa": {"sliding_window": 128},
    "hunyuan_v1_moe": {"num_shared_expert": 1},
    "hy_v3": {"num_key_value_heads": 8, "num_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 128},
    "kimi_k2": {"q_lora_rank": 1536},
    "kolibri1": {
        "num_key_value_heads": 4,
        "sliding_window": 513,
        "sliding_window_pattern": 5,
        "head_dim": 128,
        "shared_expert_intermediate_size": 512,
    },
    "lara_mini": {
        "num_key_value_heads": 4,
        "sliding_window": 512,
        "head_dim": 128,
        "shared_expert_intermediate_size": 512,
    },
    "llama4_text": {"num_key_value_heads": 8, "n_shared_experts": 1, "attention_chunk_size": 8192, "head_dim": 128},
    "minicpm5_moe": {
        "num_key_value_heads": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "attn_output_gate": True,
    },
    "minimax_m2": {"num_key_value_heads": 8, "head_dim": 128},
    "mistral4": {"n_shared_experts": 1, "q_lora_rank": 1024},
    "mixtral": {"num_key_value_heads": 8},
    "param2moe": {"num_key_value_heads": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "head_dim": 64},
    "phimoe": {"num_key_value_heads": 8},
    "qwen2_moe": {"num_key_value_heads": 16, "use_sliding_window": False, "shared_expert_intermediate_size": 5632},
    "qwen3_5_moe_text": _QWEN_HYBRID,
    "qwen3_moe": {"num_key_value_heads": 4, "use_sliding_window": False},
    "qwen3_next": _QWEN_HYBRID,
    "qwen3_omni_moe_text": {"num_key_value_heads": 4},
    "qwen3_vl_moe_text": {},
    "sarvam_mla": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "sarvam_moe": {"num_key_value_heads": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 64},
    "solar_open": {"num_key_value_heads": 8, "n_shared_experts": 1, "head_dim": 128},
}
"""Optional keys that decide shapes or layers, with the value that a silent configuration means."""

_MAMBA = "Mamba layers"
REFUSED = {
    "bailing_hybrid": "Kimi delta attention",
    "bailing_moe_linear": "lightning attention",
    "bailing_moe_v2_linear": "lightning attention",
    "doge": "attention under a learned mask and experts found by product keys",
    "ernie4_5_moe_vl": "experts of unlike widths for text and images",
    "ernie4_5_vl_moe_text": "experts of unlike widths for text and images",
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


def family_of(*parts: Mapping[str, Any]) -> str:
    """Return the first known family that ``model_type`` or ``architectures`` of these parts name, else a stated one."""
    stated = [part["model_type"] for part in parts if isinstance(part.get("model_type"), str) and part["model_type"]]
    lists = [part["architectures"] for part in parts if isinstance(part.get("architectures"), list)]
    classes = [name.split("For")[0] for names in lists for name in names if isinstance(name, str)]
    known = {_plain(family): family for family in (*DEFAULTS, *REFUSED)}
    found = [known[_plain(name)] for name in (*stated, *classes) if _plain(name) in known]
    return (found or stated or [""])[0]


def _plain(name: str) -> str:
    """Return the name of a family or class in lower-case letters and digits."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).removesuffix("text")


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
        if any(other in part for other in alike) or any(isinstance(part.get(name), list) for name in lists):
            del defaults[key]
    return {**defaults, **part}

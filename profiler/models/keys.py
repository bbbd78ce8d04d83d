"""Keys of Hugging Face configurations: spellings of one fact, what changes no shape, what cannot be priced.

A key that looks like layout (``LAYOUT``) and stands in no table here is an error: a guess would price another model.
"""

from __future__ import annotations

import re
from typing import Any

SPELLINGS = {
    "hidden_size": ("hidden_size", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "kv_n_heads", "n_kv_heads", "num_kv_heads", "num_attention_groups"),
    "head_dim": ("head_dim", "attention_head_dim"),
    "num_experts": (
        "num_experts",
        "n_routed_experts",
        "num_local_experts",
        "moe_num_experts",
        "num_routed_experts",
        "moe_num_primary_experts",
    ),
    "num_experts_per_tok": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "experts_per_token",
        "experts_per_tok",
        "top_k_experts",
        "moe_k",
        "moe_topk",
        "moe_top_k",
        "num_selected_experts",
        "moe_num_active_primary_experts",
    ),
    "moe_intermediate_size": (
        "moe_intermediate_size",
        "expert_intermediate_size",
        "expert_ffn_hidden_size",
        "moe_ffn_hidden_size",
    ),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size"),
    "n_shared_experts": ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    "shared_expert_intermediate_size": (
        "shared_expert_intermediate_size",
        "shared_experts_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "share_expert_dim",
    ),
    "dense_intermediate_size": (
        "dense_intermediate_size",
        "prefix_dense_intermediate_size",
        "intermediate_size_mlp",
        "first_dense_intermediate_size",
    ),
    "sliding_window": ("sliding_window", "sliding_window_size"),
    "first_k_dense_replace": (
        "first_k_dense_replace",
        "num_dense_layers",
        "n_dense_layers",
        "moe_layer_num_skipped",
        "num_dense_blocks",
    ),
}
"""Fact: the keys under which public models state it. The first one names it in messages."""

SAME_AS = {
    "swa_num_attention_heads": "num_attention_heads",
    "swa_num_key_value_heads": "num_key_value_heads",
    "num_global_key_value_heads": "num_key_value_heads",
    "swa_head_dim": "head_dim",
    "global_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
    "num_attention_heads_per_layer": "num_attention_heads",
    "num_key_value_heads_per_layer": "num_key_value_heads",
}
"""Sizes of one kind of layer that are read where they equal those of all."""

_FLAGS = ("use_mla", "attn_output_gate", "attention_output_gate", "use_sliding_window")
_LISTS = """
    layer_types layers_block_type attn_type_list sliding_window_layout mlp_layer_types moe_layer_layout is_moe_layer
    mlp_only_layers moe_layers
"""
_COUNTS = """
    kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim qk_head_dim v_head_dim linear_num_value_heads
    linear_num_key_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim full_attention_interval
    global_attn_every_n_layers global_attention_every_n_layers max_window_layers decoder_sparse_step
    interleave_moe_layer_step moe_layer_interval moe_layer_frequency moe_layer_start_index moe_layer_end_index
    expert_layer_period expert_layer_offset
"""
KINDS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(_FLAGS, (bool, "true or false")),
    **dict.fromkeys(_LISTS.split(), (list | tuple, "a list")),
    **dict.fromkeys((key for keys in SPELLINGS.values() for key in keys), (int, "a whole number of sane size")),
    **dict.fromkeys((*_COUNTS.split(), *SAME_AS), (int, "a whole number of sane size")),
    "moe_layer_freq": (int | list | tuple, "a whole number or a list"),
    "moe_layers_enum": (str | list | tuple, "a list, or layers with commas"),
    "sliding_window_pattern": (int | str | list | tuple, "a whole number, or a pattern of L and G"),
    "_sliding_window_pattern": (int | str | list | tuple, "a whole number, or a pattern of L and G"),
}
"""Keys whose values decide shapes or layers and are read: what they may be, in types and in words."""

MOST_LAYERS, MOST_EXPERTS, MOST, MOST_WINDOW = 4096, 1 << 16, 1 << 20, 1 << 31
"""Largest counts and sizes that are taken for those of a model; a window may be as long as any context."""

LAYOUT = re.compile(
    r"layer|expert|moe|attn|attention|window|mamba|ssm|(^|_)conv|linear|sparse|chunk|interleav|pattern|hybrid|block"
    r"|period|interval|(^|_)freq|_every_|heads?(_|$)|mlp|ffn|ffw|feed_forward|intermediate|latent|lora|(^|_)[kv]+_dim"
    r"|head_dim|compress|top_?k|dense|(^|_)swa|(^|_)kda|gated?_|(^|_)gating|_gate$|glu(_|$)|mixer|recurren|rnn|rwkv"
    r"|retention|lightning|delta|(^|_)hc_|hyper|ngram|(^|_)cla(_|$)|cross|shared?_|num_(stage|step|loop|repeat)"
    r"|loop|is_encoder|encoder_decoder|(^|_)cca|ple_|kv_channels|query_group|d_ff|d_kv|(^|_)inner|(^|_)(width|depth)$"
    r"|expansion",
    re.IGNORECASE,
)
"""Names that look like layout of layers or experts."""

HARMLESS = re.compile(
    # other parts of the model, positions, routing, number types
    r"mtp|nextn|vision|image|video|audio|visual|projector|rope|rotary|router|routing|quant|dtype|router|drop(ped)?_tokens"
    r"|attn_implementation|flash_attn|aux_loss|use_aux|_jitter|softcap|attn_scal|attention_multiplier|temperature"
    # what a number or a switch of this name can be
    r"|(bias|dropout|_coef|_alpha|_beta|_eps|epsilon|(?<!per)_token|token_ids?|_loss|_weights?|norm|_pdrop|_std|_limits?)$"
    r"|(_limits?_\w+|_scale|_scaling_factor|_multiplier|_kernels?|_class|_func(tion)?|_act|_act_fn|activation)$"
    r"|(sink|_clip|clip_qkv|_renormalize|_strategy|_tp|capacity_factor|_min|_threshold)$"
    r"|^(hidden_act|layer_?norm|qk_norm|expert_capacity|expert_parallel|forced_|suppress_|num_beam|lm_head|tie_|sdpa|cuda_)"
    r"|^(gradient_checkpoint|moe_apply|moe_permute|moe_dropless|moe_impl|moe_act|moe_use_aux|group_limited|gate_score)"
)
"""Parts of names that look like layout and change no shape of the layers that are read."""
_NAMES = """
    add_bias_linear add_full_attention_sink_bias add_swa_attention_sink_bias architectures attn_backend block_sparse_moe
    chunk_size_feed_forward cla_share_factor cross_attention_hidden_size enable_lm_head_fp32 enable_lm_head_output_fp32
    enable_moe_block enable_moe_fp32_combine encoder_no_repeat_ngram_size ep_size expert_selection_fn gate_type
    gated_linear_unit is_encoder_decoder is_moe mamba_ssm_dtype mla_use_nope model_type moe_backend moe_enabled
    moe_ep_size moe_gate moe_shared_expert_overlap n_group no_repeat_ngram_size no_rope_layer_interval no_rope_layers
    nope_layer_interval norm_head norm_topk_prob num_expert_group num_expert_groups num_logits_to_keep num_reward_heads
    output_attentions output_hidden_states query_pre_attn_scalar shared_moe_mode topk_fn topk_group topk_method top_k
    uniform_expert_assignment use_grouped_topk use_mixed_mlp_moe use_moe use_shared_expert_sigmoid
    use_unified_vision_chunk value_head vocab_size_per_layer_input
"""
HARMLESS_NAMES = frozenset(_NAMES.split())
"""Whole names likewise: groups of the router, sampling, precision, positions."""
SWITCHES = re.compile(r"((use|is|has|enable)_)?moe(_block|_enabled|_layers?)?")
"""Keys that turn a family's experts on."""
GATES = re.compile(r"glu(_|$)|gated_(linear_unit|mlp|ffn|act)|(mlp|ffn|act|activation)_gated")
"""Keys that turn the gate of feed-forwards on."""

UNPRICED = {
    r"(num_nextn_predict_layers|mtp_num(_hidden)?_layers|num_mtp_(modules|layers)|mtp_transformer_layers)": (
        "draft (MTP) layers"
    ),
    r"(vision|visual|vit|image)_(config|model)|vision_tower": "vision encoder",
    r"(audio|speech)_(config|model)|audio_tower": "audio encoder",
    r"(talker|code2wav|token2wav)_config": "speech decoder",
}
"""What may stand beside the layers that are read: named as not priced."""

_HEADS = "heads of one kind of layer unlike those of others"
_MAMBA, _LATENT = "Mamba layers", "experts behind projections to another width"
CANNOT = {
    "attention_chunk_size": "chunked attention",
    "per_layer_config": "layers of unlike shapes",
    "block_configs": "layers of unlike shapes",
    "attention_other_setting": _HEADS,
    "num_sliding_attention_heads": _HEADS,
    "attn_layer_period": _MAMBA,
    "attn_layer_indices": _MAMBA,
    "hybrid_override_pattern": "layers of one block each, Mamba among them",
    "hybrid_layer_pattern": "a mix of layers whose kinds it does not name",
    "linear_attn_config": "Kimi delta attention",
    "kda_layers": "Kimi delta attention",
    "short_conv_kernel_size": "Kimi delta attention",
    "layer_group_size": "lightning attention",
    "full_attn_idxs": "convolution layers",
    "conv_L_cache": "convolution layers",
    "use_cla": "keys and values shared between layers",
    "num_kv_shared_layers": "keys and values shared between layers",
    "kv_source_layers": "keys and values shared between layers",
    "moe_latent_size": _LATENT,
    "routed_expert_hidden_size": _LATENT,
    "moe_hidden_size": _LATENT,
    "zero_expert_num": "experts that compute nothing",
    "zero_expert_type": "experts that compute nothing",
    "mla_use_output_gate": "latent attention with an output gate",
    "hc_mult": "hyper-connections",
    "parallel_attn_mlp_res": "a dense part beside the experts of a layer",
    "use_residual": "a dense part beside the experts of a layer",
    "residual_moe": "a dense part beside the experts of a layer",
    "use_double_wide_mlp": "layers of unlike widths",
    "hidden_size_per_layer_input": "inputs of every layer from embeddings of its own",
    "is_encoder_decoder": "an encoder and a decoder",
    "add_cross_attention": "cross attention",
}
"""Keys that state, unless they are off, what no table prices."""

SAID_BY_LIST = re.compile(r"(mamba|ssm|time_step|conv)_\w+|expand|chunk_size|n_groups|\w*sliding_window_pattern")
"""Keys that mean nothing more where a list names the kind of every layer: sizes of other kinds, patterns."""

SPARSE_ATTENTION = re.compile(
    r"indexer|(^|_)index_?(top_?k|n_?heads|num_heads|head_dim)|sparse_?att|att(entio)?n_spars|blocksparse"
    r"|^sparse_config|(^|_)(dsa|nsa|moba|infllm)(_|\d|$)|deepseek_v3_?2|compress_(ratio|rate)|indexed_attention"
)
"""Snake-case names of sparse attention in configurations: DeepSeek's indexer, NSA, MoBA, InfLLM, block-sparse kinds."""
KIND_KEYS = re.compile(r"model_type|architectures|layer_types|att(entio)?n_.*type|att(entio)?n_(kind|method|mode)")
"""Keys whose values name kinds of layers."""
WAY = "Plan a model of dense, windowed or gated delta-rule attention whose layers are alike."
UNGATED = re.compile(r"relu2|relu_?squared?|squared_?relu")
"""Activations of feed-forwards with one up-projection; all others are taken as gated, as public MoE models are."""

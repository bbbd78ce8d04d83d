"""Facts of an MoE model that decide its training time, read from a Hugging Face ``config.json``."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from profiler.errors import RoutePackError
from profiler.files import content_hash
from profiler.readers import read_json

MODELS = Path(__file__).with_name("models")
SHIPPED_MODELS = tuple(sorted(path.stem for path in MODELS.glob("*.json")))
ATTENTION_SIZES = ("num_attention_heads", "num_key_value_heads", "qk_head_dim", "v_head_dim")
EXPERT_SIZES = ("hidden_size", "num_experts", "top_k", "moe_intermediate_size")
LINEAR_SIZES = ("linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim")
SPARSE_ATTENTION = re.compile(
    r"indexer|(^|_)index_?(top_?k|n_?heads|num_heads|head_dim)|sparse_?att|att(entio)?n_spars|blocksparse"
    r"|^sparse_config|(^|_)(dsa|nsa|moba|infllm)(_|\d|$)|deepseek_v3_?2|compress_(ratio|rate)"
)
"""Snake-case names of sparse attention in configurations: DeepSeek's indexer, NSA, MoBA, InfLLM, block-sparse kinds."""
KIND_KEYS = re.compile(r"model_type|architectures|layer_types|att(entio)?n_.*type|att(entio)?n_(kind|method|mode)")
"""Keys whose values name kinds of layers."""
SAME_SHAPE = r"[-_. ](base|instruct|thinking|chat|bf16|fp8|hf|v0\.1|0324|2507)(?![a-z0-9])"
"""What names of releases add that differ in weights alone."""
STATE_BYTES = 16
"""Bytes of one trained parameter that move with an expert: bf16 weight, fp32 master weight, two fp32 Adam moments (14),
rounded up for alignment and buffers."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of one MoE transformer.

    Tuples run over the hidden layers: ``windows[i]`` is the sliding window of layer i in tokens (0: full or linear
    attention), ``moe_layers[i]`` tells whether layer i has routed experts, ``linear_layers[i]`` whether its attention
    is a gated delta rule (empty: none is).
    """

    name: str
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    qk_head_dim: int
    v_head_dim: int
    attention: str
    """``gqa`` (grouped-query) or ``mla`` (multi-head latent)."""
    q_lora_rank: int
    """Rank of the query's down-projection (MLA); 0 where queries are projected directly."""
    kv_lora_rank: int
    qk_rope_head_dim: int
    num_experts: int
    top_k: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    """Width of all shared experts together; 0 without."""
    dense_intermediate_size: int
    """Width of the feed-forward of layers without experts."""
    windows: tuple[int, ...]
    moe_layers: tuple[bool, ...]
    attention_output_gate: bool = False
    """Queries come with a gate of the same width for the attention's output (Qwen3-Next)."""
    linear_layers: tuple[bool, ...] = ()
    linear_num_value_heads: int = 0
    linear_num_key_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    """Width of the short convolution before a linear attention core; it is not timed."""

    def __post_init__(self) -> None:
        for field in ("windows", "moe_layers", "linear_layers"):
            # Files hold lists.
            object.__setattr__(self, field, tuple(getattr(self, field)))
        for field in (*EXPERT_SIZES, *ATTENTION_SIZES, *(LINEAR_SIZES if self.linear_layers else ())):
            if not getattr(self, field) >= 1:
                raise ValueError(f"Expected {field} >= 1, got {getattr(self, field)}.")
        if self.attention not in ("gqa", "mla"):
            raise ValueError(f"Expected attention 'gqa' or 'mla', got {self.attention!r}.")
        if self.top_k > self.num_experts:
            raise ValueError(f"Expected top_k <= num_experts = {self.num_experts}, got {self.top_k}.")
        if len(self.windows) != len(self.moe_layers) or not any(self.moe_layers):
            raise ValueError("Expected one window and one MoE mark per layer, and at least one MoE layer.")
        linear, heads, key_heads = self.linear_layers, self.linear_num_value_heads, self.linear_num_key_heads
        if linear and (len(linear) != len(self.windows) or len(set(linear)) < 2):
            raise ValueError("Expected linear_layers to be empty, or one mark per layer, some true and some false.")
        if linear and heads % key_heads:
            raise ValueError(
                f"Expected linear_num_value_heads to be a multiple of linear_num_key_heads = {key_heads}, got {heads}."
            )

    @property
    def num_layers(self) -> int:
        """Hidden layers."""
        return len(self.windows)

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts: the L of ``expert_counts [N, L, E]``."""
        return sum(self.moe_layers)

    @property
    def spec_hash(self) -> str:
        """SHA-256 of all fields but the name and empty optional ones: equal shapes, equal hash."""
        facts = {field.name: (getattr(self, field.name), field.default) for field in fields(self)[1:]}
        return content_hash({name: value for name, (value, default) in facts.items() if value or default is MISSING})

    @property
    def attention_windows(self) -> tuple[int, ...]:
        """Distinct windows of the layers with softmax attention, ascending."""
        linear = self.linear_layers or (False,) * self.num_layers
        return tuple(sorted({window for window, mark in zip(self.windows, linear, strict=True) if not mark}))

    def attention_heads(self, tensor_parallel: int = 1, linear: bool = False) -> tuple[int, int, int, int]:
        """Return (query heads, key-value heads, qk dim, v dim) of the core on one tensor-parallel rank.

        Of linear layers: (value heads, key heads, key dim, value dim).
        """
        names = LINEAR_SIZES if linear else ATTENTION_SIZES
        heads, kv_heads, qk_dim, v_dim = (getattr(self, name) for name in names)
        return max(1, heads // tensor_parallel), max(1, kv_heads // tensor_parallel), qk_dim, v_dim

    def attention_projections(self, tensor_parallel: int = 1, linear: bool = False) -> tuple[tuple[int, int], ...]:
        """Return the (n, k) of the dense GEMMs around the attention core on one tensor-parallel rank.

        ``linear`` asks for a layer with linear attention: queries, keys, values and output gate in one GEMM, the two
        gates of the recurrence in another.
        """
        hidden = self.hidden_size
        heads, kv_heads, qk_dim, v_dim = self.attention_heads(tensor_parallel, linear)
        out = (hidden, heads * v_dim)
        if linear:
            return ((2 * (kv_heads * qk_dim + heads * v_dim), hidden), (2 * heads, hidden), out)
        if self.attention == "gqa":
            queries = heads * (qk_dim + (v_dim if self.attention_output_gate else 0))
            return ((queries + kv_heads * (qk_dim + v_dim), hidden), out)
        nope = self.qk_head_dim - self.qk_rope_head_dim
        down_kv = (self.kv_lora_rank + self.qk_rope_head_dim, hidden)
        up_kv = (heads * (nope + self.v_head_dim), self.kv_lora_rank)
        if self.q_lora_rank == 0:
            return ((heads * self.qk_head_dim, hidden), down_kv, up_kv, out)
        return ((self.q_lora_rank, hidden), (heads * self.qk_head_dim, self.q_lora_rank), down_kv, up_kv, out)

    def feed_forward(self, width: int, tensor_parallel: int = 1) -> tuple[tuple[int, int], ...]:
        """Return the (n, k) of a dense SwiGLU feed-forward of ``width`` on one tensor-parallel rank."""
        if width == 0:
            return ()
        local = max(1, width // tensor_parallel)
        return ((2 * local, self.hidden_size), (self.hidden_size, local))

    def expert_bytes(self, expert_tensor_parallel: int = 1) -> int:
        """Return the bytes of one expert's weights and optimizer state on one rank: what a move transfers."""
        width = max(1, self.moe_intermediate_size // expert_tensor_parallel)
        return 3 * self.hidden_size * width * STATE_BYTES

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str) -> ModelSpec:
        """Read a Hugging Face configuration (Qwen3-MoE, Qwen3-Next, DeepSeek-V2/V3, gpt-oss, Mixtral and kin).

        RoutePackError if a field that decides the time is missing, or the model has no routed experts.
        """
        refuse_sparse_attention(config, name)
        asked, told = partial(_integer, config, name), config.get
        hidden, heads, layers = asked("hidden_size"), asked("num_attention_heads"), asked("num_hidden_layers")
        width = asked("moe_intermediate_size", "intermediate_size")
        latent, linear_layers = "kv_lora_rank" in config, _linear_layers(config, layers)
        kv_heads, rope = heads, 0
        if latent:
            rope, v_dim = asked("qk_rope_head_dim"), asked("v_head_dim")
            qk_dim = asked("qk_nope_head_dim") + rope
        else:
            kv_heads = told("num_key_value_heads") or heads
            qk_dim = v_dim = told("head_dim") or hidden // heads
        linear_sizes = {key: asked(key) for key in LINEAR_SIZES} if linear_layers else {}
        try:
            return cls(
                name=name,
                hidden_size=hidden,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                qk_head_dim=qk_dim,
                v_head_dim=v_dim,
                attention="mla" if latent else "gqa",
                q_lora_rank=(told("q_lora_rank") or 0) if latent else 0,
                kv_lora_rank=told("kv_lora_rank") or 0,
                qk_rope_head_dim=rope,
                num_experts=asked("num_experts", "n_routed_experts", "num_local_experts"),
                top_k=asked("num_experts_per_tok", "experts_per_token"),
                moe_intermediate_size=width,
                shared_intermediate_size=told("shared_expert_intermediate_size")
                or (told("n_shared_experts") or 0) * width,
                dense_intermediate_size=told("intermediate_size") or 0,
                windows=_windows(config, layers),
                moe_layers=_moe_layers(config, layers),
                attention_output_gate=bool(told("attn_output_gate", told("model_type") == "qwen3_next")),
                linear_layers=linear_layers,
                linear_conv_kernel_dim=told("linear_conv_kernel_dim") or 0,
                **linear_sizes,
            )
        except ValueError as error:
            raise RoutePackError(f"Model {name}: {error}") from None


def refuse_sparse_attention(config: Mapping[str, Any], name: str) -> None:
    """Raise RoutePackError where a query attends to keys chosen by an indexer or in blocks: that cannot be priced yet.

    Keys tell it at any depth (``index_topk``, ``use_nsa``) unless they are off, and values that name kinds of layers.
    """
    for key, value in config.items():
        off = not value or value in ("none", "full", "dense")
        if isinstance(value, Mapping) and key != "quantization_config":
            refuse_sparse_attention(value, name)
            off |= value.get("enabled") is False
        kinds = (value if isinstance(value, list) else [value]) if KIND_KEYS.search(key) else ()
        if (_is_sparse(key) and not off) or any(isinstance(kind, str) and _is_sparse(kind) for kind in kinds):
            raise RoutePackError(
                f"Model {name}: {key} = {textwrap.shorten(str(value), 60)} means sparse attention, whose times depend "
                "on the keys it chooses: it cannot be priced yet. Plan a model of dense, windowed or linear attention."
            )


def _is_sparse(word: str) -> bool:
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|\W+", "_", word).lower()
    return SPARSE_ATTENTION.search(snake) is not None


def _integer(config: Mapping[str, Any], name: str, *keys: str) -> int:
    """Return the first of several keys that a configuration states."""
    key = next((key for key in keys if config.get(key) is not None), None)
    if key is None:
        raise RoutePackError(f"Model {name}: its config.json has no {' or '.join(keys)}. Give that of an MoE model.")
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int):
        raise RoutePackError(f"Model {name}: expected {key} to be an integer, got {value!r}.")
    return value


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    window = 0 if config.get("use_sliding_window") is False else config.get("sliding_window") or 0
    kinds = config.get("layer_types") or ["sliding_attention"] * layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:layers])


def _linear_layers(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Return a mark per layer, nothing where no layer is linear."""
    # Of every so many layers the last one attends to all tokens.
    every = config.get("full_attention_interval") or 1
    marks = [(i + 1) % every != 0 for i in range(layers)]
    if config.get("layer_types"):
        marks = [kind == "linear_attention" for kind in config["layer_types"][:layers]]
    return tuple(marks) if any(marks) else ()


def _moe_layers(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    first = config.get("first_k_dense_replace") or 0
    every = config.get("decoder_sparse_step") or 1
    frequency = config.get("moe_layer_freq") or 1
    dense = set(config.get("mlp_only_layers") or ())
    if isinstance(frequency, list):
        return tuple(bool(mark) for mark in frequency[:layers])
    return tuple(i >= first and i not in dense and (i + 1) % every == 0 and i % frequency == 0 for i in range(layers))


def shipped_name(model: str) -> tuple[str, str]:
    """Return the shipped model that a name means, and the one it is nearest to; empty where there is none.

    Case, punctuation, organisation, a hub's cache folders and words of releases that share one shape do not count.
    """
    cached = re.search(r"models--(?:[^/]+?--)?([^/]+)", model)
    last = cached[1] if cached else model.rstrip("/").rsplit("/")[-1]
    known = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in SHIPPED_MODELS}
    plain = re.sub(r"[^a-z0-9]", "", re.sub(SAME_SHAPE, "", last.lower()))
    near = difflib.get_close_matches(plain, known, n=1)
    return known.get(plain, ""), known[near[0]] if near else ""


def load_model(model: str, folder: Path | str = ".") -> ModelSpec:
    """Return the spec of a shipped model by name, or of a ``config.json`` by path (relative to ``folder``).

    RoutePackError if the name is unknown and no such file exists, or the file is not an MoE model's configuration.
    """
    path, (shipped, near) = Path(folder, model), shipped_name(model)
    path = path / "config.json" if path.is_dir() else path
    if shipped and (model in SHIPPED_MODELS or not path.is_file()):
        path = MODELS / f"{shipped}.json"
    if not path.is_file():
        raise RoutePackError(
            f"Model {model!r} is neither shipped nor the path of a config.json ({path} is none)."
            f"{f' Did you mean {near}?' if near else ''} Shipped: {', '.join(SHIPPED_MODELS)}."
        )
    config = read_json(path, "Model configuration")
    if not isinstance(config, dict):
        raise RoutePackError(f"Model configuration {path} is not a JSON object.")
    return ModelSpec.from_config(config, path.parent.name if path.name == "config.json" else path.stem)

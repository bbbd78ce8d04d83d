"""Facts of an MoE model that decide its training time, read from a Hugging Face ``config.json``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from profiler.errors import RoutePackError
from profiler.files import content_hash
from profiler.models.checks import shown
from profiler.models.config import LINEAR_SIZES, read_config
from profiler.models.keys import MOST, MOST_EXPERTS, MOST_LAYERS, MOST_WINDOW
from profiler.readers.json_text import MAX_BYTES, parse_json
from profiler.readers.raw import read_bytes

MODELS = Path(__file__).with_name("models")
SHIPPED_MODELS = tuple(sorted(path.stem for path in MODELS.glob("*.json")))
ATTENTION_SIZES = ("num_attention_heads", "num_key_value_heads", "qk_head_dim", "v_head_dim")
EXPERT_SIZES = ("hidden_size", "num_experts", "top_k", "moe_intermediate_size")
SAME_SHAPE = (
    r"[-_. ](base|instruct|thinking|chat|hf|v0\.1|[0-9]{4}|bf16|fp8|nvfp4|mxfp4|awq|gptq|int4|int8|gguf)(?![a-z0-9])"
    r"|[:@].*"
)
"""What names of releases add that differ in weights alone."""
CACHED = re.compile(r"models--(?:[^/]+?--)?([^/]+)")
"""A model's folder in a hub's cache, and its name."""
NO_LIMIT = re.compile(rb'("time_step_limit"\s*:)\s*\[[^]]*\]')
"""Configurations of Mamba models hold an infinity here, which is no JSON; it decides no shape."""
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
    unpriced: tuple[str, ...] = ()
    """What the model has beside these layers: draft (MTP) layers, vision encoder."""

    def __post_init__(self) -> None:
        for field, kind in (("windows", int), ("moe_layers", bool), ("linear_layers", bool), ("unpriced", str)):
            values = getattr(self, field)
            if not isinstance(values, list | tuple) or any(type(value) is not kind for value in values):
                raise ValueError(f"Expected {field} to be a list of {kind.__name__}, got {values!r:.80}.")
            object.__setattr__(self, field, tuple(values))  # files hold lists
        self._check_ranges()
        if self.attention not in ("gqa", "mla"):
            raise ValueError(f"Expected attention 'gqa' or 'mla', got {self.attention!r}.")
        if self.attention == "gqa" and self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"Expected num_attention_heads to be a multiple of num_key_value_heads = {self.num_key_value_heads}, "
                f"got {self.num_attention_heads}."
            )
        if self.top_k > self.num_experts:
            raise ValueError(f"Expected top_k <= num_experts = {self.num_experts}, got {self.top_k}.")
        if len(self.windows) != len(self.moe_layers) or not any(self.moe_layers):
            raise ValueError("Expected one window and one MoE mark per layer, and at least one MoE layer.")
        if not all(self.moe_layers) and self.dense_intermediate_size == 0:
            raise ValueError("Expected dense_intermediate_size >= 1 for layers without experts, got 0.")
        linear, heads, key_heads = self.linear_layers, self.linear_num_value_heads, self.linear_num_key_heads
        if linear and (len(linear) != len(self.windows) or len(set(linear)) < 2):
            raise ValueError("Expected linear_layers to be empty, or one mark per layer, some true and some false.")
        if linear and heads % key_heads:
            raise ValueError(
                f"Expected linear_num_value_heads to be a multiple of linear_num_key_heads = {key_heads}, got {heads}."
            )

    def _check_ranges(self) -> None:
        """Raise ValueError for sizes that no model has."""
        positive = {*EXPERT_SIZES, *ATTENTION_SIZES, *(LINEAR_SIZES if self.linear_layers else ())}
        for field in fields(self):
            value, least = getattr(self, field.name), int(field.name in positive)
            if field.type == "int" and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"Expected {field.name} to be an integer, got {value!r:.80}.")
            if field.type == "int" and not least <= value <= MOST:
                raise ValueError(f"Expected {field.name} >= {least} and <= {MOST}, got {value}.")
        if len(self.windows) > MOST_LAYERS or self.num_experts > MOST_EXPERTS:
            raise ValueError(f"Expected at most {MOST_LAYERS} layers and {MOST_EXPERTS} experts.")
        for said in (self.name, *self.unpriced):
            if not isinstance(said, str) or not said.isprintable() or not 0 < len(said) <= 200:
                raise ValueError(f"Expected name and unpriced to be short lines of text, got {said!r:.80}.")
        if not all(0 <= window <= MOST_WINDOW for window in self.windows):
            raise ValueError(f"Expected windows of 0 to {MOST_WINDOW} tokens, got {min(self.windows)} or more.")

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
        """SHA-256 of all fields that decide a time, without empty optional ones: equal shapes, equal hash."""
        named = [field for field in fields(self) if field.name not in ("name", "unpriced")]
        facts = {field.name: (getattr(self, field.name), field.default) for field in named}
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
        """Read a Hugging Face configuration; docs/models.md lists what public models are read as.

        RoutePackError if a field that decides the time is missing or impossible, the model has no routed experts, or
        states what no table prices.
        """
        name = shown(name) or "model"
        try:
            return cls(name=name, **read_config(config, name))
        except ValueError as error:
            raise RoutePackError(f"Model {name}: {error}") from None


def shipped_name(model: str) -> tuple[str, str]:
    """Return the shipped model that a name means, and the one it is nearest to; empty where there is none.

    Case, punctuation, organisation, a hub's cache folders and words of releases that share one shape do not count.
    """
    cached = CACHED.search(model)
    path = re.sub(r"^\w+://[^/]+/|/(tree|blob|resolve)/.*", "", model.strip()).rstrip("/")
    last = (cached[1] if cached else path.rsplit("/")[-1])[:200]
    known = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in SHIPPED_MODELS}
    plain = re.sub(r"[^a-z0-9]", "", re.sub(SAME_SHAPE, "", last.lower()))
    near = difflib.get_close_matches(plain, known, n=1)
    return known.get(plain, ""), known[near[0]] if near else ""


def load_model(model: str, folder: Path | str = ".") -> ModelSpec:
    """Return the spec of a shipped model by name, or of a ``config.json`` by path (relative to ``folder``).

    RoutePackError if the name is unknown and no such file exists, or the file is not an MoE model's configuration.
    """
    path, (shipped, near) = Path(folder, model), shipped_name(model)
    try:
        path = path / "config.json" if path.is_dir() else path
        found = path.is_file()
    except (OSError, ValueError):  # a name too long for a path, or with a zero byte
        found = False
    if shipped and (model in SHIPPED_MODELS or not found):
        path, found = MODELS / f"{shipped}.json", True
    if not found:
        raise RoutePackError(
            f"Model '{shown(model)}' is neither shipped nor the path of a config.json ({shown(path)} is none)."
            f"{f' Did you mean {near}?' if near else ''} Shipped: {', '.join(SHIPPED_MODELS)}."
        )
    what = "Model configuration"
    config = parse_json(NO_LIMIT.sub(rb"\1 null", read_bytes(path, what, MAX_BYTES)), f"{what} {shown(path)}")
    if not isinstance(config, dict):
        raise RoutePackError(f"Model configuration {path} is not a JSON object.")
    folder, cached = path.absolute().parent, CACHED.search(str(path.absolute()))
    name = cached[1] if cached else folder.name if path.name == "config.json" else path.stem
    return ModelSpec.from_config(config, name)

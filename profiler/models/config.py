"""Read the facts of an MoE model that decide its times out of a Hugging Face configuration, or refuse it by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from profiler.errors import RoutePackError
from profiler.models.checks import (
    is_off,
    quoted,
    refuse_other_types,
    refuse_sparse_attention,
    refuse_unknown,
    refuse_what_cannot_be_priced,
    shown,
)
from profiler.models.families import (
    ALL_WINDOWED,
    DEFAULTS,
    EXPERTS_ARE_INTERMEDIATE,
    family_of,
    refuse_family,
    with_defaults,
)
from profiler.models.keys import MOST, MOST_EXPERTS, MOST_LAYERS, MOST_WINDOW, SAME_AS, SPELLINGS, UNPRICED
from profiler.models.layers import LINEAR, Layers

LINEAR_SIZES = ("linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim")
FLATTENED = ("attn_config", "ffn_config", "moe_config")
"""Parts whose keys count as those of the model (DBRX)."""
NO_TEXT = re.compile(r"vision|visual|image|video|audio|speech|talker|code2wav|projector|quantization|draft|mtp|rope")
"""Nested parts that are not the language model."""


def read_config(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the fields of ``ModelSpec`` but its name.

    RoutePackError if a fact that decides the time is missing, impossible, or such that no table prices it.
    """
    part = text_part(config, name)
    refuse_sparse_attention(config, name)
    family = family_of(part, config)
    part = with_defaults(_flat(part), family)
    beside = {} if part is config else {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    refuse_family(part, family, name)
    for stated in (part, beside):
        refuse_what_cannot_be_priced(stated, name)
    refuse_other_types(part, name)
    for stated in (part, beside):
        refuse_unknown(stated, name)
    return Facts(part, name, family).fields() | {"unpriced": tuple(_unpriced(config, part))}


def text_part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the language model's part of a configuration: itself, or the one nested part with experts."""
    if not isinstance(config, Mapping):
        raise RoutePackError(f"Model {name}: its configuration is not a JSON object.")
    candidates = {"itself": config, **dict(_nested(config))}
    found = {where: part for where, part in candidates.items() if _states(part, "num_experts")}
    whole = {where: part for where, part in found.items() if _states(part, "hidden_size")}
    if len(whole) > 1 and "itself" not in whole:
        raise RoutePackError(
            f"Model {name}: experts are stated by {shown(', '.join(whole))}. Give the one that is trained as a file."
        )
    if chosen := whole or found:
        return next(iter(chosen.values()))
    if spelled := next((part for part in candidates.values() if any("expert" in str(key) for key in part)), None):
        return spelled
    kinds = [part["model_type"] for part in candidates.values() if isinstance(part.get("model_type"), str)]
    kind = f" of model_type {shown(kinds[-1])}" if kinds else ""
    raise RoutePackError(
        f"Model {name}: its config.json{kind} states no routed experts "
        f"(no {' or '.join(SPELLINGS['num_experts'])}): plans are of experts. Give the config.json of an MoE model."
    )


def _flat(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a part with the keys of its own parts among its keys (DBRX)."""
    inner = {key: value for key in FLATTENED if isinstance(part.get(key), Mapping) for key, value in part[key].items()}
    return {**inner, **{key: value for key, value in part.items() if not (key in FLATTENED and inner)}}


def _states(part: Mapping[str, Any], fact: str) -> bool:
    """Tell whether a part states a fact under any spelling."""
    return any(_flat(part).get(key) for key in SPELLINGS[fact])


def _nested(config: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield nested parts that may be a language model, with the keys that lead there; two levels deep."""
    for key, part in config.items():
        if isinstance(part, Mapping) and key not in FLATTENED and not NO_TEXT.search(str(key)):
            yield f"{where}{key}", part
            if not where:
                yield from _nested(part, f"{key}.")


def _unpriced(config: Mapping[str, Any], part: Mapping[str, Any]) -> Iterator[str]:
    """Say what a model has beside the layers that are read."""
    parts = [config, *(nested for _, nested in _nested(config)), part]
    for pattern, what in UNPRICED.items():
        for key, value in {key: value for stated in parts for key, value in stated.items()}.items():
            if re.fullmatch(pattern, str(key)) and not is_off(value):
                yield f"{what} ({key}{'' if isinstance(value, Mapping) else f' = {shown(value)}'})"
                break


class Facts:
    """Facts that one part of a configuration states under any spelling; all sizes are checked as they are read."""

    def __init__(self, part: Mapping[str, Any], name: str, family: str) -> None:
        self.part, self.name, self.family = part, name, family

    def fields(self) -> dict[str, Any]:
        """Return the fields of ``ModelSpec`` but name and what is not priced."""
        layers = Layers(self.part, self.name, self.size("num_hidden_layers", most=MOST_LAYERS))
        self.check_lists(layers)
        window = self.size("sliding_window", 0, least=0, most=MOST_WINDOW)
        kinds = layers.attention(window, self.family in ALL_WINDOWED)
        moe = layers.experts()
        heads = self.heads()
        self.check_same(heads)
        linear = tuple(kind == LINEAR for kind in kinds) if LINEAR in kinds else ()
        width = self.expert_width(moe)
        return heads | {
            "num_experts": self.size("num_experts", most=MOST_EXPERTS),
            "top_k": self.size("num_experts_per_tok", most=MOST_EXPERTS),
            "moe_intermediate_size": width,
            "shared_intermediate_size": self.shared_width(width),
            "dense_intermediate_size": self.dense_width(moe),
            "windows": layers.windows(kinds, window),
            "moe_layers": moe,
            "linear_layers": linear,
            **({key: self.linear_size(key) for key in LINEAR_SIZES} if linear else {}),
            "linear_conv_kernel_dim": self.size("linear_conv_kernel_dim", 0, least=0) if linear else 0,
        }

    def heads(self) -> dict[str, Any]:
        """Return the shape of softmax attention."""
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        gate = bool(self.part.get("attn_output_gate") or self.part.get("attention_output_gate"))
        ranks = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
        latent = self.part.get("use_mla", any(self.part.get(key) for key in ranks))
        found = {"hidden_size": hidden, "num_attention_heads": heads, "attention_output_gate": gate}
        if latent:
            if gate:
                raise self.error("attn_output_gate", True, "beside kv_lora_rank cannot be priced yet")
            rope, v_dim = self.size("qk_rope_head_dim"), self.size("v_head_dim")
            return found | {
                "attention": "mla",
                "num_key_value_heads": heads,
                "qk_head_dim": self.size("qk_nope_head_dim") + rope,
                "v_head_dim": v_dim,
                "qk_rope_head_dim": rope,
                "q_lora_rank": self.size("q_lora_rank", 0, least=0),
                "kv_lora_rank": self.size("kv_lora_rank"),
            }
        kv_heads = self.size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise self.error("num_attention_heads", heads, f"is no multiple of num_key_value_heads = {kv_heads}")
        if self.stated("head_dim") is None and hidden % heads:
            raise self.error("hidden_size", hidden, f"is no multiple of num_attention_heads = {heads}: state head_dim")
        dim = self.size("head_dim", hidden // heads)
        sizes = {"qk_head_dim": dim, "v_head_dim": self.size("v_head_dim", 0, least=0) or dim}
        unused = {"q_lora_rank": 0, "kv_lora_rank": 0, "qk_rope_head_dim": 0}
        return found | {"attention": "gqa", "num_key_value_heads": kv_heads} | sizes | unused

    def expert_width(self, moe: tuple[bool, ...]) -> int:
        """Return the width of one routed expert; ``intermediate_size`` where a family means that by it."""
        alone = all(moe) and self.family not in DEFAULTS
        if self.stated("moe_intermediate_size") or not (alone or self.family in EXPERTS_ARE_INTERMEDIATE):
            return self.size("moe_intermediate_size")
        return self.size("intermediate_size")

    def shared_width(self, expert_width: int) -> int:
        """Return the width of all shared experts together."""
        mixed = self.part.get("use_mixed_mlp_moe") is not False  # Hunyuan's switch of them
        count = self.size("n_shared_experts", 0, least=0) * mixed
        key = next((key for key in SPELLINGS["shared_expert_intermediate_size"] if self.part.get(key)), None)
        if key is None:
            return count * expert_width
        width = self.size("shared_expert_intermediate_size")
        if count > 1 and self.family.startswith("bailing"):
            return count * width
        if count > 1 and width != count * expert_width:
            raise self.error(key, width, f"may be the width of one or of all {count} shared experts: state one of both")
        return width

    def dense_width(self, moe: tuple[bool, ...]) -> int:
        """Return the width of the feed-forward of layers without experts."""
        width = self.size("dense_intermediate_size", self.size("intermediate_size", 0, least=0), least=0)
        if not width and not all(moe):
            raise self.missing("intermediate_size")
        return width

    def linear_size(self, key: str) -> int:
        """Return a size of linear attention; without it, it is no gated delta rule."""
        if self.part.get(key) is None:
            raise RoutePackError(
                f"Model {self.name}: linear_attention layers without {key} are no gated delta rule (Qwen3-Next and "
                "kin), the only linear attention that is priced."
            )
        return self.size(key)

    def check_same(self, heads: Mapping[str, Any]) -> None:
        """Raise RoutePackError where one kind of layer has other heads than the rest."""
        for key, fact in SAME_AS.items():
            stated, all_alike = self.part.get(key), heads["qk_head_dim" if fact == "head_dim" else fact]
            for value in stated if isinstance(stated, list | tuple) else [stated]:
                if not is_off(value) and value != all_alike:
                    raise self.error(
                        key, stated, f"differs from {fact} = {all_alike}: layers with unlike heads cannot be priced yet"
                    )

    def check_lists(self, layers: Layers) -> None:
        """Raise RoutePackError where a fact that is stated layer by layer has another number of entries."""
        for key, value in self.part.items():
            if isinstance(value, list) and any(key in keys for keys in SPELLINGS.values()):
                layers.check_length(key, value)

    def stated(self, fact: str) -> tuple[str, Any] | None:
        """Return key and value of a fact; a list with equal entries is its entry.

        RoutePackError if two spellings, or two layers, state different values.
        """
        found: list[tuple[str, Any]] = []
        for key in SPELLINGS.get(fact, (fact,)):
            value = self.part.get(key)
            if isinstance(value, list | tuple):
                if any(other != value[0] or type(other) is not type(value[0]) for other in value):
                    raise self.error(key, value, "differs by layer, which cannot be priced yet")
                value = value[0] if value else None
            if value is not None:
                found.append((key, value))
        if other := next((other for other in found[1:] if other[1] != found[0][1]), None):
            raise self.error(other[0], other[1], f"contradicts {found[0][0]} = {shown(found[0][1])}")
        return found[0] if found else None

    def size(self, fact: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """Return an integer in ``least..most``; ``default`` where none is stated."""
        if (found := self.stated(fact)) is None:
            if default is None:
                raise self.missing(fact)
            return default
        key, value = found
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(key, quoted(value), f"is wrong: expected an integer >= {least} and <= {most}")
        return value

    def missing(self, fact: str) -> RoutePackError:
        """Return the error for a fact that no key states, with what the configuration does state."""
        keys = " or ".join(SPELLINGS.get(fact, (fact,)))
        kind = f" of model_type {shown(self.family)}" if self.family else ""
        there = shown(", ".join(map(str, self.part)))
        return RoutePackError(f"Model {self.name}: its config.json{kind} has no {keys}. It states: {there}.")

    def error(self, key: str, value: object, wrong: str) -> RoutePackError:
        """Return the error that names key and value."""
        return RoutePackError(f"Model {self.name}: {shown(key)} = {shown(value)} {wrong}.")

"""Which hidden layers attend how, and which hold experts: one rule per key of configurations.

``i`` counts hidden layers from 0. Lists may go on with one entry per draft (MTP) layer, which are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from profiler.errors import RoutePackError
from profiler.models.keys import SPELLINGS, shown

FULL, WINDOW, LINEAR = "full", "window", "linear"
ATTENTION_NAMES = {
    "full_attention": FULL,
    "attention": FULL,
    "sliding_attention": WINDOW,
    "linear_attention": LINEAR,
}
ATTENTION_LISTS: dict[str, dict[Any, str]] = {
    "layer_types": ATTENTION_NAMES,
    "layers_block_type": ATTENTION_NAMES,
    "attn_type_list": {1: FULL},  # MiniMax: 0 is lightning attention
    "sliding_window_layout": {0: FULL, 1: WINDOW},
}
"""Lists with one entry per layer: what each value means. Other values cannot be priced."""
EVERY_FULL = {
    "full_attention_interval": LINEAR,
    "sliding_window_pattern": WINDOW,
    "_sliding_window_pattern": WINDOW,
    "global_attn_every_n_layers": WINDOW,
    "global_attention_every_n_layers": WINDOW,
}
"""Keys that say of how many layers the last one attends to all tokens, with the kind of the others."""

EVERY_LAST = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", "moe_layer_frequency")
"""Keys that say of how many layers the last one has experts."""
EXPERT_LISTS: dict[str, dict[Any, bool]] = {
    "mlp_layer_types": {"dense": False, "sparse": True, "moe": True},
    "moe_layer_freq": {0: False, 1: True},
    "moe_layer_layout": {0: False, 1: True},
    "is_moe_layer": {False: False, True: True},
}
"""Lists with one entry per layer that say whether it has experts."""


class Layers:
    """What a configuration ``part`` of model ``name`` says of its ``count`` hidden layers."""

    def __init__(self, part: Mapping[str, Any], name: str, count: int) -> None:
        self.part, self.name, self.count = part, name, count

    def windows(self, kinds: list[str], window: int) -> tuple[int, ...]:
        """Return the sliding window of every layer, 0 where there is none."""
        if self.part.get("use_sliding_window") is False:
            window = 0
        elif WINDOW in kinds and not window:
            raise self.error("sliding_window", window, "is wrong: some layers attend to a window of tokens")
        return tuple(window if kind == WINDOW else 0 for kind in kinds)

    def attention(self, window: int, all_windowed: bool) -> list[str]:
        """Return the kind of every layer's attention.

        ``all_windowed`` tells that a bare ``sliding_window`` of this family holds for all layers.
        """
        lists = {key: self.listed(key, names) for key, names in ATTENTION_LISTS.items() if self.states_list(key)}
        if lists:
            return self.agreed(lists)
        stated = {key: self.every(key, other) for key, other in EVERY_FULL.items() if self.part.get(key)}
        if stated:
            kinds = self.agreed(stated)
            return kinds if window or WINDOW not in kinds else [FULL] * self.count
        if not window or self.part.get("use_sliding_window") is False:
            return [FULL] * self.count
        if self.part.get("max_window_layers") is not None:
            full = self.integer("max_window_layers", 0)
            return [WINDOW if i >= full else FULL for i in range(self.count)]
        if not all_windowed:
            raise self.error("sliding_window", window, "does not say for which layers: name their kinds in layer_types")
        return [WINDOW] * self.count

    def experts(self) -> tuple[bool, ...]:
        """Return which layers have routed experts."""
        lists = {key: self.listed(key, marks) for key, marks in EXPERT_LISTS.items() if self.states_list(key)}
        for key in ("moe_layers", "moe_layers_enum"):
            if self.part.get(key) is not None:
                chosen = self.indices(key)
                lists[key] = [i in chosen for i in range(self.count)]
        rules = self._expert_rules()
        if not lists:
            return tuple(all(marks[i] for marks in rules.values()) for i in range(self.count))
        marks = self.agreed(lists)
        for key, allowed in rules.items():
            if any(mark and not may for mark, may in zip(marks, allowed, strict=True)):
                raise self.error(key, self.part[key], f"and {next(iter(lists))} disagree on which layers are dense")
        return tuple(marks)

    def _expert_rules(self) -> dict[str, list[bool]]:
        """Return, by key, which layers may have experts."""
        part, layers = self.part, range(self.count)
        rules: dict[str, list[bool]] = {}
        for key in (*SPELLINGS["first_k_dense_replace"], "moe_layer_start_index"):
            if part.get(key):
                first = self.integer(key, 0)
                rules[key] = [i >= first for i in layers]
        for key in EVERY_LAST:
            if part.get(key) is not None:
                step = self.integer(key, 1)
                rules[key] = [(i + 1) % step == 0 for i in layers]
        if part.get("moe_layer_freq") is not None and not self.states_list("moe_layer_freq"):
            step = self.integer("moe_layer_freq", 1)
            rules["moe_layer_freq"] = [i % step == 0 for i in layers]
        if part.get("mlp_only_layers"):
            dense = self.indices("mlp_only_layers")
            rules["mlp_only_layers"] = [i not in dense for i in layers]
        if part.get("moe_layer_end_index") not in (None, -1):
            end = self.integer("moe_layer_end_index", 0)
            rules["moe_layer_end_index"] = [i <= end for i in layers]
        if part.get("expert_layer_period") is not None:
            period = self.integer("expert_layer_period", 1)
            offset = self.integer("expert_layer_offset", 0) if part.get("expert_layer_offset") else 0
            rules["expert_layer_period"] = [i % period == offset for i in layers]
        return rules

    def states_list(self, key: str) -> bool:
        """Tell whether a key states a list; an empty one states nothing."""
        value = self.part.get(key)
        if value and not isinstance(value, list | tuple) and key != "moe_layer_freq":
            raise self.error(key, value, "is wrong: expected a list with one entry per layer")
        return isinstance(value, list | tuple) and len(value) > 0

    def listed(self, key: str, meanings: Mapping[Any, Any]) -> list[Any]:
        """Return what a list with one entry per layer means."""
        values = self.part[key]
        self.check_length(key, values)
        for value in values[: self.count]:
            if not isinstance(value, str | int) or value not in meanings:
                supported = ", ".join(map(str, meanings))
                raise self.error(
                    key, value, f"is a kind of layer that cannot be priced or is not known. Supported: {supported}"
                )
        return [meanings[value] for value in values[: self.count]]

    def check_length(self, key: str, values: list[Any] | tuple[Any, ...]) -> None:
        """Raise RoutePackError unless a list has an entry per layer, and perhaps one per draft layer."""
        draft = self.part.get("num_nextn_predict_layers") or self.part.get("num_mtp_layers") or 0
        drafts = draft if isinstance(draft, int) else 0
        if len(values) not in (self.count, self.count + drafts):
            raise self.error(key, values, f"has {len(values)} entries for num_hidden_layers = {self.count}")

    def every(self, key: str, other: str) -> list[str]:
        """Return the kinds that an interval, or a pattern of L (local) and G (global), states."""
        pattern = self.part[key]
        if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
            return [FULL if pattern[i % len(pattern)] == "G" else other for i in range(self.count)]
        step = self.integer(key, 1)
        return [FULL if (i + 1) % step == 0 else other for i in range(self.count)]

    def indices(self, key: str) -> set[int]:
        """Return the layers that a list, or a text with commas, counts up."""
        given = self.part[key]
        if isinstance(given, str):
            given = [int(word) if word.strip().isdigit() else word for word in given.split(",") if word.strip()]
        if not isinstance(given, list | tuple):
            raise self.error(key, given, "is not a list of layers")
        for layer in given:
            if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < self.count:
                raise self.error(key, layer, f"is none of the layers 0 to {self.count - 1}")
        return set(given)

    def integer(self, key: str, least: int) -> int:
        """Return an integer of at least ``least``."""
        value = self.part[key]
        if isinstance(value, bool) or not isinstance(value, int) or not value >= least:
            raise self.error(key, value, f"is wrong: expected an integer >= {least}")
        return value

    def agreed(self, stated: Mapping[str, list[Any]]) -> list[Any]:
        """Return what several keys say alike."""
        (first, kinds), *others = stated.items()
        for key, other in others:
            if other != kinds:
                raise self.error(key, self.part[key], f"and {first} say different things of the layers")
        return kinds

    def error(self, key: str, value: object, wrong: str) -> RoutePackError:
        """Return the error that names key and value."""
        return RoutePackError(f"Model {self.name}: {key} = {shown(value)} {wrong}.")

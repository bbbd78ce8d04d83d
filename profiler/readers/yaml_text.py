"""YAML of settings: mappings, lists, text, decimal numbers, true and false; nothing that stands for something else.

YAML 1.1 has aliases that multiply, tags that make objects, dates, octal and sexagesimal numbers, five words for true: a
value written by hand means here what it looks like. ``1e-3`` is a number.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from profiler.errors import RoutePackError
from profiler.readers.raw import read_bytes, reason, shown

MAX_BYTES = 64 << 10
"""PyYAML reads 20 to 100 KiB a second; settings have a few."""
MAX_DEPTH = 64
MAX_DIGITS = 40


def read_yaml(path: Path | str, what: str, hint: str = "Write it again.") -> Any:
    """Read a YAML file; RoutePackError, in which ``what`` names it, if it is missing, too large or no such YAML."""
    import yaml

    raw = read_bytes(path, what, MAX_BYTES)
    try:
        value = yaml.load(raw.decode("utf-8"), Loader=_loader())
        if b"\\" in raw:  # half a character can be escaped, and never be written again
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except UnicodeError:
        raise RoutePackError(f"{what} {shown(path)} cannot be read: it is no UTF-8 text. {hint}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise RoutePackError(f"{what} {shown(path)} cannot be read: {reason(error)}. {hint}") from None


def _loader() -> Any:
    import yaml

    def refuse(problem: str, event: Any) -> None:
        raise yaml.constructor.ConstructorError(None, None, problem, event.start_mark)

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {}  # noqa: RUF012
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()
            if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
                refuse("aliases and anchors are not read", event)
            if getattr(event, "tag", None) is not None:
                refuse(f"the tag {shown(event.tag, 80)} is not read", event)
            self.depth += 1
            if self.depth > MAX_DEPTH:
                refuse(f"nested more than {MAX_DEPTH} levels deep", event)
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key_node, _ in node.value:
                if not isinstance(key_node, yaml.ScalarNode):
                    refuse("a key is no text", key_node)
                if key_node.value in seen:
                    refuse(f"key `{shown(key_node.value, 80)}` is given twice", key_node)
                seen.add(key_node.value)
            return super().construct_mapping(node, deep)

        def number(self, node: Any) -> int | float:
            digits = node.value.replace("_", "")
            if len(digits) > MAX_DIGITS:
                refuse(f"a number of {len(digits)} digits is not read", node)
            if re.fullmatch(r"[-+]?[0-9]+", digits):
                whole = int(digits)
                if not -(1 << 63) <= whole < 1 << 63:
                    refuse(f"{digits} is beyond 64 bits", node)
                return whole
            real = float(digits)
            if real in (float("inf"), float("-inf")):
                refuse(f"{digits} is not finite", node)
            return real

    decimal = re.compile(r"[-+]?(?:(?:0|[1-9][0-9_]*)(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", decimal, list("-+.0123456789"))
    Loader.add_constructor("tag:yaml.org,2002:float", Loader.number)
    Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(?:true|True|false|False)$"), list("tTfF"))
    Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|)$"), ["~", "n", "N", ""])
    return Loader

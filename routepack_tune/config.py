"""``routepack.yaml``: read once, checked at the door, composed of each package's own parameters.

Every value is checked here, so that later code never meets a wrong type: unknown keys are errors with the nearest
valid name, NaN and infinities are errors, and each section is the frozen dataclass of the package that uses it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.errors import RoutePackError

if TYPE_CHECKING:
    from costmodels import FitParams
    from profiler import ModelSpec, ProfileParams, Topology
    from search import PlannerParams, TuneParams

CONFIG_SCHEMA_VERSION = 1
REQUIRED_KEYS = ("model", "topology", "max_tokens_per_microbatch")
OPTIONAL_KEYS = ("schema_version", "planner", "profile", "fit", "tune")


@dataclass(frozen=True, slots=True)
class Config:
    """Hold one checked ``routepack.yaml``."""

    model: ModelSpec
    topology: Topology
    max_tokens_per_microbatch: int
    """Hard cap of the tokens of one cell (one microbatch on one DP slot)."""
    planner: PlannerParams
    profile: ProfileParams
    fit: FitParams
    tune: TuneParams
    source: str = ""
    """Where it was read from, for messages."""

    @property
    def effective(self) -> dict[str, Any]:
        """Everything that was in force, defaults included, ready for JSON; no password of a URL is in it."""
        sections = {name: dataclasses.asdict(getattr(self, name)) for name in ("planner", "profile", "fit", "tune")}
        sections["tune"]["tracking_uri"] = without_password(self.tune.tracking_uri)
        return {
            "schema_version": CONFIG_SCHEMA_VERSION,
            "model": dataclasses.asdict(self.model),
            "topology": dataclasses.asdict(self.topology),
            "max_tokens_per_microbatch": self.max_tokens_per_microbatch,
            **sections,
        }


def check_tracking_uri(uri: str) -> None:
    """Refuse folder stores before any work starts: MLflow 3 does.

    Raises
    ------
    ValueError
        If ``uri`` names a folder (``file:`` or a bare path).
    """
    if uri and (uri.startswith("file:") or "://" not in uri) and uri not in ("databricks", "uc"):
        raise ValueError(
            f"Tracking URI {uri!r} is a folder store, which MLflow 3 no longer writes: use sqlite:///mlflow.db or a "
            "server (http://...); `mlflow migrate-filestore` moves old runs."
        )


def without_password(url: str) -> str:
    """Return a URL fit for a file that others read."""
    return re.sub(r"(://[^/@:]*):[^/@]*@", r"\1:***@", url)


def load_config(path: Path | str) -> Config:
    """Read ``routepack.yaml``.

    Raises
    ------
    RoutePackError
        One line: the file, the key, the value, and what is valid there.
    """
    path = Path(path)
    return parse_config(_read_yaml(path), path.parent, str(path))


def parse_config(data: Any, folder: Path | str, source: str) -> Config:
    """Check a mapping as if it were the content of ``routepack.yaml``; a model path is relative to ``folder``."""
    from costmodels import FitParams
    from profiler import ProfileParams, Topology, load_model
    from search import PlannerParams, TuneParams

    if not isinstance(data, Mapping):
        raise RoutePackError(f"{source}: expected a mapping with {', '.join(REQUIRED_KEYS)}, got {_shown(data)}.")
    _check_keys(data, (*REQUIRED_KEYS, *OPTIONAL_KEYS), source, "", {"topology": Topology, "tune": TuneParams})
    _check_version(data.get("schema_version", CONFIG_SCHEMA_VERSION), source)
    for key in REQUIRED_KEYS:
        if data.get(key) is None:
            raise RoutePackError(f"{source}: the key `{key}` is missing. {_WHAT_IT_IS[key]}")
    _check_numbers(data, source, "")
    cap = data["max_tokens_per_microbatch"]
    if isinstance(cap, bool) or not isinstance(cap, int) or not cap >= 1:
        raise RoutePackError(f"{source}: expected max_tokens_per_microbatch to be an integer >= 1, got {_shown(cap)}.")
    if not isinstance(data["model"], str):
        raise RoutePackError(f"{source}: expected model to be a name or a path, got {_shown(data['model'])}.")
    tune = _section(data, "tune", TuneParams, source)
    try:
        check_tracking_uri(tune.tracking_uri)
    except ValueError as error:
        raise RoutePackError(f"{source}: `tune.tracking_uri`: {error}") from None
    return Config(
        model=load_model(data["model"], folder),
        topology=_section(data, "topology", Topology, source),
        max_tokens_per_microbatch=cap,
        planner=_section(data, "planner", PlannerParams, source),
        profile=_section(data, "profile", ProfileParams, source),
        fit=_section(data, "fit", FitParams, source),
        tune=tune,
        source=source,
    )


_WHAT_IT_IS = {
    "model": "Give a shipped model's name or the path of a config.json.",
    "topology": "Give the parallel sizes, for example `topology: {data_parallel_size: 8}`; missing ones are 1.",
    "max_tokens_per_microbatch": "Give the token cap of one microbatch, for example 32768.",
}


def _read_yaml(path: Path) -> Any:
    import yaml

    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_strict_loader())
    except FileNotFoundError:
        raise RoutePackError(f"Configuration not found: {path}.") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise RoutePackError(f"Configuration {path} cannot be read: {' '.join(str(error).split())}.") from None


def _strict_loader() -> Any:
    """Return PyYAML's safe loader, but a key given twice is an error and ``1e-3`` is a number."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if isinstance(key, str) and key in seen:
                    twice = f"key `{key}` is given twice"
                    raise yaml.constructor.ConstructorError(None, None, twice, key_node.start_mark)
                seen.add(str(key))
            return super().construct_mapping(node, deep)

    number = re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    return Loader


def _check_keys(
    section: Mapping[Any, Any], valid: Iterable[str], source: str, prefix: str, elsewhere: Mapping[str, Any]
) -> None:
    valid = tuple(valid)
    for key in section:
        if key in valid:
            continue
        near = difflib.get_close_matches(str(key), valid, n=1, cutoff=0.6)
        home = next((name for name, cls in elsewhere.items() if str(key) in _field_names(cls)), None)
        hint = f"did you mean `{prefix}{near[0]}`?" if near else f"valid keys here: {', '.join(valid)}."
        if home and home + "." != prefix:
            hint = f"it belongs under `{home}`."
        raise RoutePackError(f"{source}: unknown key `{prefix}{key}`: {hint}")


def _field_names(cls: Any) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls) if f.init)


def _check_version(version: Any, source: str) -> None:
    if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= CONFIG_SCHEMA_VERSION:
        raise RoutePackError(
            f"{source}: schema_version {_shown(version)} is not one this version reads (up to "
            f"{CONFIG_SCHEMA_VERSION}). Update routepack-tune, or write the file for the older schema."
        )


def _check_numbers(value: Any, source: str, where: str) -> None:
    """Refuse NaN and infinities anywhere, naming the key: JSON has neither, and no comparison is true of NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        raise RoutePackError(f"{source}: `{where}` is {value}: give a finite number.")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_numbers(inner, source, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_numbers(inner, source, f"{where}[{index}]")


def _section(data: Mapping[str, Any], name: str, cls: Any, source: str) -> Any:
    """Build the dataclass of the section ``name``; an absent section holds defaults."""
    section = data.get(name)
    section = {} if section is None else section
    if not isinstance(section, Mapping):
        raise RoutePackError(f"{source}: expected `{name}` to be a mapping, got {_shown(section)}.")
    _check_keys(section, _field_names(cls), source, f"{name}.", {})
    return _build(cls, section, source, name)


def _build(cls: Any, values: Mapping[str, Any], source: str, name: str) -> Any:
    """Build one dataclass with pydantic's strict types; its own checks run in ``__post_init__``."""
    import json

    import pydantic

    try:
        return pydantic.TypeAdapter(cls).validate_json(json.dumps(dict(values)), strict=True)
    except TypeError as error:
        raise RoutePackError(f"{source}: `{name}` holds a value that is not plain: {error}.") from None
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ").rstrip(".")
        where = ".".join([name, *(str(part) for part in first["loc"])])
        got = f", got {_shown(first['input'])}" if first["loc"] else ""
        raise RoutePackError(f"{source}: `{where}`: {message}{got}.") from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

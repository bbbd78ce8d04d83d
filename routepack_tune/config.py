"""``routepack.yaml``: read once and checked at the door, so that later code never meets a wrong type.

Each section is the frozen dataclass of the package that uses it. Unknown keys are errors with the nearest valid name;
NaN and infinities are errors.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from profiler.errors import RoutePackError, explained
from profiler.extras import extras_named
from profiler.readers import read_yaml
from profiler.redact import redacted

if TYPE_CHECKING:
    from costmodels import FitParams
    from profiler import ModelSpec, ProfileParams, Topology
    from search import PlannerParams, TuneParams

CONFIG_SCHEMA_VERSION = 1
REQUIRED = {
    "model": "Give a shipped model's name or the path of a config.json.",
    "topology": "Give the parallel sizes, for example `topology: {data_parallel_size: 8}`; missing ones are 1.",
    "max_tokens_per_microbatch": "Give the token cap of one microbatch, for example 32768.",
}
UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")
"""Pydantic's names of that error, of the file and of a section."""


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

    @property
    def job(self) -> tuple[ModelSpec, Topology, int]:
        """What is planned for: model, topology and cap, in the order of the packages' arguments."""
        return self.model, self.topology, self.max_tokens_per_microbatch

    @property
    def effective(self) -> dict[str, Any]:
        """Everything that was in force, defaults included, ready for JSON; no secret of a URL is in it."""
        found = dataclasses.asdict(self)
        found["tune"]["tracking_uri"] = redacted(self.tune.tracking_uri)
        return {"schema_version": CONFIG_SCHEMA_VERSION, **found}


def check_tracking_uri(uri: str, source: str = "Tracking URI") -> None:
    """Refuse a folder store (``file:`` or a bare path) before any work: MLflow 3 refuses it later."""
    if uri and (uri.startswith("file:") or "://" not in uri) and uri not in ("databricks", "uc"):
        raise RoutePackError(
            f"{source} {uri!r} is a folder store, which MLflow 3 no longer writes: use sqlite:///mlflow.db or a "
            "server (http://...); `mlflow migrate-filestore` moves old runs."
        )


@extras_named()
def load_config(path: Path | str) -> Config:
    """Read ``routepack.yaml``; an error names the file, the key, the value, and what is valid there."""
    path = Path(path)
    data = read_yaml(path, "Configuration", "Give the path of a routepack.yaml.")
    return parse_config(data, path.parent, str(path))


@extras_named()
def parse_config(data: Any, folder: Path | str, source: str) -> Config:
    """Check a mapping as if it were the content of ``routepack.yaml``; a model path is relative to ``folder``."""
    import pydantic

    from costmodels import FitParams
    from profiler import ProfileParams, Topology, load_model
    from profiler.params import MOST_TOKENS
    from search import PlannerParams, TuneParams

    if not isinstance(data, Mapping):
        raise RoutePackError(f"{source}: expected a mapping with {', '.join(REQUIRED)}, got {data!r:.80}.")
    optional = {"planner": PlannerParams, "profile": ProfileParams, "fit": FitParams, "tune": TuneParams}
    fields: dict[str, Any] = {
        "schema_version": (Literal[1], CONFIG_SCHEMA_VERSION),
        "model": (str, ...),
        "topology": (Topology, ...),
        "max_tokens_per_microbatch": (Annotated[int, pydantic.Field(ge=1, le=MOST_TOKENS)], ...),
        **{name: (section, section()) for name, section in optional.items()},
    }
    rules = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    try:
        given = json.dumps({key: value for key, value in data.items() if value is not None})
        found = pydantic.create_model("RoutepackYaml", __config__=rules, **fields).model_validate_json(given)
    except pydantic.ValidationError as error:
        valid = {"": list(fields)}
        for name, section in {"topology": Topology, **optional}.items():
            valid[name] = [field.name for field in dataclasses.fields(section) if field.init]
        raise RoutePackError(f"{source}: {_mistake(error.errors(), valid)}") from None
    except (TypeError, ValueError) as error:
        raise RoutePackError(f"{source}: holds a value that is not plain: {error}.") from None
    check_tracking_uri(found.tune.tracking_uri, f"{source}: `tune.tracking_uri`")
    sections = {field.name: getattr(found, field.name) for field in dataclasses.fields(Config)}
    with explained(f"{source}: "):
        config = Config(**{**sections, "model": load_model(found.model, folder)})
        _check_job(config)
    return config


def _check_job(config: Config) -> None:
    """Refuse sizes that do not fit together, before a verb works for minutes and the next one fails."""
    from profiler.params import check_sizes, divisors, nearest
    from search.problem import check_padding

    with explained("`topology`: ", of=ValueError):
        check_sizes(config.model, config.topology)
    with explained("`planner`: "):
        check_padding(config.planner, config.model)
    per_node, ranks = config.planner.ranks_per_node, config.topology.expert_model_parallel_size
    if per_node and ranks % per_node:
        raise RoutePackError(
            f"`planner.ranks_per_node` = {per_node} does not divide expert_model_parallel_size = {ranks}. Nearest: "
            f"{nearest(per_node, divisors(ranks))}, or 0 where it does not matter."
        )
    least = min((config.max_tokens_per_microbatch, *config.tune.caps))
    if config.planner.sequence_alignment > least:
        raise RoutePackError(
            f"`planner.sequence_alignment` = {config.planner.sequence_alignment} pads every sample beyond the cap of "
            f"{least} tokens. Use an alignment of at most {least}, or a larger cap."
        )


def _mistake(errors: Sequence[Any], valid: Mapping[str, list[str]]) -> str:
    """Describe the first of pydantic's errors; a misspelt key goes before the missing one that it was meant to be."""
    first = min(errors, key=lambda error: error["type"] not in UNKNOWN_KEY)
    key, value = ".".join(map(str, first["loc"])), f"{first['input']!r:.80}"
    if first["type"] in UNKNOWN_KEY:
        return f"unknown key `{key}`: {_hint(key, valid)}"
    if first["type"] == "missing":
        return f"the key `{key}` is missing. {REQUIRED[key]}"
    if key == "schema_version":
        return (
            f"schema_version {value} is not the one this version reads: {CONFIG_SCHEMA_VERSION}. Update routepack-tune."
        )
    if first["type"] == "dataclass_type":
        return f"expected `{key}` to be a mapping, got {value}."
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    return f"`{key}`: {message}." if first["type"] == "value_error" else f"`{key}`: {message}, got {value}."


def _hint(key: str, valid: Mapping[str, list[str]]) -> str:
    section, _, name = key.rpartition(".")
    home = next((other for other, names in valid.items() if other and name in names), None)
    if home is not None:
        return f"it belongs under `{home}`."
    near = difflib.get_close_matches(name, valid[section], n=1)
    meant = f"{section}.{near[0]}".lstrip(".") if near else ""
    return f"did you mean `{meant}`?" if near else f"valid keys here: {', '.join(valid[section])}."

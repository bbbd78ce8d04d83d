"""What a running job knows of itself, compared with what a bundle was made for, before the first plan.

A job may be stated in part: only what is stated is compared. Names are those of ``routepack.yaml``, Megatron-LM and
verl, or short ones (``ep``, ``dp``); None is not stated.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.errors import RoutePackError, explained

if TYPE_CHECKING:
    from profiler import ModelSpec, Topology

SIZES = {
    "dp": "data_parallel_size",
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "ulysses_sequence_parallel_size": "context_parallel_size",
    "context_model_parallel_size": "context_parallel_size",
    "expert_parallel_size": "expert_model_parallel_size",
}
"""Other names of parallel sizes."""
CAPS = ("max_tokens_per_microbatch", "max_tokens", "cap")
CAPS_PER_GPU = ("ppo_max_token_len_per_gpu", "max_tokens_per_gpu")
"""verl's and slime's: times the context-parallel size they are the cap of a microbatch."""
SHAPE = {
    "num_layers": ("num_layers", "num_hidden_layers"),
    "hidden_size": ("hidden_size",),
    "num_experts": ("num_experts", "num_moe_experts", "n_routed_experts"),
    "top_k": ("top_k", "moe_router_topk", "num_experts_per_tok"),
    "moe_intermediate_size": ("moe_intermediate_size", "moe_ffn_hidden_size"),
    "num_attention_heads": ("num_attention_heads",),
}
"""Facts of the model that a job may state one by one, with their names."""
NUMBER_TYPES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
    "fp8": "float8_e4m3fn", "float8": "float8_e4m3fn", "e4m3": "float8_e4m3fn",
}  # fmt: skip
SIXTEEN_BIT = ("bfloat16", "float16")
"""Equally fast."""
OTHER = ("model", "topology", "dtype", "params_dtype", "world_size")


@dataclass(frozen=True, slots=True)
class Job:
    """State a running job, or parts of it; None is not compared."""

    model: ModelSpec | Mapping[str, Any] | str | None = None
    """A ``config.json`` as a mapping (or an object with ``to_dict()``) or its path, or a model's name."""
    topology: Topology | Mapping[str, int] | None = None
    max_tokens_per_microbatch: int | None = None
    dtype: str | None = None
    """Number type of the training's weights and activations, ``bfloat16`` and the like; torch's own types too."""


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """Hold the job that a bundle was made for."""

    spec: ModelSpec
    topology: Topology
    max_tokens: int
    dtype: str
    """Empty where nobody said it."""


def check_job(planned: PlannedJob, job: Job | Mapping[str, Any], source: str) -> None:
    """Raise :class:`RoutePackError` that names every difference between a bundle, ``source``, and the running job."""
    differences = [
        f"{name} is {ours} in the bundle, {theirs} in the job"
        for name, ours, theirs in _compared(planned, _stated(job))
        if ours != theirs
    ]
    if differences:
        raise RoutePackError(
            f"{source} is not for this job: {'; '.join(differences)}. Load the bundle of this job, or make one: "
            "`routepack fit`, `tune` and `deploy`."
        )


def _stated(job: Any) -> dict[str, Any]:
    """Return what a job states, by name, topologies and shapes flat; unknown names are errors with the nearest one."""
    if isinstance(job, Job):
        job = {one.name: getattr(job, one.name) for one in fields(job)}
    if not isinstance(job, Mapping):
        raise RoutePackError(f"Expected a Job or a mapping that states one, got {type(job).__name__}.")
    sizes = job.get("topology")
    if sizes is not None and not isinstance(sizes, Mapping):
        from profiler import Topology

        if not isinstance(sizes, Topology):
            raise RoutePackError(f"Expected the job's topology as a mapping, got {type(sizes).__name__}.")
        sizes = asdict(sizes)
    flat = [(name, value) for name, value in job.items() if name != "topology"] + list((sizes or {}).items())
    legal = {
        *OTHER,
        *CAPS,
        *CAPS_PER_GPU,
        *SIZES,
        *SIZES.values(),
        *(name for names in SHAPE.values() for name in names),
    }
    found: dict[str, Any] = {}
    for name, value in flat:
        if name not in legal:
            near = difflib.get_close_matches(str(name), sorted(legal), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(legal))}."
            raise RoutePackError(f"A job has no {name!r:.80}: {hint}")
        if value is not None:
            found[SIZES.get(str(name), str(name))] = value
    return found


def _compared(planned: PlannedJob, stated: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (what, the bundle's, the job's) of everything that a job states."""
    sizes = asdict(planned.topology)
    context = stated.get("context_parallel_size", sizes["context_parallel_size"])
    own: dict[str, Any] = sizes | dict.fromkeys(CAPS, planned.max_tokens)
    own |= {alias: getattr(planned.spec, name) for name, aliases in SHAPE.items() for alias in aliases}
    own["world_size"] = planned.topology.ranks_per_stage * planned.topology.pipeline_model_parallel_size
    pairs = []
    for name, value in stated.items():
        if name == "model":
            pairs += _model_differences(planned.spec, value)
        elif name in ("dtype", "params_dtype"):
            pairs.append(("dtype", *_same_speed(planned.dtype, number_type(value))))
        elif isinstance(value, bool) or not isinstance(value, Integral):
            raise RoutePackError(f"Expected the job's {name} to be a whole number, got {value!r:.80}.")
        elif name in CAPS_PER_GPU:
            said = f"max_tokens_per_microbatch ({name} x context parallel size)"
            pairs.append((said, planned.max_tokens, int(value) * context))
        else:
            pairs.append((name, own[name], int(value)))
    return pairs


def _model_differences(spec: ModelSpec, model: Any) -> list[tuple[str, Any, Any]]:
    """Compare a model by its shape where the job's can be read, else by name."""
    from profiler import ModelSpec, load_model

    if callable(to_dict := getattr(model, "to_dict", None)):
        model = to_dict()
    if isinstance(model, Mapping):
        with explained("The job's model: "):
            model = ModelSpec.from_config(model, str(model.get("_name_or_path") or "of the job"))
    if isinstance(model, (str, Path)):
        try:
            model = load_model(str(model))
        except RoutePackError:
            if Path(model).exists():
                raise
            named = str(model).rstrip("/").rpartition("/")[2]
            plain = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in (spec.name, named)]
            return [("model", spec.name, spec.name if plain[0] == plain[1] else named)]
    if not isinstance(model, ModelSpec):
        raise RoutePackError(
            f"Expected the job's model as a name, a config or a ModelSpec, got {type(model).__name__}."
        )
    if model.spec_hash == spec.spec_hash:
        return []
    ours, theirs = asdict(spec), asdict(model)
    differ = [name for name in ours if name != "name" and ours[name] != theirs[name]]
    return [(f"model {name}", _short(ours[name]), _short(theirs[name])) for name in differ]


def _short(value: Any) -> str:
    """Show a value of a model; of a long tuple its length and where it begins."""
    return f"{value}" if not isinstance(value, tuple) else f"{len(value)} layers {value!r:.40}"


def number_type(value: Any) -> str:
    """Return the name of a number type, however a framework writes it."""
    from profiler.params import DTYPES

    name = str(value).removeprefix("torch.").lower()
    name = NUMBER_TYPES.get(name, name)
    if name not in DTYPES or name == "auto":
        raise RoutePackError(f"Unknown number type {value!r:.80}: expected one of {', '.join(DTYPES[1:])}.")
    return name


def _same_speed(ours: str, theirs: str) -> tuple[str, str]:
    """Return two number types for comparison: those of 16 bits are equal, one that nobody said is as the other."""
    both_sixteen = ours in SIXTEEN_BIT and theirs in SIXTEEN_BIT
    return (theirs if both_sixteen or not ours else ours), theirs

"""What public models are read as: docs/models.md shows it, and their published sizes confirm it.

``tests/profiler/data/public_models.json`` holds the keys of each configuration that decide shapes.
Run this file to print the table.
"""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from profiler import SHIPPED_MODELS, ModelSpec, RoutePackError, load_model

MODELS = json.loads((Path(__file__).parents[1] / "data" / "public_models.json").read_text(encoding="utf-8"))
DOCS = Path(__file__).parents[3] / "docs" / "models.md"


def read(name: str) -> ModelSpec | str:
    """Return the spec of a public model, or why it is refused."""
    try:
        return ModelSpec.from_config(MODELS[name]["config"], name)
    except RoutePackError as refused:
        return str(refused).removeprefix(f"Model {name}: ")


def row(name: str) -> str:
    """Return the line of a public model in the table of the docs."""
    spec, source = read(name), MODELS[name]["source"]
    if isinstance(spec, str):
        reason = spec.split(": it cannot")[0].split(", whose times")[0].split(": only gated")[0].split(" (no ")[0]
        return f"| {name} | refused | {source} | | | | | {reason.replace('|', '/')} |"
    windows = [
        f"{count} of {window}" if window else f"{count} full"
        for window, count in Counter(
            window
            for window, linear in zip(spec.windows, spec.linear_layers or [False] * spec.num_layers, strict=True)
            if not linear
        ).items()
    ]
    kinds = ", ".join([*windows, *([f"{sum(spec.linear_layers)} linear"] if spec.linear_layers else [])])
    dims = f"{spec.qk_head_dim}" + (f"/{spec.v_head_dim}" if spec.v_head_dim != spec.qk_head_dim else "")
    heads = f"{spec.attention} {spec.num_attention_heads}/{spec.num_key_value_heads} x {dims}"
    gate = ", gated" if spec.attention_output_gate else ""
    dense = spec.dense_intermediate_size if spec.num_moe_layers < spec.num_layers else 0
    return (
        f"| {name} | {'partly' if spec.unpriced else 'read'} | {source} | {spec.num_layers} ({spec.num_moe_layers}) | "
        f"{heads}{gate}; {kinds} | {spec.num_experts}, top-{spec.top_k} | {spec.hidden_size}; "
        f"{spec.moe_intermediate_size}, {spec.shared_intermediate_size}, {dense} | {'; '.join(spec.unpriced)} |"
    )


def parameters(spec: ModelSpec, vocabulary: int, tied: bool) -> float:
    """Return the weights of a model in billions."""
    total = vocabulary * spec.hidden_size * (1 if tied else 2)
    for moe, linear in zip(spec.moe_layers, spec.linear_layers or [False] * spec.num_layers, strict=True):
        width = spec.shared_intermediate_size if moe else spec.dense_intermediate_size
        gemms = (*spec.attention_projections(linear=linear), *spec.feed_forward(width))
        total += sum(n * k for n, k in gemms)
        total += moe * spec.num_experts * spec.hidden_size * (3 * spec.moe_intermediate_size + 1)
    return total / 1e9


def stated(config: Mapping, key: str) -> object:
    """Return a key of a configuration or of one of its parts."""
    nested = [stated(part, key) for part in config.values() if isinstance(part, Mapping)]
    return next((value for value in [config.get(key), *nested] if value is not None), None)


def test_the_table_in_the_docs_says_what_the_reader_reads():
    lines = DOCS.read_text(encoding="utf-8").splitlines()
    shown = {line.split("|")[1].strip(): line for line in lines if line.startswith("| ") and line.count("|") == 9}
    assert {name: shown.get(name) for name in MODELS} == {name: row(name) for name in MODELS}
    assert set(shown) - {"model"} == set(MODELS)


@pytest.mark.parametrize("name", [name for name in MODELS if "billions" in MODELS[name]])
def test_the_shape_that_is_read_has_as_many_weights_as_the_makers_say(name):
    spec, config = read(name), MODELS[name]["config"]
    assert isinstance(spec, ModelSpec)
    total = parameters(spec, stated(config, "vocab_size"), stated(config, "tie_word_embeddings") is True)
    assert total == pytest.approx(MODELS[name]["billions"], rel=0.04)


def test_at_least_forty_public_models_are_told_and_refusals_name_key_and_value():
    told = {name: read(name) for name in MODELS}
    assert len(told) >= 80
    refused = {name: why for name, why in told.items() if isinstance(why, str)}
    assert len(refused) < 40
    for name, why in refused.items():
        assert "\n" not in why
        key, value = why.split(" = ")[0], why.split(" = ")[1:]
        assert (stated(MODELS[name]["config"], key) is not None and value) or "no routed experts" in why


@pytest.mark.parametrize("name", SHIPPED_MODELS)
def test_shipped_models_are_those_of_the_public_configurations(name):
    assert load_model(name).spec_hash == ModelSpec.from_config(MODELS[name]["config"], name).spec_hash


if __name__ == "__main__":
    print("\n".join(map(row, MODELS)))

"""``routepack.yaml``: what is valid, and what every mistake says."""

from __future__ import annotations

import dataclasses
import json

import pytest

from costmodels import FitParams
from profiler import ProfileParams, RoutePackError, Topology
from routepack_tune.config import load_config, parse_config
from search import PlannerParams, TuneParams


def write(job, text):
    job.config.write_text(text)
    return job.config


GOOD = "model: Qwen3-30B-A3B\ntopology: {data_parallel_size: 8}\nmax_tokens_per_microbatch: 1024\n"


def test_sections_are_the_packages_own_params(job):
    config = write(job, GOOD + "planner: {max_iterations: 7}\nfit: {folds: 3}\nprofile: {repeats: 4}\n"
                   "tune: {hidden_planning_s: 1e-3, experiment: mine}\n")  # fmt: skip
    settings = load_config(config)
    assert settings.planner.max_iterations == 7
    assert settings.fit.folds == 3
    assert settings.profile.repeats == 4
    assert settings.tune.hidden_planning_s == 1e-3
    assert settings.topology.data_parallel_size == 8
    assert settings.topology.expert_model_parallel_size == 1
    assert json.loads(json.dumps(settings.effective))["planner"]["max_iterations"] == 7


def test_model_path_is_relative_to_the_file(job, monkeypatch):
    monkeypatch.chdir("/")
    assert load_config(job.config).model.num_experts == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            GOOD.replace("max_tokens_per", "max_token_per"),
            ["max_token_per_microbatch", "did you mean `max_tokens_per_m"],
        ),
        (GOOD + "planner: {max_iteration: 3}\n", ["planner.max_iteration", "did you mean `planner.max_iterations`"]),
        (GOOD + "data_parallel_size: 8\n", ["data_parallel_size", "belongs under `topology`"]),
        (GOOD + "zzz: 8\n", ["unknown key `zzz`", "valid keys here"]),
        ("topology: {}\nmax_tokens_per_microbatch: 1\n", ["`model` is missing"]),
        ("model: Qwen3-30B-A3B\nmax_tokens_per_microbatch: 1\n", ["`topology` is missing"]),
        ("model: Qwen3-30B-A3B\ntopology: {}\n", ["`max_tokens_per_microbatch` is missing"]),
        (GOOD.replace("1024", ".nan"), ["max_tokens_per_microbatch", "nan"]),
        (GOOD.replace("1024", "0"), ["max_tokens_per_microbatch", "got 0"]),
        (GOOD.replace("1024", "'1024'"), ["integer", "'1024'"]),
        (GOOD.replace("1024", "true"), ["integer", "True"]),
        (GOOD + "planner: {hot_temperature: .inf}\n", ["planner.hot_temperature", "inf"]),
        (GOOD + "planner: {max_iterations: 2.5}\n", ["planner.max_iterations", "2.5"]),
        (GOOD + "planner: {max_iterations: 0}\n", ["max_iterations to be an integer from 1 to", "got 0"]),
        (GOOD + "planner: 3\n", ["planner", "mapping"]),
        (GOOD.replace("8}", "x}"), ["topology.data_parallel_size", "'x'"]),
        (GOOD.replace("8}", "8, expert_model_parallel_size: 3}"), ["must divide", "Nearest sizes of a block: 2 or 4"]),
        (
            GOOD.replace("8}", "12, expert_model_parallel_size: 12}"),
            ["expert_model_parallel_size = 12", "128 experts of Qwen3-30B-A3B", "Nearest: 4."],
        ),
        (
            GOOD.replace("8}", "48, expert_model_parallel_size: 6}"),
            ["expert_model_parallel_size = 6 cannot", "Nearest: 4 or 8"],
        ),
        (
            GOOD.replace("8}", "10, expert_tensor_parallel_size: 5}"),
            ["expert_tensor_parallel_size = 5", "768 wide", "Nearest: 4 or 6"],
        ),
        (GOOD.replace("8}", "8, tensor_model_parallel_size: 3}"), ["32 attention heads", "Nearest: 2 or 4"]),
        (GOOD.replace("8}", "8, tensor_model_parallel_size: 64}"), ["32 attention heads", "Nearest: 32"]),
        (GOOD.replace("8}", "8, pipeline_model_parallel_size: 49}"), ["49 stages", "48 layers", "At most: 48"]),
        (GOOD + "planner: {ranks_per_node: 8}\n", ["ranks_per_node", "8", "Nearest: 1"]),
        (GOOD + "planner: {sequence_alignment: 2048}\n", ["sequence_alignment", "2048", "1024"]),
        (GOOD + "schema_version: 2\n", ["schema_version 2", "Update"]),
        (GOOD + "model: Qwen3-30B-A3B\n", ["`model` is given twice"]),
        (GOOD.replace("Qwen3-30B-A3B", "Qwen9"), ["Qwen9", "Qwen3-30B-A3B"]),
        (GOOD + "tune: {tracking_uri: 'file:./mlruns'}\n", ["tune.tracking_uri", "sqlite:///", "migrate-filestore"]),
        (GOOD + "tune: {tracking_uri: ./mlruns}\n", ["tune.tracking_uri", "folder store"]),
        (GOOD + "planner: {2024-01-01: 1}\n", ["unknown key `planner.2024-01-01`"]),
        (GOOD + "planner: &a {starts: *a}\n", ["aliases and anchors are not read"]),
        (GOOD + "planner: {starts: [[2]]}\n", ["planner.starts", "[[2]]"]),
        (GOOD + "planner: [starts]\n", ["`planner` to be a mapping"]),
        (GOOD + "fit: {learning_rate: .nan}\n", ["fit.learning_rate", "'.nan'"]),
        ("- a\n", ["mapping"]),
        ("{ a: [", ["cannot be read"]),
        ("", ["mapping"]),
    ],
)
def test_mistakes_are_one_clear_line(job, text, words):
    with pytest.raises(RoutePackError) as caught:
        load_config(write(job, text))
    message = str(caught.value)
    assert "\n" not in message
    assert "routepack.yaml" in message or "Qwen9" in message
    for word in words:
        assert word in message


def test_missing_file_is_named(tmp_path):
    with pytest.raises(RoutePackError, match=r"not found.*nowhere.yaml"):
        load_config(tmp_path / "nowhere.yaml")


def test_parse_needs_no_file():
    data = {"model": "Mixtral-8x7B", "topology": {}, "max_tokens_per_microbatch": 10}
    assert parse_config(data, ".", "here").topology.data_parallel_size == 1


def test_passwords_never_reach_files():
    data = {"model": "Mixtral-8x7B", "topology": {}, "max_tokens_per_microbatch": 10}
    data["tune"] = {"tracking_uri": "postgresql://me:secret@host/db?password=secret"}
    config = parse_config(data, ".", "here")
    assert config.tune.tracking_uri == data["tune"]["tracking_uri"]
    assert config.effective["tune"]["tracking_uri"] == "postgresql://me:***@host/db?password=***"
    wrong = {"tracking_urls": data["tune"]["tracking_uri"], "tracking_uri": ["http://me:" + "secret" * 20]}
    for key, value in wrong.items():
        with pytest.raises(RoutePackError) as caught:
            parse_config({**data, "tune": {key: value}}, ".", "here")
        assert "secret" not in str(caught.value)


SETTINGS = [Topology, PlannerParams, ProfileParams, FitParams, TuneParams]


@pytest.mark.parametrize(
    ("settings", "field"),
    [(kind, field) for kind in SETTINGS for field in dataclasses.fields(kind)],
    ids=lambda value: getattr(value, "__name__", None) or value.name,
)
def test_no_setting_takes_another_type_or_an_absurd_value(settings, field):
    wrong = [[], {}, b"x", 1j, object()]
    if field.type != "str":
        wrong += ["1", "", float("nan"), float("inf"), -float("inf"), 2**62, 10**400, -1]
    if field.type in ("int", "float"):
        wrong += [True, None]
    if field.type == "str":
        wrong += [1, None, "two\nlines", "x" * 2000]
    for value in wrong:
        with pytest.raises(ValueError, match=field.name.removesuffix("s")) as caught:
            settings(**{field.name: value})
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD + "planner: {starts: 600}\n", ["starts", "from 1 to 64", "600"]),
        (GOOD.replace("1024", str(2**62)), ["max_tokens_per_microbatch", "16777216"]),
        (GOOD.replace("8}", f"{2**40}}}"), ["data_parallel_size", "1048576"]),
        (GOOD.replace("8}", "524288, context_parallel_size: 524288}"), ["A stage of 274877906944 ranks"]),
        (GOOD + f"tune: {{caps: [{2**40}]}}\n", ["every cap", str(2**40)]),
        (GOOD + "tune: {caps: [1, 1]}\n", ["caps", "none twice"]),
        (GOOD + "fit: {num_trees: 1000000000}\n", ["num_trees", "10000"]),
        (GOOD + "profile: {seed: -1}\n", ["seed", "-1"]),
        (GOOD + "planner: {equal_samples: 1}\n", ["equal_samples", "boolean"]),
        (GOOD + "planner: {link_gbytes_per_s: 1.0e-300}\n", ["link_gbytes_per_s", "at least 0.001"]),
    ],
)
def test_absurd_sizes_are_refused_with_their_range(job, text, words):
    with pytest.raises(RoutePackError) as caught:
        load_config(write(job, text))
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)

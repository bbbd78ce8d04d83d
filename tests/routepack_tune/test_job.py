"""A bundle meets the job that loads it: every difference in one message, what is not stated is not compared."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from profiler import RoutePackError, Topology
from routepack_tune import Job, load_planner
from routepack_tune.bundle import untuned_planner, write_bundle
from routepack_tune.job import number_type


@pytest.fixture(scope="module")
def folder(make_job):
    job = make_job()
    planner = replace(untuned_planner(job.costmodel, job.settings()), dtype="bfloat16")
    write_bundle(job.folder / "bundle", planner, {})
    return job.folder


@pytest.fixture(scope="module")
def planner(folder):
    return load_planner(folder / "bundle", warm_up=False)


def config(folder, **changes):
    return {**json.loads((folder / "tiny.json").read_text()), **changes}


def right_jobs(folder, spec):
    yield {}
    yield {"ep": 2, "dp": 2, "tp": 1, "cap": 256, "dtype": "bf16"}
    yield {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": None, "params_dtype": "torch.bfloat16"}
    yield {"topology": {"data_parallel_size": 2, "expert_model_parallel_size": 2}, "max_tokens_per_microbatch": 256}
    yield {"topology": Topology(data_parallel_size=2, expert_model_parallel_size=2), "world_size": 2}
    yield {"ppo_max_token_len_per_gpu": 256, "num_experts": 8, "moe_router_topk": 2, "num_layers": 2}
    yield {"model": spec}
    yield {"model": "tiny"}
    yield {"model": "some-org/Tiny"}
    yield {"model": config(folder)}
    yield {"model": str(folder / "tiny.json"), "dtype": "float16"}
    yield Job(model=config(folder), topology=Topology(2, expert_model_parallel_size=2), dtype="bfloat16")
    yield Job()


def test_the_right_job_passes(folder, planner):
    for job in right_jobs(folder, planner.spec):
        planner.check_job(job)
        load_planner(folder / "bundle", warm_up=False, job=job)


def test_all_differences_are_in_one_message(folder, planner):
    wrong = {
        "model": config(folder, hidden_size=128, num_experts=16),
        "ep": 1,
        "data_parallel_size": 4,
        "max_tokens_per_microbatch": 512,
        "dtype": "float8",
    }
    said = [
        r"expert_model_parallel_size is 2 in the bundle, 1 in the job",
        r"data_parallel_size is 2 in the bundle, 4 in the job",
        r"max_tokens_per_microbatch is 256 in the bundle, 512 in the job",
        r"dtype is bfloat16 in the bundle, float8_e4m3fn in the job",
        r"model hidden_size is 64 in the bundle, 128 in the job",
        r"model num_experts is 8 in the bundle, 16 in the job",
    ]
    with pytest.raises(RoutePackError, match="This planner is not for this job") as caught:
        planner.check_job(wrong)
    assert all(re.search(words, str(caught.value)) for words in said)
    assert str(caught.value).count(" in the job") == len(said)
    with pytest.raises(RoutePackError, match=r"Bundle .*bundle is not for this job: .*; .*; "):
        load_planner(folder / "bundle", job=wrong, allow_mismatch=True)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"dp": 4}, "data_parallel_size is 2 in the bundle, 4"),
        ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size is 1 in the bundle, 2"),
        ({"ulysses_sequence_parallel_size": 2}, "context_parallel_size is 1 in the bundle, 2"),
        ({"world_size": 16}, "world_size is 2 in the bundle, 16"),
        ({"ppo_max_token_len_per_gpu": 128}, "context parallel size.* is 256 in the bundle, 128"),
        ({"moe_router_topk": 4}, "moe_router_topk is 2 in the bundle, 4"),
        ({"model": "Qwen3-30B-A3B"}, "model hidden_size is 64 in the bundle, 2048 in the job"),
        ({"model": "another/model-name"}, "model is tiny in the bundle, model-name in the job"),
        ({"dtype": "fp32"}, "dtype is bfloat16 in the bundle, float32 in the job"),
        ({"epp": 4}, "no 'epp': did you mean 'etp'|no 'epp'"),
        ({"expert_model_paralel_size": 4}, "did you mean 'expert_model_parallel_size'"),
        ({"ep": "2"}, "expert_model_parallel_size to be a whole number, got '2'"),
        ({"ep": True}, "whole number, got True"),
        ({"dtype": "int7"}, "Unknown number type 'int7'"),
        ({"topology": 4}, "topology as a mapping, got int"),
        ({"model": 4}, "as a name, a config or a ModelSpec, got int"),
        ({"model": {}}, "The job's model: "),
        ("tiny", "Expected a Job or a mapping"),
    ],
)
def test_what_differs_or_cannot_be_read_is_named(planner, job, words):
    with pytest.raises(RoutePackError, match=words) as caught:
        planner.check_job(job)
    assert "\n" not in str(caught.value)


def test_a_transformers_config_is_read(folder, planner):
    class Config:
        def to_dict(self):
            return config(folder)

    planner.check_job({"model": Config()})


def test_a_bundle_whose_number_type_nobody_said_is_not_compared(planner):
    replace(planner, dtype="").check_job({"dtype": "float32"})


def test_number_types_of_torch_are_read():
    torch = pytest.importorskip("torch")
    assert number_type(torch.bfloat16) == "bfloat16"
    assert number_type(torch.float8_e4m3fn) == "float8_e4m3fn"


def test_plans_name_their_bundle(folder, planner):
    step = next((folder / "steps").glob("*.npz"))
    plan = planner.plan(step)
    stated = json.loads((folder / "bundle" / "planner.yaml").read_text())["content_hash"]
    assert plan.provenance["bundle_hash"] == planner.bundle_hash == stated
    assert plan.model.spec_hash == planner.spec.spec_hash
    assert "registry" not in plan.provenance
    batch = planner._checked(step)
    with planner.stream() as stream:
        for i in range(batch.num_samples):
            stream.add(batch.sample_ids[i], batch.lengths[i], batch.expert_counts[i], batch.known_tokens[i])
        assert stream.seal()[1].provenance["bundle_hash"] == stated
    registry = {"name": "j", "version": "3", "alias": "champion"}
    registered = replace(planner, provenance={"registry": registry})
    assert registered.plan(step).provenance["registry"] == registry

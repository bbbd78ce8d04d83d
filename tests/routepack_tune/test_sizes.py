"""Parallel sizes that cannot divide the model are refused by every verb at load, with the nearest that can."""

import json
from dataclasses import asdict

import pytest

from profiler import RoutePackError, Topology
from profiler.files import content_hash
from routepack_tune import load_planner
from routepack_tune.bundle import typed_parts, untuned_planner, write_bundle
from routepack_tune.cli import main

SAID = "expert_model_parallel_size = 3 cannot divide the 8 experts of tiny. Nearest: 1"


@pytest.mark.parametrize(
    "verb",
    [
        ["profile"],
        ["fit", "{folder}/measurements.parquet"],
        ["tune", "{steps}", "--costmodel", "{costmodel}"],
        ["plan", "{step}", "--costmodel", "{costmodel}"],
    ],
    ids=lambda verb: verb[0],
)
def test_every_verb_with_a_configuration_refuses_at_load(job, verb, capsys):
    job.config.write_text(
        job.config.read_text().replace(
            "size: 2, expert_model_parallel_size: 2", "size: 3, expert_model_parallel_size: 3"
        )
    )
    out = job.folder / "new"
    places = {"folder": job.folder, "steps": job.steps, "step": job.step, "costmodel": job.costmodel}
    given = [word.format(**places) for word in verb]
    assert main([*given, "--config", str(job.config), "--out", str(out)]) == 1
    said = capsys.readouterr().err
    assert SAID in said
    assert len(said.strip().splitlines()) == 1
    assert not out.exists()


def test_a_bundle_whose_sizes_cannot_divide_its_model_is_refused(job, capsys):
    planner = untuned_planner(job.costmodel, job.settings())
    bundle = write_bundle(job.folder / "bundle", planner, {})
    document = json.loads((bundle / "planner.yaml").read_text())
    document["topology"] |= {"data_parallel_size": 3, "expert_model_parallel_size": 3}
    document.pop("content_hash")
    (bundle / "planner.yaml").write_text(json.dumps(document | {"content_hash": content_hash(document)}))
    with pytest.raises(RoutePackError, match=r"= 3 cannot divide the 8 experts .* Nearest: 1"):
        load_planner(bundle)
    for verb in (
        ["plan", str(job.step), "--out", "p.json", "--bundle", str(bundle)],
        ["check", str(bundle), str(job.steps)],
    ):
        assert main(verb) == 1
        assert SAID in capsys.readouterr().err


def test_parts_of_a_study_are_checked_against_each_other(job):
    settings = job.settings()
    wrong = Topology(tensor_model_parallel_size=3)
    with pytest.raises(RoutePackError, match=r"Study s .* = 3 cannot divide the 4 attention heads .* Nearest: 2 or 4"):
        typed_parts(asdict(settings.model), asdict(wrong), asdict(settings.planner), "Study s")

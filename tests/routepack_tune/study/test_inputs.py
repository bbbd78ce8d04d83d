"""What a study takes from other files: the cost model's half-widths, another bundle's settings."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from profiler import RoutePackError
from profiler.files import content_hash
from routepack_tune.bundle import untuned_planner, write_bundle
from routepack_tune.study.folder import stated_half_log
from routepack_tune.study.verbs import _tune_task, best_setting


def test_stated_half_widths_come_from_the_cost_model():
    half_log = {"attention": (0.02, 0.04, 0.06), "dense": (0.01,), "alltoall": None}
    operations = {
        name: SimpleNamespace(operation=name, intervals=found and SimpleNamespace(half_log=found))
        for name, found in half_log.items()
    }
    assert stated_half_log(SimpleNamespace(operations=operations)) == {"attention": 0.04}
    assert stated_half_log(SimpleNamespace(operations={})) == {}


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (None, "params"),
        ([], "params"),
        ("fast", "params"),
        ({"max_iterations": "many"}, "max_iterations"),
        ({"seed": -1}, "seed"),
    ],
)
def test_a_damaged_bundle_is_no_warm_start(job, params, words):
    bundle = write_bundle(job.folder / "bundle", untuned_planner(job.costmodel, job.settings()), {})
    task, _ = _tune_task(job.steps, job.costmodel, job.settings(), 0)
    assert best_setting(bundle, task)
    planner = bundle / "planner.yaml"
    document = json.loads(planner.read_text()) | {"params": params}
    planner.write_text(json.dumps(document))
    with pytest.raises(RoutePackError, match="content_hash"):
        best_setting(bundle, task)

    stated = {name: value for name, value in document.items() if name != "content_hash"}
    planner.write_text(json.dumps(stated | {"content_hash": content_hash(stated)}))
    with pytest.raises(RoutePackError, match=words):
        best_setting(bundle, task)

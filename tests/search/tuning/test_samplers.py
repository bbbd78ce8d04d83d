"""Workers differ, one worker repeats itself, given settings come first, and what is wrong with them is named."""

import itertools

import pytest
from small_tasks import FAST, make_task, new_study, run_here

from profiler import RoutePackError
from search import PlannerParams, Range, TuneParams
from search.params import TUNABLE, tunable_ranges
from search.tuning.samplers import distributions, make_sampler

optuna = pytest.importorskip("optuna")


@pytest.fixture(autouse=True)
def small_space(monkeypatch):
    for name in list(TUNABLE):
        monkeypatch.delitem(TUNABLE, name)
    for name, knob in FAST.items():
        monkeypatch.setitem(TUNABLE, name, knob)


def first_settings(task, worker, finished=0):
    study = optuna.create_study()
    study.sampler = make_sampler(task, worker, finished)
    return [study.ask(distributions(task)).params for _ in range(3)]


@pytest.mark.parametrize("sampler", ["tpe", "gp", "cmaes"])
def test_fc47_workers_of_one_seed_start_differently(sampler):
    if sampler == "gp":
        pytest.importorskip("torch")
    if sampler == "cmaes":
        pytest.importorskip("cmaes")
    task = make_task(sampler=sampler)
    one, two = first_settings(task, 0), first_settings(task, 1)
    assert not any(setting in two for setting in one)
    assert one == first_settings(task, 0)


def test_studies_of_neighbouring_seeds_share_no_stream():
    """Sums of seed, worker and resumption would: seed 1's first worker would be seed 0's second."""
    streams = [
        first_settings(make_task(seed=seed), worker, finished)
        for seed in range(3)
        for worker in range(3)
        for finished in (0, 1)
    ]
    assert not any(a == b for a, b in itertools.combinations(streams, 2))


def test_fc47_one_worker_and_seed_reproduce_exactly():
    runs = []
    for _ in range(2):
        task = make_task(seed=3)
        study = new_study(task)
        run_here(task, study, 13)  # beyond the random start: the model proposes too
        runs.append([(t.params, t.state, t.values, dict(t.intermediate_values)) for t in study.trials])
    assert runs[0] == runs[1]


def test_defaults_come_first_then_what_is_given_completed_by_the_defaults():
    task = make_task(enqueue=[{"max_iterations": 300}, {"first_share": 0.3, "max_iterations": 100}])
    study = new_study(task)
    run_here(task, study, 3)
    wanted = {name: getattr(task.base, name) for name in FAST}
    assert [t.params for t in study.trials] == [
        wanted,
        {**wanted, "max_iterations": 300},
        {**wanted, "first_share": 0.3, "max_iterations": 100},
    ]


def test_caps_are_tried_only_where_allowed():
    assert "max_tokens" not in distributions(make_task())
    task = make_task(caps=(48,))
    assert distributions(task)["max_tokens"].choices == (48, 64)
    assert task.given_settings[0]["max_tokens"] == 64


def test_ranges_reach_the_users_own_values_and_leave_alone_what_is_switched_off():
    ranges = tunable_ranges(PlannerParams(max_iterations=5_000, stickiness=0.0))
    assert ranges["max_iterations"] == Range(100, 5_000, log=True, integer=True)
    assert "stickiness" not in ranges


def test_cmaes_knows_one_objective():
    with pytest.raises(ValueError, match="tpe or gp with two_objectives"):
        TuneParams(sampler="cmaes", two_objectives=True)


def test_a_sampler_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr("search.tuning.samplers.NEEDS", {"gp": "no_such_package"})
    with pytest.raises(RoutePackError, match="Sampler gp needs the package no_such_package"):
        make_sampler(make_task(sampler="gp"), 0, 0)

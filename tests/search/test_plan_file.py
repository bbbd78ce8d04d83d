"""``plan.json``: what is read is as sound as what is made, whatever was done to the file and its hash."""

import copy
import json
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
from edits import edited, said, set_at
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import TOPOLOGIES, jobs, make_batch, make_spec, make_tables

from profiler import RoutePackError
from profiler.files import content_hash
from search import Plan, PlannerParams, StreamingPlanner, check_plan, plan_step
from search.plan import check_form

SMALL = PlannerParams(max_iterations=4096, placement_swaps=200, starts=1)
TOPOLOGY, CAP, CAP_KEY = TOPOLOGIES[2], 64, "max_tokens_per_microbatch"


def make_case(seed=0, layers=2):
    rng, spec = np.random.default_rng(seed), make_spec(layers=layers)
    batch = make_batch(rng, spec, rng.integers(5, 30, 24), skew=1.5, unknown=1)
    return batch, make_tables(np.random.default_rng(1), spec, TOPOLOGY, CAP), spec, TOPOLOGY, CAP


CASE = make_case()
PLAN = plan_step(*make_case(7), replace(SMALL, stickiness=0.0), previous=plan_step(*CASE, SMALL))
DOCUMENT = json.loads(json.dumps(PLAN.to_dict()))


def rehashed(document):
    """The hashes that anyone can write under an edited plan; as they are where there is nothing to hash."""
    try:
        decided = {name: document[name] for name in ("micro_batches", "logical_to_physical")}
        about = {name: document[name] for name in ("sample_ids", "topology", "model")}
        numbers = {"num_tokens": document["denominators"]["num_tokens"], "max_tokens": document[CAP_KEY]}
        document["plan_hash"] = content_hash({**decided, **about, **numbers})
        document["placement_id"] = content_hash(document["logical_to_physical"])
        document["physical_to_logical"] = np.argsort(document["logical_to_physical"], axis=1).tolist()
    except (KeyError, TypeError, ValueError, OverflowError):
        pass
    return document


@given(edited(DOCUMENT), st.booleans())
@settings(max_examples=150, deadline=None)
def test_edited_plans_are_refused_or_sound(document, again):
    plan, refused = said(lambda: Plan.from_dict(rehashed(document) if again else document))
    if plan is None:
        assert "\n" not in refused
        return
    check_form(plan)
    assert Plan.from_dict(plan.to_dict()).to_dict() == plan.to_dict()
    quick = replace(SMALL, max_iterations=1, placement_swaps=1, extra_rows=0)
    made, refused = said(lambda: plan_step(*CASE, quick, previous=plan))
    if made is None:
        assert "revious plan" in refused
    else:
        check_plan(made, CASE[0].lengths, 8)


@given(jobs(max_samples=20), st.booleans())
@settings(max_examples=15, deadline=None)
def test_saved_plans_load_the_same(tmp_path_factory, drawn, twice):
    *case, params = drawn[0]
    params = replace(params, max_iterations=1024, placement_swaps=50, starts=1, max_received_rows=0)
    try:
        plan = plan_step(*case, params)
        plan = plan_step(*case, params, previous=plan, seed=1) if twice else plan
    except RoutePackError:  # too few samples for the rows
        return
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(path)
    loaded = Plan.load(path)
    assert loaded.to_dict() == plan.to_dict()
    assert (loaded.placement_LE == plan.placement_LE).all()
    assert loaded.moves == plan.moves
    assert loaded.provenance == plan.to_dict()["provenance"]


def wrong(place, value):
    document = copy.deepcopy(DOCUMENT)
    set_at(document, place, value)
    return rehashed(document)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("logical_to_physical", 0, 0), -(2**40), "slot"),
        (("logical_to_physical", 0, 0), 2**31, "slot"),
        (("logical_to_physical", 0, 0), 2**70, "slot|64 bits|whole"),
        (("logical_to_physical", 1), [0, 0, 1, 2, 3, 4, 5, 6], "not a bijection"),
        (("logical_to_physical", 1), [0, 1], "unlike length"),
        (("num_microbatches",), 2**31, "DP ranks of 2147483648 rows"),
        (("topology", "data_parallel_size"), 2**62, "data_parallel_size"),
        (("topology", "data_parallel_size"), 2**20, "micro_batches|straddles"),
        (("denominators", "num_samples"), 2**40, "denominators"),
        (("denominators", "num_tokens"), 1, "tokens are not those"),
        (("denominators", "num_tokens"), 2**62, "tokens are not those"),
        (("max_tokens_per_microbatch",), 1, "tokens are not those"),
        (("micro_batches", 0, 0), [], "every one of the 24 samples once"),
        (("micro_batches", 0, 0, 0), 2**33, "every one of the 24 samples once"),
        (("sample_ids", 0), "s1", "same id"),
        (("predicted", "step_time_s"), -1.0, "not the sum of parts"),
        (("predicted", "step_time_s"), float("nan"), "finite|nan"),
        (("lower_bound_s",), 1e9, "lower_bound_s"),
        (("lower_bound_s",), 10**400, "lower_bound_s"),
        (("moves", "experts", 0), [0, 0, 0, 99], "move of expert"),
        (("moves", "experts", 0, 0), 2**40, "move of expert"),
        (("moves", "bytes"), -1, ">= 0 bytes"),
        (("moves", "bytes"), 0, "all or none are 0"),
        (("moves", "seconds"), 0.0, "all or none are 0"),
        (("model", "spec_hash"), "x", "spec_hash to be 64 hex"),
        (("counters", "padding_tokens"), -1, "padding_tokens = -1 is not 0"),
        (("counters", "unknown_tokens"), 2**40, "unknown_tokens = .* is not 0 to"),
        (("moves",), {"experts": [], "bytes": 0, "seconds": 1.0}, "no move to be 0"),
        (("provenance",), {}, "names no previous placement"),
        (("provenance", "seed"), "x", "seed"),
        (("provenance", "params", "starts"), -1, "starts"),
        (("provenance", "registry"), {"name": "j", "version": 3}, "alias|version"),
        (("provenance", "more"), "x" * 2**20, "characters"),
        (("counters", "padding_tokens"), True, "padding_tokens"),
        (("counters", "padding_tokens"), "3", "padding_tokens"),
        (("provenance",), {"tables_hash": 7}, "tables_hash"),
        (("model", "moe_layers"), [1, 0], "moe_layers"),
        (("model", "moe_layers"), [0], "shape"),
    ],
)
def test_what_an_edited_plan_says_is_named(place, value, words):
    with pytest.raises(RoutePackError, match=words) as caught:
        Plan.from_dict(wrong(place, value))
    assert str(caught.value).startswith("Plan cannot be used: ")
    assert str(caught.value).endswith("Plan the step again.")


@pytest.mark.parametrize("name", sorted(set(DOCUMENT) - {"schema_version"}))
def test_no_part_of_a_plan_may_be_missing(name):
    document = {key: value for key, value in DOCUMENT.items() if key != name}
    with pytest.raises(RoutePackError, match=name):
        Plan.from_dict(document)


@pytest.mark.parametrize("document", [None, [], "x", 7, {}, {"schema_version": 1}, {"schema_version": True}])
def test_what_is_no_plan_is_refused(document):
    with pytest.raises(RoutePackError, match="schema_version"):
        Plan.from_dict(document)


def test_a_plan_names_its_model_and_the_layers_it_places():
    spec = replace(make_spec(layers=5), moe_layers=(False, False, True, True, True))
    rng = np.random.default_rng(0)
    batch = make_batch(rng, spec, rng.integers(5, 30, 24))
    tables = make_tables(rng, spec, TOPOLOGY, CAP)
    tables = replace(
        tables,
        class_layers=np.array([3, 3, 2, 2]),
        class_names=("full/moe/forward", "full/moe/backward", "full/dense/forward", "full/dense/backward"),
        sequence_ns=np.tile(tables.sequence_ns, (2, 1)),
        cell_ns=np.tile(tables.cell_ns, (2, 1)),
    )
    job = (tables, spec, TOPOLOGY, CAP)
    plan = plan_step(batch, *job, SMALL)
    named = json.loads(json.dumps(plan.to_dict()))["model"]
    assert named == {"name": "tiny", "spec_hash": spec.spec_hash, "moe_layers": [2, 3, 4]}
    assert plan.model.layer_words(0) == "MoE layer 0 (hidden layer 2)"
    assert len(plan.placement_LE) == 3
    with pytest.raises(RoutePackError, match=r"MoE layer \d \(hidden layer [234]\), above max_received_rows = 3"):
        plan_step(batch, *job, replace(SMALL, max_received_rows=3))


def other_model(spec):
    return replace(spec, hidden_size=128, name="other")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["model of equal shape", "layers", "mapping", "by hand", "float"])
def test_a_previous_plan_of_something_else_is_refused_by_naming_both(kind, stream):
    first, words = plan_step(*CASE, SMALL), "is of tiny .*is of tiny"
    if kind == "model of equal shape":
        spec = other_model(CASE[2])
        first, words = plan_step(CASE[0], CASE[1], spec, *CASE[3:], SMALL), "of other .*2 MoE layers of 8.* of tiny "
    elif kind == "layers":
        first, words = plan_step(*make_case(layers=3), SMALL), "3 MoE layers of 8 experts.*2 MoE layers of 8 experts"
    elif kind == "mapping":
        first, words = first.to_dict(), r"Expected a Plan, got dict\. Plan\.load"
    elif kind == "by hand":
        bad = first.placement_LE.copy()
        bad[0, 0] = -(2**40)
        first, words = replace(first, placement_LE=bad), "not a bijection"
    elif kind == "float":
        first, words = replace(first, placement_LE=first.placement_LE * 1.0), "to hold integers, got float64"
    how = {"params": SMALL, "previous": first}
    make = partial(StreamingPlanner, *CASE[1:], **how) if stream else partial(plan_step, *CASE, **how)
    with pytest.raises(RoutePackError, match=words):
        make()


@pytest.mark.parametrize("value", [None, "x", 1.5, [], {}, [[1]], np.zeros(3), True, -1])
@pytest.mark.parametrize("name", [one.name for one in fields(Plan)])
def test_plans_made_by_hand_of_anything_are_refused_or_sound(name, value):
    plan = replace(PLAN, **{name: value})
    made, refused = said(lambda: plan_step(*CASE, replace(SMALL, max_iterations=1), previous=plan))
    assert made is None or name in ("notes", "counters", "sample_ids")
    assert made is not None or "revious plan" in refused

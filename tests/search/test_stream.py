"""Streaming: samples are checked on arrival, the sealed plan is as good as the batch call's, nothing waits or leaks."""

import threading
from concurrent.futures import wait
from dataclasses import replace

import numpy as np
import pytest
from patience import PATIENCE_S
from strategies import TOPOLOGIES, make_batch, make_spec, make_tables

import search.stream
from profiler import RoutePackError
from search import PlannerParams, StopCriterion, StreamingPlanner, check_plan, plan_step

SMALL = PlannerParams(max_iterations=20_000, placement_swaps=500)


def make_case(seed, topology=TOPOLOGIES[1], samples=40, cap=64):
    rng = np.random.default_rng(seed)
    spec = make_spec()
    lengths = np.clip(np.exp(rng.normal(2.5, 0.8, samples)), 2, cap).astype(int)
    return make_batch(rng, spec, lengths, unknown=1), (make_tables(rng, spec, topology, cap), spec, topology, cap)


def add_all(stream, batch, order=None):
    for i in range(batch.num_samples) if order is None else order:
        stream.add(batch.sample_ids[i], batch.lengths[i], batch.expert_counts[i], prompt_id=int(i) // 4)


def live_workers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("routepack-stream")]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_sealed_plan_is_feasible_and_as_good_as_the_batch_call(seed, background):
    batch, job = make_case(seed)
    with StreamingPlanner(*job, SMALL, background=background) as stream:
        add_all(stream, batch, np.random.default_rng(seed).permutation(batch.num_samples))
        sealed, plan = stream.seal(order=batch.sample_ids)
    assert sealed.data_hash == batch.data_hash
    np.testing.assert_array_equal(sealed.prompt_ids, np.arange(batch.num_samples) // 4)
    check_plan(plan, batch.lengths, job[1].num_experts)
    assert plan.predicted.step_time_s <= 1.01 * plan_step(batch, *job, SMALL).predicted.step_time_s
    assert not live_workers()


@pytest.mark.parametrize("with_previous", [False, True])
def test_without_background_same_arrivals_give_the_same_plan(with_previous):
    batch, job = make_case(5)
    previous = plan_step(batch, *job, SMALL, seed=3) if with_previous else None
    arrivals = np.random.default_rng(1).permutation(batch.num_samples)
    plans = []
    for threads in (1, 2):
        stream = StreamingPlanner(*job, SMALL, seed=7, previous=previous, num_threads=threads, background=False)
        add_all(stream, batch, arrivals)
        assert stream.provisional is not None
        assert set(stream.provisional.sample_ids) <= set(batch.sample_ids)
        plans.append(stream.seal(StopCriterion(max_iterations=20_000))[1])
    assert plans[0].to_dict() == plans[1].to_dict()
    assert not live_workers()


def test_batch_is_ordered_by_id_whatever_the_order_of_arrival():
    batch, job = make_case(0, samples=24)
    batch = replace(batch, sample_ids=np.array([*map(str, range(22)), "a", "b"]))
    for arrivals in (np.arange(24), np.arange(24)[::-1], np.random.default_rng(0).permutation(24)):
        stream = StreamingPlanner(*job, replace(SMALL, max_iterations=4096), background=False)
        add_all(stream, batch, arrivals)
        assert stream.seal()[0].data_hash == batch.data_hash


def test_samples_may_come_from_several_threads():
    batch, job = make_case(1)
    with StreamingPlanner(*job, SMALL) as stream:
        threads = [threading.Thread(target=add_all, args=(stream, batch, range(k, 40, 4))) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert stream.seal(order=batch.sample_ids)[0].data_hash == batch.data_hash


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_id": "s0"}, "added twice"),
        ({"length": 65, "known_tokens": 9}, "above max_tokens"),
        ({"length": 0}, "at least 1"),
        ({"length": 9.5}, "whole number"),
        ({"known_tokens": 8}, "add up to 18, expected 16"),
        ({"known_tokens": 12}, r"outside 0\.\.10"),
        ({"length": 20}, "add up to 18, expected 40"),
        ({"expert_counts": np.ones((2, 4), int)}, r"shape \(2, 8\)"),
        ({"expert_counts": np.ones((2, 8))}, "integers"),
        ({"expert_counts": np.array([[18, 0, 0, 0, 0, 0, 0, 0]] * 2)}, "at most once"),
        ({"expert_counts": np.array([[9, 10, -1, 0, 0, 0, 0, 0]] * 2)}, "layer 0: expert 2 has the negative count -1"),
    ],
)
def test_wrong_samples_are_refused_at_once_and_leave_the_rest_alone(change, message):
    batch, job = make_case(0)
    good = {"sample_id": "new", "length": 10, "expert_counts": np.array([[9, 9, 0, 0, 0, 0, 0, 0]] * 2)}
    with StreamingPlanner(*job, SMALL, background=False) as stream:
        stream.add("s0", batch.lengths[0], batch.expert_counts[0])
        with pytest.raises(RoutePackError, match=message):
            stream.add(**{**good, **change})
        assert stream.num_samples == 1
        stream.add(**good)
        assert stream.num_samples == 2


def test_padding_counts_towards_the_cap():
    _, job = make_case(0, cap=63)
    counts = np.array([[61, 61, 0, 0, 0, 0, 0, 0]] * 2)
    StreamingPlanner(*job, SMALL).add("a", 61, counts)
    with pytest.raises(RoutePackError, match="padded to 64"):
        StreamingPlanner(*job, replace(SMALL, sequence_alignment=4)).add("a", 61, counts)


def test_seal_asks_for_every_sample_once_and_ends_the_stream():
    batch, job = make_case(0)
    stream = StreamingPlanner(*job, SMALL)
    with pytest.raises(RoutePackError, match="0 samples"):
        stream.seal()
    add_all(stream, batch)
    for order in (batch.sample_ids[1:], [*batch.sample_ids[1:], "s1"], [*batch.sample_ids, "other"]):
        with pytest.raises(RoutePackError, match="every sample once"):
            stream.seal(order=order)
    stream.seal()
    with pytest.raises(RoutePackError, match="sealed or closed"):
        stream.add("late", batch.lengths[0], batch.expert_counts[0])


def test_too_few_samples_are_no_provisional_plan_but_an_error_when_sealed():
    batch, job = make_case(0)
    stream = StreamingPlanner(*job, SMALL, background=False)
    add_all(stream, batch, range(3))  # four DP slots
    assert stream.provisional is None
    with pytest.raises(RoutePackError, match="3 samples cannot fill 4 DP slots"):
        stream.seal()


class Gate:
    """A planning function that says when it has begun and waits until it may go on."""

    def __init__(self):
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, *args, stop, **kwargs):
        self.begun.set()
        self.go_on.wait(PATIENCE_S)
        stop.progress(0)
        raise ZeroDivisionError("a bug")


def test_prompts_of_any_type_are_numbered_as_in_a_batch():
    batch, job = make_case(0)
    stream = StreamingPlanner(*job, SMALL, background=False)
    for i in range(batch.num_samples):
        stream.add(batch.sample_ids[i], batch.lengths[i], batch.expert_counts[i], prompt_id=("uid", i // 4))
    with pytest.raises(RoutePackError, match="prompt_ids must be told apart"):
        stream.add("more", batch.lengths[0], batch.expert_counts[0], prompt_id=[1])
    sealed, _ = stream.seal(stop=StopCriterion(max_iterations=1), order=batch.sample_ids)
    assert sealed.prompt_ids.tolist() == (np.arange(batch.num_samples) // 4).tolist()


def test_add_does_not_wait_for_the_worker_and_bugs_surface_when_sealed(monkeypatch):
    batch, job = make_case(0)
    gate = Gate()
    monkeypatch.setattr(search.stream, "plan_step", gate)
    stream = StreamingPlanner(*job, SMALL)
    add_all(stream, batch, range(4))
    assert gate.begun.wait(PATIENCE_S)
    add_all(stream, batch, range(4, 40))
    assert stream.num_samples == 40
    assert not gate.go_on.is_set()
    assert live_workers()
    gate.go_on.set()
    wait(stream._plans)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        stream.seal()


def test_close_gives_up_planning_and_leaves_no_thread(monkeypatch):
    batch, job = make_case(0)
    gate = Gate()
    monkeypatch.setattr(search.stream, "plan_step", gate)
    with StreamingPlanner(*job, SMALL) as stream:
        add_all(stream, batch)
        assert gate.begun.wait(PATIENCE_S)
        stream._closed.set()
        gate.go_on.set()
    assert not live_workers()
    assert all(plan.exception() is None for plan in stream._plans)  # given up before the bug
    stream.close()


def test_an_idle_worker_ends_when_closed():
    batch, job = make_case(0)
    with StreamingPlanner(*job, replace(SMALL, max_iterations=1000)) as stream:
        add_all(stream, batch)
    assert not live_workers()

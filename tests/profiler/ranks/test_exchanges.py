import contextlib
import dataclasses
import time

import numpy as np
import pytest

from profiler import DeviceFingerprint, ModelSpec, Observer, ProfileParams, Topology
from profiler.cases.case import Rates
from profiler.cases.design import Design
from profiler.device.fingerprint import link_rates
from profiler.journal import Journal
from profiler.ranks.exchanges import (
    PATTERNS,
    UNIT_BYTES,
    Move,
    Round,
    above_link,
    alltoall_case,
    design_exchanges,
    group_sizes,
    largest_exchange,
    run_exchanges,
    split_bytes,
    summary,
    time_exchange,
    time_round,
    transfer_case,
)
from profiler.ranks.ranks import Stage
from profiler.timer import times_of

CONFIG = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 64,
}  # fmt: skip
SPEC = ModelSpec.from_config(CONFIG, "small")
PARAMS = ProfileParams(max_points=12, repeats=3, min_repeats=2)
CARD = DeviceFingerprint("cuda", "nvidia", "sm_90", "card", 132, 141, "NVLink 450 GB/s", 8, network="8 x 400 Gb/s IB")


class Backend:
    kind = "cpu"


class Group:
    rank = 0


class Recorder:
    """Ranks and backend in one: note what is called, in order; the device is pretended."""

    rank, size, device = 0, 1, "cpu"

    def __init__(self, kind):
        self.kind, self.calls = kind, []

    def barrier(self):
        self.calls.append("barrier")

    def flush(self):
        self.calls.append("flush")

    def timed(self, run):
        self.calls.append("timed")
        return 1.0, None

    def group(self, size):
        return None

    def together(self):
        return contextlib.nullcontext()

    def gather(self, value):
        return [value]

    def agree(self, value):
        return value


def stage(fingerprint=CARD):
    return Stage(Group(), Backend(), PARAMS, fingerprint)


@pytest.mark.parametrize("group", [2, 3, 8])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_splits_keep_to_what_the_busiest_rank_may_move(pattern, group):
    for busiest in (1024, 12_345, 10**8):
        split = split_bytes(pattern, group, busiest, np.random.default_rng(1))
        assert (split >= 0).all()
        assert not (split % UNIT_BYTES).any()
        features = alltoall_case(pattern, split, group).features
        assert busiest - group * UNIT_BYTES <= features["bytes"] <= busiest
        assert features["inter_bytes"] == 0
        assert features["ranks"] == group
        if pattern == "sparse":
            assert (split.sum(axis=0) == 0).any()
            assert (split.sum(axis=1) == 0).any()


def test_bytes_over_the_border_are_those_of_the_busiest_rank():
    split = np.array([[1, 2, 3, 4], [0, 0, 0, 0], [5, 0, 0, 9], [0, 0, 0, 0]]) * 16
    assert alltoall_case("", split, 2).features == {"bytes": 14 * 16, "inter_bytes": 7 * 16, "ranks": 4}
    # The backward pass sends the same back: its busiest rank is as busy.
    assert alltoall_case("", split.T, 2).features == alltoall_case("", split, 2).features


@pytest.mark.parametrize(
    ("block", "size", "per_node", "expected"),
    [(8, 8, 8, [8]), (4, 8, 8, [4, 8]), (16, 16, 8, [8, 16]), (64, 16, 8, [8, 16]), (3, 4, 4, [4]), (2, 2, 1, [2])],
)
def test_groups_are_those_that_the_job_can_form(block, size, per_node, expected):
    topology = Topology(data_parallel_size=block, expert_model_parallel_size=block)
    assert group_sizes(topology, size, per_node) == expected


def test_the_design_spans_a_kib_to_the_fullest_exchange_and_reports_cuts():
    topology = Topology(data_parallel_size=8, expert_model_parallel_size=8)
    design = Design(SPEC, topology, 4096, PARAMS, Rates(1e15, 1e15, 1e13, 1e-6, 1 << 40), 2)
    asked, links = ([4, 8], 4, 1), dict.fromkeys(("4", "8", "inside", "between"), 2.0**40)
    cases = design_exchanges(design, *asked, links)
    assert not design.limits
    assert [case.case_id("forward", "") for case in cases] == [
        case.case_id("forward", "") for case in design_exchanges(design, *asked, links)
    ]
    for ranks in (4, 8):
        group = [case for case in cases if case.op == "alltoall" and case.features["ranks"] == ranks]
        assert {case.pattern for case in group} == {"empty", *PATTERNS}
        sizes = sorted(case.features["bytes"] for case in group)
        assert sizes[:2] == [0, 1024]
        # 4096 tokens x 2 choices of 64 numbers in 16 bits: twice the mean load of a rank.
        assert sizes[-1] == largest_exchange(design) == 4096 * 2 * 2 * 64 * 2
        assert all((case.features["inter_bytes"] > 0) == (ranks == 8) for case in group if case.pattern == "even")
    moved = [case for case in cases if case.op == "transfer"]
    assert 16 * 3 * 64 * 32 in {case.features["bytes"] for case in moved}
    assert {case.features["inter_bytes"] == case.features["bytes"] for case in moved} == {True, False}
    small = design_exchanges(design, *asked, links | {"8": 4096 / design.longest_s})
    assert [(limit["op"], limit["designed"]) for limit in design.limits] == [("alltoall", 4096)]
    assert max(case.features["bytes"] for case in small if case.features.get("ranks") == 8) <= 4096


def rounds(*skews, time_us=1000.0):
    return [Round(time_us, 0, skew, max(2000.0, 0.1 * time_us), 1, 0.1) for skew in skews]


def summed(seen, fingerprint=CARD, size=2048):
    case = alltoall_case("even", split_bytes("even", 2, size, np.random.default_rng(0)), 2)
    return summary(stage(fingerprint), case, seen)


def test_rounds_that_began_apart_are_dropped_and_too_many_fail_the_case():
    # FC-29: start skew.
    row = summed(rounds(10.0, 5000.0, 30.0, 20.0))
    assert (row["status"], row["time_us"], row["skew_us"], len(row["repeats_us"])) == ("ok", 1000.0, 20.0, 3)
    assert row["message"] == "1 of 4 rounds dropped: rank 1 began up to 5000 us late (limit 2000)"
    assert row["rank"] == 0
    row = summed(rounds(10.0, 5000.0, 6000.0))
    assert (row["status"], row["skew_us"], row["rank"]) == ("failed", 5000.0, 1)
    assert "time_us" not in row
    # A long exchange may begin a little further apart.
    assert summed(rounds(5000.0, 5000.0, time_us=1e5))["status"] == "ok"


def test_what_is_faster_than_the_links_was_not_measured():
    # FC-29: bandwidth above the link rate.
    assert link_rates(CARD) == (450e9, 400e9)
    assert link_rates(dataclasses.replace(CARD, interconnect="", network="")) == (0.0, 0.0)
    row = summed(rounds(0.0, 0.0, time_us=1.0), size=2**20)
    assert row["status"] == "failed"
    assert row["message"] == "524 GB/s inside a node cannot be: the links carry 450."
    assert summed(rounds(0.0, 0.0, time_us=2.0), size=2**20)["status"] == "ok"
    unknown = dataclasses.replace(CARD, interconnect="")
    assert summed(rounds(0.0, 0.0, time_us=1.0), unknown, 2**20)["status"] == "ok"
    between = alltoall_case("even", split_bytes("even", 2, 2**20, np.random.default_rng(0)), 1)
    assert "between nodes cannot be" in above_link(stage(), between, 1.0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("cuda", ["barrier", "flush", "device barrier", "timed"]), ("cpu", ["flush", "barrier", "timed"])],
)
def test_nothing_waits_between_the_flush_and_an_exchange_on_a_gpu(monkeypatch, kind, expected):
    # Else the flush is over when the exchange is launched, and the launch is timed with it.
    dist = pytest.importorskip("torch.distributed", reason="torch is not installed")
    recorder = Recorder(kind)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: recorder.calls.append("device barrier"))
    move = Move(lambda: None, lambda: True, (0,), "")
    one = time_round(Stage(recorder, recorder, PARAMS, CARD), move, [0.0], time.perf_counter())
    assert recorder.calls == expected
    assert (one.time_us, one.slowest, one.skew_us, one.latest) == (1.0, 0, 0.0, 0)
    assert one.limit_us == {"cuda": 200.0, "cpu": 2000.0}[kind]  # a longer exchange may begin further apart


@pytest.mark.parametrize(("kind", "expected"), [("cuda", [900.0, 900.0, 500.0, 300.0]), ("cpu", [300.0])])
def test_exchanges_in_doubt_are_pooled_on_gpus_and_chosen_on_cpus(monkeypatch, kind, expected):
    small, large = (transfer_case("inside", size) for size in (1024, 2048))
    times = {1024: [[900.0, 900.0], [500.0], [300.0]], 2048: [[100.0]]}

    def timed(stage, case, direction):
        row = {"case_id": case.case_id(direction, "uint8"), "op": case.op, "direction": direction, **case.features}
        return row | {"status": "ok", **times_of(times[case.features["bytes"]].pop(0))}

    monkeypatch.setattr("profiler.ranks.exchanges.time_exchange", timed)
    journal = Journal(None)
    run_exchanges(Stage(Recorder(kind), Recorder(kind), PARAMS, CARD), [small, large], journal, Observer())
    row = journal.rows[small.case_id("forward", "uint8")]
    assert row["looks"] == 3
    assert row["repeats_us"] == expected


def timed_once(monkeypatch, move):
    """Time one exchange whose move is made by a function; the rounds are pretended."""
    monkeypatch.setattr("profiler.ranks.exchanges._move", move)
    monkeypatch.setattr("profiler.ranks.exchanges.time_round", lambda *_: rounds(0.0)[0])
    recorder = Recorder("cpu")
    recorder.clock_offsets = lambda: [0.0]
    return time_exchange(Stage(recorder, recorder, PARAMS, CARD), transfer_case("inside", 1024), "forward")


def test_buffers_that_do_not_fit_are_a_row_that_says_so(monkeypatch):
    def too_large(*_):
        raise MemoryError("Tried to allocate 2 GiB")

    row = timed_once(monkeypatch, too_large)
    assert (row["status"], row["message"]) == ("oom", "rank 0: Tried to allocate 2 GiB")
    assert row["bytes"] == 1024


@pytest.mark.parametrize(("right", "status"), [(True, "ok"), (False, "failed")])
def test_an_exchange_that_brings_other_bytes_was_not_measured(monkeypatch, right, status):
    row = timed_once(monkeypatch, lambda *_: Move(lambda: None, lambda: right, (0,), "gloo"))
    assert row["status"] == status
    assert ("not those that were sent" in row["message"]) == (not right)

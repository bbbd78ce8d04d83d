import numpy as np

from profiler.cases.doubt import curve_ids, doubtful_cases, faster, point_flags, shard_flags


def test_a_spike_below_a_larger_size_is_flagged():
    curve = np.array([0, 0, 0, 0, 1, 1])
    size = np.array([3, 1, 2, 4, 1, 2])
    time = np.array([3.0, 1.0, 9.0, 4.0, 9.0, 10.0])
    assert point_flags(curve, size, time, 1.25).tolist() == [False, False, True, False, False, False]


def test_a_small_dip_is_not_flagged():
    assert not point_flags(np.zeros(3), np.arange(3), np.array([1.0, 1.2, 1.1]), 1.25).any()


def test_curves_slower_than_a_coarser_sharding_are_flagged_even_when_their_neighbour_is_slow_too():
    tokens = np.tile([1, 1024, 4096], 4)
    shards = np.repeat([1, 2, 4, 8], 3)
    time = np.concatenate([[4, 8, 16], [2, 4, 8], [6, 7, 20], [6, 7, 20]]).astype(float)
    flagged = shard_flags(np.zeros(12, dtype=int), shards, tokens, time)
    assert flagged.reshape(4, 3).tolist() == [[False] * 3, [False] * 3, [True] * 3, [True] * 3]


def test_curve_ids_tell_rows_apart_by_every_column():
    ids = curve_ids(np.array([1, 1, 2]), np.array(["a", "b", "a"]))
    assert len(set(ids.tolist())) == 3


def row(case, tokens, time, status="ok"):
    return {"case_id": case, "op": "dense", "direction": "forward", "status": status, "time_us": time,
            "tokens": tokens, "n": 8, "k": 8}  # fmt: skip


def test_a_measured_case_is_doubtful_when_a_larger_one_was_clearly_faster():
    rows = [row("a", 1, 500.0), row("b", 2, 100.0), row("c", 3, 105.0), row("d", 9, float("nan"), "oom")]
    assert doubtful_cases(rows) == {"a"}
    assert doubtful_cases([]) == set()


def test_the_faster_of_two_looks_is_kept_and_a_time_beats_none():
    good, bad, none = row("a", 1, 1.0), row("a", 1, 2.0), row("a", 1, float("nan"), "oom")
    assert faster(bad, good) == faster(good, bad) == good
    assert faster(none, bad) == faster(bad, none) == bad

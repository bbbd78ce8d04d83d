"""Cases D of the field: a device that is not steady is found, named and flagged (FC-27)."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from profiler import ProfileParams
from profiler.cases.case import Case
from profiler.journal import JOURNAL_NAME, Journal
from profiler.steadiness import (
    CpuUse,
    cpu_use,
    foreign_share,
    order_effect,
    steadiness,
    time_anchor,
    watched,
)
from profiler.timer import time_case

torch = pytest.importorskip("torch", reason="torch is not installed")
backends = pytest.importorskip("profiler.device.backend")

PARAMS = ProfileParams(dtype="float32", threads=1, repeats=3, min_repeats=2, max_case_seconds=0.2)
ANCHOR = Case("dense", "", {"tokens": 128, "n": 256, "k": 256})
ROW = {"op": "dense", "direction": "forward", "status": "ok", "time_us": 1000.0}
SESSION = {"kind": "cpu", "wall_s": 10.0, "busy_s": 9.0, "foreign_cpu_share": 0.0, "throttled": 0}


@pytest.fixture(scope="module")
def backend():
    return backends.TorchBackend("cpu", PARAMS)


def anchors(times, **readings):
    said = [{name: values[i] for name, values in readings.items()} for i in range(len(times))]
    return [{"case_id": "a", "time_us": t, "readings": said[i]} for i, t in enumerate(times)]


def verdict(folder, times, session=None, repeats=(), **readings):
    """Return the verdict over a journal that holds these anchor times and one session."""
    with Journal(folder) as journal:
        for reading in anchors(times, **readings):
            journal.add(anchor=reading)
        journal.add(session={**SESSION, **(session or {})})
        for i, samples in enumerate(repeats):
            journal.add(rows=[{**ROW, "case_id": str(i), "repeats_us": [float(sample) for sample in samples]}])
    with Journal(folder) as journal:  # As a later process reads it.
        return steadiness(journal, PARAMS)


def test_a_quiet_sweep_is_steady(tmp_path):
    found = verdict(tmp_path, [100.0, 101.0, 99.0, 100.5, 100.2], clock_mhz=[1980, 1975, 1980, 1980, 1965])
    assert found["steady"]
    assert found["problems"] == []
    assert found["busy_share"] == pytest.approx(0.9)
    assert found["clock_fall"] == pytest.approx(1 - 1965 / 1980)


@pytest.mark.parametrize(
    ("times", "changes", "words"),
    [
        # FC-27: clocks throttle through the sweep; one case 15% slower at its end.
        (np.linspace(100, 115, 20), {}, "14% slower at the end"),
        # Measured right after idling: the first readings show the ramp.
        ([180.0, 100.0, 100.0, 100.0, 100.0], {}, "left its median by 80%"),
        ([100.0] * 5, {"slowed_by": [0x80, 0x80, 0, 0, 0]}, "clocks were held down by the power brake at 2 of 5 looks"),
        ([100.0] * 5, {"slowed_by": [0x40, 0, 0, 0, 0]}, "its temperature (hardware) at 1 of 5 looks"),
        ([100.0] * 5, {"session": {"foreign_cpu_share": 0.23}}, "other processes used 23% of the CPU"),
        ([100.0] * 5, {"session": {"throttled": 7}}, "CPU limit stopped this process 7 times"),
        (
            [100.0] * 5,
            {"repeats": [(1000, 1000, 1000, 1100, 1200, 1200, 1200)] * 3},
            "last repeats of a case were 20% slower",
        ),
    ],
)
def test_every_way_to_be_unsteady_is_one_plain_sentence(tmp_path, times, changes, words):
    found = verdict(tmp_path, times, **changes)
    assert not found["steady"]
    assert any(words in problem for problem in found["problems"]), found["problems"]


def test_a_card_at_its_power_cap_is_steady_while_its_times_are(tmp_path):
    # How an H100 or H200 works under GEMMs, in training too: 1980 MHz at the start, 1755 at the cap.
    clocks, cap = [1980, 1830, 1770, 1755, 1755], [0, 0x4, 0x4, 0x4, 0x4]
    found = verdict(tmp_path / "even", [100.0, 101.0, 100.0, 100.5, 100.2], clock_mhz=clocks, slowed_by=cap)
    assert (found["steady"], found["problems"]) == (True, [])
    assert (found["clock_fall"], found["held_by"]) == (pytest.approx(0.114, abs=1e-3), {"the power cap": 4})
    assert not verdict(tmp_path / "not", [100.0, 100.0, 110.0, 130.0, 131.0], clock_mhz=clocks)["steady"]


def test_what_nobody_tells_is_no_problem(tmp_path):
    found = verdict(tmp_path, [100.0, 100.0], {"foreign_cpu_share": None})
    assert found["steady"]
    assert found["foreign_cpu_share"] is None
    assert (found["clock_fall"], found["ends"], found["order_effect"]) == (None, None, None)
    with Journal(tmp_path / "empty") as journal:
        assert steadiness(journal, PARAMS)["steady"]


def test_the_gpus_host_may_be_busy_where_a_cpu_may_not(tmp_path):
    assert not verdict(tmp_path / "cpu", [100.0] * 3, {"foreign_cpu_share": 0.3})["steady"]
    assert verdict(tmp_path / "cuda", [100.0] * 3, {"foreign_cpu_share": 0.3, "kind": "cuda"})["steady"]


def test_sessions_weigh_by_their_length(tmp_path):
    with Journal(tmp_path) as journal:
        journal.add(session=SESSION | {"wall_s": 30.0, "busy_s": 30.0, "foreign_cpu_share": 0.1})
        journal.add(session=SESSION | {"wall_s": 10.0, "busy_s": 6.0, "foreign_cpu_share": 0.5})
        found = steadiness(journal, PARAMS)
    assert found["busy_share"] == pytest.approx(0.9)
    assert found["foreign_cpu_share"] == pytest.approx(0.2)


def test_a_device_that_slows_down_shows_at_the_ends(tmp_path):
    found = verdict(tmp_path, 100 * np.linspace(1.0, 1.3, 40)[::4])  # FC-27
    assert found["ends"] == pytest.approx(0.27, abs=0.02)
    assert found["drift"] > 0.1


def test_a_slowdown_in_the_middle_of_a_real_sweep_is_flagged(backend, tmp_path, monkeypatch):
    # FC-27: the same case on the real clock; for the middle third every run takes ten times as long.
    timed = backend.timed

    def slowed(run):
        return timed(lambda: [run() for _ in range(10)][-1])

    with backend.pinned(), Journal(tmp_path) as journal, watched(backend, journal):
        for i in range(9):
            monkeypatch.setattr(backend, "timed", slowed if 3 <= i < 6 else timed)
            time_anchor(ANCHOR, backend, PARAMS, journal)
        monkeypatch.setattr(backend, "timed", timed)
    with Journal(tmp_path) as journal:
        assert len(journal.anchors) == 9
        found = steadiness(journal, PARAMS)
    assert found["drift"] > PARAMS.max_drift
    assert any("left its median" in problem for problem in found["problems"])


def test_a_watch_notes_the_session_even_when_it_is_interrupted(backend, tmp_path):
    def interrupted():
        with Journal(tmp_path) as journal, watched(backend, journal):
            time_anchor(ANCHOR, backend, PARAMS, journal)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with Journal(tmp_path) as journal:
        (session,) = journal.sessions
    assert 0 < session["busy_s"] <= session["wall_s"]


def test_a_watch_over_nothing_writes_nothing(backend, tmp_path):
    with Journal(tmp_path) as journal, watched(backend, journal):
        pass
    assert journal.sessions == []
    assert not (tmp_path / JOURNAL_NAME).exists()


def test_a_real_process_that_burns_the_cpu_is_seen():
    # A hog on every core: the machine must show far more foreign work than it does without.
    def share(seconds):
        before, began = cpu_use(), time.perf_counter()
        time.sleep(seconds)
        return foreign_share(before, cpu_use(), time.perf_counter() - began)

    if share(0.3) is None:
        pytest.skip("this kernel tells nothing of CPU use")
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cpu_use().cores)]
    try:
        time.sleep(0.3)
        assert share(1.5) > 0.5
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def test_own_work_is_not_foreign():
    before, began = CpuUse(2, 101.0, 50.0, 0), 4.0
    assert foreign_share(before, CpuUse(2, 105.0, 54.0, 0), began) == 0
    assert foreign_share(before, CpuUse(2, 107.0, 54.0, 0), began) == pytest.approx(0.25)
    # Counters of different resolution never give a negative share.
    assert foreign_share(before, CpuUse(2, 104.9, 54.0, 0), began) == 0


def test_a_machine_without_counters_is_unknown(tmp_path):
    found = cpu_use(tmp_path)
    assert found.machine_s is None
    assert foreign_share(found, found, 1.0) is None


def test_only_the_usable_cores_of_a_host_count(tmp_path, monkeypatch):
    # A container sees every core of its host; what happens on the others disturbs nobody here.
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {1}, raising=False)
    (tmp_path / "stat").write_text("cpu 9 9 9 9\ncpu0 9000 0 0 5 0 0 0 0 0 0\ncpu1 100 20 30 5 7 1 2 40 0 0\n")
    found = cpu_use(tmp_path)
    ticks = os.sysconf("SC_CLK_TCK")
    assert (found.cores, found.machine_s) == (1, (153 + 40) / ticks)


def test_orders_need_enough_samples():
    assert order_effect([(1e3, 2e3), (1.0, 1.0, 1.0, 9.0, 9.0, 9.0)]) is None
    rising, wild = (1e3, 1e3, 1e3, 1e3, 1.1e3, 1.1e3), (1e3, 1e3, 1e3, 1e3, 9e3, 9e3)
    assert order_effect([rising] * 3 + [wild]) == pytest.approx(0.1)


def test_reasons_that_cost_no_time_are_not_named(tmp_path):
    assert verdict(tmp_path, [100.0] * 2, slowed_by=[0x1, 0x1])["held_by"] == {}  # idle


def test_most_of_a_sweeps_time_is_inside_timed_work(backend, tmp_path):
    # A share of 85% is measured by experiments/04_profiler/repeatability.py; half is what any loaded machine keeps.
    with backend.pinned(), Journal(tmp_path) as journal, watched(backend, journal):
        for tokens in (256, 512, 1024):
            journal.add(rows=time_case(Case("dense", "", {"tokens": tokens, "n": 512, "k": 512}), backend, PARAMS))
    (session,) = journal.sessions
    assert 0.5 < session["busy_s"] / session["wall_s"] <= 1

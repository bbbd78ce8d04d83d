import time
import weakref

import pytest

from profiler import ProfileParams, RoutePackError
from profiler.cases.case import Case, experts_case
from profiler.kernels.works import WORKS
from profiler.timer import LAUNCH_BOUND, both_looks, measure_rates, time_case

torch = pytest.importorskip("torch", reason="torch is not installed")
backends = pytest.importorskip("profiler.device.backend")

PARAMS = ProfileParams(dtype="float32", threads=1, repeats=3, min_repeats=2, max_case_seconds=0.2)
CASE = Case("dense", "", {"tokens": 4, "n": 8, "k": 8})


@pytest.fixture(scope="module")
def backend():
    return backends.TorchBackend("cpu", PARAMS)


def test_a_case_gives_a_row_each_way_with_raw_repeats_and_the_kernel(backend):
    forward, backward = time_case(CASE, backend, PARAMS)
    assert (forward["direction"], backward["direction"]) == ("forward", "backward")
    for row in (forward, backward):
        assert row["status"] == "ok"
        assert row["time_us"] > 0
        assert len(row["repeats_us"]) >= 2
        assert min(row["repeats_us"]) <= row["time_us"] <= max(row["repeats_us"])
        assert row["kernel"].startswith("torch: ")
        assert "mm" in row["kernel"]
        assert row["case_id"] == CASE.case_id(row["direction"], "float32")


def test_an_empty_rank_takes_a_small_time_that_is_not_zero(backend):
    counts = (0, 0, 0)
    rows = time_case(experts_case("empty", counts, 16, 8, 3), backend, PARAMS)
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert all(row["time_us"] > 0 for row in rows)


def test_repeats_stop_when_the_case_has_used_its_time(backend, monkeypatch):
    monkeypatch.setattr(backend, "flush", lambda: time.sleep(0.03))
    rows = time_case(CASE, backend, ProfileParams(repeats=50, min_repeats=2, max_case_seconds=0.2))
    assert all(2 <= len(row["repeats_us"]) < 50 for row in rows)


def test_one_result_of_a_case_is_alive_at_a_time(backend, monkeypatch):
    alive, most = weakref.WeakSet(), []

    class Tracked(torch.Tensor):
        pass

    def work(case, backend):
        def run():
            most.append(len(alive))
            made = torch.ones(4).as_subclass(Tracked)
            alive.add(made)
            return made

        return run, ()

    monkeypatch.setitem(WORKS, "dense", work)
    assert time_case(CASE, backend, PARAMS, directions=("forward",))[0]["status"] == "ok"
    assert len(most) > 2
    assert max(most) == 0  # the one before was freed: large cases have room for one


def raising(error):
    def work(case, backend):
        def run():
            raise error

        return run, ()

    return work


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."), "oom"),
        (NotImplementedError("no kernel for this shape"), "unsupported"),
        (ValueError("Expect head dims to agree\nand more"), "unsupported"),
        # What libraries raise: one such case once ended every resume of a sweep.
        (AssertionError("FP8 is not supported"), "failed"),
        (TypeError("forward() got an unexpected keyword argument 'm_splits'"), "failed"),
        (type("CompilationError", (Exception,), {})("at 3:4: no such layout"), "failed"),
    ],
)
def test_what_the_device_cannot_do_is_a_row_that_says_so(backend, monkeypatch, error, status):
    monkeypatch.setitem(WORKS, "dense", raising(error))
    rows = time_case(CASE, backend, PARAMS)
    assert [row["status"] for row in rows] == [status, status]
    assert all("time_us" not in row and "\n" not in row["message"] for row in rows)
    assert [row["direction"] for row in rows] == ["forward", "backward"]


def test_a_failure_on_the_way_back_keeps_the_forward_time(backend, monkeypatch):
    def work(case, backend):
        weight = torch.ones(3, requires_grad=True)
        return lambda: weight.detach() * 2, (weight,)

    monkeypatch.setitem(WORKS, "dense", work)
    forward, backward = time_case(CASE, backend, PARAMS)
    assert (forward["status"], backward["status"]) == ("ok", "unsupported")


def test_results_that_are_not_finite_fail(backend, monkeypatch):
    def work(case, backend):
        weight = torch.full((3,), float("nan"), requires_grad=True)
        return lambda: weight * 2, (weight,)

    monkeypatch.setitem(WORKS, "dense", work)
    backward = time_case(CASE, backend, PARAMS)[1]
    assert (backward["status"], backward["message"]) == ("failed", "The output holds NaN or infinity.")


def test_the_callers_thread_count_comes_back(backend):
    before = torch.get_num_threads()
    with backend.pinned():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_every_run_is_timed_and_counted_as_busy(backend, monkeypatch):
    # Nothing runs beside the clock: what torch was asked to do is what the backend counted.
    calls = 0

    def work(case, backend):
        weight = torch.ones(3, requires_grad=True)

        def run():
            nonlocal calls
            calls += 1
            return weight * 2

        return run, (weight,)

    monkeypatch.setitem(WORKS, "dense", work)
    timed, runs = backend.timed, []
    monkeypatch.setattr(backend, "timed", lambda run: runs.append(run) or timed(run))
    (row,) = time_case(CASE, backend, PARAMS, directions=("forward",))
    assert row["direction"] == "forward"
    assert calls == len(runs) >= 1 + len(row["repeats_us"])


def test_busy_time_is_that_of_flushes_and_runs_alone(backend):
    sleep = time.sleep
    before, began = backend.busy_s, time.perf_counter()
    sleep(0.05)
    assert backend.busy_s == before
    elapsed, kept = backend.timed(lambda: sleep(0.05) or "result")
    assert kept == "result"
    assert elapsed >= 5e4
    # Another process may hold the CPU between two looks at the clock.
    assert 0.99 * elapsed / 1e6 <= backend.busy_s - before <= time.perf_counter() - began - 0.05


def test_a_long_case_is_named_by_its_first_warm_up_run(backend, monkeypatch):
    # FC-31, R-12: the kernel path is in the row even where the case affords only its least repeats.
    (row,) = time_case(CASE, backend, ProfileParams(repeats=1, min_repeats=1, max_case_seconds=1e-6), ("forward",))
    assert "mm" in row["kernel"]
    assert len(row["repeats_us"]) == 1


def test_tensors_are_seeded_normal_numbers_that_differ(backend):
    first, second = (backends.TorchBackend("cpu", PARAMS).tensor(64, 64) for _ in range(2))
    assert torch.equal(first, second)
    made = backend.tensor(2000, 2000, scale=0.5)
    assert made.requires_grad
    assert abs(float(made.detach().std()) - 0.5) < 0.01
    # More numbers than the pool holds: rows never repeat, and two tensors are not the same.
    assert not torch.equal(made[0], made[1])
    assert not torch.equal(backend.tensor(8), backend.tensor(8))


def test_pythons_collector_is_off_while_a_case_runs_and_back_after(backend, monkeypatch):
    import gc

    seen = []

    def work(case, backend):
        seen.append(gc.isenabled())
        raise ValueError("no such shape")

    monkeypatch.setitem(WORKS, "dense", work)
    time_case(CASE, backend, PARAMS)
    assert seen == [False]
    assert gc.isenabled()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_what_ends_the_process_ends_the_case(backend, monkeypatch, error):
    monkeypatch.setitem(WORKS, "dense", raising(error))
    with pytest.raises(type(error)):
        time_case(CASE, backend, PARAMS)


def test_launches_that_no_flush_covers_are_flagged(backend, monkeypatch):
    monkeypatch.setattr(backend, "launch_bound", True)
    assert [row["flag"] for row in time_case(CASE, backend, PARAMS)] == [LAUNCH_BOUND] * 2
    monkeypatch.setattr(backend, "launch_bound", False)
    assert all("flag" not in row for row in time_case(CASE, backend, PARAMS))


def test_the_cover_knows_where_it_ends(backend, monkeypatch):
    monkeypatch.setattr(backend, "_write_s", 1e-4)
    for launch_s, writes, bound in ((1e-6, 1, False), (2e-4, 3, False), (5e-4, 8, False), (6e-4, 8, True)):
        backend._cover(launch_s)
        assert (backend._writes, backend.launch_bound) == (writes, bound)
    monkeypatch.setattr(backend, "_writes", 1)
    monkeypatch.setattr(backend, "launch_bound", False)


def test_a_device_that_cannot_run_the_first_look_says_so_in_one_line(backend, monkeypatch):
    monkeypatch.setitem(WORKS, "attention", raising(RuntimeError("FlashAttention only supports fp16 and bf16\nmore")))
    with pytest.raises(RoutePackError, match=r"cannot run attention in float32 \(RuntimeError: FlashAttention.*dtype"):
        measure_rates(backend)


def test_gpus_pool_what_cpus_choose():
    first = {"case_id": "a", "status": "ok", "time_us": 10.0, "spread_us": 0.0, "repeats_us": [10.0, 10.0, 10.0]}
    second = first | {"time_us": 8.0, "repeats_us": [8.0, 8.0]}
    assert both_looks(first, second, "cpu")["time_us"] == 8.0
    pooled = both_looks(first, second, "cuda")
    assert (pooled["repeats_us"], pooled["time_us"], pooled["spread_us"]) == ([10.0, 10.0, 10.0, 8.0, 8.0], 10.0, 2.0)
    assert both_looks(second, first, "cuda")["time_us"] == 10.0
    failed = {"case_id": "a", "status": "oom"}
    for kind in ("cpu", "cuda"):
        assert both_looks(first, failed, kind) == both_looks(failed, first, kind) == first

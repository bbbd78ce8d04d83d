import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from profiler import Measurements, RoutePackError
from profiler.journal import journal_name
from profiler.ranks.ranks import Ranks
from profiler.ranks.slow_ranks import relative_times

pytest.importorskip("torch", reason="torch is not installed")

ROOT = Path(__file__).parents[3]
MODEL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 64,
}  # fmt: skip
CONFIG = """
schema_version: 1
model: model.json
topology: {data_parallel_size: 2, expert_model_parallel_size: 2}
max_tokens_per_microbatch: 256
profile: {max_points: 6, repeats: 4, min_repeats: 1, max_case_seconds: 1.0, threads: 1, dtype: float32, max_drift: 9.0}
"""
PLANTED = """
import os, sys, time
from profiler.kernels import works
from profiler.ranks import ranks
from routepack_tune.cli import main

if os.environ["RANK"] == "1":
    def heavier(work):
        def made(case, backend):
            run, inputs = work(case, backend)[:2]
            return (lambda: sum(run() for _ in range(6))), inputs
        return made

    for op, work in works.WORKS.items():
        works.WORKS[op] = heavier(work)

    barrier, calls = ranks.Ranks.barrier, [0]

    def late(self):
        barrier(self)
        calls[0] += 1
        time.sleep(0.005 if calls[0] % 2 else 0)

    ranks.Ranks.barrier = late
sys.exit(main())
"""

BROKEN = """
import datetime, os, sys
import torch.distributed as dist
from profiler.ranks import ranks
from routepack_tune.cli import main

ranks.EXCHANGE_PATIENCE = datetime.timedelta(seconds=5)
if os.environ["RANK"] == "1":
    exchange, calls = dist.all_to_all_single, [0]

    def breaks(*args, **kwargs):
        calls[0] += 1
        if calls[0] > 12 and sys.argv[1] == "before":
            raise ValueError("planted")
        exchange(*args, **kwargs)
        if calls[0] > 12:
            raise ValueError("planted")

    dist.all_to_all_single = breaks
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "planted.py").write_text(PLANTED)
    (folder / "broken.py").write_text(BROKEN)
    return folder


def arguments(job, out):
    return ["profile", "--config", str(job / "config.yaml"), "--out", str(out), "--device", "cpu"]


def environment(**more):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def start_torchrun(job, out, program=("-m", "routepack_tune"), ranks=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.Popen(
        [*command, *program, *arguments(job, out)], cwd=ROOT, env=environment(), start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def start_two_nodes(job, out, program=("-m", "routepack_tune")):
    """Start one rank on each of two pretended nodes, without a launcher that would clean up after them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    return [
        subprocess.Popen(
            [sys.executable, *program, *arguments(job, out)], cwd=ROOT, text=True,
            env=environment(RANK=str(rank), MASTER_PORT=port, **common), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip


def wait_for_rows(out, rows):
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        path = out / journal_name(0)
        if path.exists() and path.read_text().count('{"rows"') >= rows:
            return
        time.sleep(0.05)
    raise AssertionError("no rows were written")


@pytest.fixture(scope="module")
def planted(job):
    """A finished profile of two ranks, of which rank 1 works six times as much and comes late to every second round."""
    out = job / "planted"
    process = start_torchrun(job, out, (str(job / "planted.py"),))
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    return out, output, Measurements.load(out)


def test_one_command_times_what_a_rank_computes_and_what_ranks_exchange(planted):
    out, _, measurements = planted
    assert {"attention", "dense", "experts", "alltoall", "transfer"} <= set(measurements.rows["op"])
    exchanges = measurements.select(op="alltoall")
    assert set(exchanges.rows["direction"]) == {"forward", "backward"}
    assert set(exchanges.rows["ranks"]) == {2}
    assert set(exchanges.rows["inter_bytes"]) == {0}
    assert {"empty", "even", "skewed", "hot", "sparse"} >= set(exchanges.rows["pattern"]) > {"empty", "even"}
    assert (exchanges.rows["bytes"] == 0).sum() == 2
    assert (out / journal_name(1)).exists()
    assert measurements.meta["fingerprint"]["ranks_per_node"] == 2
    assert len(measurements.meta["provenance"]["files"]) == 2


def test_the_slow_rank_is_found_and_named(planted):
    _, output, measurements = planted
    first, second = measurements.meta["ranks"]
    assert second["speed"] > 1.5 > first["speed"] == 1.0
    assert "Rank 1 (host " in output
    assert "slower than the others" in output
    # Its times are its own business: the measurements hold each compute case once, as rank 0 timed it.
    compute = measurements.select(op="attention").rows
    assert set(compute["rank"]) == {0}
    assert len(set(compute["case_id"])) == len(compute["case_id"])


def test_late_rounds_are_recorded_and_dropped(planted):
    # FC-29: a rank that sleeps before the exchange must not look like a slow wire.
    out, _, measurements = planted
    small = measurements.select(op="alltoall").rows
    dropped = np.char.find(small["message"], "rounds dropped: rank 1 began up to") >= 0
    assert dropped.any()
    good = small["status"] == "ok"
    assert good.any()
    # The 5 ms that rank 1 slept are in no kept round: neither in its skew nor in the time that others waited.
    assert (small["skew_us"][good] < 5000).all()
    assert np.median(small["time_us"][good]) < 5000
    own = [json.loads(line) for line in (out / journal_name(1)).read_text().splitlines()]
    rows = [row for line in own for row in line.get("rows", []) if row["status"] == "ok"]
    assert {row["rank"] for row in rows} == {1}


def test_a_rank_of_other_software_is_refused_by_name(planted, job):
    out = planted[0]
    path = out / journal_name(1)
    before = path.read_text()
    lines = [json.loads(line) for line in before.splitlines()]
    for line in lines:
        if "header" in line:
            line["header"]["fingerprint"]["software"]["torch"] = "1.0"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = (out / "measurements.parquet").read_bytes()
    process = start_torchrun(job, out)
    output = process.communicate(timeout=120)[0]
    path.write_text(before)
    assert process.returncode != 0
    assert "Rank 1 stopped: " in output
    assert "expected 1.0" in output
    assert (out / "measurements.parquet").read_bytes() == kept


def test_a_job_killed_whole_continues(job):
    # FC-33, on several ranks.
    out = job / "killed"
    process = start_torchrun(job, out)
    wait_for_rows(out, 4)
    # torchrun puts its workers into sessions of their own: end each by its id.
    owners = [int((out / name).read_text()) for name in (".lock", ".lock-rank00001")]
    process.send_signal(signal.SIGKILL)
    for owner in owners:
        os.kill(owner, signal.SIGKILL)
    process.communicate(timeout=30)
    assert not (out / "measurements.parquet").exists()
    finished = [line for line in (out / journal_name(0)).read_text().splitlines(keepends=True) if line.endswith("\n")]
    again = start_torchrun(job, out)
    output = again.communicate(timeout=120)[0]
    assert again.returncode == 0, output
    assert (out / journal_name(0)).read_text().startswith("".join(finished))
    assert len(Measurements.load(out).select(op="alltoall")) > 8


def test_a_killed_rank_stops_the_others_and_two_nodes_continue(job):
    out = job / "nodes"
    first, second = start_two_nodes(job, out)
    wait_for_rows(out, 4)
    second.kill()
    output = first.communicate(timeout=120)[0]
    second.communicate(timeout=30)
    assert first.returncode != 0
    assert "Rank 0 lost another rank" in output
    assert not list(out.glob("*.parquet")) + list(out.glob("*.tmp"))
    for process in (again := start_two_nodes(job, out)):
        output = process.communicate(timeout=120)[0]
        assert process.returncode == 0, output
    assert len(again) == 2
    exchanges = Measurements.load(out).select(op="alltoall").rows
    even = (exchanges["pattern"] == "even") & (exchanges["bytes"] > 1024)
    assert (2 * exchanges["inter_bytes"][even] == exchanges["bytes"][even]).all()
    moved = Measurements.load(out).select(op="transfer").rows
    assert (moved["inter_bytes"] == moved["bytes"]).all()


@pytest.mark.parametrize(
    ("moment", "told"),
    [("before", "An exchange broke off on rank 0: "), ("after", "Rank 1 stopped: An exchange broke")],
)
def test_a_rank_that_fails_inside_an_exchange_tells_the_others(job, moment, told):
    # One that never entered leaves the other inside, as long as the group's timeout; then all stop.
    processes = start_two_nodes(job, job / moment, (str(job / "broken.py"), moment))
    outputs = [process.communicate(timeout=90)[0] for process in processes]
    assert all(process.returncode for process in processes)
    assert told in outputs[0]
    assert "Error: An exchange broke off on rank 1: planted." in outputs[1]
    assert "Traceback" not in "".join(outputs)


def test_a_group_of_one_needs_no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with Ranks() as ranks:
        assert (ranks.rank, ranks.size, ranks.per_node, ranks.clock_offsets()) == (0, 1, 1, [0.0])
        assert ranks.gather({"a": 1}) == [{"a": 1}]
        with pytest.raises(ValueError, match="own"), ranks.together():
            raise ValueError("own")


@pytest.mark.parametrize(("name", "text", "message"), [
    ("RANK", "one", "RANK='one', expected a whole number"), ("RANK", "0", "not LOCAL_RANK, LOCAL_WORLD_SIZE"),
])  # fmt: skip
def test_a_half_set_environment_is_a_clear_error(monkeypatch, name, text, message):
    for known in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(known, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(name, text)
    with pytest.raises(RoutePackError, match=message):
        Ranks("cpu")


def test_relative_times_compare_what_all_ranks_timed():
    times = [{"a": 10.0, "b": 100.0, "only": 1.0}, {"a": 10.0, "b": 102.0}, {"a": 13.0, "b": 135.0}]
    assert relative_times(times) == pytest.approx([(1 + 100 / 102) / 2, 1.0, (1.3 + 135 / 102) / 2])
    assert relative_times([{}, {"a": 1.0}]) == [1.0, 1.0]

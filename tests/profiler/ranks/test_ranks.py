import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from patience import PATIENCE_S
from rank_jobs import MODEL, finish, start_ranks, wait_for_rows

from profiler import Measurements, RoutePackError
from profiler.journal import JOURNAL_NAME
from profiler.ranks.ranks import RANK_VARIABLES, Ranks, relative_times

pytest.importorskip("torch", reason="torch is not installed")

ROOT = Path(__file__).parents[3]
CONFIG = """
schema_version: 1
model: model.json
topology: {data_parallel_size: 2, expert_model_parallel_size: 2}
max_tokens_per_microbatch: 256
profile: {max_points: 6, repeats: 4, min_repeats: 1, max_case_seconds: 30.0, threads: 1, dtype: float32, max_drift: 9.0}
"""
PLANTED = """
import os, sys, time
from types import SimpleNamespace
from profiler.device import backend
from profiler.ranks import exchanges, ranks
from routepack_tune.cli import main

backend.FLUSH_BYTES["cpu"] = 1 << 20
exchanges.SKEW_US["cpu"] = 60e6  # seconds apart is what a loaded machine does
if os.environ["RANK"] == "1":
    def heavier(*asked):
        return [row | {"time_us": 60 * row["time_us"]} for row in time_case(*asked)]

    time_case, ranks.time_case = ranks.time_case, heavier
    calls = [0]

    def late():
        # Read twice a round, when it begins and when it ended: every third round begins an hour late.
        calls[0] += 1
        return time.perf_counter() + (3600 if calls[0] % 3 == 0 else 0)

    exchanges.time = SimpleNamespace(perf_counter=late)
sys.exit(main())
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A finished profile under torchrun, whose rank 1 says sixty times its times and comes late every third time."""
    job = tmp_path_factory.mktemp("job")
    (job / "model.json").write_text(json.dumps(MODEL))
    (job / "config.yaml").write_text(CONFIG)
    (job / "planted.py").write_text(PLANTED)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    verb = ["profile", "--config", str(job / "config.yaml"), "--out", str(job / "planted"), "--device", "cpu"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*launcher, str(job / "planted.py"), *verb], cwd=ROOT, text=True, timeout=PATIENCE_S, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return job / "planted", done.stdout, Measurements.load(job / "planted")


def test_one_command_times_what_a_rank_computes_and_what_ranks_exchange(planted):
    out, _, measurements = planted
    assert {"attention", "dense", "experts", "alltoall", "transfer"} <= set(measurements.rows["op"])
    exchanges = measurements.select(op="alltoall")
    assert set(exchanges.rows["direction"]) == {"forward", "backward"}
    assert set(exchanges.rows["ranks"]) == {2}
    assert set(exchanges.rows["inter_bytes"]) == {0}
    assert {"empty", "even", "skewed", "hot", "sparse"} >= set(exchanges.rows["pattern"]) > {"empty", "even"}
    assert (exchanges.rows["bytes"] == 0).sum() == 2
    assert measurements.meta["fingerprint"]["ranks_per_node"] == 2
    assert measurements.meta["provenance"]["files"].keys() == {JOURNAL_NAME}
    assert {path.name for path in out.iterdir()} >= {JOURNAL_NAME, "measurements.parquet"}


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
    small = planted[2].select(op="alltoall").rows
    dropped = np.char.find(small["message"], "rounds dropped: rank 1 began up to") >= 0
    assert dropped.any()
    good = small["status"] == "ok"
    assert good.any()
    assert (small["skew_us"][good] < 60e6).all()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Folder and output of rank 0, on a node of its own, after rank 1 was killed while rank 0 timed alone."""
    out = tmp_path_factory.mktemp("nodes") / "out"
    first, second = start_ranks(out)
    wait_for_rows(out, 4)
    second.kill()
    status, output = finish(first)
    assert status == 1
    return out, output


def copied(folder, name):
    return Path(shutil.copytree(folder, folder.with_name(name)))


def test_a_killed_rank_stops_the_others(stopped):
    out, output = stopped
    assert "Error: Rank 0 lost another rank" in output
    assert not list(out.glob("*.parquet")) + list(out.glob("*.tmp"))


def test_a_job_killed_whole_continues_on_two_nodes(stopped):
    # FC-33, on several ranks.
    out = copied(stopped[0], "killed")
    before = (out / JOURNAL_NAME).read_text()
    processes = start_ranks(out)
    wait_for_rows(out, before.count('{"rows"') + 4)
    for process in processes:
        process.kill()
        process.join()
    assert not (out / "measurements.parquet").exists()
    finished = [line for line in (out / JOURNAL_NAME).read_text().splitlines(keepends=True) if line.endswith("\n")]
    assert finished[: before.count("\n")] == before.splitlines(keepends=True)
    for status, output in map(finish, start_ranks(out)):
        assert status == 0, output
    assert (out / JOURNAL_NAME).read_text().startswith("".join(finished))
    exchanges = Measurements.load(out).select(op="alltoall").rows
    assert len(exchanges["bytes"]) > 8
    even = (exchanges["pattern"] == "even") & (exchanges["bytes"] > 1024)
    assert (2 * exchanges["inter_bytes"][even] == exchanges["bytes"][even]).all()
    moved = Measurements.load(out).select(op="transfer").rows
    assert (moved["inter_bytes"] == moved["bytes"]).all()


def test_a_rank_of_other_software_is_refused_by_name(stopped):
    out = copied(stopped[0], "software")
    lines = [json.loads(line) for line in (out / JOURNAL_NAME).read_text().splitlines()]
    for line in lines:
        if "header" in line:
            line["header"]["fingerprints"][1]["software"]["torch"] = "1.0"
    (out / JOURNAL_NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = (out / JOURNAL_NAME).read_bytes()
    first, second = map(finish, start_ranks(out))
    assert (first[0], second[0]) == (1, 1)
    assert "rank 1: torch is " in first[1]
    assert "expected 1.0" in first[1]
    assert "Error: Rank 0 stopped: " in second[1]
    assert (out / JOURNAL_NAME).read_bytes() == kept


@pytest.mark.parametrize(
    ("moment", "told"),
    [("before", "An exchange broke off on rank 0: "), ("after", "Rank 1 stopped: An exchange broke")],
)
def test_a_rank_that_fails_inside_an_exchange_tells_the_others(stopped, moment, told):
    # One that never entered leaves the other inside, as long as the group's timeout; then all stop.
    (first, output), (second, own) = map(finish, start_ranks(copied(stopped[0], moment), moment))
    assert (first, second) == (1, 1)
    assert told in output
    assert "Error: An exchange broke off on rank 1: planted." in own
    assert "Traceback" not in output + own


def test_a_group_of_one_needs_no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with Ranks() as ranks:
        assert (ranks.rank, ranks.size, ranks.per_node, ranks.clock_offsets()) == (0, 1, 1, [0.0])
        assert ranks.gather({"a": 1}) == [{"a": 1}]
        with pytest.raises(ValueError, match="own"), ranks.together():
            raise ValueError("own")


@pytest.mark.parametrize(("given", "message"), [
    (dict.fromkeys(RANK_VARIABLES, "one"), "Expected whole numbers in the environment, got .*'RANK': 'one'"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "not LOCAL_RANK, LOCAL_WORLD_SIZE"),
])  # fmt: skip
def test_a_half_set_environment_is_a_clear_error(monkeypatch, given, message):
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(RoutePackError, match=message):
        Ranks("cpu")


def test_relative_times_compare_what_all_ranks_timed():
    times = [{"a": 10.0, "b": 100.0, "only": 1.0}, {"a": 10.0, "b": 102.0}, {"a": 13.0, "b": 135.0}]
    assert relative_times(times) == pytest.approx([(1 + 100 / 102) / 2, 1.0, (1.3 + 135 / 102) / 2])
    assert relative_times([{}, {"a": 1.0}]) == [1.0, 1.0]

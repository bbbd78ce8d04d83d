"""The verb profile with rounds: a real sweep of a tiny model on this CPU, the user's own steps among the cases."""

from __future__ import annotations

import numpy as np
import pytest

from profiler import RoutePackError
from routepack_tune import api
from routepack_tune.cli import main
from routepack_tune.steps.seen import MOST, seen_of_steps
from routepack_tune.summaries import measurements_summary

pytest.importorskip("torch", reason="torch is not installed")
PROFILE = """
profile: {max_points: 6, repeats: 2, min_repeats: 1, max_case_seconds: 2.0, threads: 1, dtype: float32, max_drift: 1e9}
"""


def test_seen_cells_and_loads_are_those_of_the_steps(job):
    settings = job.settings()
    seen = seen_of_steps([job.steps], settings)
    assert 0 < len(seen.cells) <= MOST
    assert 0 < len(seen.rank_rows) <= MOST
    lengths = set(np.concatenate([job.arrays(step)["lengths"] for step in range(4)]).tolist())
    assert {length for cell in seen.cells for length in cell} <= lengths
    assert all(sum(cell) <= 256 for cell in seen.cells)
    # Both slots form one block: its rows over both ranks are at most top_k rows a token of two full cells.
    assert all(len(rows) == 4 and sum(rows) <= 2 * 2 * 256 for rows in seen.rank_rows)
    assert seen == seen_of_steps([job.steps], settings)
    assert seen_of_steps((), settings) is None


@pytest.mark.filterwarnings("ignore:The device was not steady")
def test_profile_times_the_users_steps_and_says_what_the_rounds_gained(job, capsys):
    from profiler import Measurements

    job.config.write_text(job.config.read_text() + PROFILE)
    out = job.folder / "measurements"
    arguments = ["profile", "--config", job.config, "--out", out, "--device", "cpu", "--steps", job.steps,
                 "--target-error", "0.001", "--max-minutes", "0"]  # fmt: skip
    assert main([str(argument) for argument in arguments]) == 0
    said = capsys.readouterr().out
    found = Measurements.load(out)
    assert found.meta["params"]["target_error"] == 0.001
    assert {"attention", "experts"} <= set(found.select(pattern="seen").rows["op"].tolist())
    assert "stopped by max_points" in said
    assert "min" in said
    for problem in found.meta["steadiness"]["problems"]:
        assert problem in said


def test_a_summary_names_what_is_above_the_target_and_what_to_do():
    from profiler import Measurements

    rounds = [
        {"cases": 40, "errors_pct": {"attention": 9.0, "dense": 4.0}, "minutes": 1.0, "stopped_by": ""},
        {"cases": 10, "errors_pct": {"attention": 6.5, "dense": 4.0}, "minutes": 0.5, "stopped_by": "max_minutes"},
    ]
    device = {"origin": "measured", "name": "x", "arch": "y"}
    meta = {"fingerprint": device, "rounds": rounds, "params": {"target_error": 5.0},
            "steadiness": {"problems": ["the anchor drifted by 30%"]}}  # fmt: skip
    said = measurements_summary(Measurements.from_rows([], meta), "out")
    assert "50 cases in 2 rounds, 1.5 min; stopped by max_minutes" in said
    assert "attention: held-out median error 9.0 -> 6.5%" in said
    assert "above the target of 5%: attention. Go on with more --max-minutes" in said
    assert "NOT STEADY: the anchor drifted by 30%" in said
    assert said.splitlines()[-1].startswith("  NOT STEADY")


def test_a_summary_of_published_tables_says_software_precision_and_what_is_left_out():
    from profiler import Measurements

    device = {"origin": "published", "name": "x", "arch": "y", "software": {"tables": "t-1.2", "exchange": "nccl-2.9"}}
    meta = {"fingerprint": device, "backward": "absent", "dtype": "float16",
            "provenance": {"tables": "t-1.2", "passed_over": ["v-0.9"]},
            "skipped": {"moe_perf": {"fp8_block": 3, "w4a16_mxfp4": 2}}}  # fmt: skip
    rows = [{"case_id": "a", "op": "experts", "status": "ok", "flag": "slower than more tokens"}]
    lines = measurements_summary(Measurements.from_rows(rows, meta), "out").splitlines()
    assert "  float16 rows of t-1.2, exchanges of nccl-2.9; also here: v-0.9 (--tables)" in lines
    assert "  other number types are left out: moe 5 rows (fp8_block 3, w4a16_mxfp4 2)" in lines
    assert "  1 rows contradict their neighbours or the device's peak: flagged, no fit takes them" in lines
    assert lines[-1] == "  next: routepack fit"


def test_tables_are_chosen_among_published_ones_only(job):
    with pytest.raises(RoutePackError, match="--tables chooses among published tables"):
        api.profile(job.config, job.folder / "measurements", tables="trtllm")

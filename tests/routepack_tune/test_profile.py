"""The verb profile with rounds: a real sweep of a tiny model on this CPU, the user's own steps among the cases."""

from __future__ import annotations

import numpy as np
import pytest

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

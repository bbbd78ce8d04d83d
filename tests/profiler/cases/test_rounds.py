"""Rounds of a real sweep on this CPU: a scripted chooser says what to time, the clock and the journal do the rest."""

import json

import pytest

from profiler import Measurements, ModelSpec, Observer, ProfileParams, Topology, profile_device
from profiler.cases.design import Round
from profiler.journal import JOURNAL_NAME
from profiler.sweep import progress_message

backend = pytest.importorskip("profiler.device.backend")

SPEC = ModelSpec.from_config({
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 64,
}, "small")  # fmt: skip
PARAMS = {"repeats": 2, "min_repeats": 1, "max_case_seconds": 2.0, "threads": 1, "dtype": "float32", "max_drift": 1e9}


class Script:
    """Ask for ``size`` more cases of the pool until ``rounds`` are full; errors halve every round."""

    def __init__(self, rounds=3, size=4, reason="target_error"):
        self.rounds, self.size, self.reason = rounds, size, reason

    def __call__(self, pool, timed, rows, params):
        done, known = {id(case) for case in timed}, list(rows)
        left = [case for case in pool[: self.rounds * self.size] if id(case) not in done]
        full = len(timed) // self.size
        errors = {"attention": 16.0 / 2**full} if known else {}
        missing = self.size - len(timed) % self.size
        return Round(tuple(left[:missing]), errors, "" if left else self.reason)


class Watcher(Observer):
    def __init__(self):
        self.bars, self.messages = [], []

    def start(self, what, total):
        self.bars.append((what, total))

    def advance(self, what, message=""):
        self.messages.append(message)


def profile(out, chooser, observer=None, **params):
    settings = ProfileParams(**{**PARAMS, **params})
    topology = Topology(data_parallel_size=2, expert_model_parallel_size=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONWARNINGS", "ignore")
        return profile_device(SPEC, topology, 256, settings, out, "cpu", observer, chooser)


def lines_of(out, key):
    lines = [json.loads(line) for line in (out / JOURNAL_NAME).read_text().splitlines()]
    return [line[key] for line in lines if key in line]


pytestmark = pytest.mark.filterwarnings("ignore:The device was not steady")


@pytest.fixture(scope="module", autouse=True)
def small_flushes():
    """What these tests watch does not depend on caches: most of a tiny sweep's time would go into displacing them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(backend.FLUSH_BYTES, "cpu", 1 << 20)
        yield


def test_rounds_go_on_until_the_chooser_has_enough_and_say_what_they_gained(tmp_path):
    watcher = Watcher()
    measurements = profile(tmp_path, Script(), watcher)
    rounds = measurements.meta["rounds"]
    assert [one["cases"] for one in rounds] == [4, 4, 4]
    assert [one["errors_pct"]["attention"] for one in rounds] == [8.0, 4.0, 2.0]
    assert [one["stopped_by"] for one in rounds] == ["", "", "target_error"]
    assert [bar for bar in watcher.bars if "again" not in bar[0]] == [
        ("profile", 4), ("profile, round 2", 4), ("profile, round 3", 4)
    ]  # fmt: skip
    assert any("attention 4.0%" in message and "left" in message for message in watcher.messages)
    assert Measurements.load(tmp_path).meta["rounds"] == json.loads(json.dumps(rounds))


def test_a_finished_sweep_times_and_writes_nothing_more(tmp_path):
    profile(tmp_path, Script(reason="max_points"))
    before = lines_of(tmp_path, "rows"), lines_of(tmp_path, "round")
    assert before[1][-1]["stopped_by"] == "max_points"
    watcher = Watcher()
    profile(tmp_path, Script(reason="max_points"), watcher)
    after = lines_of(tmp_path, "rows"), lines_of(tmp_path, "round")
    assert after == before
    assert watcher.bars[0] == ("profile, round 4", 12)
    assert watcher.messages[:12] == ["done before"] * 12


def test_a_killed_sweep_goes_on_with_the_same_cases(tmp_path):
    class Kill(Observer):
        left = 6

        def advance(self, what, message=""):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

    whole = profile(tmp_path / "whole", Script())
    with pytest.raises(KeyboardInterrupt):
        profile(tmp_path / "killed", Script(), Kill())
    done = lines_of(tmp_path / "killed", "rows")
    resumed = profile(tmp_path / "killed", Script())
    assert lines_of(tmp_path / "killed", "rows")[: len(done)] == done
    assert set(resumed.rows["case_id"]) == set(whole.rows["case_id"])


def test_used_up_minutes_end_a_sweep_and_more_minutes_continue_it(tmp_path):
    stopped = profile(tmp_path, Script(), max_minutes=1e-9)
    assert stopped.meta["rounds"][-1]["stopped_by"] == "max_minutes"
    assert len(stopped) == 0
    # All runs of a folder share the minutes.
    assert len(profile(tmp_path, Script(), max_minutes=1e-9)) == 0
    assert len(profile(tmp_path, Script(), max_minutes=0)) == 24


def test_a_progress_line_says_errors_minutes_and_the_case():
    assert progress_message({"experts": 6.0, "attention": 4.06}, 3.2, "dense 8: 1.00 ms") == (
        "attention 4.1%, experts 6.0%; about 3 min left; dense 8: 1.00 ms"
    )
    assert progress_message({}, 0.4, "dense 8: oom") == "less than a minute left; dense 8: oom"

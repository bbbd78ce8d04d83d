"""Journals of a study with one line changed: refused by line, or Optuna replays what is there."""

import json

import pytest

from profiler import RoutePackError
from search.tuning.journal_file import check_journal

WORKER = {"worker_id": "w"}
KNOB = json.dumps({"name": "IntDistribution", "attributes": {"log": False, "step": 1, "low": 1, "high": 4}})
SCORE = dict.fromkeys(
    ("step_time_s", "move_s", "plan_s", "default_s", "lower_bound_s", "reference_step_s", "reference_plan_s"), 1.0
)
WHEN = "2026-01-02T03:04:05.000006+00:00"
LINES = [
    {"op_code": 0, "study_name": "s", "directions": [1]},
    {"op_code": 2, "study_id": 0, "user_attr": {"signature": {"seed": 0}}},
    {"op_code": 4, "study_id": 0, "datetime_start": None, "state": 4, "system_attrs": {"fixed_params": {"starts": 2}}},
    {"op_code": 6, "trial_id": 0, "state": 0, "values": None, "datetime_start": WHEN},
    {"op_code": 5, "trial_id": 0, "param_name": "starts", "param_value_internal": 2.0, "distribution": KNOB},
    {"op_code": 8, "trial_id": 0, "user_attr": {"worker": 0}},
    {"op_code": 7, "trial_id": 0, "step": 0, "intermediate_value": 1.0},
    {"op_code": 8, "trial_id": 0, "user_attr": {"scores": [{"name": "a", "seed": 1, **SCORE}]}},
    {"op_code": 6, "trial_id": 0, "state": 1, "values": [1.0], "datetime_complete": WHEN},
]


def write(path, lines):
    path.write_text("".join(json.dumps(line | WORKER) + "\n" for line in lines))
    return path


def test_what_optuna_writes_is_replayed(tmp_path):
    import optuna

    path = write(tmp_path / "study.journal", LINES)
    with open(path, "a") as journal:
        journal.write('{"op_code":')  # cut short: no line yet
    check_journal(path)
    check_journal(tmp_path / "none yet")
    write(path, LINES)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    (trial,) = optuna.load_study(study_name="s", storage=storage).trials
    assert (trial.values, trial.params) == ([1.0], {"starts": 2})


@pytest.mark.parametrize(
    ("line", "change", "words"),
    [
        (0, {"op_code": 99}, "operation 99"), (0, {"op_code": "0"}, "op_code"), (0, {"directions": []}, "directions"),
        (0, {"directions": [3]}, "directions"), (0, {"study_name": 3}, "study_name"),
        (1, {"study_id": 1}, "not exist yet"),
        (1, {"user_attr": {}}, "one attribute"), (1, {"user_attr": {"signature": 3}}, "signature"),
        (2, {"datetime_start": "yesterday"}, "Invalid isoformat"), (2, {"state": 1}, "begins with"),
        (2, {"params": {"starts": 2}}, "begins with"), (2, {"system_attrs": []}, "system_attrs"),
        (3, {"trial_id": 5}, "trial_id 5 does not exist"), (3, {"trial_id": -1}, "trial_id -1"),
        (3, {"state": 9}, "state 9"),
        (3, {"datetime_start": None}, "time"), (3, {"datetime_start": "2026-02-30T00:00:00"}, "day is out of range"),
        (4, {"param_value_internal": 9.0}, "'starts' = 9.0 is no choice"), (4, {"distribution": "{}"}, "attributes"),
        (4, {"distribution": "IntDistribution"}, "distribution"), (4, {"param_value_internal": True}, "param_value"),
        (5, {"user_attr": {"worker": "me"}}, "worker"), (6, {"intermediate_value": "1"}, "intermediate_value"),
        (6, {"intermediate_value": float("nan")}, "NaN"), (7, {"user_attr": {"scores": [{"name": "a"}]}}, "missing"),
        (7, {"user_attr": {"scores": 3}}, "scores"), (7, {"user_attr": {"time": {"planning_s": 1}}}, "total_s"),
        (8, {"values": None}, "state 1 with values"), (8, {"values": [1.0, 2.0]}, "state 1 with values"),
        (8, {"values": ["1"]}, "values"), (8, {"datetime_complete": 3}, "time"),
    ],
)  # fmt: skip
def test_a_damaged_line_is_named_with_the_way_out(tmp_path, line, change, words):
    path = write(tmp_path / "study.journal", [one | change if i == line else one for i, one in enumerate(LINES)])
    before = path.read_bytes()
    with pytest.raises(RoutePackError, match=rf"is damaged: line {line + 1}.*{words}.*give another --out") as caught:
        check_journal(path)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["null", "[]", "{", "\xff", "", "[" * 5000, '{"op_code": 0, "op_code": 0}'])
def test_foreign_lines_are_refused(tmp_path, text):
    path = write(tmp_path / "study.journal", LINES)
    path.write_bytes(path.read_bytes() + text.encode("latin-1") + b"\n")
    with pytest.raises(RoutePackError, match=rf"line {len(LINES) + 1}"):
        check_journal(path)


def test_a_lost_trial_line_is_noticed(tmp_path):
    with pytest.raises(RoutePackError, match="trial_id 0 does not exist yet"):
        check_journal(write(tmp_path / "study.journal", LINES[:2] + LINES[3:]))

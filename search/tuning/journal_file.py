"""Whether a study's journal is one that Optuna and this package wrote: Optuna replays its lines and trusts them.

A line that is cut short at the end is none yet. Any other damage is refused: trials are counted by their lines, so that
leaving one out would give later values to other trials.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from profiler import RoutePackError
from profiler.errors import explained
from profiler.readers import build, parse_json, read_bytes
from search.tuning.objective import BatchScore

MAX_BYTES = 256 << 20
Attributes = dict[str, Any]
CREATE_STUDY, CREATE_TRIAL, PARAMETER, STATE = 0, 4, 5, 6
RUNNING, COMPLETE, WAITING = 0, 1, 4
LINES: dict[int, dict[str, Any]] = {
    CREATE_STUDY: {"study_name": str, "directions": list[int]},
    1: {"study_id": int},
    2: {"study_id": int, "user_attr": Attributes},
    3: {"study_id": int, "system_attr": Attributes},
    CREATE_TRIAL: {"study_id": int, "datetime_start": str | None},
    PARAMETER: {"trial_id": int, "param_name": str, "param_value_internal": float, "distribution": str},
    STATE: {"trial_id": int, "state": int, "values": list[float] | None},
    7: {"trial_id": int, "step": int, "intermediate_value": float},
    8: {"trial_id": int, "user_attr": Attributes},
    9: {"trial_id": int, "system_attr": Attributes},
}
"""What Optuna's operations say beside ``op_code`` and ``worker_id``; one that creates a trial may say more."""


@dataclass(frozen=True)
class Spent:
    """Time of a trial, seconds."""

    planning_s: float
    total_s: float


OWN: dict[str, Any] = {
    "scores": list[BatchScore],
    "time": Spent,
    "lock": int,
    "worker": int,
    "machine": str,
    "duplicate": int,
    "pruned": str,
    "infeasible": str,
    "retries": int,
    "retry_of": int,
    "signature": Attributes,
}
"""Attributes that this package writes and reads."""


def check_journal(path: Path | str) -> None:
    """Raise RoutePackError, with line and way out, unless every line of a journal is one that can be replayed."""
    if not Path(path).exists():
        return
    known: dict[str, list[int]] = {"study_id": [], "trial_id": []}
    whole = read_bytes(path, "Journal", MAX_BYTES).split(b"\n")[:-1]
    way_out = " Restore the file, or give another --out and this folder as --warm-start."
    for number, text in enumerate(whole, 1):
        with explained(f"Journal {path} is damaged: ", way_out):
            _check_line(parse_json(text, f"line {number}"), known, f"line {number}")


def _check_line(line: Any, known: dict[str, list[int]], where: str) -> None:
    """Check a line; ``known`` has the number of objectives of every study so far, and of every trial's."""
    line = build(dict[str, Any], line, where)
    code = build(int, line.get("op_code"), f"{where}, op_code")
    build(str, line.get("worker_id"), f"{where}, worker_id")
    if code not in LINES:
        raise RoutePackError(f"{where}: operation {code} is none of Optuna's.")
    for name, kind in LINES[code].items():
        if name not in line:
            raise RoutePackError(f"{where}: {name} is missing.")
        value = build(kind, line[name], f"{where}, {name}")
        if name in known and not 0 <= value < len(known[name]):
            raise RoutePackError(f"{where}: {name} {value} does not exist yet.")
    if code == CREATE_STUDY:
        if not line["directions"] or not set(line["directions"]) <= {1, 2}:
            raise RoutePackError(f"{where}: directions {line['directions']!r:.40}.")
        known["study_id"].append(len(line["directions"]))
    elif code == CREATE_TRIAL:
        known["trial_id"].append(known["study_id"][line["study_id"]])
        filled = [
            name for name in ("params", "distributions", "intermediate_values", "value", "values") if line.get(name)
        ]
        if filled or line.get("state", RUNNING) not in (RUNNING, WAITING) or "datetime_start" not in line:
            raise RoutePackError(f"{where}: a trial that begins with {filled or 'an outcome'}.")
        if line["datetime_start"] is not None:
            _check_time(line["datetime_start"], where)
    elif code == STATE:
        _check_state(line, known["trial_id"][line["trial_id"]], where)
    elif code == PARAMETER:
        _check_parameter(line, where)
    for attributes in (line[name] for name in LINES[code] if name.endswith("_attr")):
        if len(attributes) != 1:
            raise RoutePackError(f"{where}: expected one attribute, got {len(attributes)}.")
    build(Attributes, line.get("system_attrs", {}), f"{where}, system_attrs")
    own = {**build(Attributes, line.get("user_attrs", {}), f"{where}, user_attrs"), **line.get("user_attr", {})}
    for name in own.keys() & OWN.keys():
        build(OWN[name], own[name], f"{where}, {name}")


def _check_state(line: dict[str, Any], objectives: int, where: str) -> None:
    """Refuse an unknown state, one without its time, and a complete trial without a value for every objective."""
    state, values = line["state"], line["values"] or []
    if state not in range(5) or len(values) not in ((objectives,) if state == COMPLETE else (0, objectives)):
        raise RoutePackError(f"{where}: state {state} with values {values!r:.40}.")
    if state != WAITING:
        _check_time(line.get("datetime_start" if state == RUNNING else "datetime_complete"), where)


def _check_time(told: Any, where: str) -> None:
    with explained(f"{where}: ", ".", of=ValueError):
        if datetime.fromisoformat(build(str, told, f"{where}, time")).year < 1970:
            raise ValueError(f"{told!r:.40} is no time")


def _check_parameter(line: dict[str, Any], where: str) -> None:
    """Refuse a value outside what its trial could choose from, or a choice that Optuna does not know."""
    told = build(dict[str, Any], parse_json(line["distribution"], f"{where}, distribution"), f"{where}, distribution")
    kind, attributes = told.get("name"), build(Attributes, told.get("attributes"), f"{where}, attributes")
    if kind in ("IntDistribution", "FloatDistribution"):
        low, high = (build(float, attributes.get(name), f"{where}, {name}") for name in ("low", "high"))
        build(bool, attributes.get("log"), f"{where}, log")
        wrong = not low <= line["param_value_internal"] <= high or attributes.keys() != {"low", "high", "log", "step"}
    else:
        choices = build(list[Any], attributes.get("choices"), f"{where}, choices")
        wrong = kind != "CategoricalDistribution" or line["param_value_internal"] not in range(len(choices))
    if wrong:
        raise RoutePackError(f"{where}: {line['param_name']!r:.60} = {line['param_value_internal']} is no choice.")

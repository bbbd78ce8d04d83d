"""Kill every verb at random moments, run the same command again, and look at what is there. Synthetic inputs.

    python experiments/06_attack/kills.py                          # 15 kills of every verb, resumable
    python experiments/06_attack/kills.py --each 3 --verbs fit,tune
    python experiments/06_attack/kills.py --write                  # kills.md beside this file

A kill is SIGKILL to the verb and all its processes, after a random share of the time that the verb takes unhindered.
The same command then has to end with 0, with everything that an unhindered run leaves, nothing temporary beside it,
MLflow's database whole: one finished run of the study and one of every trial, none still running.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pristine import write_job

HERE = Path(__file__).parent
TRIALS = 6
LIMIT_S = 900
LEFT = (".tmp", ".old", ".claim")


class Verb(NamedTuple):
    """A command, and what must be true of its folder when it has ended."""

    arguments: str
    check: Callable[[Path], str]
    """Returns what is wrong, nothing where all is right."""


def holds(*names: str) -> Callable[[Path], str]:
    """Return a check that files are there, and are not empty."""
    return lambda job: "".join(f"{name} is missing. " for name in names if not (job / name).stat().st_size)


def fitted(job: Path) -> str:
    """Check a cost model, its report and its run."""
    runs = runs_of(job / "made" / "mlflow.db")
    wrong = "" if [run["status"] for run in runs] == ["FINISHED"] else f"runs are {runs}. "
    return wrong + holds("made/costmodel.json", "made/tables.npz", "made/costmodel-report.html")(job)


def tuned(job: Path) -> str:
    """Check a study: every trial once, its run and the study's finished."""
    study = json.loads((job / "made" / "study.json").read_text())
    summary, runs = study["summary"], runs_of(job / "made" / "mlflow.db")
    wrong = "" if study["state"] == "finished" else f"the study is {study['state']}. "
    done = sum(summary["trials"][state] for state in ("complete", "pruned", "infeasible"))
    if done != TRIALS:
        wrong += f"{done} trials of {TRIALS}. "
    children = [run for run in runs if run["parent"]]
    finished = [run for run in children if run["status"] in ("FINISHED", "KILLED")]
    if len({run["number"] for run in finished}) < TRIALS or len(runs) - len(children) != 1:
        wrong += f"{len(finished)} runs of trials, {len(runs) - len(children)} of the study. "
    if running := [run for run in runs if run["status"] == "RUNNING"]:
        wrong += f"{len(running)} runs still running. "
    return wrong + holds("made/tuning-report.html", "made/tables.npz", "made/recheck.npz")(job)


def runs_of(database: Path) -> list[dict]:
    """Return every run of a tracking database that is whole."""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as store:
        if store.execute("PRAGMA integrity_check").fetchone() != ("ok",):
            return [{"status": "DAMAGED", "parent": "", "number": ""}]
        tags = store.execute("SELECT run_uuid, key, value FROM tags").fetchall()
        runs = store.execute("SELECT run_uuid, status FROM runs WHERE lifecycle_stage = 'active'").fetchall()
    told: dict[str, dict[str, str]] = {run: {} for run, _ in runs}
    for run, key, value in tags:
        told.setdefault(run, {})[key] = value
    return [
        {"status": status, "parent": told[run].get("mlflow.parentRunId"), "number": told[run].get("mlflow.runName")}
        for run, status in runs
    ]


INPUTS = "--config routepack.yaml"
VERBS = {
    "profile": Verb(f"profile {INPUTS} --device cpu --max-minutes 0.1 --out made", holds("made/measurements.parquet")),
    "fit": Verb(f"fit measurements {INPUTS} --out made", fitted),
    "tune": Verb(f"tune steps --costmodel costmodel {INPUTS} --trials {TRIALS} --out made", tuned),
    "tune, 2 workers": Verb(
        f"tune steps --costmodel costmodel {INPUTS} --trials {TRIALS} --workers 2 --out made", tuned
    ),
    "deploy": Verb("deploy study --out made", holds("made/planner.yaml", "made/tables.npz")),
    "plan": Verb("plan steps/step4.npz --bundle bundle --previous plan.json --out made.json", holds("made.json")),
    "check": Verb("check bundle steps --out made.json", holds("made.json")),
    "quickstart": Verb(
        "quickstart --out made", holds("made/report.html", "made/bundle/planner.yaml", "made/plan.json")
    ),
}
ENDS = {"check": (0, 3)}
"""Exit codes of verbs that have a verdict."""


def start(job: Path, verb: Verb) -> subprocess.Popen:
    """Start a verb in its own session, so that it is killed with all its workers."""
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    command = [sys.executable, "-m", "routepack_tune", *verb.arguments.split()]
    return subprocess.Popen(
        command, cwd=job, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )


def ended(name: str, job: Path, verb: Verb) -> str:
    """Run a verb to its end; return what is wrong then."""
    process = start(job, verb)
    try:
        _, said = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return f"not at its end after {LIMIT_S} s"
    last = (said.decode(errors="replace").strip().splitlines() or [""])[-1]
    if process.returncode not in ENDS.get(name, (0,)):
        return f"exit code {process.returncode}: {last}"
    if left := [str(path.relative_to(job)) for path in job.rglob(".*") if path.suffix in LEFT]:
        return f"left behind: {', '.join(left)}"
    try:
        return verb.check(job).strip()
    except (OSError, KeyError, ValueError, sqlite3.Error) as error:
        return f"{type(error).__name__}: {error}"


def killed(name: str, job: Path, verb: Verb, after_s: float) -> str:
    """Kill a verb after so many seconds and run it again; return what is wrong, ``late`` where it had ended."""
    process = start(job, verb)
    time.sleep(after_s)
    late = process.poll() is not None
    if not late:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return ended(name, job, verb) or ("late" if late else "")


def main() -> int:
    """Kill, run again, note each outcome in ``kills.jsonl``; print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=15, help="kills of every verb")
    parser.add_argument("--verbs", default=",".join(VERBS).replace("tune, 2", "tune; 2"), help="some of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=HERE / ".cache" / "kills", help="folder of all that is made")
    parser.add_argument("--write", action="store_true", help="write kills.md")
    asked = parser.parse_args()
    pristine, journal = asked.work / "job", asked.work / "kills.jsonl"
    if not journal.exists():
        shutil.rmtree(asked.work, ignore_errors=True)
        write_job(pristine)
        journal.touch()
    known = [json.loads(line) for line in journal.read_text().splitlines()]
    names = [name.replace(";", ",") for name in asked.verbs.split(",")]
    for name in names:
        verb, job = VERBS[name], asked.work / "now"
        takes = next((one["takes_s"] for one in known if one["verb"] == name), 0.0)
        for kill in range(asked.each):
            if any((one["verb"], one["kill"], one["seed"]) == (name, kill, asked.seed) for one in known):
                continue
            shutil.rmtree(job, ignore_errors=True)
            shutil.copytree(pristine, job)
            if not takes:
                begin = time.monotonic()
                if wrong := ended(name, job, verb):
                    print(f"{name} fails unhindered: {wrong}", file=sys.stderr)
                    return 1
                takes = time.monotonic() - begin
                shutil.rmtree(job)
                shutil.copytree(pristine, job)
            after = takes * random.Random(f"{asked.seed}-{name}-{kill}").uniform(0.02, 1.0)
            wrong = killed(name, job, verb, after)
            found = {"verb": name, "kill": kill, "seed": asked.seed, "takes_s": takes, "after_s": after, "wrong": wrong}
            known.append(found)
            with journal.open("a") as stream:
                stream.write(json.dumps(found) + "\n")
            print(f"{name} {kill}: killed after {after:.1f} s of {takes:.1f}: {wrong or 'whole'}", flush=True)
    table = markdown([one for one in known if one["seed"] == asked.seed and one["kill"] < asked.each])
    print(table)
    if asked.write:
        (HERE / "kills.md").write_text(table + "\n")
    return int(any(one["wrong"] not in ("", "late") for one in known))


def markdown(known: list[dict]) -> str:
    """Return a row a verb."""
    lines = [
        "| verb | unhindered, s | kills | whole after the same command | had ended before | wrong |",
        "|---" * 6 + "|",
    ]
    for name in VERBS:
        rows = [one for one in known if one["verb"] == name]
        if rows:
            late = sum(one["wrong"] == "late" for one in rows)
            wrong = sum(one["wrong"] not in ("", "late") for one in rows)
            whole = len(rows) - late - wrong
            lines.append(f"| {name} | {rows[0]['takes_s']:.0f} | {len(rows)} | {whole} | {late} | {wrong} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

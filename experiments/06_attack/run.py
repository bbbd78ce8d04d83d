"""Attack every door with seeded mutations and count what becomes of them. Synthetic inputs; see README.md.

    python experiments/06_attack/run.py [--total 20000] [--workers 2] [--doors step,plan]
    python experiments/06_attack/run.py --door plan --seed 123 [--keep DIR]      # one mutation again

Resumable: results go to experiments/.cache/06_attack/journal-CODE.jsonl, where CODE is a hash of the packages and of
this program; what is there is not run again. --write also writes results.csv and table.md beside this file.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = HERE.parent / ".cache" / "06_attack"
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ARROW_DEFAULT_MEMORY_POOL"):
    os.environ.setdefault(name, "system" if name.startswith("ARROW") else "1")

import ask_doors  # noqa: E402
import doors  # noqa: E402
import hashes  # noqa: E402
import judge  # noqa: E402
import operators  # noqa: E402
import pool  # noqa: E402
from table import markdown, write_csv  # noqa: E402
from walk import copy_job, run_case  # noqa: E402

from profiler.errors import RoutePackError  # noqa: E402

DOORS = ask_doors.DOORS


def code_hash(*rooms: str) -> str:
    """Return a hash of the packages and of further files or folders."""
    digest = hashlib.sha256()
    for room in ("profiler", "costmodels", "search", "routepack_tune", *rooms):
        for path in sorted((ROOT / room).rglob("*.py")) if (ROOT / room).is_dir() else [ROOT / room]:
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def pristine() -> Path:
    """Return the unchanged job, made by a process of its own: this one must stay free of threads."""
    job = CACHE / f"job-{code_hash('experiments/06_attack/pristine.py')}"
    if not job.is_dir():
        made = Path(tempfile.mkdtemp(dir=CACHE)) / "job"
        call = f"from pathlib import Path; import pristine; pristine.make(Path({str(made)!r}))"
        subprocess.run([sys.executable, "-c", call], check=True, env=_environment(), stdout=subprocess.DEVNULL)
        made.rename(job)
        made.parent.rmdir()
    return job


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(HERE), str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def preload() -> None:
    """Import and compile in the parent what every worker needs; nothing of it starts threads."""
    for name in (
        "pyarrow.parquet",
        "pyarrow.csv",
        "pandas",
        "pydantic",
        "yaml",
        "optuna",
        "scipy.stats",
        "lightgbm",
        "typer",
    ):
        importlib.import_module(name)
    for name in (
        "sklearn.gaussian_process",
        "scipy.optimize",
        "routepack_tune.cli",
        "costmodels",
        "search.tuning.study",
    ):
        importlib.import_module(name)
    doors.planner().warm_up()
    gc.freeze()  # what is here stays: workers need not look at it


def check_unchanged(chosen: list[str], workers: int) -> None:
    """Walk through every door with the unchanged job: were that refused, the attack would tell nothing."""

    def unchanged(door: str, seed: int, folder: Path) -> tuple[str, str, str]:
        copy_job(door, folder)
        ask_doors.prepare(door, seed, folder)
        DOORS[door].walk(folder)
        return "accepted", "", ""

    hashes.check_formulas(doors.PRISTINE)
    for one in pool.run_cases([(door, seed) for door in chosen for seed in (0, 1)], unchanged, workers):
        if one.outcome != "accepted":
            raise SystemExit(f"The unchanged job fails at the door {one.door}: {one.outcome} {one.detail}")


def all_cases(total: int, chosen: list[str]) -> list[tuple[str, int]]:
    """Return doors and seeds, doors mixed so that a stopped run has seen them all."""
    counts = {name: max(1, round(total * DOORS[name].weight)) for name in chosen}
    listed = [((seed + 0.5) / count, name, seed) for name, count in counts.items() for seed in range(count)]
    return [(name, seed) for _, name, seed in sorted(listed)]


def replay(door: str, seed: int, keep: Path | None) -> None:
    """Run one mutation in this process and let its traceback be seen."""
    folder = keep or Path(tempfile.mkdtemp(prefix="attack-"))
    folder.mkdir(parents=True, exist_ok=True)
    copy_job(door, folder)
    print(f"{door} {seed}: {DOORS[door].mutate(operators.seeded(door, seed), folder)}  (in {folder})", flush=True)
    home = os.getcwd()
    try:
        DOORS[door].walk(folder)
        print("rightly accepted")
    except (RoutePackError, judge.Wrong) as error:
        print(f"{type(error).__name__}: {error}")
    finally:
        os.chdir(home)
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--total", type=int, default=20_000, help="mutations over all doors")
    parser.add_argument("--each", type=int, help="instead: mutations of every door")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--doors", default=",".join(DOORS))
    parser.add_argument("--door", choices=list(DOORS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder in which the changed job of --door and --seed is kept")
    parser.add_argument("--write", action="store_true", help="write results.csv and table.md")
    given = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    doors.PRISTINE = pristine()
    preload()
    if given.door:
        replay(given.door, given.seed, given.keep)
        return
    chosen = given.doors.split(",")
    cases = (
        [(name, seed) for seed in range(given.each) for name in chosen]
        if given.each
        else all_cases(given.total, chosen)
    )
    check_unchanged(chosen, given.workers)
    journal = CACHE / f"journal-{code_hash('experiments/06_attack')}.jsonl"
    known = read_journal(journal)
    todo = [case for case in cases if case not in known]
    print(f"{len(cases)} mutations, {len(todo)} to run, journal {journal}", file=sys.stderr)
    found: Counter[str] = Counter()
    with journal.open("a") as stream:
        for count, result in enumerate(pool.run_cases(todo, run_case, given.workers), 1):
            known[result.door, result.seed] = asdict(result)
            stream.write(json.dumps(asdict(result)) + "\n")
            stream.flush()
            found[result.outcome] += 1
            if count % 200 == 0:
                print(f"{count} of {len(todo)}: {dict(found)}", file=sys.stderr, flush=True)
    results = [known[case] for case in cases]
    print(markdown(results))
    if given.write:
        write_csv(HERE / "results.csv", results)
        (HERE / "table.md").write_text(markdown(results) + "\n")


def read_journal(path: Path) -> dict[tuple[str, int], dict]:
    """Return results that are there, by door and seed; a line that a kill left half is none."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            one = json.loads(line)
        except ValueError:
            continue
        found[one["door"], one["seed"]] = one
    return found


if __name__ == "__main__":
    main()

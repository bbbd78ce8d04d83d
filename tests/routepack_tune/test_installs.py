"""Both installs as their users make them: a wheel in a fresh environment, from the package index.

``pytest -m slow tests/routepack_tune/test_installs.py`` takes minutes; interpreters that are not here are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

from routepack_tune.bundle import load_planner, untuned_planner, write_bundle
from routepack_tune.config import load_config

ROOT = Path(__file__).parents[2]
LARGEST_MB = 350
PLAN = """
import json, sys, time
begin = time.perf_counter()
import routepack_tune
planner = routepack_tune.load_planner(sys.argv[1])
first = time.perf_counter()
plans = [planner.plan(sys.argv[2]) for _ in range(2)]
heavy = sorted({"torch", "typer", "mlflow", "optuna", "pandas"} & set(sys.modules))
print(json.dumps({"plan_hash": plans[0].plan_hash, "predicted": plans[0].predicted.step_time_s, "heavy": heavy}))
"""


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "NUMBA"))}
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("profiler", "costmodels", "search", "routepack_tune"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    done = run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", out, source, cwd=out)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


def environment(python: str, folder: Path, wheel: Path, extra: str = "", constrained: bool = True) -> Path:
    """Make an environment with a wheel in it; return its interpreter."""
    managed = sorted((Path.home() / ".pyenv" / "versions").glob(f"{python.removeprefix('python')}.*/bin/python"))
    found = [one for one in (shutil.which(python), *managed) if one and run(one, "-c", "", cwd=folder).returncode == 0]
    if not found:
        pytest.skip(f"{python} is not on this machine")
    assert run(found[0], "-m", "venv", folder / "venv", cwd=folder).returncode == 0
    inside = folder / "venv" / "bin" / "python"
    limits = ("-c", ROOT / "constraints.txt") if constrained else ()
    done = run(inside, "-m", "pip", "install", "-q", *limits, f"{wheel}{extra}", cwd=folder)
    assert done.returncode == 0, done.stderr
    return inside


@pytest.mark.slow
@pytest.mark.parametrize("python", ["python3.11", "python3.12", "python3.13"])
def test_the_base_plans_the_same_with_numpy_and_numba_alone(python, wheel, job, tmp_path):
    bundle = write_bundle(tmp_path / "bundle", untuned_planner(job.costmodel, load_config(job.config)), {})
    expected = load_planner(bundle).plan(job.step)
    inside = environment(python, tmp_path, wheel)
    done = run(inside, "-c", PLAN, bundle, job.step, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"plan_hash": expected.plan_hash, "predicted": expected.predicted.step_time_s, "heavy": []}
    packages = {
        one["name"] for one in json.loads(run(inside, "-m", "pip", "list", "--format=json", cwd=tmp_path).stdout)
    }
    assert packages == {"llvmlite", "numba", "numpy", "pip", "routepack-tune"} | (packages & {"setuptools"})
    size = sum(
        path.stat().st_size for path in (tmp_path / "venv").rglob("*") if path.is_file() and not path.is_symlink()
    )
    assert size < LARGEST_MB * 1e6, f"{size / 1e6:.0f} MB"
    told = run(tmp_path / "venv" / "bin" / "routepack", "--help", cwd=tmp_path)
    assert (told.returncode, told.stdout) == (1, "")
    assert told.stderr == "Error: This needs typer, which is not installed: pip install 'routepack-tune[tune]'.\n"


@pytest.mark.slow
def test_the_extra_tune_brings_every_verb_but_timing(wheel, job, tmp_path):
    inside = environment("python3.11", tmp_path, wheel, "[tune]")
    assert run(inside, "-c", "import torch", cwd=tmp_path).returncode != 0
    command = tmp_path / "venv" / "bin" / "routepack"
    published = ROOT / "routepack_tune" / "example" / "timings" / "h200_sxm"
    done = run(
        command, "profile", "--published", published, "--config", job.config, "--out", tmp_path / "p", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    given = ("--costmodel", job.costmodel, "--config", job.config)
    done = run(command, "tune", job.steps, *given, "--trials", 2, "--out", tmp_path / "study", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = run(command, "deploy", tmp_path / "study", "--out", tmp_path / "bundle", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    timed = run(command, "profile", "--config", job.config, "--out", tmp_path / "m", cwd=tmp_path)
    assert timed.returncode == 1
    assert "pip install 'routepack-tune[profile]'" in timed.stderr.splitlines()[-1]

"""``import routepack_tune`` is light: training jobs and the command's help never wait for what they do not use."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from patience import PATIENCE_S

import routepack_tune
from profiler.extras import EXTRAS
from routepack_tune.bundle import untuned_planner, write_bundle
from routepack_tune.config import load_config

ROOT = Path(__file__).parents[2]


def test_import_is_light(blocker):
    code = blocker + "import routepack_tune; print(sorted(routepack_tune.__all__))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("load_planner", "profile", "fit", "tune", "deploy", "plan"):
        assert name in done.stdout


def test_names_of_the_search_come_when_asked_for():
    code = (
        "import sys, routepack_tune; before = 'numba' in sys.modules, 'torch' in sys.modules\n"
        "import search\n"
        "assert routepack_tune.Plan is search.Plan and routepack_tune.StepBatch is search.StepBatch\n"
        "from routepack_tune import *\n"
        "print(before, relayout.__name__, hasattr(routepack_tune, 'Nonsense'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(False, False) routepack_tune.trainers.relayout False\n"


def test_the_example_of_help_runs(job, monkeypatch):
    """``help(routepack_tune)`` shows how a training job plans: the very lines, on a bundle and its steps."""
    bundle = write_bundle(job.folder / "bundle", untuned_planner(job.costmodel, load_config(job.config)), {})
    assert bundle.name == "bundle"
    for number, path in enumerate(sorted(job.steps.glob("*.npz"))[:2]):
        path.rename(job.steps / f"step{number:02d}.npz")
    monkeypatch.chdir(job.folder)
    example = textwrap.dedent(routepack_tune.__doc__.split("::\n")[1].split("\nThe verbs")[0])
    names = {}
    exec(example, names)
    assert names["last_plan"].moves.seconds >= 0
    assert names["last_plan"].provenance["previous_placement_id"]


def test_published_times_are_imported_without_torch(job):
    published = ROOT / "routepack_tune" / "example" / "timings" / "h200_sxm"
    code = (
        "import sys; sys.modules['torch'] = None; import routepack_tune as r; "
        "r.profile(sys.argv[1], sys.argv[2], published=sys.argv[3])"
    )
    given = [str(job.config), str(job.folder / "m"), str(published)]
    done = subprocess.run([sys.executable, "-c", code, *given], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_face_is_whole():
    assert set(routepack_tune.__all__) < set(dir(routepack_tune))
    assert all(getattr(routepack_tune, name) is not None for name in dir(routepack_tune))
    assert re.match(r"\d+\.\d+", routepack_tune.__version__)
    for page in ("README.md", "docs/training.md", "docs/tuning.md"):
        named = re.findall(r"routepack_tune\.(\w+)(?!\.\w)\(", (ROOT / page).read_text(encoding="utf-8"))
        assert set(named) <= set(dir(routepack_tune)), page


@pytest.mark.parametrize("name", ["profiler", "search", "costmodels"])
def test_a_file_that_hides_a_package_is_named(name, tmp_path):
    (tmp_path / f"{name}.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import routepack_tune"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: routepack_tune needs its own package '{name}', but {tmp_path}")


def test_the_base_is_numpy_and_numba_and_never_constrains_torch():
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = document["project"]
    named = {re.split(r"[\[<>=~! ]", one)[0] for one in project["dependencies"]}
    assert named == {"numpy", "numba"}
    extras = project["optional-dependencies"]
    assert not [
        name for name, needs in extras.items() if name != "profile" and any(n.startswith("torch") for n in needs)
    ]
    brought = {re.split(r"[\[<>=~! ]", one)[0].lower() for needs in extras.values() for one in needs}
    modules = {"yaml": "pyyaml", "sklearn": "scikit-learn", "pynvml": "nvidia-ml-py"}
    assert {modules.get(name, name) for name in EXTRAS} <= brought  # every hint names an extra that brings the package
    for name in ("profiler", "costmodels", "search", "routepack_tune"):
        assert (ROOT / name / "py.typed").is_file()
        assert (
            "py.typed"
            in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][name]
        )


@pytest.mark.parametrize("package", ["typer", "yaml", "optuna", "pyarrow"])
def test_a_missing_extra_is_one_line(package, job):
    """As in a training image: the package is not there, and our code imports it."""
    published = ROOT / "routepack_tune" / "example" / "timings" / "h200_sxm"
    arguments = ["tune", job.steps, "--costmodel", job.costmodel, "--config", job.config, "--out", job.folder / "study"]
    if package == "pyarrow":
        arguments = ["profile", "--published", published, "--config", job.config, "--out", job.folder / "m"]
    code = (
        f"import sys; sys.modules[{package!r}] = None; from routepack_tune.__main__ import main; "
        f"sys.argv = {['routepack', *map(str, arguments)]!r}; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last == f"Error: This needs {package}, which is not installed: pip install 'routepack-tune[tune]'."

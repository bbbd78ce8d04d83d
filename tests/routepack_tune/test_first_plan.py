"""Containers and first plans: nothing writable is needed, and loading leaves nothing to compile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from patience import PATIENCE_S

from costmodels.compiled import cache_folder
from routepack_tune.bundle import untuned_planner, write_bundle
from routepack_tune.config import load_config

ROOT = Path(__file__).parents[2]
SOMEBODY = 12345
"""A user id that no passwd entry knows, as containers give."""
ONE_KERNEL = """
import logging, numpy as np
logging.basicConfig(format="%(levelname)s %(message)s")
from search.kernels import sample_rank_rows, unit_expert_rows
counts = np.ones((3, 1, 4), np.int64)
unit_expert_rows(counts, np.zeros(3, np.int64), 1)
sample_rank_rows(counts, np.arange(3), np.zeros((1, 4), np.int64), 1)
print("ran")
"""
SIGNATURES = """
import json, sys
import routepack_tune
from costmodels.compiled import _STAMPS

def compiled():
    return {kernel.py_func.__qualname__: len(kernel.signatures) for kernel in _STAMPS}

planner = routepack_tune.load_planner(sys.argv[1])
loaded = compiled()
plan = planner.plan(sys.argv[2])
planner.plan(sys.argv[3], previous=plan)
with planner.stream(previous=plan) as stream:
    batch = routepack_tune.load_step_batch(sys.argv[3], planner.spec)
    for name, length, counts in zip(batch.sample_ids, batch.lengths, batch.expert_counts):
        stream.add(str(name), int(length), counts)
    stream.seal()
after = compiled()
print(json.dumps({name: [loaded[name], after[name]] for name in after if after[name] != loaded[name]}))
"""


@pytest.fixture
def bundle(job):
    return write_bundle(job.folder / "bundle", untuned_planner(job.costmodel, load_config(job.config)), {})


def test_after_loading_nothing_is_left_to_compile(bundle, job):
    steps = sorted(job.steps.glob("*.npz"))[:2]
    done = subprocess.run(
        [sys.executable, "-c", SIGNATURES, bundle, *steps], cwd=ROOT, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}


def in_an_image(code, *arguments, cache=None):
    """Run code with a copy of the packages that its user cannot write to, without a home.

    The interpreter may be readable by root alone: the packages belong to somebody else, and root goes without rights.
    """
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("only root, by setpriv, can do without rights")
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder)
        for name in ("profiler", "costmodels", "search", "routepack_tune"):
            shutil.copytree(ROOT / name, image / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (image, *image.rglob("*")):
            os.chown(path, SOMEBODY, SOMEBODY)
            path.chmod(0o555 if path.is_dir() else 0o444)
        kept = {} if cache is None else {"NUMBA_CACHE_DIR": str(cache)}
        return subprocess.run(
            ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", code, *map(str, arguments)],
            cwd=image, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
            env={"PATH": os.environ["PATH"], "HOME": "/proc", "PYTHONPATH": str(image), **kept},
        )  # fmt: skip


def test_a_read_only_image_is_told_once_that_nothing_is_kept():
    done = in_an_image(ONE_KERNEL)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert done.stderr.count("Compiled code cannot be kept") == 1
    assert "NUMBA_CACHE_DIR" in done.stderr


def test_the_named_cache_folder_is_used_without_a_word(tmp_path):
    done = in_an_image(ONE_KERNEL, cache=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")
    assert list(tmp_path.rglob("*.nbi"))


@pytest.mark.slow
def test_a_read_only_image_without_a_home_plans(bundle, job):
    plan = "import sys, routepack_tune as r; print(r.load_planner(sys.argv[1]).plan(sys.argv[2]).plan_hash)"
    done = in_an_image(plan, bundle, job.step)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Compiled code cannot be kept") == 1
    expected = untuned_planner(job.costmodel, load_config(job.config)).plan(job.step)
    assert done.stdout.strip() == expected.plan_hash


def test_where_kernels_are_kept(tmp_path, monkeypatch):
    source, given = tmp_path / "search", tmp_path / "given"
    source.mkdir()
    beside = str(source / "__pycache__")
    assert cache_folder(str(source), "") == beside
    assert Path(cache_folder(str(source), str(given))).parent == given
    assert cache_folder(str(source), "/proc/nowhere") == beside  # a folder that cannot be made is passed over
    monkeypatch.setattr(sys.modules["costmodels.compiled"], "_writable", lambda folder: "given" in folder)
    cache_folder.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(given))
    assert Path(cache_folder(str(source), "")).parent == given / "numba"
    cache_folder.cache_clear()
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # a user id that nobody knows, and no HOME
    assert cache_folder(str(source), "") == beside
    cache_folder.cache_clear()

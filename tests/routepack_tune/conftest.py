"""A whole tiny job on disk: model, configuration, cost model (random valid tables), step batches. All synthetic."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
from strategies import make_tables

from costmodels import tables_key
from costmodels.cost_model import SCHEMA_VERSION, Header
from costmodels.tables import TABLES
from profiler import fingerprint_device
from profiler.files import write_json
from routepack_tune import tune
from routepack_tune.config import load_config
from routepack_tune.steps.generator import WorkloadParams, make_step_batch
from routepack_tune.steps.traces import save_step_batch
from search import TUNABLE, Range

MODEL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 128,
}  # fmt: skip
BLOCKED = ("torch", "pydantic", "yaml", "optuna", "mlflow", "lightgbm", "pyarrow", "sklearn", "scipy", "matplotlib",
           "typer", "rich", "pandas")  # fmt: skip
CONFIG = """
model: tiny.json
topology: {data_parallel_size: 2, expert_model_parallel_size: 2}
max_tokens_per_microbatch: 256
planner: {max_iterations: 2000, starts: 1, alternations: 1, placement_swaps: 200, extra_rows: 1}
"""
WORKLOAD = WorkloadParams(num_prompts=5, rollouts=4, median_tokens=60, sigma=0.6, max_tokens=256)


@dataclasses.dataclass(frozen=True)
class Job:
    """Paths of a tiny job's inputs."""

    folder: Path

    @property
    def config(self):
        return self.folder / "routepack.yaml"

    @property
    def costmodel(self):
        return self.folder / "costmodel"

    @property
    def steps(self):
        return self.folder / "steps"

    @property
    def step(self):
        return self.steps / "step03.npz"

    def arrays(self, step=3):
        with np.load(self.steps / f"step{step:02d}.npz") as archive:
            return {name: archive[name] for name in archive.files}

    def settings(self):
        return load_config(self.config)


def write_cost_model(folder, settings, fingerprint):
    """Write a cost model's folder as far as planning and tuning read it."""
    tables = make_tables(np.random.default_rng(0), settings.model, settings.topology, 256)
    key = tables_key(settings.model, settings.topology, settings.max_tokens_per_microbatch)
    # Milliseconds, so that planning is short against a step, as in real work.
    slow = {name: getattr(tables, name) * 100_000 for name in TABLES}
    tables = dataclasses.replace(tables, key=key, **slow)
    tables.save(folder / "tables.npz")
    header = Header(
        SCHEMA_VERSION, fingerprint, *settings.job[:2], settings.fit, settings.max_tokens_per_microbatch, "0" * 64,
        provenance=[], table_errors={}, doubts=(), notes=tables.notes, tables_hash=tables.tables_hash, operations={},
    )  # fmt: skip
    write_json(folder / "costmodel.json", header)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Inputs of every verb but profile and fit."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return write_job(tmp_path / "job")


@pytest.fixture(scope="session")
def make_job(tmp_path_factory):
    """Write such inputs once for many tests."""
    return lambda: write_job(tmp_path_factory.mktemp("job") / "job")


def write_job(folder):
    """Write the inputs of a tiny job."""
    folder.mkdir()
    (folder / "tiny.json").write_text(json.dumps(MODEL))
    (folder / "routepack.yaml").write_text(CONFIG)
    made = Job(folder)
    settings = made.settings()
    write_cost_model(made.costmodel, settings, fingerprint_device("cpu"))
    for step in range(4):
        save_step_batch(made.steps / f"step{step:02d}.npz", make_step_batch(settings.model, WORKLOAD, step=step))
    return made


@pytest.fixture
def blocker():
    """Code that makes importing anything but numpy and numba an error, for a fresh process."""
    return f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED!r}:
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture
def small_ranges(monkeypatch):
    """Tune over short searches."""
    monkeypatch.setitem(TUNABLE, "max_iterations", Range(100, 3000, log=True, integer=True))
    monkeypatch.setitem(TUNABLE, "placement_swaps", Range(10, 300, log=True, integer=True))


@pytest.fixture(scope="session")
def study_template(tmp_path_factory):
    """A finished study of the tiny job, made once; tests copy it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setitem(TUNABLE, "max_iterations", Range(100, 3000, log=True, integer=True))
        patch.setitem(TUNABLE, "placement_swaps", Range(10, 300, log=True, integer=True))
        made = write_job(tmp_path_factory.mktemp("template") / "job")
        tune(made.steps, made.costmodel, made.config, made.folder / "study", trials=3)
    return made


@pytest.fixture(autouse=True)
def environment_names_the_same_store():
    """MLflow writes its process-wide URIs into the environment: a test that leaks them breaks others far away."""
    names = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")
    before = [os.environ.get(name) for name in names]
    yield
    assert [os.environ.get(name) for name in names] == before

"""The program of experiments/06_attack on a job that is made quickly: random valid tables, a bundle, a plan."""

import json
import sys
from pathlib import Path

import pytest
from strategies import make_tables

PROGRAM = Path(__file__).parents[2] / "experiments" / "06_attack"


@pytest.fixture(scope="session")
def program():
    """The program's folder among those that modules are imported from."""
    sys.path.insert(0, str(PROGRAM))
    yield PROGRAM
    sys.path.remove(str(PROGRAM))


@pytest.fixture(scope="session")
def pristine(program, tmp_path_factory):
    """The files that the doors of planning need, of a job and of another model's."""
    import doors
    import pristine

    folder = tmp_path_factory.mktemp("attack")
    for part, model in ((folder, pristine.MODEL), (folder / "other", pristine.OTHER)):
        write_planning_job(part, {**model, "mlp_only_layers": []})  # the tables price layers with experts alone
    doors.PRISTINE = folder
    return folder


def write_planning_job(folder, model):
    import dataclasses

    import numpy as np
    import pristine

    from costmodels import tables_key
    from costmodels.cost_model import SCHEMA_VERSION, Header
    from profiler import fingerprint_device
    from profiler.files import write_json
    from routepack_tune.bundle import write_bundle
    from routepack_tune.config import load_config
    from routepack_tune.planner import Planner
    from routepack_tune.steps.generator import WorkloadParams, make_step_batch
    from routepack_tune.steps.traces import save_step_batch

    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(model))
    (folder / "routepack.yaml").write_text(pristine.CONFIG)
    settings = load_config(folder / "routepack.yaml")
    tables = make_tables(np.random.default_rng(0), settings.model, settings.topology, 256)
    tables = dataclasses.replace(tables, key=tables_key(*settings.job))
    planner = Planner(*settings.job, settings.planner, tables, fingerprint_device("cpu"))
    write_bundle(folder / "bundle", planner, {})
    tables.save(folder / "costmodel" / "tables.npz")
    header = Header(
        SCHEMA_VERSION,
        planner.fingerprint,
        *settings.job[:2],
        settings.fit,
        settings.max_tokens_per_microbatch,
        "0" * 64,
        provenance=[],
        table_errors={},
        doubts=(),
        notes=tables.notes,
        tables_hash=tables.tables_hash,
        operations={},
    )
    write_json(folder / "costmodel" / "costmodel.json", header)
    work = WorkloadParams(num_prompts=4, rollouts=3, median_tokens=60, sigma=0.6, max_tokens=250)
    for step in range(3):
        save_step_batch(folder / "steps" / f"step{step}.npz", make_step_batch(settings.model, work, step=step))
    pristine.write_routes(folder / "routes.npz", settings.model)
    planner.plan(folder / "steps" / "step0.npz").save(folder / "plan.json")


@pytest.fixture
def attack(pristine, tmp_path_factory):
    """Run one mutation of a door in this process; return its outcome and what to say of it."""
    import walk

    def run(door, seed):
        folder = tmp_path_factory.mktemp("case")
        outcome, changed, detail = walk.run_case(door, seed, folder)
        return outcome, f"{door} {seed}: {changed}: {outcome}: {detail}"

    return run

"""`routepack fit --prior`: the option's path from the command line to the model and its notes."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from costmodels import CostModel
from profiler import DeviceFingerprint, Measurements
from profiler.cases.case import case_id, causal_pairs
from routepack_tune import api
from routepack_tune.cli import main

CONFIG = """
model: tiny.json
topology: {data_parallel_size: 2, expert_model_parallel_size: 2}
max_tokens_per_microbatch: 256
fit: {num_trees: 40, folds: 3}
"""
SOURCE = DeviceFingerprint("cuda", "synthetic", "sm_0", "Old", 1, 1, "", 8, {}, "measured")
TARGET = dataclasses.replace(SOURCE, name="New")


def rows_of(speed, keep):
    """Formulas with a bump that no roofline has; ``speed`` divides the work, every ``keep``-th row is kept."""
    listed = []
    for length in (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768):
        for count in (1, 2, 4):
            pairs = int(count * causal_pairs(length, 0))
            time_us = (10.0 + 2.0 * pairs * 4 * 32 / 1e5 / speed) * np.exp(0.3 * np.sin(2 * np.log2(length)))
            listed.append(("attention", time_us, {
                "tokens": count * length, "pairs": pairs, "num_sequences": count, "max_length": length, "num_heads": 4,
                "num_kv_heads": 2, "qk_head_dim": 16, "v_head_dim": 16, "window": 0,
            }))  # fmt: skip
    for rows in (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024):
        for hottest in (1, 2, 3):
            largest = min(rows, -(-rows // 4) * hottest)
            time_us = (20.0 + 6.0 * rows * 64 * 32 / 1e5 / speed) * np.exp(0.3 * np.sin(2 * np.log2(rows)))
            listed.append(("experts", time_us, {
                "rows": rows, "active_experts": 4, "padded_rows": rows + 256, "max_rows": largest, "local_experts": 4,
                "hidden_size": 64, "inter_size": 32, "router_tokens": 0, "num_experts": 8,
            }))  # fmt: skip
    return listed[::keep]


def save_measurements(folder, fingerprint, speed, keep):
    rows = [
        {**features, "op": op, "direction": "forward", "status": "ok", "time_us": float(time_us), "spread_us": 0.0,
         "case_id": case_id(op, "forward", "float16", features), "source": "measured", "dtype": "float16"}
        for op, time_us, features in rows_of(speed, keep)
    ]  # fmt: skip
    meta = {"schema_version": 1, "fingerprint": fingerprint.to_dict(), "model": None, "topology": None, "params": {},
            "provenance": {}, "backward": "absent"}  # fmt: skip
    Measurements.from_rows(rows, meta).save(folder)


@pytest.fixture(scope="module", autouse=True)
def untracked():
    """The tracking of fits is not what is tested here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("routepack_tune.tracking.fit_tracking.track_fit", lambda *_, **__: None)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield


@pytest.fixture(scope="module")
def job(make_job, untracked):
    """Measurements of both GPUs, and the old one's cost model."""
    job = make_job()
    job.config.write_text(CONFIG)
    save_measurements(job.folder / "old", SOURCE, 1.0, 1)
    save_measurements(job.folder / "new", TARGET, 1.5, 4)
    api.fit(job.folder / "old", job.config, job.folder / "sibling")
    return job


def test_fit_takes_several_priors_and_says_which_it_used(job, tmp_path, capsys):
    folders, out = job.folder, tmp_path / "joint"
    code = main(["fit", str(folders / "new"), "--config", str(job.config), "--out", str(out),
                 "--prior", str(folders / "sibling"), "--prior", str(folders / "sibling")])  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0, printed.err
    header = json.loads((out / "costmodel.json").read_text())
    assert header["operations"]["experts-forward"]["kind"] == "prior"
    assert header["operations"]["experts-forward"]["prior"]["name"] == "Old"
    assert "prior Old (sm_0, the same architecture" in printed.out
    sibling = json.loads((folders / "sibling" / "costmodel.json").read_text())
    assert header["operations"]["experts-forward"]["prior"]["data_hash"] == sibling["data_hash"]


def test_few_rows_with_a_prior_are_nearer_the_truth(job, tmp_path):
    alone = api.fit(job.folder / "new", job.config, tmp_path / "alone")
    joint = api.fit(job.folder / "new", job.config, tmp_path / "joint", priors=[job.folder / "sibling"])
    asked = [(time_us, features) for op, time_us, features in rows_of(1.5, 1) if op == "experts"]
    true_us = np.array([time_us for time_us, _ in asked])
    columns = {name: np.array([features[name] for _, features in asked], dtype=np.float64) for name in asked[0][1]}
    errors = [
        np.abs(model.predict_us("experts", "forward", columns)[0] / true_us - 1.0).mean() for model in (alone, joint)
    ]
    assert errors[1] < 0.5 * errors[0]
    loaded = CostModel.load(tmp_path / "joint")
    after, _ = loaded.predict_us("experts", "forward", columns)
    assert after.tobytes() == joint.predict_us("experts", "forward", columns)[0].tobytes()


def test_a_missing_prior_is_one_line_and_nothing_is_written(job, tmp_path, capsys):
    code = main(["fit", str(job.folder / "new"), "--config", str(job.config), "--out", str(tmp_path / "joint"),
                 "--prior", str(job.folder / "nowhere")])  # fmt: skip
    error = capsys.readouterr().err
    assert code == 1
    assert error.count("Error: ") == 1
    assert "nowhere" in error
    assert not (tmp_path / "joint").exists()

"""The Python examples of docs/training.md run as they stand, with a tiny bundle in the working folder."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import search
from routepack_tune.bundle import untuned_planner, write_bundle
from routepack_tune.steps.traces import batch_from_arrays, load_step_batch

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
FRAMEWORKS = re.compile(r"^## From a framework's arrays.*?(?=^## )", re.MULTILINE | re.DOTALL)
TEXT = PAGE.read_text(encoding="utf-8")


def blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


BLOCKS = blocks(FRAMEWORKS.sub("", TEXT))


def test_examples_of_the_page_run_in_order(job, monkeypatch):
    assert len(BLOCKS) == 2
    write_bundle(job.folder / "bundle", untuned_planner(job.costmodel, job.settings()), {})
    monkeypatch.chdir(job.folder)
    (job.folder / "config.json").write_bytes((job.folder / "tiny.json").read_bytes())
    arrays = job.arrays()
    samples = [
        SimpleNamespace(id=name, length=length, expert_counts=counts)
        for name, length, counts in zip(arrays["sample_ids"], arrays["lengths"], arrays["expert_counts"], strict=True)
    ]
    names = {
        "lengths": arrays["lengths"],
        "expert_counts": arrays["expert_counts"],
        "last_plan": None,
        "dp_rank": 0,
        "finished_rollouts": samples,
    }
    exec(BLOCKS[0], names)
    assert isinstance(names["plan"], search.Plan)
    names["last_plan"] = names["plan"]
    exec(BLOCKS[1], names)
    assert names["batch"].num_samples == len(samples)


@pytest.fixture
def rollout(job, monkeypatch):
    """Routes of a small step [N][tokens, L, k], its tiny job's folder as the working one, and the batch they are."""
    monkeypatch.chdir(job.folder)
    spec, rng = job.settings().model, np.random.default_rng(0)
    lengths = rng.integers(5, 60, 20)
    shape = (spec.num_moe_layers, spec.num_experts)
    routes = [np.argsort(rng.random((n, *shape)), axis=2)[:, :, : spec.top_k].astype(np.uint8) for n in lengths]
    for rows in routes:
        rows[-1] = 0  # the last sampled token
    offsets = np.concatenate([[0], np.cumsum(lengths - 1)])
    known = {"lengths": lengths, "expert_ids": np.concatenate([r[:-1] for r in routes]), "offsets": offsets}
    return lengths, routes, batch_from_arrays(known, spec), spec


def verl(lengths, routes, framework):
    width = max(lengths) + 3
    mask, ids = np.zeros((20, width), np.int64), np.zeros((20, width, *routes[0].shape[1:]), np.uint8)
    for i, rows in enumerate(routes):
        begin = 3 - i % 4  # prompts are padded on the left, responses on the right
        mask[i, begin : begin + len(rows)], ids[i, begin : begin + len(rows)] = 1, rows
    data = {"attention_mask": framework(mask), "routed_experts": framework(ids)}
    return {"data": {**data, "uid": np.array([f"u{i // 4}" for i in range(20)], dtype=object)}}


def slime(lengths, routes, _):
    texts = [base64.b64encode(rows[:-1].astype(np.int32).tobytes()).decode() for rows in routes]
    samples = [SimpleNamespace(tokens=[0] * n, routed_experts=one) for n, one in zip(lengths, texts, strict=True)]
    return {"samples": samples, "num_layers": routes[0].shape[1], "top_k": routes[0].shape[2]}


def vllm(lengths, routes, _):
    outputs = [
        [SimpleNamespace(token_ids=[0] * (n - 2), routed_experts=rows)] for n, rows in zip(lengths, routes, strict=True)
    ]
    return {"requests": [SimpleNamespace(prompt_token_ids=[0, 0], outputs=one) for one in outputs]}


@pytest.mark.parametrize(("block", "given"), enumerate((verl, slime, vllm)))
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_arrays_of_frameworks_become_the_step_batch_they_are(rollout, block, given, framework):
    lengths, routes, expected, spec = rollout
    make = np.asarray if framework == "numpy" else pytest.importorskip("torch").from_numpy
    found = blocks(FRAMEWORKS.search(TEXT)[0])
    assert len(found) == 3
    exec(found[block], {"np": np, "base64": base64, "step": 7, **given(lengths, routes, make)})
    batch = load_step_batch("steps/step000007.npz", spec)
    assert batch.data_hash == expected.data_hash
    assert (batch.prompt_ids is None) == (given is not verl)


def test_the_walk_of_the_tuning_page_records_a_step(job, monkeypatch):
    text = PAGE.with_name("tuning.md").read_text(encoding="utf-8").split("**2. Record")[1].split("**3.")[0]
    lines = re.findall(r"^    (.*)$", text, re.MULTILINE)
    monkeypatch.chdir(job.folder)
    arrays = job.arrays()
    exec("\n".join(lines), {"step": 7, "lengths": arrays["lengths"], "expert_counts": arrays["expert_counts"]})
    assert load_step_batch("steps/step000007.npz", job.settings().model).num_samples == 20

"""The Python examples of docs/training.md run as they stand, with a tiny bundle in the working folder."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import search
from routepack_tune.bundle import untuned_planner, write_bundle

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_examples_of_the_page_run_in_order(job, monkeypatch):
    assert len(BLOCKS) == 2
    write_bundle(job.folder / "bundle", untuned_planner(job.costmodel, job.settings()), {})
    monkeypatch.chdir(job.folder)
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

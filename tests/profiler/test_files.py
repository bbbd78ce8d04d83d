import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from profiler.files import (
    arrays_hash,
    canonical_json,
    content_hash,
    write_json,
    write_text,
)

ROOT = Path(__file__).parents[2]


def test_hashes_are_the_same_in_every_process():
    code = "from profiler.files import content_hash; print(content_hash({'b': [1, 2.5], 'a': 'x'}))"
    seen = set()
    for seed in ("0", "1", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
        )
        seen.add(done.stdout.strip())
    assert seen == {content_hash({"a": "x", "b": [1, 2.5]})}


def test_not_a_number_cannot_be_written():
    with pytest.raises(ValueError):
        canonical_json({"x": float("nan")})


def test_array_hashes_see_names_types_and_shapes():
    array = np.arange(6)
    assert arrays_hash(a=array) == arrays_hash(a=array.copy())
    others = [arrays_hash(b=array), arrays_hash(a=array.astype(np.int32)), arrays_hash(a=array.reshape(2, 3))]
    assert arrays_hash(a=array) not in others


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    write_text(tmp_path / "a.json", "old")
    with pytest.raises(ValueError):
        write_json(tmp_path / "a.json", {"x": float("inf")})
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "old")]

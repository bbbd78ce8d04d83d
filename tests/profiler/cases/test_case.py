import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.cases.case import Case, attention_features, causal_pairs, experts_features

ROOT = Path(__file__).parents[3]


@given(st.integers(1, 40), st.integers(0, 50))
def test_pairs_equal_their_count(length, window):
    seen = sum(1 for q in range(length) for k in range(q + 1) if window == 0 or q - k < window)
    assert int(causal_pairs(np.array(length), window)) == seen


def test_attention_features_sum_over_sequences():
    features = attention_features((5, 3), (8, 2, 64, 64), window=2)
    assert features["tokens"] == 8
    assert features["pairs"] == (1 + 2 * 4) + (1 + 2 * 2)
    assert (features["num_sequences"], features["max_length"], features["window"]) == (2, 5, 2)


def test_experts_features_pad_each_expert_to_whole_tiles():
    features = experts_features((162, 0, 2577, 446, 0, 83), hidden=64, inter=32, num_experts=48)
    assert (features["rows"], features["active_experts"], features["max_rows"]) == (3268, 4, 2577)
    assert features["padded_rows"] == 256 + 2688 + 512 + 128
    assert (features["local_experts"], features["router_tokens"], features["num_experts"]) == (6, 0, 48)


def test_case_ids_are_the_same_in_every_process():
    # FC-33: Python's salted hash would change each session.
    code = (
        "from profiler.cases.case import Case\n"
        "print(Case('dense', '', dict(tokens=1, n=2, k=3)).case_id('forward', 'x'))"
    )
    seen = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
        )
        seen.add(done.stdout.strip())
    case = Case("dense", "", {"k": 3, "n": 2, "tokens": 1})
    assert seen == {case.case_id("forward", "x")}
    assert len(case.case_id("forward", "x")) == 16
    assert case.case_id("backward", "x") not in seen
    assert case.case_id("forward", "y") not in seen


def test_a_case_id_needs_every_feature():
    with pytest.raises(KeyError):
        Case("dense", "", {"tokens": 1}).case_id("forward", "x")

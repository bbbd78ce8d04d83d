import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.cases.case import (
    OPERATIONS,
    Case,
    case_bytes,
    causal_pairs,
    cell_case,
    doubtful_cases,
    experts_case,
    forward_flops,
)

ROOT = Path(__file__).parents[3]


@given(st.integers(1, 40), st.integers(0, 50))
def test_pairs_equal_their_count(length, window):
    seen = sum(1 for q in range(length) for k in range(q + 1) if window == 0 or q - k < window)
    assert int(causal_pairs(np.array(length), window)) == seen


def test_attention_features_sum_over_sequences():
    features = cell_case("attention", "", (5, 3), (8, 2, 64, 64), window=2).features
    assert features["tokens"] == 8
    assert features["pairs"] == (1 + 2 * 4) + (1 + 2 * 2)
    assert (features["num_sequences"], features["max_length"], features["window"]) == (2, 5, 2)


def test_experts_features_pad_each_expert_to_whole_tiles():
    features = experts_case("", (162, 0, 2577, 446, 0, 83), hidden=64, inter=32, num_experts=48).features
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


def test_an_operation_nobody_knows_is_an_error_not_another_ones_estimate():
    case = Case("convolution", "", {"rows": 8, "hidden_size": 4, "inter_size": 2, "local_experts": 1})
    for ask in (forward_flops, lambda case: case_bytes(case, 2), lambda case: case.case_id("forward", "x")):
        with pytest.raises(KeyError, match="convolution"):
            ask(case)


def test_what_moves_bytes_alone_computes_nothing():
    assert forward_flops(Case("transfer", "inside", {"bytes": 4096, "inter_bytes": 0})) == 0


def test_estimates_of_columns_are_those_of_single_cases():
    lengths, windows = ((5, 3), (700,), (64,) * 9), (0, 128, 4)
    both, heads = zip(lengths, windows, strict=True), (8, 2, 192, 128)
    rows = [cell_case("attention", "", parts, heads, window).features for parts, window in both]
    columns = {name: np.array([row[name] for row in rows]) for name in OPERATIONS["attention"].features}
    flops = [forward_flops(Case("attention", "", row)) for row in rows]
    assert OPERATIONS["attention"].flops(columns).tolist() == flops
    # Two products over 192 and 128 numbers, both as wide as the wider; a windowed kernel masks half of its work.
    assert flops[:2] == [4 * rows[0]["pairs"] * 8 * 192, 2 * 4 * rows[1]["pairs"] * 8 * 192]


def row(case, tokens, time, status="ok"):
    return {"case_id": case, "op": "dense", "direction": "forward", "status": status, "time_us": time,
            "tokens": tokens, "n": 8, "k": 8}  # fmt: skip


def test_a_measured_case_is_doubtful_when_a_larger_one_was_clearly_faster():
    rows = [row("a", 1, 500.0), row("b", 2, 100.0), row("c", 3, 105.0), row("d", 9, float("nan"), "oom")]
    assert doubtful_cases(rows) == {"a"}
    assert doubtful_cases([]) == set()

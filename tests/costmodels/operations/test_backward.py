"""What stands for backward times of attention cores that nobody measured here."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels import FitParams, freeze_tables, lookup_many_ns
from costmodels.operations.backward import BACKWARD, LENGTHS, attention_ratio, source_of
from profiler.cases.case import causal_pairs

PUBLIC = {1024: 5.0, 2048: 4.4, 4096: 3.75, 8192: 3.2, 16384: 2.95}


@pytest.mark.parametrize(("length", "ratio"), PUBLIC.items())
def test_heads_of_128_take_what_was_measured_in_public(length, ratio):
    assert attention_ratio(length, 128, 128) == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("heads", "short", "long"),
    [((64, 64), 3.1, 2.5), ((192, 128), 3.9, 3.6), ((256, 256), 5.0, 2.95), ((32, 32), 3.1, 2.5)],
)
def test_other_heads_fall_between_their_own_ends(heads, short, long):
    assert attention_ratio(np.array([1, 1024, 16384, 10**6]), *heads) == pytest.approx([short, short, long, long])
    assert long < attention_ratio(4096, *heads) < short


@given(st.floats(1, 1e6), st.floats(1, 1.5), st.integers(16, 256))
def test_longer_sequences_never_raise_the_ratio_and_nothing_jumps(length, stretch, dim):
    one, more = attention_ratio(np.array([length, length * stretch]), dim, dim)
    assert more <= one
    assert one - more <= 1.0 * np.log2(stretch) + 1e-9
    assert attention_ratio(length, dim, dim) <= attention_ratio(length, max(dim, 96), max(dim, 96))


@given(st.lists(st.integers(1, 40000), min_size=1, max_size=6), st.sampled_from([0, 128, 4096]))
def test_the_length_that_counts_is_what_a_query_attends_to(lengths, window):
    pairs = causal_pairs(np.array(lengths), window)
    features = {"tokens": sum(lengths), "pairs": pairs.sum(), "qk_head_dim": 128, "v_head_dim": 128}
    found = BACKWARD["attention"](features)
    each = attention_ratio(2 * pairs / np.array(lengths) - 1, 128, 128)
    assert each.min() - 1e-9 <= found <= each.max() + 1e-9
    if len(lengths) == 1 and not window:
        assert found == pytest.approx(attention_ratio(lengths[0], 128, 128))
    if window == 128:
        assert found == pytest.approx(5.0)


def test_frozen_backward_times_are_forward_times_with_each_length_its_own_ratio(fitted):
    """A full cell of equal sequences costs its ratio, floor included, so a cell sums its sequences' own times."""
    tables, places = fitted.tables, {name: place for place, name in enumerate(fitted.tables.class_names)}
    for length in (256, 1024, 4096):
        forward, backward = (
            lookup_many_ns(tables.sequence_ns[places[f"full/moe/{way}"]], tables.length_shift, length) / 1e3
            for way in ("forward", "backward")
        )
        count, shape = (
            fitted.max_tokens // length,
            {"num_heads": 8, "num_kv_heads": 2, "qk_head_dim": 64, "v_head_dim": 64},
        )
        floors = [fitted.floor_us("attention", way, shape | {"window": 0}) for way in ("forward", "backward")]
        whole = [floor + count * time for floor, time in zip(floors, (forward, backward), strict=True)]
        assert whole[1] / whole[0] == pytest.approx(attention_ratio(length, 64, 64), rel=0.03)


@pytest.mark.parametrize(
    ("shape", "said"),
    [({"qk_head_dim": 192, "v_head_dim": 128, "window": 0}, "flash-attention #2270"),
     ({"qk_head_dim": 128, "v_head_dim": 128, "window": 0}, "tritonbench #1267"),
     ({"qk_head_dim": 128, "v_head_dim": 128}, "TileOPs #633")],
)  # fmt: skip
def test_every_ratio_names_who_measured_it(shape, said):
    assert said in source_of(shape)


def test_a_number_in_the_settings_overrides(fitted):
    own = replace(fitted, params=replace(fitted.params, attention_backward_factor=2.5), tables=None)
    tables = freeze_tables(own, fitted.spec, fitted.topology, fitted.max_tokens)
    assert any("backward of attention is assumed 2.5x forward: only" in note for note in tables.notes)
    rows = [kind.endswith("/backward") for kind in tables.class_names]
    assert (tables.sequence_ns[rows] <= fitted.tables.sequence_ns[rows] + 1).all()
    assert FitParams().attention_backward_factor == 0
    assert tuple(PUBLIC) == LENGTHS
    with pytest.raises(ValueError, match="attention_backward_factor"):
        FitParams(attention_backward_factor=float("nan"))

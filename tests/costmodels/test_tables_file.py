"""Tables of times: read as written, and refused unless every part fits the others."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import TOPOLOGIES, make_spec, make_tables

from costmodels import StepTables
from costmodels.tables import npz_bytes
from profiler import RoutePackError

TABLES = make_tables(np.random.default_rng(0), make_spec(), TOPOLOGIES[0], 64)
ARRAYS = ("sequence_ns", "cell_ns", "class_layers", "expert_rank_ns", "exchange_ns")


def saved(path, header=(), **arrays):
    """Write TABLES with another header or other arrays, as someone would who edits a file."""
    written = TABLES._arrays() | arrays
    changed = json.loads(written["header"].tobytes()) | dict(header)
    written["header"] = np.frombuffer(json.dumps(changed).encode(), np.uint8)
    path.write_bytes(npz_bytes({name: array for name, array in written.items() if array is not None}))
    return path


def test_tables_are_read_as_they_were_written(tmp_path):
    TABLES.save(tmp_path / "t.npz")
    found = StepTables.load(tmp_path / "t.npz")
    assert found.tables_hash == TABLES.tables_hash
    assert found.notes == TABLES.notes
    assert StepTables.load(saved(tmp_path / "same.npz")).tables_hash == TABLES.tables_hash


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"tokens_shift": 1.0}, "tokens_shift to be a whole number"),
        ({"tokens_shift": True}, "tokens_shift to be a whole number"),
        ({"tokens_shift": 2**40}, "tokens_shift of 0 to 40"),
        ({"tokens_shift": -1}, "tokens_shift of 0 to 40"),
        ({"rows_shift": TABLES.rows_shift + 1}, "expert_rank_ns of int64"),
        ({"rows_shift": max(0, TABLES.rows_shift - 1)}, "expert_rank_ns of int64"),
        ({"max_tokens": TABLES.max_tokens * 2}, "sequence_ns of int64"),
        ({"max_tokens": 0}, "max_tokens of 1 to"),
        ({"max_tokens": 2**62}, "max_tokens of 1 to"),
        ({"top_k": 2**20, "slots_per_block": 2**20}, "max_rows of 1 to"),
        ({"pipeline_stages": 0}, "pipeline_stages of 1 to"),
        ({"measured_length_max": None}, "measured_length_max to be a whole number"),
        ({"row_fixed_ns": -1}, "row_fixed_ns of 0 to"),
        ({"row_fixed_ns": 2**62}, "row_fixed_ns of 0 to"),
        ({"link_gbytes_per_s": -1.0}, "link_gbytes_per_s of 0 to"),
        ({"link_gbytes_per_s": "8"}, "link_gbytes_per_s to be a number"),
        ({"class_names": ["full/moe/forward"]}, "class_layers of int64"),
        ({"class_names": []}, "class_layers of int64"),
        ({"class_names": "ab"}, "class_names to be a list"),
        ({"notes": [3]}, r"notes\[0\] to be text"),
        ({"notes": ["x" * 5000]}, "notes of at most"),
        ({"key": None}, "key to be text"),
        ({"unknown": 1}, "unknown key"),
        ({"sequence_ns": 1}, "in their header and an array"),
        ({"schema_version": 1}, "schema_version 1, this version reads"),
    ],
)
def test_headers_that_fit_no_tables_are_refused(tmp_path, header, said):
    with pytest.raises(RoutePackError, match=rf"Frozen tables .*{said}.*Run `routepack fit` again") as refused:
        StepTables.load(saved(tmp_path / "t.npz", header))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: None, "is missing"),
        (lambda a: a[..., :-1], "of int64"),
        (lambda a: np.concatenate([a, a[..., -1:]], axis=-1), "of int64"),
        (lambda a: a[:, None], "of int64"),
        (lambda a: a.reshape(-1)[0], "of int64"),
        (lambda a: a.astype(np.int32), "of int64"),
        (lambda a: a.astype(np.float64), "of int64"),
        (lambda a: a.astype(bool), "of int64"),
        (lambda a: a.astype("U8"), "of int64"),
        (lambda a: -a - 1, "negative|of 1 to"),
        (lambda a: np.full_like(a, 2**62), "above|of 1 to"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, name, change, said):
    with pytest.raises(RoutePackError, match=rf"damaged: .*{name.split('_')[0]}.*({said})|classes {said}"):
        StepTables.load(saved(tmp_path / "t.npz", **{name: change(getattr(TABLES, name))}))


def test_times_of_nothing_and_jumps_beyond_64_bits_are_refused():
    for name in ("sequence_ns", "expert_rank_ns"):
        with pytest.raises(ValueError, match=f"{name} is zero"):
            replace(TABLES, **{name: np.zeros_like(getattr(TABLES, name))})
    jump = TABLES.cell_ns.copy()
    jump[:, -1] = 1 << 53
    with pytest.raises(ValueError, match="beyond 64 bits"):
        replace(TABLES, cell_ns=jump, class_layers=np.full(2, 1 << 20))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_changed_files_are_refused_or_look_up_inside_their_tables(tmp_path_factory, draw):
    """Whatever is edited, tables that are read answer every size they claim to."""
    integers = st.integers(-2, 70) | st.sampled_from([2**31, 2**40, 2**62, -(2**63)])
    header = draw.draw(st.dictionaries(st.sampled_from(["max_tokens", "top_k", "tokens_shift", "rows_shift",
                       "length_shift", "slots_per_block", "num_moe_layers"]), integers, max_size=2))  # fmt: skip
    name = draw.draw(st.sampled_from(ARRAYS))
    array = getattr(TABLES, name).copy()
    array.reshape(-1)[draw.draw(st.integers(0, array.size - 1)) :] += draw.draw(integers)
    path = saved(tmp_path_factory.getbasetemp() / "changed.npz", header, **{name: array})
    try:
        found = StepTables.load(path)
    except RoutePackError:
        return
    for table, shift, largest in (
        (found.sequence_ns, found.length_shift, found.max_tokens),
        (found.cell_ns, found.tokens_shift, found.max_tokens),
        (found.expert_rank_ns, found.rows_shift, found.max_rows),
        (found.exchange_ns, found.rows_shift, found.max_rows),
    ):
        assert (largest >> shift) + 1 < table.shape[-1]
        assert table.min() >= 0

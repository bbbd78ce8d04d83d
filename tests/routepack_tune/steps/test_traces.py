"""The npz door: what is read, and what every broken batch says."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
from strategies import make_spec

from profiler import RoutePackError
from routepack_tune.steps.generator import WorkloadParams, make_step_batch
from routepack_tune.steps.traces import batch_from_arrays, list_step_files, load_step_batch, save_step_batch

SPEC = make_spec(layers=3, experts=8, top_k=2)


def good():
    """Two samples of 4 and 6 tokens; every token uses experts 0 and 1."""
    counts = np.zeros((2, 3, 8), np.uint16)
    counts[:, :, :2] = np.array([4, 6])[:, None, None]
    return {"lengths": np.array([4, 6], np.int32), "expert_counts": counts}


def changed(**arrays):
    return {name: value for name, value in {**good(), **arrays}.items() if value is not None}


def with_count(i, layer, expert, value, dtype=np.int32):
    counts = good()["expert_counts"].astype(dtype)
    counts[i, layer, expert] = value
    return counts


def test_good_batch():
    batch = batch_from_arrays(good(), SPEC)
    assert batch.lengths.dtype == np.int64
    assert batch.known_tokens.tolist() == [4, 6]
    assert batch.sample_ids.tolist() == ["0", "1"]


def test_last_token_without_route_is_unknown():
    counts = good()["expert_counts"]
    counts[1, :, :2] = 5
    assert batch_from_arrays(changed(expert_counts=counts), SPEC).known_tokens.tolist() == [4, 5]


def test_known_tokens_allow_missing_routes():
    counts = good()["expert_counts"]
    counts[1] = 0
    known = np.array([4, 0])
    assert batch_from_arrays(changed(expert_counts=counts, known_tokens=known), SPEC).known_tokens.tolist() == [4, 0]
    with pytest.raises(RoutePackError, match=r"'1' MoE layer 0.*add up to 0.*known_tokens"):
        batch_from_arrays(changed(expert_counts=counts), SPEC)


def test_all_hidden_layers_are_accepted_and_dense_ones_dropped():
    import dataclasses

    spec = dataclasses.replace(make_spec(layers=4), moe_layers=(False, True, True, True))
    counts = np.zeros((2, 4, 8), np.uint16)
    counts[:, 1:] = good()["expert_counts"]
    assert batch_from_arrays(changed(expert_counts=counts), spec).expert_counts.shape == (2, 3, 8)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (changed(lengths=None), ["no step batch", "`lengths` [N]"]),
        (changed(expert_counts=None), ["no step batch", "`expert_counts` [N, L, E]"]),
        (changed(lengths=np.zeros(0, np.int32), expert_counts=np.zeros((0, 3, 8), np.int32)), ["step is empty"]),
        (changed(lengths=np.array([4, 0])), ["'1'", "length 0"]),
        (changed(lengths=np.array([4.0, 6.0])), ["lengths", "float64"]),
        (changed(lengths=np.array([True, True])), ["lengths", "bool"]),
        (changed(lengths=np.array([[4, 6]])), ["lengths", "shape [1, 2]"]),
        (changed(expert_counts=good()["expert_counts"][0]), ["expert_counts", "shape [3, 8]"]),
        (changed(expert_counts=good()["expert_counts"].astype(float)), ["expert_counts", "float64"]),
        (changed(expert_counts=good()["expert_counts"][:1]), ["1 samples", "lengths has 2"]),
        (changed(expert_counts=np.zeros((2, 5, 8), np.int32)), ["5 layers", "3 MoE layers", "another model"]),
        (changed(expert_counts=np.zeros((2, 3, 10), np.int32)), ["10 experts", "has 8", "redundant experts"]),
        (changed(expert_counts=np.zeros((2, 3, 6), np.int32)), ["6 experts", "has 8", "another model"]),
        (changed(expert_counts=with_count(1, 2, 0, -3)), ["'1' MoE layer 2", "expert 0", "negative count -3"]),
        (
            changed(expert_counts=with_count(1, 2, 0, 5)),
            ["'1' MoE layer 2", "add up to 11", "12 = top_k 2 x length 6", "10"],
        ),
        (changed(expert_counts=np.where(np.arange(8) == 0, [[[8]], [[12]]], 0).repeat(3, 1)), ["at most once", "of 4"]),
        (changed(known_tokens=np.array([4, 7])), ["known_tokens 7", "0..6"]),
        (changed(known_tokens=np.array([4, 5])), ["add up to 12", "known_tokens 5"]),
        (changed(sample_ids=np.array(["a", "a"])), ["'a' occurs twice", "`prompt_ids`"]),
        (changed(sample_ids=np.array([7, 7])), ["'7' occurs twice"]),
        (changed(lengths=np.array([4, 2**62])), ["'1' has length 4611686018427387904, beyond"]),
        (changed(expert_counts=np.zeros((2, 4, 8), np.int32)), ["4 layers", "last 1 may be draft (MTP) layers: drop"]),
        (changed(expert_counts=with_count(1, 2, 0, 2**62, np.int64)), ["'1' MoE layer 2", "add up to"]),
        (changed(sample_ids=np.array(["a"])), ["sample_ids has 1 samples", "lengths has 2"]),
        (changed(prompt_ids=np.array([0, 1, 2])), ["prompt_ids has 3 samples", "lengths has 2"]),
        (changed(lengths=np.array([2**64 - 1, 6], np.uint64)), ["lengths holds 18446744073709551615", "beyond"]),
    ],
)
def test_broken_batches_name_sample_layer_and_value(arrays, words):
    with pytest.raises(RoutePackError) as caught:
        batch_from_arrays(arrays, SPEC, "some.npz")
    message = str(caught.value)
    assert message.startswith("some.npz")
    assert "\n" not in message
    for word in words:
        assert word in message


def routes(tokens_per_sample=(4, 6), dtype=np.uint8, rows=None):
    """Token-level routes: token t uses experts t mod 8 and (t + 1) mod 8 in every layer."""
    rows = tokens_per_sample if rows is None else rows
    ids = np.concatenate([np.stack([np.arange(n) % 8, (np.arange(n) + 1) % 8], axis=1) for n in rows])
    return {
        "lengths": np.array(tokens_per_sample), "offsets": np.concatenate([[0], np.cumsum(rows)]),
        "expert_ids": np.repeat(ids[:, None, :], 3, axis=1).astype(dtype),
    }  # fmt: skip


def test_token_routes_are_counted():
    batch = batch_from_arrays(routes(), SPEC)
    assert batch.expert_counts[0, 0].tolist() == [1, 2, 2, 2, 1, 0, 0, 0]
    assert batch.known_tokens.tolist() == [4, 6]


def test_missing_last_row_is_the_unknown_last_token():
    assert batch_from_arrays(routes(rows=(4, 5)), SPEC).known_tokens.tolist() == [4, 5]


def test_other_row_counts_are_refused_with_both_numbers():
    with pytest.raises(RoutePackError, match=r"sample '1' has 3 rows .* length of 6: expected 6, or 5"):
        batch_from_arrays(routes(rows=(4, 3)), SPEC)


def test_minus_one_is_unknown_and_adds_no_load():
    arrays = routes(dtype=np.int8)
    arrays["expert_ids"][6:8] = -1
    batch = batch_from_arrays(arrays, SPEC)
    assert batch.known_tokens.tolist() == [4, 4]
    assert batch.expert_counts[1].sum() == 3 * 2 * 4


def test_rows_of_one_expert_are_padding_and_counted(caplog):
    caplog.set_level("INFO", "routepack_tune")
    arrays = routes((4, 60), dtype=np.uint8)
    arrays["expert_ids"][[3, 63]] = 0  # verl: the last token of a sample is never routed
    arrays["expert_ids"][10:40] = 0  # a prefix from the cache
    arrays["expert_ids"][40] = 5
    with warnings.catch_warnings(action="error"):
        batch = batch_from_arrays(arrays, SPEC, "some.npz")
    assert batch.known_tokens.tolist() == [3, 28]
    assert (batch.expert_counts.sum(axis=2) == 2 * np.array([[3], [28]])).all()
    assert "some.npz: 33 of 64 rows of routes are padding" in caplog.text
    wrapped = routes(dtype=np.uint8)
    wrapped["expert_ids"][3] = -1 % 256  # 8 bits without a sign hold no -1
    assert batch_from_arrays(wrapped, SPEC).known_tokens.tolist() == [3, 6]


def test_top_1_ends_of_zero_are_padding_only_where_that_is_certain(caplog):
    caplog.set_level("INFO", "routepack_tune")
    spec, arrays = make_spec(layers=3, experts=8, top_k=1), routes((4,) * 6)
    arrays["expert_ids"] = arrays["expert_ids"][:, :, :1] % 7 + 1
    ends = np.arange(3, 24, 4)
    arrays["expert_ids"][ends] = 0
    assert batch_from_arrays(arrays, spec).known_tokens.tolist() == [3] * 6
    assert "6 of 24 rows" in caplog.text
    arrays["expert_ids"][5] = 0  # a token that expert 0 took in all layers: then the ends may be such ones too
    assert batch_from_arrays(arrays, spec).known_tokens.tolist() == [4] * 6
    arrays["expert_ids"][5] = 1
    arrays["expert_ids"][3] = 1  # one end was routed
    assert batch_from_arrays(arrays, spec).known_tokens.tolist() == [4] * 6
    few = routes((4,))
    few["expert_ids"] = few["expert_ids"][:, :, :1] % 7 + 1
    few["expert_ids"][3] = 0
    assert batch_from_arrays(few, spec).known_tokens.tolist() == [4]


def test_padded_routes_are_refused_with_the_line_that_helps():
    ids = np.zeros((2, 6, 3, 2), np.uint8)
    for arrays in (
        {"lengths": [4, 6], "expert_ids": ids},
        {"lengths": [4, 6], "expert_ids": ids, "offsets": [0, 4, 10]},
    ):
        with pytest.raises(RoutePackError, match=r"\[2, 6, 3, 2\].*expert_ids\[attention_mask.*give offsets"):
            batch_from_arrays(arrays, SPEC)


@pytest.mark.parametrize(
    ("prompts", "numbers"),
    [
        (["b", "a"], [0, 1]),
        (np.array(["x", "x"]), [0, 0]),
        (np.array([b"x", b"\xff"]), [0, 1]),
        (np.array([("u", 1), None], dtype=object), [0, 1]),
        ([("u", 1), ("u", 1)], [0, 0]),
        (np.array([7, 2**70], dtype=object), [0, 1]),
        (np.array([7, -3], dtype=object), [7, -3]),
        ([5.5, 5.5], [0, 0]),
        (np.array([9, 9], np.uint8), [9, 9]),
    ],
)
def test_prompts_are_told_apart_whatever_they_are(prompts, numbers):
    found = batch_from_arrays(changed(prompt_ids=prompts), SPEC).prompt_ids
    assert (found.dtype, found.tolist()) == (np.int64, numbers)


def test_samples_are_named_by_anything_and_lists_are_no_names(tmp_path):
    class Uid:
        def __init__(self, name):
            self.name = name

        def __str__(self):
            return self.name

    batch = batch_from_arrays(changed(sample_ids=np.array([Uid("p"), Uid("q")])), SPEC)
    assert batch.sample_ids.tolist() == ["p", "q"]
    assert batch_from_arrays(changed(sample_ids=[b"p", b"q"]), SPEC).sample_ids.tolist() == ["p", "q"]
    save_step_batch(tmp_path / "a.npz", batch)
    assert load_step_batch(tmp_path / "a.npz", SPEC).sample_ids.tolist() == ["p", "q"]
    with pytest.raises(RoutePackError, match=r"some: prompt_ids must be told apart .*numbers or text"):
        batch_from_arrays(changed(prompt_ids=np.array([{}, []], dtype=object)), SPEC, "some")
    np.savez(tmp_path / "b.npz", **changed(prompt_ids=np.array(["p", None])))
    with pytest.raises(RoutePackError, match=r"Python objects.*dtype=str"):
        load_step_batch(tmp_path / "b.npz", SPEC)


def test_half_unknown_token_is_refused():
    arrays = routes(dtype=np.int8)
    arrays["expert_ids"][6, 1] = -1
    with pytest.raises(RoutePackError, match=r"sample '1' MoE layer 1: token 2 mixes ids and -1"):
        batch_from_arrays(arrays, SPEC)


@pytest.mark.parametrize(("value", "hint"), [(8, "redundant"), (9, "redundant"), (-56, "8-bit")])
def test_ids_outside_the_experts_name_value_layer_and_cause(value, hint):
    arrays = routes(dtype=np.int8)
    arrays["expert_ids"][5, 2, 1] = value
    with pytest.raises(
        RoutePackError, match=rf"sample '1' MoE layer 2: token 1 has expert id {value}, outside 0..7.*{hint}"
    ):
        batch_from_arrays(arrays, SPEC)


def test_wide_ids_survive_narrow_stores():
    spec = make_spec(layers=3, experts=512, top_k=2)
    arrays = routes(dtype=np.uint16)
    arrays["expert_ids"][:] = np.array([510, 511])
    batch = batch_from_arrays(arrays, spec)
    assert batch.expert_counts[1, 0, 510:].tolist() == [6, 6]


def test_repeated_experts_in_a_row_are_refused():
    arrays, spec = routes(), make_spec(layers=3, experts=8, top_k=3)
    arrays["expert_ids"] = np.concatenate([arrays["expert_ids"], arrays["expert_ids"][:, :, :1] ^ 4], axis=2)
    assert batch_from_arrays(arrays, spec).known_tokens.tolist() == [4, 6]
    arrays["expert_ids"][0, 1] = 3, 3, 5
    with pytest.raises(RoutePackError, match=r"sample '0' MoE layer 1: token 0 names expert 3 twice.*layout"):
        batch_from_arrays(arrays, spec)


def test_rows_that_no_router_made_are_unknown_by_layer_and_few(caplog):
    caplog.set_level("INFO", "routepack_tune")
    arrays = routes((40, 60))
    arrays["expert_ids"][3:8, 1] = 0  # one layer alone was not captured
    arrays["expert_ids"][5, 2] = 7
    assert batch_from_arrays(arrays, SPEC, "some.npz").known_tokens.tolist() == [35, 60]
    assert "some.npz: 5 of 100 rows of routes are padding" in caplog.text
    assert "5 in MoE layer 1, 0 in MoE layer 0" in caplog.text
    assert caplog.records[-1].levelname == "INFO"
    arrays["expert_ids"][10:60] = 0
    assert batch_from_arrays(arrays, SPEC).known_tokens.tolist() == [5, 40]
    assert caplog.records[-1].levelname == "WARNING"
    for value in (0, 7, 255):
        arrays["expert_ids"][8:] = value
        with pytest.raises(
            RoutePackError, match=r"some\.npz: routes were not captured: 97 of 100 rows.*routing replay"
        ):
            batch_from_arrays(arrays, SPEC, "some.npz")


def test_rows_that_count_up_are_unknown_where_that_is_certain():
    spec, rng = make_spec(layers=3, experts=64, top_k=8), np.random.default_rng(0)
    ids = np.argsort(rng.random((20, 3, 64)), axis=2)[:, :, :8]
    ids[4:9] = np.arange(8)  # a buffer as it was made
    ids[15, 1] = np.arange(8)  # in one layer a router may
    arrays = {"lengths": [20], "offsets": [0, 20], "expert_ids": ids}
    assert batch_from_arrays(arrays, spec).known_tokens.tolist() == [15]
    assert batch_from_arrays(routes((1,)), SPEC).known_tokens.tolist() == [1]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_the_largest_value_without_a_sign_is_a_lost_minus_one(dtype):
    arrays = routes(dtype=dtype)
    arrays["expert_ids"][5, 2, 1] = np.iinfo(dtype).max
    with pytest.raises(RoutePackError, match=rf"MoE layer 2: token 1 has expert id {np.iinfo(dtype).max}.*lost -1"):
        batch_from_arrays(arrays, SPEC)
    arrays["expert_ids"][5, 2, 1] = 9
    with pytest.raises(RoutePackError, match="redundant"):
        batch_from_arrays(arrays, SPEC)
    wide = routes(dtype=np.int64)
    wide["expert_ids"][3] = -1
    assert batch_from_arrays({**wide, "expert_ids": wide["expert_ids"].view(np.uint64)}, SPEC).known_tokens[0] == 3


def test_batches_of_another_shape_are_refused_before_they_are_read(tmp_path, monkeypatch):
    from profiler.readers import npz

    monkeypatch.setattr(npz, "_array", None)  # nothing is unpacked
    for arrays, words in (
        (changed(expert_counts=np.zeros((2, 5, 8), np.int32)), "5 layers.*last 2 may be draft"),
        (changed(lengths=np.zeros(3, np.int32)), "2 samples, lengths has 3"),
        (changed(expert_counts=np.zeros((2, 3, 8))), "integers, got float64"),
        (changed(lengths=None), "no step batch"),
    ):
        np.savez_compressed(tmp_path / "a.npz", **arrays)
        with pytest.raises(RoutePackError, match=rf"a\.npz.*{words}"):
            load_step_batch(tmp_path / "a.npz", SPEC)


def test_stale_rows_raise_a_warning_with_the_range():
    arrays = routes((70,))
    rng = np.random.default_rng(0)
    order = np.argsort(rng.random((70, 3, 8)), axis=2)[:, :, :2]
    order[30:] = order[30]
    with pytest.warns(UserWarning, match=r"sample '0' rows 30-69"):
        batch_from_arrays({**arrays, "expert_ids": order}, SPEC)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch_from_arrays({**arrays, "expert_ids": np.argsort(rng.random((70, 3, 8)), axis=2)[:, :, :2]}, SPEC)


def test_offsets_must_fit():
    with pytest.raises(RoutePackError, match="offsets must rise from 0 to the 10 rows"):
        batch_from_arrays({**routes(), "offsets": np.array([0, 4, 9])}, SPEC)
    with pytest.raises(RoutePackError, match=r"offsets has 2 offsets, lengths has 2 samples"):
        batch_from_arrays({**routes(), "offsets": np.array([0, 10])}, SPEC)


@pytest.mark.parametrize("cut", [0, 1, 100, 0.5, 0.97])
def test_truncated_file_is_named(tmp_path, cut):
    path = tmp_path / "step.npz"
    np.savez_compressed(path, **good())
    data = path.read_bytes()
    path.write_bytes(data[: int(cut * len(data)) if isinstance(cut, float) else cut])
    with pytest.raises(RoutePackError, match=r"step\.npz cannot be read.*truncated or not an \.npz"):
        load_step_batch(path, SPEC)


def test_pickled_arrays_are_never_loaded(tmp_path):
    np.savez(tmp_path / "step.npz", lengths=np.array([{}], dtype=object))
    with pytest.raises(RoutePackError, match="pickle"):
        load_step_batch(tmp_path / "step.npz", SPEC)


def test_foreign_files_and_missing_ones(tmp_path):
    (tmp_path / "a.npz").write_text("hello")
    np.save(tmp_path / "b.npy", np.arange(3))
    for name, words in (("a.npz", "truncated or not"), ("b.npy", "truncated or not"), ("c.npz", "not found")):
        with pytest.raises(RoutePackError, match=words):
            load_step_batch(tmp_path / name, SPEC)


def test_save_then_load_is_the_same_and_bytes_repeat(tmp_path):
    batch = make_step_batch(SPEC, WorkloadParams(num_prompts=3, rollouts=2, median_tokens=40, max_tokens=90))
    save_step_batch(tmp_path / "a.npz", batch)
    save_step_batch(tmp_path / "b.npz", batch)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert load_step_batch(tmp_path / "a.npz", SPEC).data_hash == batch.data_hash


def test_cap_error_names_sample_length_and_way_out(tmp_path):
    path = tmp_path / "some.npz"
    np.savez(path, **changed(sample_ids=np.array(["x", "y"])))
    load_step_batch(path, SPEC, 6)
    with pytest.raises(RoutePackError, match=r"some\.npz: Sample y has 6 tokens.* = 5 .*at least 6"):
        load_step_batch(path, SPEC, 5)


def test_step_files_from_folder_file_glob_and_list(tmp_path):
    for name in ("b.npz", "a.npz", "c.txt"):
        (tmp_path / name).write_text("")
    assert [p.name for p in list_step_files(tmp_path)] == ["a.npz", "b.npz"]
    assert [p.name for p in list_step_files(str(tmp_path / "b*"))] == ["b.npz"]
    assert [p.name for p in list_step_files([tmp_path / "b.npz", tmp_path / "a.npz"])] == ["b.npz", "a.npz"]
    (tmp_path / "empty").mkdir()
    for wrong in (tmp_path / "empty", tmp_path / "nowhere", str(tmp_path / "x*.npz")):
        with pytest.raises(RoutePackError):
            list_step_files(wrong)


def test_objects_are_never_pickled_into_a_file(tmp_path):
    batch = make_step_batch(SPEC, WorkloadParams(num_prompts=3, rollouts=2, median_tokens=40, max_tokens=90))
    odd = replace(batch, prompt_ids=np.array([{}] * batch.num_samples, dtype=object))
    with pytest.raises(RoutePackError, match="prompt_ids holds Python objects"):
        save_step_batch(tmp_path / "odd.npz", odd)
    assert not list(tmp_path.iterdir())

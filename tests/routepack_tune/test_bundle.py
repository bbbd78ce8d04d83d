"""Bundles: whole, checked, light, and true to their device."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
from edits import edited, said, set_at
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S

from profiler import DeviceFingerprint, RoutePackError, Topology, compare_fingerprints, fingerprint_device
from profiler.files import content_hash
from routepack_tune import bundle as bundles
from routepack_tune import load_planner, load_step_batch
from routepack_tune.bundle import json_that_is_yaml, untuned_planner, write_bundle
from routepack_tune.cli import main
from search import StopCriterion

H200 = DeviceFingerprint("cuda", "nvidia", "sm_90", "NVIDIA H200", 132, 141, "NVLink 450 GB/s", 8, {}, "measured")


@pytest.fixture
def planner(job):
    return untuned_planner(job.costmodel, job.settings())


@pytest.fixture
def bundle(job, planner):
    return write_bundle(job.folder / "bundle", planner, {"study": "s", "trial": 1})


def edit(bundle, rehash=False, **changes):
    path = bundle / "planner.yaml"
    document = {**json.loads(path.read_text()), **changes}
    if rehash:
        document.pop("content_hash")
        document["content_hash"] = content_hash(document)
    path.write_text(json.dumps(document))


def test_save_load_same_plan(job, bundle, planner):
    loaded = load_planner(bundle)
    assert loaded.params == planner.params
    assert loaded.spec == planner.spec
    assert loaded.provenance == {"study": "s", "trial": 1}
    batch = load_step_batch(job.step, planner.spec)
    assert loaded.plan(batch).plan_hash == planner.plan(job.step).plan_hash
    assert loaded.plan(loaded.batch(**job.arrays())).plan_hash == planner.plan(job.step).plan_hash


def test_stream_plans_with_the_bundle(job, planner):
    batch = planner.batch(**job.arrays())
    with planner.stream(seed=1) as stream:
        for i in range(batch.num_samples):
            stream.add(batch.sample_ids[i], batch.lengths[i], batch.expert_counts[i], batch.known_tokens[i])
        sealed, plan = stream.seal(order=batch.sample_ids)
    assert sealed.data_hash == batch.data_hash
    assert plan.max_tokens == planner.max_tokens


def test_planner_file_is_yaml_and_json(bundle):
    import yaml

    text = (bundle / "planner.yaml").read_text()
    assert yaml.safe_load(text) == json.loads(text)
    tricky = {"a": 3e-6, "b": ["4e-7", 5e-08, -1e22], "c": 'x": 3e-06'}
    assert yaml.safe_load(json_that_is_yaml(tricky)) == json.loads(json_that_is_yaml(tricky)) == tricky
    assert sorted(path.name for path in bundle.iterdir()) == ["planner.yaml", "tables.npz"]


def test_bytes_repeat(job, planner, bundle):
    again = write_bundle(job.folder / "again", planner, {"study": "s", "trial": 1})
    for name in ("planner.yaml", "tables.npz"):
        assert (again / name).read_bytes() == (bundle / name).read_bytes()


def test_batch_errors_name_the_sample(bundle, job):
    arrays = job.arrays()
    arrays["lengths"][3] += 2
    del arrays["known_tokens"]
    with pytest.raises(RoutePackError, match="'p0r3'"):
        load_planner(bundle).batch(**arrays)


@pytest.mark.parametrize(
    ("changes", "rehash", "words"),
    [
        ({"schema_version": 9}, True, "schema_version 9"),
        ({"max_tokens_per_microbatch": 512}, False, "content_hash"),
        ({"max_tokens_per_microbatch": 512}, True, "another model, topology or cap"),
        ({"files": {"../tables.npz": "0"}}, True, "no other file is read"),
        ({"files": {"/etc/passwd": "0"}}, True, "no other file is read"),
        ({"params": {"nonsense": 1}}, True, "nonsense"),
        ({"params": {"max_iterations": 0}}, True, "max_iterations to be an integer from 1"),
        ({"topology": {"data_parallel_size": 0}}, True, "data_parallel_size"),
        ({"fingerprint": {"kind": "cpu"}}, True, "fingerprint"),
    ],
)
def test_edited_bundles_are_refused(bundle, changes, rehash, words):
    edit(bundle, rehash, **changes)
    with pytest.raises(RoutePackError, match=words):
        load_planner(bundle)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("model", "num_experts"), 2**63, "num_experts|64 bits"),
        (("model", "num_experts"), "8", "num_experts"),
        (("model", "top_k"), 4, "another model, topology or cap"),
        (("model", "moe_layers"), [True], "model"),
        (("topology", "expert_model_parallel_size"), 1, "another model, topology or cap"),
        (("topology", "data_parallel_size"), 2**62, "data_parallel_size"),
        (("max_tokens_per_microbatch",), True, "max_tokens_per_microbatch"),
        (("params", "starts"), 600, "starts to be an integer from 1 to 64"),
        (("params", "sequence_alignment"), 512, "beyond the cap of 256"),
        (("params", "ranks_per_node"), 3, "ranks_per_node = 3 does not divide"),
        (("params", "padding_routes"), "constant 8", "experts 0 to 7"),
        (("params", "hot_temperature"), None, "hot_temperature"),
        (("notes",), ["faster"], "notes are not those"),
        (("notes",), "x", "notes"),
        (("provenance",), [], "provenance"),
        (("provenance", "tables_hash"), "0" * 64, "provenance names tables"),
        (("provenance", "default_params"), {"nonsense": 1}, "nonsense"),
        (("provenance", "default_params"), {"starts": -1}, "starts"),
        (("provenance", "hidden_planning_s"), -1.0, "hidden_planning_s"),
        (("provenance", "cost_model"), {"half_log": {"experts": "wide"}}, "half_log"),
        (("provenance", "data_hashes"), [1], "data_hashes"),
        (("provenance", "long"), "x" * 2**22, "characters"),
        (("fingerprint", "units"), "many", "units"),
        (("fingerprint", "software"), {"torch": 2}, "software|torch"),
        (("dtype",), 16, "dtype"),
        (("surplus",), 1, "surplus"),
    ],
)
def test_bundles_that_contradict_themselves_are_refused(bundle, place, value, words):
    document = json.loads((bundle / "planner.yaml").read_text())
    set_at(document, place, value)
    edit(bundle, rehash=True, **document)
    with pytest.raises(RoutePackError, match=words) as caught:
        load_planner(bundle)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def edited_bundle(make_job):
    job = make_job()
    made = untuned_planner(job.costmodel, job.settings())
    known = {"study": "s", "trial": 1, "tables_hash": made.tables.tables_hash, "hidden_planning_s": 2.0}
    folder = write_bundle(job.folder / "bundle", made, known)
    return folder, json.loads((folder / "planner.yaml").read_text()), job.step


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_edited_bundles_are_refused_or_plan(edited_bundle, data):
    folder, document, step = edited_bundle
    changed = data.draw(edited(document, keep=("schema_version", "fingerprint")))
    if data.draw(st.booleans()):
        changed.pop("content_hash", None)
        with contextlib.suppress(ValueError):
            changed["content_hash"] = content_hash(changed)
    (folder / "planner.yaml").write_text(json.dumps(changed))
    planner, refused = said(lambda: load_planner(folder, warm_up=False))
    if planner is None:
        assert "\n" not in refused
        return
    assert (planner.topology, planner.max_tokens) == (Topology(2, expert_model_parallel_size=2), 256)
    plan, refused = said(lambda: planner.plan(step, stop=StopCriterion(max_iterations=1)))
    if plan is None:
        assert planner.params.max_received_rows > 0  # a limit that is legal to ask and may be too tight for any plan
        assert "above max_received_rows" in refused
        return
    assert plan.num_rows >= 1


def test_damaged_files_are_refused(bundle, tmp_path):
    data = (bundle / "tables.npz").read_bytes()
    (bundle / "tables.npz").write_bytes(data[:-10])
    with pytest.raises(RoutePackError, match="does not match its hash"):
        load_planner(bundle)
    (bundle / "tables.npz").unlink()
    with pytest.raises(RoutePackError, match=r"tables\.npz is missing"):
        load_planner(bundle)
    for text, words in (("{", "cannot be read"), ("[]", "schema_version None"), ("model: x\n", "cannot be read")):
        (bundle / "planner.yaml").write_text(text)
        with pytest.raises(RoutePackError, match=words):
            load_planner(bundle)
    with pytest.raises(RoutePackError, match="is no bundle"):
        load_planner(tmp_path)


def for_device(job, planner, fingerprint):
    return write_bundle(job.folder / "bundle", replace(planner, fingerprint=fingerprint), {})


def test_exact_device_is_used_silently(bundle):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_planner(bundle).notes == ("synthetic tables",)


def test_renamed_device_is_near_and_warns(job, planner):
    renamed = replace(fingerprint_device("cpu"), name="the same chip in other words")
    assert compare_fingerprints(renamed, fingerprint_device("cpu")).level == "near"
    with pytest.warns(UserWarning, match="near"):
        load_planner(for_device(job, planner, renamed))


def test_only_the_first_rank_warns(job, planner, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    path = for_device(job, planner, replace(fingerprint_device("cpu"), name="other words"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_planner(path)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_other_device_is_refused_unless_forced(job, planner, monkeypatch, device):
    if device == "gpu":
        monkeypatch.setattr("profiler.fingerprint_device", lambda kind=None: replace(H200, arch="sm_80", units=108))
        other = H200
    else:
        other = replace(fingerprint_device("cpu"), arch="riscv64")
    path = for_device(job, planner, other)
    with pytest.raises(RoutePackError, match=r"another device.*allow_mismatch"):
        load_planner(path)
    with pytest.warns(UserWarning, match="different"):
        assert load_planner(path, allow_mismatch=True).plan(job.step).num_rows >= 1


def test_a_planning_host_needs_no_gpu_and_no_torch(job, planner, blocker):
    # Planners run on CPU-side drivers too: a measured bundle of a GPU was refused there as "another device".
    path = for_device(job, planner, H200)
    code = blocker + (
        "import subprocess\n"
        "def refuse(*a, **k): raise AssertionError(f'a process was started: {a}')\n"
        "subprocess.Popen = refuse\n"
        "import routepack_tune\n"
        f"planner = routepack_tune.load_planner({str(path)!r})\n"
        "print(planner.notes[-1])\n"
    )
    with_no_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=with_no_gpu, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"times were measured on {H200.name} (sm_90); this host has no GPU to compare with\n"


@pytest.mark.parametrize("origin", ["published", "measured"])
def test_times_of_a_gpu_pass_where_nothing_can_be_compared(job, planner, monkeypatch, capsys, origin):
    path = for_device(job, planner, replace(H200, origin=origin))
    monkeypatch.setattr("profiler.fingerprint_device", lambda kind=None: fingerprint_device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "no GPU to compare" in load_planner(path).notes[-1]
    assert main(["plan", str(job.step), "--bundle", str(path), "--out", str(job.folder / "plan.json")]) == 0
    err = capsys.readouterr().err
    assert err.startswith("Note: Bundle")
    assert len(err.splitlines()) == 1


def test_published_times_are_compared_with_a_visible_gpu(job, planner, monkeypatch):
    path = for_device(job, planner, replace(H200, origin="published"))
    monkeypatch.setattr("profiler.fingerprint_device", lambda kind=None: H200)
    with pytest.warns(UserWarning, match="near"):
        load_planner(path)
    monkeypatch.setattr("profiler.fingerprint_device", lambda kind=None: replace(H200, arch="sm_80", units=108))
    with pytest.raises(RoutePackError, match="sm_80"):
        load_planner(path)


def test_one_rank_of_a_host_asks_for_its_device(job, bundle, monkeypatch):
    def asked(kind=None):
        raise AssertionError("asked for a device")

    monkeypatch.setattr("profiler.fingerprint_device", asked)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert load_planner(bundle).plan(job.step).num_rows >= 1
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(AssertionError, match="asked"):
        load_planner(bundle)


def test_cli_refuses_and_forces(job, planner, capsys):
    path = for_device(job, planner, replace(fingerprint_device("cpu"), arch="riscv64"))
    arguments = ["plan", str(job.step), "--bundle", str(path), "--out", str(job.folder / "plan.json")]
    assert main(arguments) == 1
    assert "--allow-mismatch" in capsys.readouterr().err
    assert not (job.folder / "plan.json").exists()
    assert main([*arguments, "--allow-mismatch"]) == 0
    assert "Warning: " in capsys.readouterr().err


def test_existing_folders_are_never_swept_away(job, planner, monkeypatch):
    mine = job.folder / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("x")
    with pytest.raises(RoutePackError, match="not replaced"):
        write_bundle(mine, planner, {})
    monkeypatch.chdir(mine)
    for out in (".", "..", job.folder):
        with pytest.raises(RoutePackError, match="not replaced"):
            write_bundle(out, planner, {})
    assert (mine / "thesis.txt").exists()


def test_failed_write_keeps_the_old_bundle(job, planner, bundle, monkeypatch):
    before = {path.name: path.read_bytes() for path in bundle.iterdir()}

    def fail(*_):
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr(bundles, "write_text", fail)
    with pytest.raises(OSError, match="No space"):
        write_bundle(bundle, planner, {"other": 1})
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before
    assert [path.name for path in job.folder.iterdir() if path.name.startswith(".")] == []


def test_training_needs_numpy_and_numba_alone(job, bundle, blocker):
    code = f"""
{blocker}
import numpy as np, sys
from routepack_tune import load_planner
planner = load_planner({str(bundle)!r})
with np.load({str(job.step)!r}) as archive:
    plan = planner.plan(planner.batch(**archive))
plan.save({str(job.folder / "light.json")!r})
print(plan.plan_hash)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == load_planner(bundle).plan(job.step).plan_hash


def test_unknown_tokens_survive_the_planner(job, bundle):
    arrays = job.arrays()
    arrays["expert_counts"] = arrays["expert_counts"].copy()
    arrays["expert_counts"][4] = 0
    arrays["known_tokens"] = np.where(np.arange(20) == 4, 0, arrays["lengths"])
    planner = load_planner(bundle)
    assert planner.plan(planner.batch(**arrays)).counters["unknown_samples"] == 1

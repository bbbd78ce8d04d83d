import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from profiler import DeviceFingerprint, RoutePackError, compare_fingerprints, fingerprint_device

ROOT = Path(__file__).parents[2]

H200 = DeviceFingerprint(
    kind="cuda", vendor="nvidia", arch="sm_90", name="NVIDIA H200", units=132, memory_gib=141, interconnect="450 GB/s",
    ranks_per_node=8, software={"torch": "2.13.0", "driver": "580.1"},
)  # fmt: skip


def changed(**facts):
    return dataclasses.replace(H200, **facts)


def test_the_same_device_is_exact():
    match = compare_fingerprints(H200, changed())
    assert (match.level, match.reasons) == ("exact", ())


@pytest.mark.parametrize(
    ("facts", "level", "word"),
    [
        # FC-55: another wording of the name, or a variant, is used with a warning; other silicon is refused.
        ({"name": "NVIDIA H200 NVL"}, "near", "name"),
        ({"name": "NVIDIA H200 NVL", "interconnect": "", "ranks_per_node": 4}, "near", "interconnect"),
        ({"software": {"torch": "2.12.0", "driver": "580.1"}}, "near", "torch is 2.12.0, expected 2.13.0"),
        ({"software": {"torch": "2.13.0"}}, "near", "driver is absent"),
        ({"memory_gib": 140}, "near", "memory"),
        ({"units": 0}, "near", "units"),
        ({"name": "NVIDIA H200", "units": 114, "memory_gib": 80}, "different", "units"),
        ({"name": "NVIDIA H100 80GB HBM3", "memory_gib": 80}, "different", "memory is 80 GiB, expected 141 GiB"),
        ({"arch": "sm_100", "units": 148}, "different", "arch"),
        ({"kind": "cpu", "vendor": "AuthenticAMD", "arch": "x86_64", "units": 132}, "different", "kind"),
    ],
)
def test_hardware_decides_and_the_name_alone_never_does(facts, level, word):
    match = compare_fingerprints(H200, changed(**facts))
    assert match.level == level
    assert any(word in reason for reason in match.reasons)


def test_origin_does_not_count():
    assert compare_fingerprints(H200, changed(origin="published")).level == "exact"


def test_a_fingerprint_survives_its_dictionary():
    assert DeviceFingerprint.from_dict(H200.to_dict()) == H200
    with pytest.raises(RoutePackError, match="damaged"):
        DeviceFingerprint.from_dict({"kind": "cpu"})


def test_the_cpu_is_known_without_importing_torch():
    code = (
        "import sys; from profiler import fingerprint_device; f = fingerprint_device('cpu'); "
        "print(f.kind, f.units >= 1, f.memory_gib >= 1, bool(f.arch), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["cpu", "True", "True", "True", "False"]


def test_an_absent_cuda_device_is_a_clear_error(monkeypatch):
    monkeypatch.setattr("profiler.device._cuda_visible", lambda: False)
    with pytest.raises(RoutePackError, match="--device cpu"):
        fingerprint_device("cuda")
    assert fingerprint_device(None).kind == "cpu"
    with pytest.raises(RoutePackError, match="tpu"):
        fingerprint_device("tpu")

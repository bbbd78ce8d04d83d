import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from profiler import DeviceFingerprint, RoutePackError, compare_fingerprints, fingerprint_device
from profiler.device.fingerprint import driver_facts, network_cards, nvlink_total, own_cores, usable_cores

ROOT = Path(__file__).parents[3]

H200 = DeviceFingerprint(
    kind="cuda", vendor="nvidia", arch="sm_90", name="NVIDIA H200", units=132, memory_gib=141, interconnect="450 GB/s",
    ranks_per_node=8, software={"torch": "2.13.0", "driver": "580.1"}, l2_mib=50, pcie="gen 5 x16",
    network="8 x 400 Gb/s InfiniBand", clock_max_mhz=1980,
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
        # Other cards with the same arch code: H20, GH200 with 96 GiB, a slice of the card itself.
        ({"name": "NVIDIA H20", "units": 78, "memory_gib": 96, "l2_mib": 60}, "different", "units is 78"),
        ({"name": "NVIDIA GH200", "memory_gib": 96}, "different", "memory"),
        ({"units": 60, "memory_gib": 70, "l2_mib": 25}, "different", "l2 is 25 MiB, expected 50 MiB"),
        ({"arch": "sm_100", "units": 148}, "different", "arch"),
        # The same silicon in another machine.
        ({"pcie": "gen 4 x16"}, "near", "pcie is gen 4 x16, expected gen 5 x16"),
        ({"network": "1 x 25 Gb/s Ethernet"}, "near", "network"),
        ({"name": "NVIDIA H200 NVL", "clock_max_mhz": 1785}, "near", "clock_max_mhz"),
        ({"software": {"torch": "2.13.0", "driver": "580.1", "flash-attn": "2.8.3"}}, "near", "flash-attn is 2.8.3"),
        # What one side does not know is no other hardware.
        ({"memory_gib": 0}, "near", "memory is unknown"),
        ({"units": 0, "memory_gib": 0, "interconnect": "", "l2_mib": 0, "pcie": ""}, "near", "units"),
        ({"kind": "cpu", "vendor": "AuthenticAMD", "arch": "x86_64", "units": 132}, "different", "kind"),
    ],
)
def test_hardware_decides_and_the_name_alone_never_does(facts, level, word):
    match = compare_fingerprints(H200, changed(**facts))
    assert match.level == level
    assert any(word in reason for reason in match.reasons)


def test_another_wording_of_the_name_alone_is_near_and_the_only_reason():
    for alias in ("NVIDIA H200 141GB HBM3e", "H200 SXM", "nvidia h200"):
        match = compare_fingerprints(H200, changed(name=alias))
        assert (match.level, len(match.reasons)) == ("near", 1)


def test_facts_that_older_files_lack_are_no_difference():
    old = {name: value for name, value in H200.to_dict().items()
           if name not in ("l2_mib", "pcie", "network", "clock_max_mhz")}  # fmt: skip
    assert compare_fingerprints(DeviceFingerprint.from_dict(old), H200).level == "exact"
    assert compare_fingerprints(H200, DeviceFingerprint.from_dict(old)).reasons == ()


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
    pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RoutePackError, match="--device cpu"):
        fingerprint_device("cuda")
    assert fingerprint_device(None).kind == "cpu"
    with pytest.raises(RoutePackError, match="tpu"):
        fingerprint_device("tpu")


def port(system, card, rate, layer, state="4: ACTIVE"):
    folder = system / "class" / "infiniband" / card / "ports" / "1"
    folder.mkdir(parents=True)
    for name, text in (("rate", rate), ("state", state), ("link_layer", layer)):
        (folder / name).write_text(text + "\n")


def test_network_cards_are_counted_by_rate_and_kind(tmp_path):
    assert network_cards(tmp_path) == ""
    for name, speed, real in (("eth0", "25000", True), ("eth1", "-1", True), ("veth0", "10000", False)):
        folder = tmp_path / "class" / "net" / name
        folder.mkdir(parents=True)
        (folder / "speed").write_text(speed)
        if real:
            (folder / "device").mkdir()
    assert network_cards(tmp_path) == "1 x 25 Gb/s Ethernet"
    port(tmp_path, "mlx5_0", "400 Gb/sec (4X NDR)", "InfiniBand")
    port(tmp_path, "mlx5_1", "400 Gb/sec (4X NDR)", "InfiniBand")
    port(tmp_path, "mlx5_2", "200 Gb/sec (2X NDR)", "Ethernet")
    port(tmp_path, "mlx5_3", "10 Gb/sec (4X SDR)", "InfiniBand", state="1: DOWN")
    assert network_cards(tmp_path) == "2 x 400 Gb/s InfiniBand, 1 x 200 Gb/s Ethernet"


SMI = """#!/bin/sh
case "$*" in
  *nvlink*) printf 'GPU 0: NVIDIA H200 (UUID: GPU-1)\\n\\t Link 0: 26.562 GB/s\\n\\t Link 1: 26.562 GB/s\\n' ;;
  *) echo "580.65.06, 5, 16, 1980" ;;
esac
"""


def test_the_drivers_facts_are_read_from_its_command(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert driver_facts("GPU-1") == {"driver": "580.65.06", "pcie": "gen 5 x16", "clock_max_mhz": "1980"}
    assert nvlink_total("GPU-1") == "NVLink 53 GB/s"
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert driver_facts("GPU-1") == {"driver": "", "pcie": "", "clock_max_mhz": "0"}
    assert nvlink_total("GPU-1") == ""


def test_a_containers_quota_limits_the_cores(monkeypatch):
    cores = len(own_cores())
    for said, expected in (("150000 100000", 1), ("50000 100000", 1), ("999999999 10", cores), ("max 100000", cores)):
        monkeypatch.setattr("profiler.device.fingerprint.read_text", lambda path, said=said: said)
        assert usable_cores() == expected
    # The older form is two files.
    for quota, expected in (("100000", 1), ("-1", cores)):
        told = {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": "100000"}
        monkeypatch.setattr(
            "profiler.device.fingerprint.read_text", lambda path, told=told: told.get(path.rpartition("/")[2], "")
        )
        assert usable_cores() == expected

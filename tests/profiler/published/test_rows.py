import shutil
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from profiler import DeviceFingerprint, Measurements, RoutePackError, import_published
from profiler.cases.case import OPERATIONS, moved_elements

SHARED = Path(__file__).parents[3].parent / "shared" / "data" / "gpu-timings"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="shared/data/gpu-timings is not beside the repository")

HEAD = "framework,version,device,op_name,kernel_source"
LEFT = "TRTLLM,1.0,NVIDIA H200"
TABLES = {
    "trtllm/1.0/moe_perf.txt": [
        f"{HEAD},moe_dtype,num_tokens,hidden_size,inter_size,topk,num_experts,moe_tp_size,moe_ep_size,distribution,latency",
        f"{LEFT},moe,flow,float16,64,32,48,2,8,2,4,balanced,0.5",
        f"{LEFT},moe,flow,float16,64,32,48,2,8,2,4,power_law_1.2,0.75",
        f"{LEFT},moe,flow,fp8_block,64,32,48,2,8,2,4,balanced,0.25",
    ],
    "trtllm/1.0/context_attention_perf.txt": [
        f"{HEAD},batch_size,isl,num_heads,num_key_value_heads,head_dim,window_size,beam_width,attn_dtype,kv_cache_dtype,step,latency",
        f"{LEFT},context_attention,flow,2,16,8,2,64,0,1,float16,float16,0,0.1",
        f"{LEFT},context_attention,flow,2,16,8,2,64,4,1,float16,float16,0,0.05",
        f"{LEFT},context_attention,flow,2,16,8,2,64,4,1,float16,fp8,0,0.04",
    ],
    "trtllm/1.0/context_mla_perf.txt": [
        f"{HEAD},mla_dtype,kv_cache_dtype,num_heads,batch_size,isl,tp_size,step,latency",
        f"{LEFT},mla_context,default,float16,float16,16,1,32,8,0,0.2",
    ],
    "trtllm/1.0/gemm_perf.txt": [f"{HEAD},gemm_dtype,m,n,k,latency", f"{LEFT},gemm,flow,float16,5,6,7,0.01"],
    "nccl/2.9/nccl_perf.txt": [
        f"{HEAD},nccl_dtype,num_gpus,message_size,latency",
        f"{LEFT},alltoall,NCCL,half,8,1024,0.02",
        f"{LEFT},alltoall,NCCL,int8,8,1024,0.01",
        f"{LEFT},all_gather,NCCL,half,8,1024,0.9",
    ],
}
SYSTEM = """
gpu: {mem_capacity: 151397597184, sm_version: 90}
node: {num_gpus_per_node: 8, intra_node_bw: 450000000000}
"""


@pytest.fixture
def folder(tmp_path):
    """The package's layout: systems/data/<gpu>/<framework>/<version>/<op>_perf.txt beside systems/<gpu>.yaml."""
    root = tmp_path / "systems" / "data" / "h200_sxm"
    for name, lines in TABLES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("\n".join(lines) + "\n")
    (tmp_path / "systems" / "h200_sxm.yaml").write_text(SYSTEM)
    return root


def one(measurements, **equals):
    rows = measurements.select(**equals)
    assert len(rows) == 1
    return {name: column[0] for name, column in rows.rows.items()}


def has(row, **expected):
    assert {name: row[name] for name in expected} == expected


def test_expert_rows_are_those_of_rank_zero(folder):
    experts = import_published(folder).select(op="experts")
    assert len(experts) == 2
    even = one(experts, pattern="balanced")
    # 64 tokens x 2 choices over 8 experts on 4 ranks: 2 local experts of 16 rows each; the width is cut by 2.
    has(even, rows=32, active_experts=2, padded_rows=256, max_rows=16, local_experts=2, hidden_size=32, inter_size=24,
        router_tokens=64, num_experts=8, dtype="float16", kernel="flow", flag="")  # fmt: skip
    assert even["time_us"] == pytest.approx(500)
    assert one(experts, pattern="power_law_1.2")["rows"] > 32


def test_attention_rows_count_causal_pairs_within_the_window(folder):
    measurements = import_published(folder)
    full = one(measurements, op="attention", window=0, v_head_dim=64)
    has(
        full,
        tokens=32,
        pairs=2 * 16 * 17 // 2,
        num_sequences=2,
        max_length=16,
        num_heads=8,
        num_kv_heads=2,
        qk_head_dim=64,
    )
    assert one(measurements, op="attention", window=4)["pairs"] == 2 * (1 + 2 + 3 + 4 * 13)
    latent = one(measurements, op="attention", v_head_dim=128)
    has(latent, qk_head_dim=192, num_heads=16, num_kv_heads=16, tokens=32, num_sequences=1)


def test_dense_and_exchange_rows(folder):
    measurements = import_published(folder)
    has(one(measurements, op="dense"), tokens=5, n=6, k=7)
    # Messages are counted in elements, of two bytes or one; other collectives are not read.
    has(one(measurements, op="alltoall", dtype="float16"), bytes=2048, ranks=8)
    has(one(measurements, op="alltoall", dtype="int8"), bytes=1024, ranks=8)


def test_what_is_imported_says_where_it_comes_from(folder):
    measurements = import_published(folder)
    assert set(measurements.rows["direction"]) == {"forward"}
    assert set(measurements.rows["source"]) == {"published"}
    assert measurements.meta["backward"] == "absent"
    assert measurements.meta["system"]["node"]["intra_node_bw"] == 450000000000
    assert set(measurements.meta["provenance"]["files"]) == set(TABLES)
    fingerprint = DeviceFingerprint.from_dict(measurements.meta["fingerprint"])
    assert (fingerprint.kind, fingerprint.arch, fingerprint.units, fingerprint.memory_gib) == (
        "cuda",
        "sm_90",
        132,
        141,
    )
    assert (fingerprint.interconnect, fingerprint.ranks_per_node, fingerprint.origin) == ("450 GB/s", 8, "published")


def test_an_excerpt_without_optional_tables_is_enough(folder):
    for name in TABLES:
        if "moe" not in name:
            (folder / name).unlink()
    assert set(import_published(folder).rows["op"]) == {"experts"}


def test_both_layouts_give_the_same_rows(folder, tmp_path):
    import pyarrow.csv
    import pyarrow.parquet

    other = tmp_path / "h200_sxm"
    for name in TABLES:
        framework, version, table = name.split("/")
        (other / f"{framework}-{version}").mkdir(parents=True, exist_ok=True)
        rows = pyarrow.csv.read_csv(folder / name)
        pyarrow.parquet.write_table(rows, other / f"{framework}-{version}" / table.replace(".txt", ".parquet"))
    (other / "system.yaml").write_text(SYSTEM)
    first, second = import_published(folder), import_published(other)
    assert first.meta["fingerprint"] == second.meta["fingerprint"]
    for name, column in first.rows.items():
        if name != "repeats_us":
            np.testing.assert_array_equal(column, second.rows[name])


def test_tables_of_other_kernels_do_not_replace_the_plain_ones(folder):
    before = import_published(folder).rows["time_us"].tolist()
    wide = folder / "trtllm" / "1.0" / "wideep_moe_perf.txt"
    wide.write_text("\n".join(TABLES["trtllm/1.0/moe_perf.txt"]).replace("0.5", "9.5"))
    assert import_published(folder).rows["time_us"].tolist() == before


def test_the_newest_version_of_trtllm_is_read_and_the_others_are_named(folder):
    for name, factor in (("trtllm/1.10", 3), ("vllm/9.0", 5)):
        (folder / name).mkdir(parents=True)
        lines = TABLES["trtllm/1.0/moe_perf.txt"]
        changed = [lines[0]] + [line.rsplit(",", 1)[0] + f",{factor}" for line in lines[1:]]
        (folder / name / "moe_perf.txt").write_text("\n".join(changed) + "\n")
    measurements = import_published(folder)
    assert set(measurements.rows["time_us"]) == {3000.0, 20.0, 10.0}
    assert measurements.meta["provenance"]["passed_over"] == ["trtllm-1.0", "vllm-9.0"]


def test_importing_twice_gives_the_same(folder):
    first, second = import_published(folder), import_published(folder)
    assert first.meta == second.meta
    assert first.rows["rows"].tolist() == second.rows["rows"].tolist()


def test_wrong_folders_are_clear_errors(folder, tmp_path):
    with pytest.raises(RoutePackError, match="not a folder"):
        import_published(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RoutePackError, match="holds no moe_perf table"):
        import_published(tmp_path / "empty")


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_the_hint_names_a_folder_that_can_be_imported(folder, levels):
    other = folder.with_name("h100_sxm")
    shutil.copytree(folder, other)
    with pytest.raises(RoutePackError, match="Give one GPU of it: ") as refused:
        import_published(folder.parents[levels - 1])
    named = str(refused.value).partition("Give one GPU of it: ")[2].rstrip(".").split(", ")
    assert named == [str(other), str(folder)]
    assert all(len(import_published(path)) for path in named)


def test_one_GPU_does_not_pass_for_a_folder_of_tables(tmp_path):
    """``gpu/framework-version/`` looks like ``framework/version/`` from one level above."""
    path = tmp_path / "timings" / "h200_sxm" / "trtllm-1.0" / "moe_perf.txt"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(TABLES["trtllm/1.0/moe_perf.txt"]) + "\n")
    with pytest.raises(RoutePackError, match=r"Give one GPU of it: .*timings/h200_sxm"):
        import_published(tmp_path / "timings")
    with pytest.raises(RoutePackError, match=r"Give the whole folder of the GPU: .*h200_sxm"):
        import_published(path.parent)


def test_tables_are_chosen_by_name_and_errors_list_those_present(folder):
    for name, factor in (("sglang/0.5.8.post1", 3), ("vllm/0.9", 5), ("vllm/0.10", 7)):
        (folder / name).mkdir(parents=True)
        lines = TABLES["trtllm/1.0/moe_perf.txt"]
        changed = [lines[0]] + [line.rsplit(",", 1)[0] + f",{factor}" for line in lines[1:]]
        (folder / name / "moe_perf.txt").write_text("\n".join(changed) + "\n")
    for wanted, time_us in (("sglang", 3000.0), ("SGLang-0.5.8.post1", 3000.0), ("vllm/0.9", 5000.0), (None, 500.0)):
        found = import_published(folder, tables=wanted)
        assert found.select(op="experts", pattern="balanced").rows["time_us"].tolist() == [time_us]
    assert found.meta["fingerprint"]["software"] == {"tables": "trtllm-1.0", "exchange": "nccl-2.9"}
    assert found.meta["provenance"]["passed_over"] == ["vllm-0.10", "vllm-0.9", "sglang-0.5.8.post1"]
    for wrong in ("vllm", "tensorrt", ""):
        with pytest.raises(RoutePackError, match=r"one of trtllm-1.0, vllm-0.10, vllm-0.9, sglang-0.5.8.post1"):
            import_published(folder, tables=wrong)


def test_rows_left_out_for_their_type_are_counted(folder):
    meta = import_published(folder).meta
    assert meta["skipped"] == {"moe_perf": {"fp8_block": 1}, "context_attention_perf": {"fp8": 1}}
    assert meta["dtype"] == "float16"


def test_what_is_faster_than_the_device_is_flagged(folder):
    """1,250 TFLOP/s, then 833; 2 GiB of weights at 7,200 GB/s, then 3,600; 2 MB, which stay in a cache."""
    system = SYSTEM.replace("gpu: {", "gpu: {float16_tc_flops: 989000000000000, mem_bw: 4800000000000, ")
    (folder.parents[2] / "systems" / "h200_sxm.yaml").write_text(system)
    head, sizes = TABLES["trtllm/1.0/gemm_perf.txt"][0], f"{LEFT},gemm,flow,float16"
    cases = ("65536,8192,4656,4", "65536,8192,4656,6", "8,32768,32768,0.3", "8,32768,32768,0.6", "8,1024,1024,0.0003")
    lines = [f"{sizes},{size}" for size in cases]
    (folder / "trtllm/1.0/gemm_perf.txt").write_text("\n".join([head, *lines]) + "\n")
    flags = import_published(folder).select(op="dense").rows["flag"].tolist()
    assert flags == ["faster than the device's peak allows", "", "faster than the device's peak allows", "", ""]
    (folder.parents[2] / "systems" / "h200_sxm.yaml").write_text(SYSTEM)
    assert import_published(folder).select(op="dense").rows["flag"].tolist() == [""] * 5


def test_weights_of_experts_without_rows_are_not_read():
    features = {"rows": 8, "active_experts": 8, "padded_rows": 1024, "max_rows": 1, "local_experts": 384}
    features |= {"hidden_size": 7168, "inter_size": 2048, "router_tokens": 1, "num_experts": 384}
    read = 3 * 8 * 7168 * 2048 + 8 * (2 * 7168 + 4 * 2048)
    assert moved_elements("experts", features) == read
    assert OPERATIONS["experts"].elements(features) > 40 * read


@pytest.mark.parametrize(("times", "said"), [(1.0, False), (11.7, True)])
def test_a_table_that_is_slow_as_a_whole_is_a_warning_that_names_it(folder, times, said):
    system = SYSTEM.replace("gpu: {", "gpu: {float16_tc_flops: 989000000000000, ")
    (folder.parents[2] / "systems" / "h200_sxm.yaml").write_text(system)
    # Half of the peak, from 1e11 operations on.
    lines = [
        f"{LEFT},gemm,flow,float16,{m},8192,8192,{times * 2 * m * 8192**2 / 5e14 * 1e3}"
        for m in range(1024, 12 * 1024, 512)
    ]
    (folder / "trtllm/1.0/gemm_perf.txt").write_text("\n".join([TABLES["trtllm/1.0/gemm_perf.txt"][0], *lines]) + "\n")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        doubts = import_published(folder).meta["doubts"]
    assert [str(one.message) for one in caught] == doubts
    assert len(doubts) == said
    if said:
        assert "Table trtllm-1.0, gemm_perf" in doubts[0]
        assert "13.9x too slow" in doubts[0]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("moe_ep_size", "ep", "lack.* moe_ep_size"),
        ("kernel_source", "source", "lack.* kernel_source"),
        (",0.5\n", ",-0.5\n", "positive"),
        (",0.5\n", ",nan\n", "positive"),
        ("float16,64,", "float16,many,", "num_tokens must hold whole numbers"),
        ("balanced,0.5", "zipf,0.5", "Unknown distribution 'zipf'"),
        ("power_law_1.2", "power_law_steep", "Unknown distribution 'power_law_steep'"),
        ("power_law_1.2", "power_law_1.0", "Unknown distribution 'power_law_1.0'"),
        ("float16", "fp8", "no 16-bit rows"),
    ],
)
def test_broken_tables_are_clear_errors(folder, old, new, message):
    for name in TABLES:
        if "moe" not in name:
            (folder / name).unlink()
    path = folder / "trtllm/1.0/moe_perf.txt"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(RoutePackError, match=message):
        import_published(folder)


DEEPEP = [
    "framework,version,device,op_name,node_num,kernel_source,hidden_size,num_token,num_topk,num_experts,dispatch_sms,"
    "dispatch_transmit_us,dispatch_notify_us,combine_sms,combine_transmit_us,combine_notify_us",
    "sglang,0.5,H100,normal,1,deepep,7168,4096,8,256,20,500,0,20,900,0",
    "sglang,0.5,H100,normal,2,deepep,7168,4096,8,256,20,800,60,20,1800,50",
    "sglang,0.5,H100,normal,2,deepep,7168,4096,8,256,4,2800,60,4,4800,50",
]


@pytest.mark.parametrize("name", ["deepep_normal_perf", "wideep_deepep_normal_perf"])
def test_deepep_is_read_instead_of_nccl_when_asked(folder, name):
    (folder / "sglang/0.5").mkdir(parents=True)
    (folder / f"sglang/0.5/{name}.txt").write_text("\n".join(DEEPEP) + "\n")
    assert set(import_published(folder).select(op="alltoall").rows["kernel"]) == {"NCCL"}
    exchanges = import_published(folder, exchange="deepep").select(op="alltoall")
    assert len(exchanges) == 4
    # 4096 tokens a rank x 8 choices x 7168 numbers: 8 bits on the way out, 16 on the way back; times in microseconds.
    rows = 4096 * 8 * 7168
    out = one(exchanges, kernel="deepep dispatch", ranks=16)
    has(out, bytes=rows, inter_bytes=rows // 2, time_us=860.0, dtype="float8_e4m3fn")
    back = one(exchanges, kernel="deepep combine", ranks=8)
    has(back, bytes=2 * rows, inter_bytes=0, time_us=900.0, dtype="bfloat16")
    with pytest.raises(RoutePackError, match="expected nccl or deepep"):
        import_published(folder, exchange="mpi")


def test_an_absent_deepep_table_is_a_clear_error(folder):
    with pytest.raises(RoutePackError, match="holds no deepep_normal_perf table"):
        import_published(folder, exchange="deepep")


def test_tables_without_windows_are_read(folder):
    """Those of sglang on an A100 have no ``window_size``."""
    path = folder / "trtllm/1.0/context_attention_perf.txt"
    head, first = TABLES["trtllm/1.0/context_attention_perf.txt"][:2]
    path.write_text(head.replace("window_size,", "") + "\n" + first.replace(",64,0,1,", ",64,1,") + "\n")
    row = one(import_published(folder), op="attention", v_head_dim=64)
    has(row, window=0, kernel="flow", pairs=2 * 16 * 17 // 2, qk_head_dim=64)


def experts_flags(folder, lines):
    """Return the flags of a table of experts of these (tokens, tensor ranks, EP ranks, distribution, time)."""
    path = folder / "trtllm/1.0/moe_perf.txt"
    cells = [f"{LEFT},moe,flow,float16,{t},32,48,2,8,{tp},{ep},{name},{time}" for t, tp, ep, name, time in lines]
    path.write_text("\n".join([TABLES["trtllm/1.0/moe_perf.txt"][0], *cells]) + "\n")
    return import_published(folder).select(op="experts").rows["flag"].tolist()


def test_a_spike_below_a_larger_size_of_its_curve_is_flagged(folder):
    slow, even, drawn = "slower than more tokens", "balanced", "power_law_1.2"
    lines = [
        (3, 1, 1, even, 3.0),
        (1, 1, 1, even, 1.0),
        (2, 1, 1, even, 9.0),
        (4, 1, 1, even, 4.0),
        (1, 1, 1, drawn, 3.0),
        (2, 1, 1, drawn, 4.0),
        (8, 1, 1, even, 3.3),
        (3, 1, 1, drawn, 2.0),
    ]
    assert experts_flags(folder, lines) == ["", "", slow, "", "", slow, "", ""]


def test_curves_slower_than_on_fewer_ranks_are_flagged_even_when_their_neighbour_is_slow_too(folder):
    times = {1: (4, 8, 16), 2: (2, 4, 8), 4: (6, 7, 20), 8: (6, 7, 20)}
    for what, ranks in (("expert", lambda n: (1, n)), ("tensor", lambda n: (n, 1))):
        lines = [
            (tokens, *ranks(n), "balanced", time)
            for n in times
            for tokens, time in zip((1, 1024, 4096), times[n], strict=True)
        ]
        slow = f"slower than fewer {what}-parallel ranks"
        assert experts_flags(folder, lines) == [""] * 6 + [slow] * 6


@pytest.mark.parametrize("latency", ["0.00113", "1130.0"])
def test_times_in_another_unit_are_refused(folder, latency):
    path = folder / "trtllm/1.0/gemm_perf.txt"
    path.write_text(f"{TABLES['trtllm/1.0/gemm_perf.txt'][0]}\n{LEFT},gemm,flow,float16,16384,8192,4096,1.13\n")
    assert len(import_published(folder).select(op="dense")) == 1
    path.write_text(path.read_text().replace(",1.13\n", f",{latency}\n"))
    with pytest.raises(RoutePackError, match=r"gemm_perf.*another unit"):
        import_published(folder)


def test_a_truncated_parquet_is_a_clear_error(tmp_path):
    (tmp_path / "trtllm-1.0").mkdir()
    (tmp_path / "trtllm-1.0" / "moe_perf.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(RoutePackError, match="cannot be read"):
        import_published(tmp_path)


@needs_shared
def test_the_whole_h200_import_is_fast_and_right(tmp_path):
    began = time.process_time()
    measurements = import_published(SHARED / "h200_sxm")
    assert time.process_time() - began < 60
    sizes = {op: len(measurements.select(op=op)) for op in ("attention", "dense", "experts", "alltoall")}
    assert sizes == {"attention": 16256, "dense": 9240, "experts": 19710, "alltoall": 126}
    measurements.save(tmp_path)
    assert len(Measurements.load(tmp_path)) == len(measurements)


@needs_shared
def test_the_h200_flags_are_the_documented_ones():
    experts = import_published(SHARED / "h200_sxm").select(op="experts")
    flags = experts.rows["flag"]
    assert np.char.startswith(flags, "slower than fewer").sum() == 51 * 30
    assert (flags == "slower than more tokens").sum() == 200
    # The spike at 256-384 tokens of Qwen3-30B, EP16, power law.
    spike = experts.select(hidden_size=2048, inter_size=768, local_experts=8, router_tokens=256)
    assert (spike.rows["flag"] != "").any()


@needs_shared
def test_the_published_deepep_rows_import():
    exchanges = import_published(SHARED / "h100_sxm", exchange="deepep").select(op="alltoall").rows
    assert set(exchanges["ranks"]) == {8, 16, 32, 64}
    assert len(exchanges["ranks"]) == 2 * 4 * 23
    assert (exchanges["flag"] == "").mean() > 0.9


@needs_shared
@pytest.mark.parametrize("gpu", ["h100_sxm", "a100_sxm"])
def test_the_other_gpus_import(gpu):
    measurements = import_published(SHARED / gpu)
    fingerprint = DeviceFingerprint.from_dict(measurements.meta["fingerprint"])
    assert fingerprint.units == {"h100_sxm": 132, "a100_sxm": 108}[gpu]
    assert fingerprint.memory_gib == 80
    local = measurements.select(op="experts").rows
    assert (local["active_experts"] <= local["local_experts"]).all()
    assert (local["max_rows"] <= local["rows"]).all()
    assert (local["rows"] <= local["padded_rows"]).all()


MOE = "trtllm/1.0/moe_perf.txt"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (",64,32,48,", ",-64,32,48,", "every num_tokens must be 1 to"), (",64,32,48,", ",many,32,48,", "whole numbers"),
        (",64,32,48,", ",9999999999,32,48,", "every num_tokens must be 1 to"),
        (",64,32,48,", ",,32,48,", "without a value"),
        (",64,32,48,2,8,2,4,", ",64,32,48,2,8,2,3,", "row 1: its experts make no such layer"),
        (",64,32,48,2,8,", ",64,32,48,9,8,", "no such layer"),
        (",64,32,48,2,8,", ",64,32,48,0,8,", "every topk must be"),
        ("power_law_1.2", "power_law_99", "Unknown distribution"), ("balanced,0.5", "balanced,nan", "positive number"),
        ("balanced,0.5", "balanced,1e300", "positive number"), ("balanced,0.5", "balanced,", "positive number"),
        (None, "", "cannot be read"),
        (None, "version https://git-lfs.github.com/spec/v1\noid x\n", "is a Git LFS pointer"),
        (None, "\x00\x01\x02", "lacks the columns|cannot be read"), (None, TABLES[MOE][0] + "\n", "holds no row"),
    ],
)  # fmt: skip
def test_damaged_tables_are_one_clear_line(folder, old, new, words):
    text = (folder / MOE).read_text()
    (folder / MOE).write_text(new if old is None else text.replace(old, new))
    with pytest.raises(RoutePackError, match=words) as caught:
        import_published(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "expected the content to be a mapping"), ("gpu: 3", "mapping"), ("gpu: {mem_bw: fast}", "gpu.mem_bw"),
        ("node: {num_gpus_per_node: -1}", "node.num_gpus_per_node"), ("gpu: {mem_capacity: 1e200}", "no rate or size"),
        ("gpu: &a {x: *a}", "aliases"),
    ],
)  # fmt: skip
def test_damaged_system_files_are_one_clear_line(folder, text, words):
    (folder / "system.yaml").write_text(text)
    with pytest.raises(RoutePackError, match=words) as caught:
        import_published(folder)
    assert "\n" not in str(caught.value)

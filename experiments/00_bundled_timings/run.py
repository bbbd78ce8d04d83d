"""Cut the bundled excerpt of published timings out of the wheel ``aiconfigurator-0.7.0-py3-none-any.whl``.

Run by hand when the excerpt is to change: ``python experiments/00_bundled_timings/run.py WHEEL``. Values are copied as
they are; only the encoding changes (CSV to Parquet) and rows that neither bundled model asks for are left out.
"""

import io
import sys
import zipfile
from functools import reduce
from operator import or_
from pathlib import Path

import pyarrow.csv
import pyarrow.parquet
from pyarrow.compute import field

SYSTEMS = "aiconfigurator/systems"
FRAMEWORK = f"{SYSTEMS}/data/h200_sxm/trtllm/1.2.0rc5"
HEADS = [
    (field("num_heads") == heads) & (field("num_key_value_heads") == kv_heads) & (field("head_dim") == size)
    for heads, kv_heads, size in ((32, 4, 128), (16, 2, 128), (64, 8, 64), (32, 4, 64))
]
"""Attention of Qwen3-30B-A3B and gpt-oss-20b, on one and on two tensor-parallel ranks."""
WIDE = [(field(side) >= 1024) & (field(side) <= 8192) for side in ("n", "k")]
"""As wide as the bundled models' projections."""
QWEN = (field("moe_dtype") == "float16") & (field("hidden_size") == 2048) & (field("inter_size") == 768)
GPT_OSS = (field("moe_dtype") == "w4a16_mxfp4") & (field("num_experts") == 32)
"""The only rows published for its shape: 4-bit weights."""
TABLES = {
    f"{FRAMEWORK}/context_attention_perf.txt": (
        "trtllm-1.2.0rc5/context_attention_perf.parquet",
        (field("attn_dtype") == "float16") & (field("kv_cache_dtype") == "float16") & reduce(or_, HEADS),
    ),
    f"{FRAMEWORK}/gemm_perf.txt": (
        "trtllm-1.2.0rc5/gemm_perf.parquet",
        (field("gemm_dtype") == "float16") & WIDE[0] & WIDE[1],
    ),
    f"{FRAMEWORK}/moe_perf.txt": ("trtllm-1.2.0rc5/moe_perf.parquet", QWEN | GPT_OSS),
    f"{SYSTEMS}/data/h200_sxm/nccl/2.26.2/nccl_perf.txt": (
        "nccl-2.26.2/nccl_perf.parquet",
        field("op_name") == "alltoall",
    ),
}

if __name__ == "__main__":
    out = Path(__file__).parents[2] / "routepack_tune" / "example" / "timings" / "h200_sxm"
    with zipfile.ZipFile(sys.argv[1]) as archive:
        for source, (target, wanted) in TABLES.items():
            table = pyarrow.csv.read_csv(io.BytesIO(archive.read(source))).filter(wanted)
            (out / target).parent.mkdir(parents=True, exist_ok=True)
            pyarrow.parquet.write_table(table, out / target, compression="zstd")
            print(f"{out / target}: {len(table)} rows")
        (out / "system.yaml").write_bytes(archive.read(f"{SYSTEMS}/h200_sxm.yaml"))

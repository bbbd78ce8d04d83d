"""Cut the bundled excerpt of published timings out of the wheel ``aiconfigurator-0.7.0-py3-none-any.whl``.

Run by hand when the excerpt is to change: ``python routepack_tune/example/excerpt.py WHEEL``. Values are copied as they
are; only the encoding changes (CSV to Parquet) and rows that neither bundled model asks for are left out.
"""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path

import numpy as np

SYSTEMS = "aiconfigurator/systems"
FRAMEWORK = "data/h200_sxm/trtllm/1.2.0rc5"
NCCL = "data/h200_sxm/nccl/2.26.2"
ATTENTION_SHAPES = ((32, 4, 128), (16, 2, 128), (64, 8, 64), (32, 4, 64))
"""Heads, key-value heads and head size of Qwen3-30B-A3B and gpt-oss-20b, on one and on two tensor-parallel ranks."""

Columns = dict[str, np.ndarray]


def attention_rows(table: Columns) -> np.ndarray:
    """Keep the 16-bit rows of the bundled models' head shapes."""
    shapes = zip(table["num_heads"], table["num_key_value_heads"], table["head_dim"], strict=True)
    wanted = np.array([shape in ATTENTION_SHAPES for shape in shapes])
    return wanted & (table["attn_dtype"] == "float16") & (table["kv_cache_dtype"] == "float16")


def dense_rows(table: Columns) -> np.ndarray:
    """Keep the 16-bit GEMMs as wide as the bundled models' projections."""
    wide = [(table[side] >= 1024) & (table[side] <= 8192) for side in ("n", "k")]
    return (table["gemm_dtype"] == "float16") & wide[0] & wide[1]


def expert_rows(table: Columns) -> np.ndarray:
    """Keep the 16-bit rows of Qwen3-30B-A3B's shape and the only ones published for gpt-oss-20b's (4-bit weights)."""
    qwen = (table["moe_dtype"] == "float16") & (table["hidden_size"] == 2048) & (table["inter_size"] == 768)
    gpt_oss = (table["moe_dtype"] == "w4a16_mxfp4") & (table["num_experts"] == 32)
    return qwen | gpt_oss


def alltoall_rows(table: Columns) -> np.ndarray:
    """Keep the all-to-all collectives."""
    return table["op_name"] == "alltoall"


TABLES = (
    (f"{FRAMEWORK}/context_attention_perf.txt", "trtllm-1.2.0rc5/context_attention_perf.parquet", attention_rows),
    (f"{FRAMEWORK}/gemm_perf.txt", "trtllm-1.2.0rc5/gemm_perf.parquet", dense_rows),
    (f"{FRAMEWORK}/moe_perf.txt", "trtllm-1.2.0rc5/moe_perf.parquet", expert_rows),
    (f"{NCCL}/nccl_perf.txt", "nccl-2.26.2/nccl_perf.parquet", alltoall_rows),
)


def cut_excerpt(wheel: Path, out: Path) -> None:
    """Write the excerpt under ``out`` in the layout ``<gpu>/<framework>-<version>/<op>_perf.parquet``."""
    import pyarrow.csv
    import pyarrow.parquet

    with zipfile.ZipFile(wheel) as archive:
        for source, target, choose in TABLES:
            table = pyarrow.csv.read_csv(io.BytesIO(archive.read(f"{SYSTEMS}/{source}")))
            columns = {name: table[name].to_numpy() for name in table.column_names}
            table = table.filter(pyarrow.array(choose(columns)))
            path = out / "h200_sxm" / target
            path.parent.mkdir(parents=True, exist_ok=True)
            pyarrow.parquet.write_table(table, path, compression="zstd")
            print(f"{path}: {len(table)} rows")
        (out / "h200_sxm" / "system.yaml").write_bytes(archive.read(f"{SYSTEMS}/h200_sxm.yaml"))


if __name__ == "__main__":
    cut_excerpt(Path(sys.argv[1]), Path(__file__).parent / "timings")

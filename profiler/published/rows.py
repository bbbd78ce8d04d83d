"""Import of public GPU timing tables: the layout of the PyPI package aiconfigurator, plain or re-encoded as Parquet.

A folder is one GPU. Its tables lie in ``<framework>/<version>/<op>_perf.txt`` (CSV, as in the package) or
``<framework>-<version>/<op>_perf.parquet``; peaks and link rates in ``system.yaml`` or, as in the package, in
``../../<gpu>.yaml``. Only rows of 16-bit types are read. The tables hold forward times in milliseconds (DeepEP's in
microseconds), summaries without repeats. Attention tables of some frameworks have no ``window_size``: none was timed.

What the columns mean (read in the package and its public collector): ``num_tokens`` of a MoE row is the *global* token
count, one GPU runs EP rank 0, and routing plus permutation over all tokens is inside the time: so ``router_tokens`` is
that count here. ``inter_size`` is the whole one, the GPU holds ``inter_size / moe_tp_size``. NCCL's ``message_size``
counts elements.

DeepEP's ``num_token`` counts tokens *a rank* of 8 a node, ``node_num`` nodes; a time is that of one dispatch (8-bit
rows) or one combine (16-bit), notification included. ``bytes`` are one copy per routed row, as a plan counts them,
though DeepEP sends a token once per rank and once per node: so its rows and NCCL's must not meet in one fit, and an
import takes those of one library.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from profiler.cases.case import case_id, causal_pairs
from profiler.cases.doubt import POINT_LIMIT, POINT_LIMIT_RANDOM, curve_ids, point_flags, shard_flags
from profiler.cases.operations import EXPERT_ROWS, FEATURE_COLUMNS, HEADS, OPERATIONS
from profiler.device.fingerprint import GIB, DeviceFingerprint
from profiler.errors import RoutePackError
from profiler.files import file_hash
from profiler.measurements import SCHEMA_VERSION, WHOLE_COLUMNS, Measurements
from profiler.params import EXCHANGES, FLOAT8
from profiler.published.routing_counts import balanced_counts, hottest_rank_counts, local_features, power_law_counts
from profiler.published.tables import PublishedFolder, find_tables, read_system, read_table

SIXTEEN_BIT = ("float16", "bfloat16", "half")
KEY_SEED = 20260812
"""Seed of the expected counts of random routings: a constant of the importer, so that every import agrees."""
UNITS_BY_NAME = {"A100": 108, "H100": 132, "H200": 132}
"""Streaming multiprocessors of cards whose tables do not state them."""
MLA_QK_HEAD_DIM, MLA_V_HEAD_DIM = 192, 128
DEEPEP_RANKS_PER_NODE = 8
DEEPEP_SMS = 20
"""Multiprocessors that the library takes by default; other rows of its tables tell what fewer would cost."""
LARGE_FLOPS, FLOPS_PER_S = 1e11, (5e12, 1e16)
LARGE_BYTES, BYTES_PER_S = 2.0**26, (2e8, 1e13)
"""What any GPU of these tables reaches at large sizes: outside of it a unit is wrong."""

Columns = dict[str, np.ndarray]


def import_published(folder: Path | str, exchange: str = "nccl") -> Measurements:
    """Read the published timings of one GPU: attention, dense and expert GEMMs, all-to-all; forward only.

    ``exchange`` names the library whose all-to-all is read: ``nccl`` or ``deepep``.

    Raises
    ------
    RoutePackError
        If the folder holds no such tables, a table lacks a column, or its times are in another unit.
    """
    if exchange not in EXCHANGES:
        raise RoutePackError(f"Unknown exchange {exchange!r}: expected {' or '.join(EXCHANGES)}.")
    found = find_tables(Path(folder), exchange)
    parts: list[Columns] = []
    devices: list[str] = []
    for table, (op, reader) in READERS.items():
        if table in found.tables:
            raw = read_table(found.tables[table])
            devices += np.unique(raw["device"]).tolist() if table == "moe_perf" else []
            parts.append(_rows(op, reader(raw)))
            _check_unit(found.tables[table], op, parts[-1])
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if not len(columns["op"]):
        raise RoutePackError(f"The tables of {found.folder} hold no 16-bit rows: nothing to import.")
    columns["case_id"] = np.array(_case_ids(columns))
    return Measurements.from_columns(columns, _meta(found, devices))


def _rows(op: str, block: Columns) -> Columns:
    """Return every column of measurements from what a table told, and the features of its operation."""
    size = len(block["time_us"])
    same: dict[str, Any] = {"op": op, "direction": "forward", "status": "ok", "message": "", "source": "published"}
    same |= {"case_id": "", "spread_us": np.nan, "skew_us": np.nan, **dict.fromkeys(WHOLE_COLUMNS, 0)}
    columns = {name: np.full(size, value) for name, value in same.items()} | block
    columns["repeats_us"] = np.fromiter((() for _ in range(size)), dtype=object, count=size)
    return columns


def _case_ids(columns: Columns) -> list[str]:
    listed = {name: columns[name].tolist() for name in ("op", "direction", "dtype", *FEATURE_COLUMNS)}
    return [
        case_id(op, listed["direction"][i], listed["dtype"][i], {name: column[i] for name, column in listed.items()})
        for i, op in enumerate(listed["op"])
    ]


def _keep(raw: Columns, mask: np.ndarray) -> Columns:
    # A step counts tokens that lie in the cache already: training has none.
    mask = mask & (raw["step"] == 0) if "step" in raw else mask
    return {name: column[mask] for name, column in raw.items()}


def _block(raw: Columns, dtype: str, features: Columns, flag: Any = "", pattern: Any = "") -> Columns:
    """Return the columns of one table; texts are one for all rows, or one a row."""
    text = {"kernel": raw["kernel_source"], "pattern": pattern, "flag": flag}
    text["dtype"] = np.where(raw[dtype] == "half", "float16", raw[dtype])
    told = {name: np.broadcast_to(one, raw["latency"].shape) for name, one in text.items()}
    return {"time_us": raw["latency"] * 1e3, **told, **features}


def _attention(raw: Columns) -> Columns:
    raw = _keep(raw, np.isin(raw["attn_dtype"], SIXTEEN_BIT) & np.isin(raw["kv_cache_dtype"], SIXTEEN_BIT))
    heads = raw["num_heads"]
    kv_heads = np.where(raw["num_key_value_heads"] > 0, raw["num_key_value_heads"], heads)
    window = raw.get("window_size", np.zeros_like(heads))
    return _cells(raw, "attn_dtype", (heads, kv_heads, raw["head_dim"], raw["head_dim"]), window)


def _latent_attention(raw: Columns) -> Columns:
    raw = _keep(raw, np.isin(raw["mla_dtype"], SIXTEEN_BIT) & np.isin(raw["kv_cache_dtype"], SIXTEEN_BIT))
    heads = raw["num_heads"]
    dims = (np.full_like(heads, MLA_QK_HEAD_DIM), np.full_like(heads, MLA_V_HEAD_DIM))
    return _cells(raw, "mla_dtype", (heads, heads, *dims), np.zeros_like(heads))


def _cells(raw: Columns, dtype: str, heads: tuple[np.ndarray, ...], window: np.ndarray) -> Columns:
    batch, length = raw["batch_size"], raw["isl"]
    features = dict(zip(HEADS, heads, strict=True)) | {"num_sequences": batch, "max_length": length, "window": window}
    features |= {"tokens": batch * length, "pairs": batch * causal_pairs(length, window)}
    spike = point_flags(curve_ids(batch, *heads, window), length, raw["latency"], POINT_LIMIT)
    flag = np.where(spike, "slower than a longer sequence", "")
    return _block(raw, dtype, features, flag, np.where(batch == 1, "single", "even"))


def _dense(raw: Columns) -> Columns:
    raw = _keep(raw, np.isin(raw["gemm_dtype"], SIXTEEN_BIT))
    features = {"tokens": raw["m"], "n": raw["n"], "k": raw["k"]}
    return _block(raw, "gemm_dtype", features)


def _alltoall(raw: Columns) -> Columns:
    # A wire carries bytes: so many 8-bit elements take as long as half as many of 16 bits.
    raw = _keep(raw, np.isin(raw["nccl_dtype"], (*SIXTEEN_BIT, "int8")) & (raw["op_name"] == "alltoall"))
    width = np.where(raw["nccl_dtype"] == "int8", 1, 2)
    features = {"bytes": raw["message_size"] * width, "inter_bytes": np.zeros_like(width), "ranks": raw["num_gpus"]}
    return _block(raw, "nccl_dtype", features)


def _deepep(raw: Columns) -> Columns:
    """Return dispatch and combine rows: ``kernel`` says which, ``bytes`` are what each would send without sharing."""
    raw = _keep(raw, raw["dispatch_sms"] == DEEPEP_SMS)
    nodes, rows = raw["node_num"], raw["num_token"] * raw["num_topk"] * raw["hidden_size"]
    curve = curve_ids(nodes, raw["hidden_size"], raw["num_topk"], raw["num_experts"])
    blocks = []
    for side, width, dtype in (("dispatch", 1, FLOAT8), ("combine", 2, "bfloat16")):
        time_us = (raw[f"{side}_transmit_us"] + raw[f"{side}_notify_us"]).astype(np.float64)
        sent = rows * width
        # Routes are even over all experts, so this share of them leaves the node.
        features = {"bytes": sent, "inter_bytes": sent * (nodes - 1) // nodes, "ranks": nodes * DEEPEP_RANKS_PER_NODE}
        spike = point_flags(curve, rows, time_us, POINT_LIMIT_RANDOM)
        same = {"dtype": dtype, "kernel": f"deepep {side}", "pattern": "even"}
        text = {name: np.full(len(rows), value) for name, value in same.items()}
        flag = np.where(spike, "slower than more tokens", "")
        blocks.append({"time_us": time_us, "flag": flag, **text, **features})
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def _check_unit(path: Path, op: str, rows: Columns) -> None:
    """Refuse a table whose times are in another unit: no GPU is that fast, or that slow with so much to do."""
    asked = OPERATIONS[op]
    features = {name: rows[name].astype(np.float64) for name in asked.features}
    if asked.exchange:
        work, large, (low, high), unit = features["bytes"], LARGE_BYTES, BYTES_PER_S, "bytes"
    else:
        work, large, (low, high), unit = asked.flops(features), LARGE_FLOPS, FLOPS_PER_S, "operations"
    rate = work / (rows["time_us"] * 1e-6)
    big = work >= large
    for wrong in (rate[rate > high], rate[big][:1] if big.any() and rate[big].max() < low else rate[:0]):
        if wrong.size:
            raise RoutePackError(
                f"Published table {path}: {wrong.max():.2g} {unit} a second cannot be (expected {low:.0e} to "
                f"{high:.0e}): its times are in another unit."
            )


def _experts(raw: Columns) -> Columns:
    raw = _keep(raw, np.isin(raw["moe_dtype"], SIXTEEN_BIT))
    tokens, experts, ranks = raw["num_tokens"], raw["num_experts"], raw["moe_ep_size"]
    features = dict(zip(EXPERT_ROWS, _local_features(raw).T, strict=True))
    features |= {"local_experts": experts // ranks, "num_experts": experts, "router_tokens": tokens}
    features |= {"hidden_size": raw["hidden_size"], "inter_size": raw["inter_size"] // raw["moe_tp_size"]}
    return _block(raw, "moe_dtype", features, _experts_flags(raw), raw["distribution"])


def _local_features(raw: Columns) -> np.ndarray:
    """Return [rows of the table, 4] features of EP rank 0, each distinct routing worked out once."""
    names = ("num_tokens", "num_experts", "topk", "moe_ep_size", "distribution")
    keys = list(zip(*(raw[name].tolist() for name in names), strict=True))
    known: dict[tuple[Any, ...], tuple[int, int, int, int]] = {}
    global_counts = functools.cache(_global_counts)
    for tokens, experts, top_k, ep_size, distribution in set(keys):
        drawn = global_counts(tokens, experts, top_k, distribution)
        local = drawn[: experts // ep_size] if drawn.ndim == 1 else hottest_rank_counts(drawn, ep_size, tokens)
        known[tokens, experts, top_k, ep_size, distribution] = local_features(local)
    return np.array([known[key] for key in keys], dtype=np.int64).reshape(-1, 4)


def _global_counts(tokens: int, experts: int, top_k: int, distribution: str) -> np.ndarray:
    if distribution == "balanced":
        return balanced_counts(tokens, experts, top_k)
    exponent = re.fullmatch(r"power_law_(\d+(?:\.\d+)?)", distribution)
    if exponent is None or float(exponent[1]) == 1:
        raise RoutePackError(f"Unknown distribution {distribution!r} in moe_perf: expected balanced or power_law_<a>.")
    alpha = float(exponent[1])
    # One generator per routing: a row's features do not depend on which other rows the table holds.
    rng = np.random.default_rng([KEY_SEED, tokens, experts, top_k, round(alpha * 1000)])
    return power_law_counts(tokens, experts, top_k, alpha, rng)


def _experts_flags(raw: Columns) -> np.ndarray:
    time, tokens = raw["latency"], raw["num_tokens"]
    shape = [raw[name] for name in ("hidden_size", "inter_size", "topk", "num_experts", "distribution")]
    tp, ep = raw["moe_tp_size"], raw["moe_ep_size"]
    limit = np.where(raw["distribution"] == "balanced", POINT_LIMIT, POINT_LIMIT_RANDOM)
    flag = np.full(len(time), "", dtype="<U48")
    flag[point_flags(curve_ids(*shape, tp, ep), tokens, time, limit)] = "slower than more tokens"
    for shards, other, what in ((ep, tp, "expert"), (tp, ep, "tensor")):
        slow = shard_flags(curve_ids(*shape, other), shards, tokens, time)
        flag[slow] = f"slower than fewer {what}-parallel ranks"
    return flag


READERS: dict[str, tuple[str, Callable[[Columns], Columns]]] = {
    "context_attention_perf": ("attention", _attention),
    "context_mla_perf": ("attention", _latent_attention),
    "gemm_perf": ("dense", _dense),
    "moe_perf": ("experts", _experts),
    "nccl_perf": ("alltoall", _alltoall),
    "deepep_normal_perf": ("alltoall", _deepep),
}
"""Operation and reader of every table."""


def _meta(found: PublishedFolder, devices: list[str]) -> dict[str, Any]:
    system = read_system(found)
    gpu, node = system.get("gpu", {}), system.get("node", {})
    name = devices[0] if devices else found.folder.name
    bandwidth = node.get("intra_node_bw")
    fingerprint = DeviceFingerprint(
        kind="cuda",
        vendor="nvidia",
        arch=f"sm_{gpu['sm_version']}" if "sm_version" in gpu else "",
        name=name,
        units=next((units for key, units in UNITS_BY_NAME.items() if key in name), 0),
        memory_gib=round(gpu.get("mem_capacity", 0) / GIB),
        interconnect=f"{bandwidth / 1e9:.0f} GB/s" if bandwidth else "",
        ranks_per_node=int(node.get("num_gpus_per_node", 1)),
        software={"tables": found.framework},
        origin="published",
    )
    files = {str(path.relative_to(found.folder)): file_hash(path) for path in sorted(found.tables.values())}
    return {
        "schema_version": SCHEMA_VERSION,
        "fingerprint": fingerprint.to_dict(),
        "model": None,
        "topology": None,
        "params": {},
        "backward": "absent",
        "system": {"gpu": gpu, "node": node},
        "provenance": {
            "package": "aiconfigurator",
            "license": "Apache-2.0",
            "copyright": "NVIDIA CORPORATION & AFFILIATES",
            "tables": found.framework,
            "passed_over": list(found.passed_over),
            "files": files,
            "note": "Forward times of one GPU; power-law rows carry expected, not actual, rows per expert.",
        },
    }

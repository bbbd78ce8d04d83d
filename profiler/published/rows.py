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

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.csv

from profiler.cases.case import EXPERT_ROWS, HEADS, OPERATIONS, case_id, causal_pairs
from profiler.device.fingerprint import GIB, DeviceFingerprint
from profiler.errors import RoutePackError
from profiler.files import file_hash
from profiler.measurements import SCHEMA_VERSION, Measurements
from profiler.params import EXCHANGES, FLOAT8
from profiler.published.folder import RENAMED, find_tables, read_system, set_name
from profiler.published.plausible import faster_than_peak, slow_table
from profiler.published.routing_counts import rank_zero_rows
from profiler.readers import read_bytes, read_parquet
from profiler.readers.raw import reason

CELL = ("batch_size", "isl", "num_heads", "kv_cache_dtype")
EXPERTS = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size", "distribution")
TEXT = {"device", "kernel_source", "op_name", "distribution"}
SIXTEEN_BIT = ("float16", "bfloat16", "half")
MAX_BYTES = 256 << 20
MOST_SIZE, MOST_ROUTES = 2**24, 2**24
MOST_OF = {"message_size": 2**40, "isl": 2**21, "batch_size": 2**16, "hidden_size": 2**20, "num_experts": 2**14}
MOST_OF |= {"topk": 2**12, "num_topk": 2**12, "num_token": 2**20, "num_tokens": 2**20, "node_num": 2**16}
"""Largest numbers of columns: so that no product leaves 64 bits, and no table asks for memory that is not there."""
MAY_BE_ZERO = ("num_key_value_heads", "window_size", "step")
UNITS_BY_NAME = {"A100": 108, "H100": 132, "H200": 132}
"""Streaming multiprocessors of cards whose tables do not state them."""
MLA_QK_HEAD_DIM, MLA_V_HEAD_DIM = 192, 128
DEEPEP_RANKS_PER_NODE = 8
DEEPEP_SMS = 20
"""Multiprocessors that the library takes by default; other rows of its tables tell what fewer would cost."""
LARGE_FLOPS, FLOPS_PER_S = 1e11, (5e12, 1e16)
LARGE_BYTES, BYTES_PER_S = 2.0**26, (2e8, 1e13)
"""What any GPU of these tables reaches at large sizes: outside of it a unit is wrong."""
POINT_LIMIT, POINT_LIMIT_RANDOM = 1.25, 1.6
"""How much slower than a larger row of its curve a row may be; more where a drawn routing adds noise."""
CURVE_LIMIT, SMALL_TOKENS = 1.15, 512
"""How much slower than on fewer ranks the same work may be, in the median over all sizes and over small ones."""


def import_published(folder: Path | str, exchange: str = "nccl", tables: str | None = None) -> Measurements:
    """Read the published timings of one GPU: attention, dense and expert GEMMs, all-to-all; forward only.

    ``exchange`` names the library whose all-to-all is read: ``nccl`` or ``deepep``; ``tables`` the software whose other
    tables are (``trtllm-1.2.0``, or ``trtllm`` where there is one version), by default the newest TensorRT-LLM's.

    Rows faster than the device's peak are flagged; a table that is far slower than its kind is a warning.

    RoutePackError if the folder holds no such tables, a table lacks a column, or its times are in another unit.
    """
    if exchange not in EXCHANGES:
        raise RoutePackError(f"Unknown exchange {exchange!r}: expected {' or '.join(EXCHANGES)}.")
    folder = Path(folder)
    frameworks, found = find_tables(folder, exchange, tables)
    system, skipped, doubts, parts, device = read_system(folder), {}, [], [], ""
    for name, (op, reader, *_) in TABLES.items():
        if name in found:
            raw = _read_table(found[name])
            device = raw["device"].min() if name == "moe_perf" else device
            skipped[name] = _other_types(raw)
            # A step counts tokens that lie in the cache already: training has none.
            part = reader(raw[raw["step"] == 0] if "step" in raw else raw)
            _check_unit(found[name], op, part)
            part = _flagged(part, faster_than_peak(op, part, system), "the device's peak allows", "faster")
            doubts += slow_table(f"{set_name(folder, found[name])}, {name}", op, part, system)
            told = part[["dtype", *OPERATIONS[op].features]].to_dict("records")
            ids = [case_id(op, "forward", row["dtype"], row) for row in told]
            parts.append(part.assign(case_id=ids, op=op, direction="forward", status="ok", source="published"))
    rows = pd.concat(parts, ignore_index=True)
    if rows.empty:
        raise RoutePackError(f"The tables of {folder} hold no 16-bit rows: nothing to import.")
    for doubt in doubts:
        warnings.warn(doubt, stacklevel=2)
    about = {"skipped": {name: counts for name, counts in skipped.items() if counts}, "doubts": doubts}
    about["dtype"] = str(rows["dtype"].mode()[0])
    measurements = Measurements.from_rows(rows, _meta(folder, frameworks, found, device, system) | about)
    measurements.check(f"Published tables of {folder}")
    return measurements


def _other_types(raw: pd.DataFrame) -> dict[str, int]:
    """Return how many rows are left out for their number type, by type; of an attention row that of its cache too."""
    kinds = [name for name in raw if name.endswith("_dtype") and name != "nccl_dtype"]
    other = pd.DataFrame({name: raw[name].where(~raw[name].isin(SIXTEEN_BIT)) for name in kinds}, index=raw.index)
    first = other.bfill(axis=1).iloc[:, 0].dropna() if kinds else pd.Series(dtype=str)
    return {str(kind): int(count) for kind, count in first.value_counts().sort_index().items()}


def _rows(raw: pd.DataFrame, dtype: Any, **columns: Any) -> pd.DataFrame:
    """Return what every table tells of its rows, and their other columns and features."""
    same = {"kernel": raw["kernel_source"], "dtype": dtype, "flag": "", "pattern": ""}
    same["time_us"] = raw.get("latency", 0) * 1e3
    return pd.DataFrame({**same, **columns}, index=raw.index).replace({"dtype": {"half": "float16"}})


def _attention(raw: pd.DataFrame) -> pd.DataFrame:
    heads, kv_heads, dim = raw["num_heads"], raw["num_key_value_heads"], raw["head_dim"]
    shape = (heads, kv_heads.where(kv_heads > 0, heads), dim, dim)
    return _cells(raw, "attn_dtype", shape, raw.get("window_size", 0 * heads))


def _latent_attention(raw: pd.DataFrame) -> pd.DataFrame:
    heads = raw["num_heads"]
    return _cells(raw, "mla_dtype", (heads, heads, MLA_QK_HEAD_DIM, MLA_V_HEAD_DIM), 0 * heads)


def _cells(raw: pd.DataFrame, dtype: str, shape: tuple[Any, ...], window: pd.Series) -> pd.DataFrame:
    batch, length = raw["batch_size"], raw["isl"]
    sizes = {"num_sequences": batch, "max_length": length, "window": window, "tokens": batch * length}
    sizes |= {"pairs": batch * causal_pairs(length, window), **dict(zip(HEADS, shape, strict=True))}
    rows = _rows(raw, raw[dtype], pattern=np.where(batch == 1, "single", "even"), **sizes)
    rows = rows[raw[dtype].isin(SIXTEEN_BIT) & raw["kv_cache_dtype"].isin(SIXTEEN_BIT)]
    return _flagged(rows, _spikes(rows, ["num_sequences", *HEADS, "window"], "max_length"), "a longer sequence")


def _dense(raw: pd.DataFrame) -> pd.DataFrame:
    raw = raw[raw["gemm_dtype"].isin(SIXTEEN_BIT)]
    return _rows(raw, raw["gemm_dtype"], tokens=raw["m"], n=raw["n"], k=raw["k"])


def _alltoall(raw: pd.DataFrame) -> pd.DataFrame:
    # A wire carries bytes: so many 8-bit elements take as long as half as many of 16 bits.
    raw = raw[raw["nccl_dtype"].isin((*SIXTEEN_BIT, "int8")) & (raw["op_name"] == "alltoall")]
    width = np.where(raw["nccl_dtype"] == "int8", 1, 2)
    return _rows(raw, raw["nccl_dtype"], bytes=raw["message_size"] * width, inter_bytes=0, ranks=raw["num_gpus"])


def _deepep(raw: pd.DataFrame) -> pd.DataFrame:
    """Return dispatch and combine rows: ``kernel`` says which, ``bytes`` are what each would send without sharing."""
    raw = raw[raw["dispatch_sms"] == DEEPEP_SMS]
    nodes, numbers = raw["node_num"], raw["num_token"] * raw["num_topk"] * raw["hidden_size"]
    sides = []
    for side, width, dtype in (("dispatch", 1, FLOAT8), ("combine", 2, "bfloat16")):
        sent, time_us = numbers * width, raw[f"{side}_transmit_us"] + raw[f"{side}_notify_us"]
        timed = raw.assign(time_us=time_us, sent=sent)
        slow = _spikes(timed, ["node_num", "hidden_size", "num_topk", "num_experts"], "sent", POINT_LIMIT_RANDOM)
        # Routes are even over all experts, so this share of them leaves the node.
        sizes = {"bytes": sent, "inter_bytes": sent * (nodes - 1) // nodes, "ranks": nodes * DEEPEP_RANKS_PER_NODE}
        rows = _rows(raw, dtype, time_us=time_us, pattern="even", **sizes).assign(kernel=f"deepep {side}")
        sides.append(_flagged(rows, slow, "more tokens"))
    return pd.concat(sides)


def _experts(raw: pd.DataFrame) -> pd.DataFrame:
    raw = raw[raw["moe_dtype"].isin(SIXTEEN_BIT)]
    routing = raw[["num_tokens", "num_experts", "topk", "moe_ep_size", "distribution"]]
    # Each distinct routing is worked out once.
    known = {key: rank_zero_rows(*key) for key in set(routing.itertuples(index=False, name=None))}
    local = [known[key] for key in routing.itertuples(index=False, name=None)]
    sizes: dict[str, Any] = dict(zip(EXPERT_ROWS, np.array(local, dtype=np.int64).reshape(-1, 4).T, strict=True))
    sizes |= {"hidden_size": raw["hidden_size"], "inter_size": raw["inter_size"] // raw["moe_tp_size"]}
    sizes |= {"num_experts": raw["num_experts"], "local_experts": raw["num_experts"] // raw["moe_ep_size"]}
    rows = _rows(raw, raw["moe_dtype"], pattern=raw["distribution"], router_tokens=raw["num_tokens"], **sizes)
    raw = raw.assign(time_us=rows["time_us"])
    layer = ["hidden_size", "inter_size", "topk", "num_experts", "distribution"]
    limit = np.where(raw["distribution"] == "balanced", POINT_LIMIT, POINT_LIMIT_RANDOM)
    rows = _flagged(rows, _spikes(raw, [*layer, "moe_tp_size", "moe_ep_size"], "num_tokens", limit), "more tokens")
    rows = _flagged(rows, _slow_shards(raw, [*layer, "moe_tp_size"], "moe_ep_size"), "fewer expert-parallel ranks")
    return _flagged(rows, _slow_shards(raw, [*layer, "moe_ep_size"], "moe_tp_size"), "fewer tensor-parallel ranks")


def _flagged(rows: pd.DataFrame, marked: Any, what: str, how: str = "slower") -> pd.DataFrame:
    # Mostly systematic (a bad kernel choice of that software): kept and marked, and a fit may leave them out.
    return rows.assign(flag=np.where(marked, f"{how} than {what}", rows["flag"]))


def _spikes(rows: pd.DataFrame, curve: list[str], size: str, limit: Any = POINT_LIMIT) -> Any:
    """Return a mask of rows slower than ``limit`` times the fastest larger row of their curve."""
    falling = rows.sort_values(size, kind="stable")[::-1]
    groups = [falling[name] for name in curve]
    fastest_larger = falling["time_us"].groupby(groups).cummin().groupby(groups).shift()
    return rows["time_us"] > limit * fastest_larger.reindex(rows.index)


def _slow_shards(rows: pd.DataFrame, curve: list[str], shards: str) -> Any:
    """Return a mask of whole curves that are slower than on fewer ranks (``shards``) at most sizes."""
    times = rows.pivot_table("time_us", [*curve, "num_tokens"], shards, aggfunc="last")
    # Against the fastest coarser sharding, not the next one: that may be slow itself.
    ratios = times / times.cummin(axis=1).ffill(axis=1).shift(axis=1)
    small = ratios[ratios.index.get_level_values("num_tokens") <= SMALL_TOKENS]
    medians = pd.concat([some.groupby(curve).median().stack() for some in (ratios, small)])
    slow = (medians > CURVE_LIMIT).groupby(level=[*range(len(curve) + 1)]).any()
    return slow.reindex(pd.MultiIndex.from_frame(rows[[*curve, shards]]), fill_value=False).to_numpy()


def _check_unit(path: Path, op: str, rows: pd.DataFrame) -> None:
    """Refuse a table whose times are in another unit: no GPU is that fast, or that slow with so much to do."""
    asked = OPERATIONS[op]
    work = rows["bytes"] if asked.exchange else asked.flops(rows[list(asked.features)].astype(float))
    large, (low, high) = (LARGE_BYTES, BYTES_PER_S) if asked.exchange else (LARGE_FLOPS, FLOPS_PER_S)
    rate, big = work / (rows["time_us"] * 1e-6), work >= large
    if rate.max() > high or rate[big].max() < low:
        wrong = rate.max() if rate.max() > high else rate[big].iloc[0]
        raise RoutePackError(
            f"Published table {path}: {wrong:.2g} {'bytes' if asked.exchange else 'operations'} a second cannot be "
            f"(expected {low:.0e} to {high:.0e}): its times are in another unit."
        )


class Table(NamedTuple):
    """What a table holds."""

    op: str
    reader: Callable[[pd.DataFrame], pd.DataFrame]
    keys: tuple[str, ...]
    """Columns that it must have, text or whole numbers, besides its device and kernel."""
    times: tuple[str, ...] = ("latency",)
    """Columns of positive times: milliseconds, or microseconds where the name says so."""


TABLES = {
    "context_attention_perf": Table("attention", _attention, (*CELL, "num_key_value_heads", "head_dim", "attn_dtype")),
    "context_mla_perf": Table("attention", _latent_attention, (*CELL, "mla_dtype")),
    "gemm_perf": Table("dense", _dense, ("gemm_dtype", "m", "n", "k")),
    "moe_perf": Table("experts", _experts, ("moe_dtype", "num_tokens", *EXPERTS)),
    "nccl_perf": Table("alltoall", _alltoall, ("op_name", "nccl_dtype", "num_gpus", "message_size")),
    "deepep_normal_perf": Table(
        "alltoall",
        _deepep,
        ("node_num", "hidden_size", "num_token", "num_topk", "num_experts", "dispatch_sms"),
        ("dispatch_transmit_us", "combine_transmit_us", "dispatch_notify_us", "combine_notify_us"),
    ),
}


def _read_table(path: Path) -> pd.DataFrame:
    """Read a table, and check that the columns it must have are text, whole numbers or positive latencies."""
    what = "Published table"
    if path.suffix == ".parquet":
        table = read_parquet(path, what)
    else:
        try:
            table = pa.csv.read_csv(io.BytesIO(read_bytes(path, what, MAX_BYTES)))
        except (pa.ArrowException, ValueError) as error:
            raise RoutePackError(f"{what} {path} cannot be read ({reason(error)}). Fetch it again.") from None
    _, _, keys, latencies = TABLES[RENAMED.get(path.stem, path.stem)]
    missing = [n for n in (*latencies, *keys, "device", "kernel_source") if n not in table.column_names]
    if missing:
        raise RoutePackError(f"{what} {path} lacks the columns {', '.join(missing)}: not of this layout.")
    if not table.num_rows or len(table.column_names) != len(set(table.column_names)):
        raise RoutePackError(f"{what} {path} holds no row, or a column twice. Fetch it again.")
    if gaps := [name for name in (*keys, "device") if table[name].null_count]:
        raise RoutePackError(f"{what} {path}: {gaps[0]} has rows without a value. Fetch it again.")
    frame = table.to_pandas()
    text = [name for name in frame if name in TEXT or name.endswith("_dtype")]
    frame[text] = frame[text].astype(str)
    for name in (*keys, *(name for name in MAY_BE_ZERO if name in frame)):
        if name in text:
            continue
        if frame[name].dtype.kind != "i":
            raise RoutePackError(f"{what} {path}: {name} must hold whole numbers, got {frame[name].dtype}.")
        least, most = 0 if name in MAY_BE_ZERO else 1, MOST_OF.get(name, MOST_SIZE)
        if not frame[name].between(least, most).all():
            wrong = frame[name][~frame[name].between(least, most)].iloc[0]
            raise RoutePackError(f"{what} {path}: every {name} must be {least} to {most}, got {wrong}.")
    for name in latencies:
        times, unit = frame[name], "microseconds" if name.endswith("_us") else "milliseconds"
        if (
            times.dtype.kind not in "if"
            or not (((times > 0) | (times == 0) & ("notify" in name)) & (times < 1e9)).all()
        ):
            raise RoutePackError(f"{what} {path}: every {name} must be a positive number of {unit}.")
    if "moe_ep_size" in keys:
        uneven = (frame["num_experts"] % frame["moe_ep_size"] > 0) | (frame["topk"] > frame["num_experts"])
        uneven |= (frame["inter_size"] < frame["moe_tp_size"]) | (frame["num_tokens"] * frame["topk"] > MOST_ROUTES)
        if uneven.any():
            raise RoutePackError(f"{what} {path}, row {uneven.idxmax() + 1}: its experts make no such layer.")
    return frame


def _meta(
    folder: Path, frameworks: list[str], tables: dict[str, Path], device: str, system: dict[str, Any]
) -> dict[str, Any]:
    gpu, node = system.get("gpu") or {}, system.get("node") or {}
    software = {"tables": frameworks[0]}
    for name in tables.keys() & EXCHANGES.values():
        software["exchange"] = set_name(folder, tables[name])
    bandwidth, network = node.get("intra_node_bw"), node.get("inter_node_bw")
    fingerprint = DeviceFingerprint(
        kind="cuda",
        vendor="nvidia",
        arch=f"sm_{gpu['sm_version']}" if "sm_version" in gpu else "",
        name=device,
        units=next((units for key, units in UNITS_BY_NAME.items() if key in device), 0),
        memory_gib=round((gpu.get("mem_capacity") or 0) / GIB),
        interconnect=f"{bandwidth / 1e9:.0f} GB/s" if bandwidth else "",
        ranks_per_node=int(node.get("num_gpus_per_node") or 1),
        network=f"{node.get('num_gpus_per_node') or 1} x {network * 8 / 1e9:g} Gb/s" if network else "",
        software=software,
        origin="published",
    )
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
            "tables": frameworks[0],
            "passed_over": frameworks[1:],
            "files": {str(path.relative_to(folder)): file_hash(path) for path in sorted(tables.values())},
            "note": "Forward times of one GPU; power-law rows carry expected, not actual, rows per expert.",
        },
    }

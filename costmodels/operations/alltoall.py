"""All-to-all among the ranks of one expert-parallel block: dispatch or combine of one layer.

Baseline: a start-up time that grows with the ranks and once more where messages leave the low-latency protocol, the
bytes that leave a rank over its bandwidth (two ranks use fewer links than many), and a pipeline that fills over a few
MiB. Where some of the bytes leave the node: one more start-up, and those bytes over the rank's share of the network, if
that takes longer than the links inside.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from costmodels.features import Columns, Operation, Parameter, smooth_max

LOW_LATENCY_MIB = 2.0**-8
"""Half of the second start-up shows at this size: messages of a few KiB go without staging."""


def _baseline(c: Columns, p: Mapping[str, float]) -> np.ndarray:
    peers = c["ranks"] - 1.0
    leaving = c["bytes"] * peers / c["ranks"]
    mib = leaving / 2.0**20
    start = p["alpha_us"] + p["alpha_rank_us"] * c["ranks"] + p["staged_us"] * mib / (mib + LOW_LATENCY_MIB)
    filling = p["fill_us"] * mib / (mib + p["fill_mib"])
    wire = leaving / (p["wire_gbps"] * 1e3) * (1.0 + p["peer_share"] / np.maximum(peers, 1.0))
    network = c["inter_bytes"] / (p["nic_gbps"] * 1e3)
    between = np.where(c["inter_bytes"] > 0, p["inter_us"], 0.0)
    return start + filling + between + smooth_max(wire, network, sharpness=3.0)


def _derive(c: Columns) -> Columns:
    return {
        "log_bytes": np.log(c["bytes"]),
        "log_ranks": np.log(c["ranks"]),
        "log_message": np.log(c["bytes"] / c["ranks"]),
        "inter_share": c["inter_bytes"] / c["bytes"],
    }


ALLTOALL = Operation(
    name="alltoall",
    features={
        "bytes": "bytes the busiest rank sends or receives, its own share included",
        "inter_bytes": "those of them that cross the border of its node",
        "ranks": "ranks that exchange",
    },
    shape=(),
    family=("ranks",),
    size=("bytes",),
    parameters={
        "alpha_us": Parameter(5.0, "us"),
        "alpha_rank_us": Parameter(0.7, "us per rank"),
        "staged_us": Parameter(2.0, "us beyond a few KiB"),
        "fill_us": Parameter(20.0, "us of a pipeline's filling"),
        "fill_mib": Parameter(6.0, "MiB at which half of it shows", 0),
        "wire_gbps": Parameter(330.0, "GB/s", -1),
        "peer_share": Parameter(0.15, "bandwidth lost with one peer, share", 0),
        "inter_us": Parameter(15.0, "us more between nodes"),
        "nic_gbps": Parameter(45.0, "GB/s between nodes", -1),
    },
    baseline=_baseline,
    derive=_derive,
    floor=lambda c, p: np.zeros_like(c["bytes"]),
    zero_allowed=frozenset({"inter_bytes"}),
    dimensionless=("log_bytes", "log_message", "inter_share"),
)

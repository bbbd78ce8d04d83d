"""Traffic between ranks: the all-to-all of dispatch or combine of one layer, and the move of one expert.

All-to-all: a start-up time that grows with the ranks and once more where messages leave the low-latency protocol, the
bytes that leave a rank over its bandwidth (two ranks use fewer links than many), and a pipeline that fills over a few
MiB. Where some of the bytes leave the node: one more start-up, and those bytes over the rank's share of the network, if
that takes longer than the links inside.

Transfer (an expert's parameters and optimizer state): start-up + bytes over bandwidth, both of their own between nodes.
"""

from __future__ import annotations

import numpy as np

from costmodels.features import Columns, Operation, Parameter, Parameters, smooth_max

LOW_LATENCY_MIB = 2.0**-8
"""Half of the second start-up shows at this size: messages of a few KiB go without staging."""


def _baseline(c: Columns, p: Parameters) -> np.ndarray:
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


def _inter_share(c: Columns) -> tuple[np.ndarray, ...]:
    # A share of 0 and one of a tenth are on different curves.
    return (np.log1p(10.0 * c["inter_bytes"] / c["bytes"]),)


ALLTOALL = Operation(
    name="alltoall",
    features={
        "bytes": "bytes the busiest rank sends or receives, its own share included",
        "inter_bytes": "those of them that cross the border of its node",
        "ranks": "ranks that exchange",
    },
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
    zero_allowed=frozenset({"inter_bytes"}),
    dimensionless=("log_bytes", "log_message", "inter_share"),
    curve=("ranks",),
    settings=_inter_share,
)


def _transfer_baseline(c: Columns, p: Parameters) -> np.ndarray:
    inside = np.maximum(c["bytes"] - c["inter_bytes"], 0.0) / (p["wire_gbps"] * 1e3)
    between = np.where(c["inter_bytes"] > 0, p["inter_us"], 0.0) + c["inter_bytes"] / (p["nic_gbps"] * 1e3)
    return p["alpha_us"] + inside + between


TRANSFER = Operation(
    name="transfer",
    features={"bytes": "bytes that move", "inter_bytes": "those of them that cross the border of a node"},
    family=("bytes",),
    size=("bytes",),
    parameters={
        "alpha_us": Parameter(10.0, "us"),
        "wire_gbps": Parameter(150.0, "GB/s inside a node", -1),
        "inter_us": Parameter(10.0, "us more between nodes"),
        "nic_gbps": Parameter(40.0, "GB/s between nodes", -1),
    },
    baseline=_transfer_baseline,
    derive=lambda c: {"log_bytes": np.log(c["bytes"]), "inter_share": c["inter_bytes"] / c["bytes"]},
    dimensionless=("log_bytes", "inter_share"),
    zero_allowed=frozenset({"inter_bytes"}),
    settings=_inter_share,
)

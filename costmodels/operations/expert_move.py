"""One expert's parameters and optimizer state on their way from rank to rank (operation ``transfer``).

Baseline: start-up + bytes over bandwidth, with a start-up and a bandwidth of their own between nodes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from costmodels.features import Columns, Operation, Parameter


def _baseline(c: Columns, p: Mapping[str, float]) -> np.ndarray:
    inside = np.maximum(c["bytes"] - c["inter_bytes"], 0.0) / (p["wire_gbps"] * 1e3)
    between = np.where(c["inter_bytes"] > 0, p["inter_us"], 0.0) + c["inter_bytes"] / (p["nic_gbps"] * 1e3)
    return p["alpha_us"] + inside + between


TRANSFER = Operation(
    name="transfer",
    features={"bytes": "bytes that move", "inter_bytes": "those of them that cross the border of a node"},
    shape=(),
    family=("bytes",),
    size=("bytes",),
    parameters={
        "alpha_us": Parameter(10.0, "us"),
        "wire_gbps": Parameter(150.0, "GB/s inside a node", -1),
        "inter_us": Parameter(10.0, "us more between nodes"),
        "nic_gbps": Parameter(40.0, "GB/s between nodes", -1),
    },
    baseline=_baseline,
    derive=lambda c: {"log_bytes": np.log(c["bytes"]), "inter_share": c["inter_bytes"] / c["bytes"]},
    dimensionless=("log_bytes", "inter_share"),
    floor=lambda c, p: np.zeros_like(c["bytes"]),
    zero_allowed=frozenset({"inter_bytes"}),
)

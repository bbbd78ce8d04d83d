"""All-to-all among the ranks of one expert-parallel block: dispatch or combine of one layer.

Baseline: smooth maximum of a start-up time that grows with the ranks, and the bytes that leave a rank over its
bandwidth plus a square-root term for the sizes in between, where the protocol changes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from costmodels.features import Columns, Operation, Parameter, smooth_max


def _baseline(c: Columns, p: Mapping[str, float]) -> np.ndarray:
    leaving = c["bytes"] * (c["ranks"] - 1.0) / c["ranks"]
    start = p["alpha_us"] + p["alpha_rank_us"] * c["ranks"]
    wire = leaving / (p["wire_gbps"] * 1e3)
    between = p["middle_us"] * np.sqrt(leaving / 2.0**20)
    return smooth_max(start, wire + between, sharpness=1.0 + p["sharpness"])


def _derive(c: Columns) -> Columns:
    return {
        "log_bytes": np.log(c["bytes"]),
        "log_ranks": np.log(c["ranks"]),
        "log_message": np.log(c["bytes"] / c["ranks"]),
    }


ALLTOALL = Operation(
    name="alltoall",
    features={"bytes": "bytes one rank holds for all ranks", "ranks": "ranks that exchange"},
    shape=(),
    family=("ranks",),
    size=("bytes",),
    parameters={
        "alpha_us": Parameter(6.0, "us"),
        "alpha_rank_us": Parameter(0.7, "us per rank"),
        "wire_gbps": Parameter(330.0, "GB/s", -1),
        "middle_us": Parameter(5.0, "us per square root of a MiB"),
        "sharpness": Parameter(2.0, "exponent of the smooth maximum, less 1", 0),
    },
    baseline=_baseline,
    derive=_derive,
    floor=lambda c, p: np.zeros_like(c["bytes"]),
    dimensionless=("log_bytes", "log_message"),
)

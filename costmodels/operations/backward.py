"""Backward over forward time of attention cores where only forward was timed: *assumed*, from what others measured.

A factor of 2.5 is the ratio of arithmetic (five products for two); only long sequences come near it. Kernels of
FlashAttention's kind also prepare and convert gradients, token by token, and start three times. Measured in public,
bf16, causal, whole sequences:

* heads of 128, FlashAttention-3 on H100: meta-pytorch/tritonbench #1254, #1256, #1267; arXiv 2407.08608 (cuDNN and
  FlashAttention-2 alike): the curve below;
* heads of 64, same sources: 3.1 falling to 2.5; between 64 and 128 in proportion;
* latent heads (192 / 128): 3.9 falling to 3.6, Dao-AILab/flash-attention #2270;
* linear attention: 1.7 to 2.2 without a trend over length, tile-ai/TileOPs #633.

The length that counts is what a query attends to: that of the whole causal sequence with as many keys per query. So a
sliding window of 128 tokens costs like short sequences, however long its own are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

LENGTHS = (1024, 2048, 4096, 8192, 16384)
MEASURED = (5.0, 4.4, 3.75, 3.2, 2.95)
"""Ratio of heads of 128 at these lengths; what lies outside is as at the nearer end."""
SMALL_HEAD, SMALL = 64, (3.1, 2.5)
WIDE_HEAD, WIDE = 128, (MEASURED[0], MEASURED[-1])
LATENT = (3.9, 3.6)
"""Ratios of short and of long sequences; between, all fall as heads of 128 do."""
LINEAR = 1.9
DENSE_SOURCE, LATENT_SOURCE = "FlashAttention-3, H100: tritonbench #1267, arXiv 2407.08608", "flash-attention #2270"
LINEAR_SOURCE = "TileOPs #633"


def attention_ratio(length: np.ndarray | float, qk_head_dim: np.ndarray | int, v_head_dim: np.ndarray | int) -> Any:
    """Return backward over forward time of a causal core by attended length in tokens and head widths."""
    from scipy.interpolate import PchipInterpolator

    # Monotone and smooth in the log of length.
    curve = PchipInterpolator(np.log2(LENGTHS), np.array(MEASURED))
    ratio = curve(np.log2(np.clip(length, LENGTHS[0], LENGTHS[-1])))
    fallen = (MEASURED[0] - ratio) / (MEASURED[0] - MEASURED[-1])
    wide = np.clip((np.asarray(v_head_dim) - SMALL_HEAD) / (WIDE_HEAD - SMALL_HEAD), 0.0, 1.0)
    latent = np.asarray(qk_head_dim) > np.asarray(v_head_dim)
    short, long = (
        np.where(latent, of_latent, of_small + wide * (of_wide - of_small))
        for of_latent, of_small, of_wide in zip(LATENT, SMALL, WIDE, strict=True)
    )
    return short - fallen * (short - long)


def _attention(features: Mapping[str, Any]) -> Any:
    # A whole causal sequence of n tokens holds n (n + 1) / 2 pairs.
    length = 2.0 * np.asarray(features["pairs"]) / np.asarray(features["tokens"]) - 1.0
    return attention_ratio(length, features["qk_head_dim"], features["v_head_dim"])


def source_of(shape: Mapping[str, Any]) -> str:
    """Return who measured the ratio of an attention core of these head widths, in few words."""
    if "window" not in shape:
        return LINEAR_SOURCE
    return LATENT_SOURCE if shape["qk_head_dim"] > shape["v_head_dim"] else DENSE_SOURCE


BACKWARD: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "attention": _attention,
    "linear_attention": lambda features: LINEAR,
}
"""From the raw features of an attention core to its ratio."""

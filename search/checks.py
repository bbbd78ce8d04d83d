"""What is checked before a kernel sees it: kernels look at no index, so that one beyond an array reads other memory.

Every function raises :class:`RoutePackError`; whoever made the data, a file, the search or a caller, it passes here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from costmodels import StepTables
from profiler import ModelSpec, RoutePackError, Topology

MOST_TOKENS = 2**31 - 1
"""Tokens of a step, and routed rows of an EP block's row: kernels count both in 32 bits."""
MOST_STEP_NS = 2**61
"""Nanoseconds over all layers and blocks that a step may cost at worst, so that sums of them fit int64."""


def check_array(name: str, value: Any, shape: tuple[int, ...], whole: bool = True) -> None:
    """Refuse what is no array of that shape, or no array of integers where they are ``whole``."""
    if not isinstance(value, np.ndarray):
        raise RoutePackError(f"Expected {name} to be a numpy array, got {type(value).__name__}.")
    if value.shape != shape:
        raise RoutePackError(f"Expected {name} of the shape {list(shape)}, got {list(value.shape)}.")
    if whole and value.dtype.kind not in "iu":
        raise RoutePackError(f"Expected {name} to hold integers, got {value.dtype}.")


def check_placement(placement_LE: Any, num_layers: int, num_experts: int) -> None:
    """Refuse a placement of another shape, or one in which a layer is no bijection of experts and physical slots."""
    check_array("a placement [MoE layers, experts]", placement_LE, (num_layers, num_experts))
    wrong = (np.sort(placement_LE, axis=1) != np.arange(num_experts)).any(axis=1)
    if wrong.any():
        raise RoutePackError(f"Placement of MoE layer {wrong.argmax()} is not a bijection of experts and slots.")


def check_ranks(rank_LE: Any, num_layers: int, num_experts: int, num_ranks: int) -> None:
    """Refuse ranks of experts [L, E] unless every EP rank holds equally many experts in every layer."""
    check_array("ranks of experts [MoE layers, experts]", rank_LE, (num_layers, num_experts))
    full = np.repeat(np.arange(num_ranks), num_experts // num_ranks)
    wrong = (np.sort(rank_LE, axis=1) != full).any(axis=1)
    if wrong.any():
        raise RoutePackError(f"In MoE layer {wrong.argmax()} the EP ranks do not hold equally many experts.")


def check_packing(row_N: Any, slot_N: Any, num_samples: int, num_rows: int, num_slots: int) -> None:
    """Refuse a packing that puts a sample outside ``num_rows`` rows x ``num_slots`` DP slots."""
    if not 1 <= num_rows * num_slots <= num_samples:
        raise RoutePackError(
            f"{num_rows} rows x {num_slots} DP slots cannot each hold one of {num_samples} samples, or are none."
        )
    for name, values, most in (("row", row_N, num_rows), ("slot", slot_N, num_slots)):
        check_array(f"the {name} of every sample", values, (num_samples,))
        lost = (values < 0) | (values >= most)
        if lost.any():
            i = int(lost.argmax())
            raise RoutePackError(
                f"Sample {i} is in no cell of {num_rows} rows x {num_slots} slots: it has {name} {values[i]}."
            )


def check_tables(tables: StepTables, spec: ModelSpec, topology: Topology, max_tokens: int) -> None:
    """Refuse tables of another model, topology or a lower cap, by their own numbers."""
    own = {
        "num_moe_layers": spec.num_moe_layers,
        "top_k": spec.top_k,
        "slots_per_block": topology.slots_per_block,
        "pipeline_stages": topology.pipeline_model_parallel_size,
    }
    found_own = {name: getattr(tables, name) for name in own}
    differ = [f"{name} {found_own[name]}, not {value}" for name, value in own.items() if found_own[name] != value]
    if not 1 <= max_tokens <= tables.max_tokens:
        differ.append(f"cells of 1 to {tables.max_tokens} tokens, not up to {max_tokens}")
    layers = {"backward": [0, 0], "forward": [0, 0]}
    for name, count in zip(tables.class_names, tables.class_layers.tolist(), strict=True):
        of_class = layers.setdefault(name.rpartition("/")[2], [0, 0])
        of_class[0] += count
        of_class[1] += count if "/moe/" in name else 0
    every = [spec.num_layers, spec.num_moe_layers]
    passes = {"backward": (1,), "forward": (1, 2)}  # forward twice where it is recomputed
    for direction, found in layers.items():
        if found not in [[n * count for count in every] for n in passes.get(direction, ())]:
            differ.append(f"{found[0]} layers {direction}, {found[1]} of them MoE, not {every[0]} and {every[1]}")
    if differ:
        raise RoutePackError(
            f"The tables of times are not of {spec.name} in this topology: they have {'; '.join(differ)}. Run "
            "`routepack fit` again."
        )


def check_times(tables: StepTables, num_layers: int, num_samples: int, topology: Topology) -> None:
    """Refuse times so long that a step's sum, or a step between two nodes of a table, is beyond 64 bits."""
    layers, rows = tables.class_layers[:, None].astype(np.float64), num_samples / topology.data_parallel_size
    sequence, cell = tables.sequence_ns * layers, tables.cell_ns * layers
    expert = tables.expert_rank_ns.astype(np.float64) + tables.exchange_ns
    row_ns = cell[:, -1].sum() + num_layers * expert[-1] + tables.row_fixed_ns
    worst = topology.num_blocks * (num_samples * sequence[:, -1].sum() + rows * row_ns)
    shifts = ((sequence, tables.length_shift), (cell, tables.tokens_shift), (expert, tables.rows_shift))
    if not max(worst, *(float(np.diff(table).max()) * 2.0**shift for table, shift in shifts)) < MOST_STEP_NS:
        raise RoutePackError(
            f"The tables' times are beyond any step: {worst * 1e-9:.3g} s at worst, over all layers and blocks. Run "
            "`routepack fit` again."
        )

"""The independent judge: slow, obvious checks of whatever the product accepted. It calls none of the product's checks.

Every function raises :class:`Wrong` with what cannot be. Shape suffixes: N samples, L MoE layers, E experts.
"""

from __future__ import annotations

import itertools
import json
import math
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np


class Wrong(Exception):
    """Say why an accepted input, or what was made of it, cannot be right."""


def holds(fact: bool, text: str) -> None:
    """Raise :class:`Wrong` unless a fact holds."""
    if not fact:
        raise Wrong(text)


def whole(value: Any, low: int = 0, high: int = 2**63 - 1) -> bool:
    """Tell whether a value is an integer, no bool, within bounds."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and low <= value <= high


def number(value: Any, low: float = -math.inf) -> bool:
    """Tell whether a value is a finite number of at least ``low``."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= low


# --- what was read ---


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read an archive that the product read, also one with bytes before or after it."""
    found = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as member:
                if not member.peek(6).startswith(b"\x93NUMPY"):
                    continue
                found[name.removesuffix(".npy")] = np.lib.format.read_array(member, allow_pickle=False)
    return found


def check_batch(batch: Any, spec: Any) -> None:
    """A step batch adds up: lengths, counts by layer, distinct names."""
    lengths, counts, known = batch.lengths.tolist(), np.asarray(batch.expert_counts), batch.known_tokens.tolist()
    holds(all(whole(n, 1) for n in lengths), f"lengths {lengths[:5]}")
    holds(len(set(map(str, batch.sample_ids))) == len(lengths), "sample ids are not distinct")
    holds(counts.shape == (len(lengths), spec.num_moe_layers, spec.num_experts), f"counts of shape {counts.shape}")
    for i, n in enumerate(lengths):
        holds(0 <= known[i] <= n, f"sample {i}: {known[i]} known of {n} tokens")
        for layer in range(spec.num_moe_layers):
            row = counts[i, layer].tolist()
            holds(min(row) >= 0 and max(row) <= known[i], f"sample {i} layer {layer}: counts {row[:4]} of {known[i]}")
            holds(sum(row) == spec.top_k * known[i], f"sample {i} layer {layer}: {sum(row)} routes")


def check_same_batch(path: Path, batch: Any, spec: Any) -> None:
    """The batch says what the file says: lengths as they are, and counts made from routes one token after another."""
    arrays = read_arrays(path)
    holds(arrays["lengths"].tolist() == batch.lengths.tolist(), "lengths are not the file's")
    if "expert_counts" in arrays:
        given = arrays["expert_counts"]
        given = (
            given[:, [i for i, m in enumerate(spec.moe_layers) if m]] if given.shape[1] == spec.num_layers else given
        )
        holds(np.array_equal(given.astype(object), np.asarray(batch.expert_counts)), "counts are not the file's")
        return
    ids, offsets = arrays["expert_ids"], arrays["offsets"].tolist()
    ids = ids[:, [i for i, m in enumerate(spec.moe_layers) if m]] if ids.shape[1] == spec.num_layers else ids
    for i, (first, last) in enumerate(itertools.pairwise(offsets)):
        for layer in range(ids.shape[1]):
            tokens = [row for row in ids[first:last, layer].tolist() if len(set(row)) > 1 and min(row) >= 0]
            counted = Counter(expert for row in tokens for expert in row)
            found = np.asarray(batch.expert_counts)[i, layer].tolist()
            holds([counted[e] for e in range(len(found))] == found, f"sample {i} layer {layer}: counts {found[:4]}")


def check_spec(spec: Any) -> None:
    """A model's sizes are whole, positive and of a model that can exist; its lists run over its layers."""
    sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "qk_head_dim", "v_head_dim", "num_experts")
    for name in (*sizes, "top_k", "moe_intermediate_size"):
        holds(whole(getattr(spec, name), 1, 2**24), f"{name} = {getattr(spec, name)!r:.60}")
    for name in (
        "shared_intermediate_size",
        "dense_intermediate_size",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_rope_head_dim",
    ):
        holds(whole(getattr(spec, name), 0, 2**24), f"{name} = {getattr(spec, name)!r:.60}")
    holds(spec.top_k <= spec.num_experts, f"top_k {spec.top_k} of {spec.num_experts} experts")
    holds(len(spec.windows) == len(spec.moe_layers) <= 10_000, f"{len(spec.windows)} layers")
    holds(all(whole(window, 0, 2**40) for window in spec.windows), f"windows {spec.windows[:4]!r:.60}")
    holds(all(isinstance(mark, bool) for mark in spec.moe_layers), f"moe_layers {spec.moe_layers[:4]!r:.60}")
    holds(any(spec.moe_layers), "no layer has experts")
    dense = not all(spec.moe_layers)
    holds(not dense or spec.dense_intermediate_size >= 1, "dense layers of width 0")
    holds(isinstance(spec.name, str), f"name {spec.name!r:.60}")


def check_params(params: Any) -> None:
    """Settings have their types and are finite."""
    for name in params.__dataclass_fields__:
        value, kind = getattr(params, name), str(params.__dataclass_fields__[name].type)
        if kind == "int":
            holds(whole(value), f"{name} = {value!r:.60}")
        elif kind == "bool":
            holds(isinstance(value, bool), f"{name} = {value!r:.60}")
        elif kind == "float":
            holds(number(value, 0), f"{name} = {value!r:.60}")


def check_topology(topology: Any) -> None:
    """Parallel sizes are whole, positive and those of a cluster that can exist."""
    for name in topology.__dataclass_fields__:
        holds(whole(getattr(topology, name), 1, 2**20), f"{name} = {getattr(topology, name)!r:.60}")


def check_tables(tables: Any, spec: Any, topology: Any, cap: int) -> None:
    """Frozen times are of the job, cover every size that it can ask, are not negative and never fall."""
    wanted = {
        "num_moe_layers": spec.num_moe_layers,
        "top_k": spec.top_k,
        "slots_per_block": topology.slots_per_block,
        "pipeline_stages": topology.pipeline_model_parallel_size,
    }
    for name, value in wanted.items():
        holds(
            whole(getattr(tables, name)) and getattr(tables, name) == value, f"{name} = {getattr(tables, name)!r:.40}"
        )
    holds(whole(tables.max_tokens, cap), f"max_tokens {tables.max_tokens!r:.40} for a cap of {cap}")
    classes = len(tables.class_names)
    layers = np.asarray(tables.class_layers)
    holds(layers.dtype == np.int64 and layers.shape == (classes,), f"class_layers {layers.dtype} {layers.shape}")
    for way in ("forward", "backward"):
        mine = [n for n, name in zip(layers.tolist(), tables.class_names, strict=True) if name.endswith(way)]
        most = 2 if way == "forward" else 1  # forward twice where it is recomputed
        right = sum(mine) in (spec.num_layers, most * spec.num_layers)
        holds(min(mine, default=0) >= 0 and right, f"{way} classes hold {sum(mine)} layers")
    rows = cap * topology.slots_per_block * spec.top_k
    of = {"sequence_ns": (tables.length_shift, cap, 2), "cell_ns": (tables.tokens_shift, cap, 2)}
    of |= dict.fromkeys(("expert_rank_ns", "exchange_ns"), (tables.rows_shift, rows, 1))
    for name, (shift, most, axes) in of.items():
        table = np.asarray(getattr(tables, name))
        holds(whole(shift, 0, 40), f"shift of {name} {shift!r:.40}")
        holds(table.dtype == np.int64 and table.ndim == axes, f"{name} is {table.dtype} {table.shape}")
        holds(axes == 1 or len(table) == classes, f"{name} has {len(table)} classes of {classes}")
        holds(table.shape[-1] >= (most >> shift) + 2, f"{name} ends before {most}")
        for line in table.reshape(-1, table.shape[-1]).tolist():
            holds(line[0] >= 0 and all(a <= b for a, b in itertools.pairwise(line)), f"{name} falls or is < 0")
    for name in ("row_fixed_ns", "measured_length_max", "measured_rows_max", "expert_move_ns"):
        holds(whole(getattr(tables, name)), f"{name} = {getattr(tables, name)!r:.60}")
    holds(number(tables.link_gbytes_per_s, 0), f"link_gbytes_per_s = {tables.link_gbytes_per_s!r:.60}")
    holds(all(isinstance(note, str) for note in tables.notes), "a note that is no text")


def check_plan_file(path: Path) -> None:
    """A plan that was taken as the previous one does not contradict itself."""
    data = json.loads(path.read_text(encoding="utf-8-sig"))
    slots, rows = data["topology"]["data_parallel_size"], data["num_microbatches"]
    cells = data["micro_batches"]
    holds(whole(rows, 1) and len(cells) == slots, f"{rows!r:.30} rows, {len(cells)} slots of {slots!r:.30}")
    holds(all(len(cell) == rows for cell in cells), "slots hold unlike numbers of rows")
    samples = sorted(i for slot in cells for cell in slot for i in cell)
    count = data["denominators"]["num_samples"]
    holds(samples == list(range(count)) and len(data["sample_ids"]) == count, f"samples {samples[:5]} of {count!r:.30}")
    holds(all(type(i) is int for slot in cells for cell in slot for i in cell), "a sample that is no integer")
    holds(all(cell for slot in cells for cell in slot), "an empty cell")
    for there, back in zip(data["logical_to_physical"], data["physical_to_logical"], strict=True):
        holds(sorted(there) == list(range(len(there))), f"placement {there[:4]} is no bijection")
        holds(all(type(slot) is int for slot in there), "a physical slot that is no integer")
        holds([there[e] for e in back] == list(range(len(there))), "physical_to_logical is not the inverse")
    holds(whole(data["max_tokens_per_microbatch"], 1), f"cap {data['max_tokens_per_microbatch']!r:.40}")
    holds(whole(data["denominators"]["num_tokens"], count), f"{data['denominators']['num_tokens']!r:.40} tokens")
    holds(all(isinstance(name, str) for name in data["sample_ids"]), "a sample id that is no text")
    for part in ("predicted", "default"):
        for name, value in data[part].items():
            holds(number(value, 0), f"{part}.{name} = {value!r:.40}")
        holds(data[part]["step_time_s"] > 0, f"{part}.step_time_s = 0")
    holds(number(data["lower_bound_s"], 0), f"lower_bound_s = {data['lower_bound_s']!r:.40}")
    holds(data["lower_bound_s"] <= data["predicted"]["step_time_s"] * (1 + 1e-9), "the bound is above the plan")


# --- what was made ---


def check_plan(plan: Any, batch: Any, job: tuple[Any, Any, Any, int, Any], previous: Any = None) -> None:
    """A plan keeps every constraint, its numbers are finite and positive, and cost what they cost by the definition."""
    tables, spec, topology, cap, params = job
    align = params.sequence_alignment
    lengths = [-(-n // align) * align for n in batch.lengths.tolist()]
    slots, rows = topology.data_parallel_size, plan.num_rows
    holds(len(plan.row_N) == len(plan.slot_N) == len(lengths), f"{len(plan.row_N)} samples of {len(lengths)}")
    cells = Counter()
    for n, row, slot in zip(lengths, plan.row_N.tolist(), plan.slot_N.tolist(), strict=True):
        holds(0 <= row < rows and 0 <= slot < slots, f"a sample in row {row}, slot {slot}")
        cells[row, slot] += n
    holds(len(cells) == rows * slots, f"{rows * slots - len(cells)} empty cells")
    holds(max(cells.values()) <= cap, f"a cell of {max(cells.values())} tokens, cap {cap}")
    if topology.virtual_pipeline_model_parallel_size > 1:
        holds(rows % topology.pipeline_model_parallel_size == 0, f"{rows} rows")
    holds(plan.placement_LE.shape == (spec.num_moe_layers, spec.num_experts), f"placement {plan.placement_LE.shape}")
    for layer in plan.placement_LE.tolist():
        holds(sorted(layer) == list(range(spec.num_experts)), f"placement {layer[:4]} is no bijection")
    if params.equal_samples:
        held = Counter(plan.slot_N.tolist())
        holds(max(held.values()) - min(held[slot] for slot in range(slots)) <= 1, f"slots hold {sorted(held.values())}")
    for part in (plan.predicted, plan.default):
        for name in ("step_time_s", "attention_s", "experts_s", "rest_s"):
            holds(number(getattr(part, name), -1e-12), f"{name} = {getattr(part, name)!r}")
        holds(part.step_time_s > 0, f"step_time_s = {part.step_time_s!r}")
        total = part.attention_s + part.experts_s + part.rest_s
        holds(math.isclose(total, part.step_time_s, rel_tol=1e-6), f"parts add up to {total}, not {part.step_time_s}")
    holds(number(plan.lower_bound_s, 0), f"lower_bound_s = {plan.lower_bound_s!r}")
    holds(plan.lower_bound_s <= plan.predicted.step_time_s * (1 + 1e-9), "the proven bound is above the plan")
    _check_moves(plan, previous)
    if align == 1:
        counts = filled_counts(batch, spec.top_k)
        loads = rank_rows(plan, counts, topology, spec)
        most = params.max_received_rows
        holds(not most or max(loads.values(), default=0) <= most, f"a rank receives {max(loads.values())} rows")
        slow = step_ns(plan, lengths, loads, job) * 1e-9 / tables.pipeline_stages
        holds(
            math.isclose(slow, plan.predicted.step_time_s, rel_tol=1e-9),
            f"costs {slow}, not {plan.predicted.step_time_s}",
        )


def _check_moves(plan: Any, previous: Any) -> None:
    moves = plan.moves
    holds(whole(moves.bytes) and number(moves.seconds, 0), f"moves of {moves.bytes!r} bytes in {moves.seconds!r} s")
    if previous is None:
        holds(not moves.experts, "moves without a previous plan")
        return
    changed = {
        (e, int(old), int(new))
        for before, after in zip(previous.placement_LE, plan.placement_LE, strict=True)
        for e, (old, new) in enumerate(zip(before, after, strict=True))
        if old != new
    }
    holds({tuple(map(int, one[1:])) for one in moves.experts} == changed, "moves are not old and new placement")


def filled_counts(batch: Any, top_k: int) -> list[list[list[int]]]:
    """Return counts [N, L, E] in which tokens without a route stand as the sample's (or batch's) average token."""
    counts, known = np.asarray(batch.expert_counts).astype(int).tolist(), batch.known_tokens.tolist()
    layers = range(len(counts[0]))
    totals = [[sum(sample[layer][e] for sample in counts) for e in range(len(counts[0][0]))] for layer in layers]
    found = []
    for sample, seen, n in zip(counts, known, batch.lengths.tolist(), strict=True):
        basis, share = (sample, seen) if seen else (totals, sum(known))
        made = []
        for layer in layers:
            parts = [divmod(count * n, share) for count in basis[layer]]
            order = sorted(range(len(parts)), key=lambda e: (-parts[e][1], e))
            row = [part[0] for part in parts]
            for e in order[: top_k * n - sum(row)]:
                row[e] += 1
            made.append(row)
        found.append(made)
    return found


def rank_rows(plan: Any, counts: list, topology: Any, spec: Any) -> Counter:
    """Return the routed rows by (row, block, EP rank, layer)."""
    per_block = topology.data_parallel_size // topology.num_blocks
    per_rank = spec.num_experts // topology.expert_model_parallel_size
    loads: Counter = Counter()
    for i, sample in enumerate(counts):
        row, block = int(plan.row_N[i]), int(plan.slot_N[i]) // per_block
        for layer, experts in enumerate(sample):
            for e, count in enumerate(experts):
                loads[row, block, int(plan.placement_LE[layer, e]) // per_rank, layer] += count
    return loads


def step_ns(plan: Any, lengths: list[int], loads: Counter, job: tuple[Any, Any, Any, int, Any]) -> int:
    """Return the time of a step by the definition, ns over all layers: per row two maxima, the slowest block."""
    tables, spec, topology, _, params = job
    blocks, per_block = topology.num_blocks, topology.data_parallel_size // topology.num_blocks
    together = blocks if params.couple_blocks else 1
    times = []
    for first in range(0, blocks, together):
        total, mine = 0, range(first, first + together)
        for row in range(plan.num_rows):
            cells = [
                [
                    n
                    for n, r, s in zip(lengths, plan.row_N.tolist(), plan.slot_N.tolist(), strict=True)
                    if (r, s) == (row, d)
                ]
                for block in mine
                for d in range(block * per_block, (block + 1) * per_block)
            ]
            for c, layers in enumerate(np.asarray(tables.class_layers).tolist()):
                total += max(  # a cell's time is rounded once for all layers, a sequence's in each
                    look_up(tables.cell_ns[c] * layers, tables.tokens_shift, sum(cell))
                    + layers * sum(look_up(tables.sequence_ns[c], tables.length_shift, n) for n in cell)
                    for cell in cells
                )
            sent = max(sum(c) * spec.top_k * topology.blocks_per_slot // topology.ranks_per_slot for c in cells)
            for layer in range(spec.num_moe_layers):
                ranks = range(topology.expert_model_parallel_size)
                peak = max(loads[row, block, rank, layer] for block in mine for rank in ranks)
                experts, exchange = tables.expert_rank_ns, tables.exchange_ns
                if peak >= sent:  # one look-up of the sum, which rounds once
                    total += look_up(experts + exchange, tables.rows_shift, peak)
                else:
                    total += look_up(experts, tables.rows_shift, peak) + look_up(exchange, tables.rows_shift, sent)
            total += tables.row_fixed_ns
        times.append(total)
    return max(times)


def look_up(table: Any, shift: int, x: int) -> int:
    """Interpolate between nodes every ``1 << shift``, rounded down."""
    node, rest = divmod(x, 1 << shift)
    low, high = int(table[node]), int(table[node + 1])
    return low + (high - low) * rest // (1 << shift)

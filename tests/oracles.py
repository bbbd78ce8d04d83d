"""Slow, obvious versions of what the project computes fast; nothing here is clever."""

from __future__ import annotations

import itertools

import numpy as np


def lookup_slow(table, shift, x):
    """Linear interpolation between nodes every ``1 << shift``, rounded down."""
    step = 1 << shift
    node, rest = divmod(int(x), step)
    low, high = int(table[node]), int(table[node + 1])
    return low + (high - low) * rest // step


def step_ns_slow(problem, row_N, slot_N, placement_LE, num_rows):
    """Time of a step by the definition: per block, row and layer two maxima; the slowest block."""
    topology, tables = problem.topology, problem.tables
    slots, blocks, ranks = problem.num_slots, problem.num_blocks, problem.num_ranks
    per_block, per_rank = slots // blocks, problem.num_experts // ranks
    block_times = []
    together = problem.blocks_per_unit
    for end in range(blocks // together):
        total = 0
        for row in range(num_rows):
            in_block = range(end * together * per_block, (end + 1) * together * per_block)
            cells = {d: [i for i in range(len(row_N)) if row_N[i] == row and slot_N[i] == d] for d in in_block}
            tokens = {d: sum(int(problem.lengths[i]) for i in cells[d]) for d in in_block}
            for c in range(problem.cell_ns.shape[0]):
                total += max(
                    lookup_slow(problem.cell_ns[c], tables.tokens_shift, tokens[d])
                    + sum(int(problem.sequence_ns[i, c]) for i in cells[d])
                    for d in in_block
                )
            sent = max(
                tokens[d] * problem.spec.top_k * topology.blocks_per_slot // topology.ranks_per_slot for d in in_block
            )
            for layer in range(problem.num_layers):
                rows = [0] * ranks * blocks  # every block has ranks of its own
                for d in in_block:
                    for i in cells[d]:
                        for expert in range(problem.num_experts):
                            rank = d // per_block * ranks + placement_LE[layer, expert] // per_rank
                            rows[rank] += int(problem.counts[i, layer, expert])
                if max(rows) >= sent:
                    total += lookup_slow(problem.expert_ns + problem.exchange_ns, tables.rows_shift, max(rows))
                else:
                    total += lookup_slow(problem.expert_ns, tables.rows_shift, max(rows))
                    total += lookup_slow(problem.exchange_ns, tables.rows_shift, sent)
            total += tables.row_fixed_ns
        block_times.append(total)
    return max(block_times), block_times


def wall_ns_slow(problem, rank_rows_RBPL):
    """What the search charges every end of the step for rows above the receive cap, by the definition."""
    cap, row_ns = problem.receive_wall
    together = problem.blocks_per_unit
    charges = [0] * (problem.num_blocks // together)
    for row in rank_rows_RBPL.tolist():
        for end in range(len(charges)):
            for layer in range(problem.num_layers):
                blocks = row[end * together : (end + 1) * together]
                peak = max(rank[layer] for block in blocks for rank in block)
                charges[end] += row_ns * max(0, peak - cap)
    return np.array(charges)


def best_step_ns(problem, max_rows):
    """The optimum over every capped packing into at most ``max_rows`` rows and every placement, by enumeration."""
    best = None
    for num_rows in range(1, max_rows + 1):
        cells = num_rows * problem.num_slots
        for packing in itertools.product(range(cells), repeat=problem.num_samples):
            tokens = np.bincount(packing, weights=problem.lengths, minlength=cells)
            if len(set(packing)) < cells or tokens.max() > problem.max_tokens:
                continue
            row_N, slot_N = np.array(packing) // problem.num_slots, np.array(packing) % problem.num_slots
            time = _best_placement_ns(problem, row_N, slot_N, num_rows)
            best = time if best is None else min(best, time)
    return best


def _best_placement_ns(problem, row_N, slot_N, num_rows):
    """Layers separate when there is one block: take the best bijection of each."""
    identity = np.tile(np.arange(problem.num_experts), (problem.num_layers, 1))
    total = step_ns_slow(problem, row_N, slot_N, identity, num_rows)[0]
    for layer in range(problem.num_layers):
        times = []
        for order in itertools.permutations(range(problem.num_experts)):
            placement = identity.copy()
            placement[layer] = order
            times.append(step_ns_slow(problem, row_N, slot_N, placement, num_rows)[0])
        total += min(times) - times[0]
    return total


def delta_rule_slow(query, key, value, decay, write, lengths):
    """The gated delta rule token by token and head by head: [T, H, K] and [T, H, V] torch tensors in, [T, H, V] out.

    Queries and keys come normalised; ``decay`` holds logs. Every sequence starts from a state of zeros.
    """
    import torch

    outputs, first = [], 0
    for length in lengths:
        for head in range(value.shape[1]):
            state = value.new_zeros(key.shape[-1], value.shape[-1])
            rows = []
            for t in range(first, first + length):
                state = state * decay[t, head].exp()
                correction = write[t, head] * (value[t, head] - key[t, head] @ state)
                state = state + torch.outer(key[t, head], correction)
                rows.append(query[t, head] @ state / query.shape[-1] ** 0.5)
            outputs.append((first, head, torch.stack(rows)))
        first += length
    by_head = [torch.cat([rows for _, head, rows in outputs if head == h]) for h in range(value.shape[1])]
    return torch.stack(by_head, dim=1)


def experts_slow(rows, gate_up, down, counts):
    """The SwiGLU feed-forward of every expert on its own rows, one after the other."""
    import torch

    parts, first = [], 0
    for expert, count in enumerate(counts):
        gate, up = (rows[first : first + count] @ gate_up[expert].T).chunk(2, dim=-1)
        parts.append((torch.nn.functional.silu(gate) * up) @ down[expert].T)
        first += count
    return torch.cat(parts)


def router_slow(tokens, weight, top_k):
    """Every token's own rows, one for each of its experts, added up by the experts' renormalised shares."""
    import torch

    outputs = []
    for token in tokens:
        shares = torch.softmax(weight @ token, dim=0)
        chosen = sorted(range(len(weight)), key=lambda e: -shares[e].item())[:top_k]
        total = sum(shares[e] for e in chosen)
        outputs.append(sum(token * (shares[e] / total) for e in chosen))
    return torch.stack(outputs)


def padded_counts_slow(counts, padding, experts):
    """Counts [N, L, E] with every token of ``padding`` [N] sent to each of ``experts`` in each layer, one by one."""
    found = counts.tolist()
    for i, tokens in enumerate(padding.tolist()):
        for layer in range(counts.shape[1]):
            for _ in range(tokens):
                for expert in experts:
                    found[i][layer][expert] += 1
    return np.array(found)

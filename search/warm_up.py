"""Compile before the first step what planning it will run, or load it where numba has kept it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from costmodels import StepTables
from profiler import ModelSpec, Topology
from search.joint import plan_step
from search.kernels import seed_state
from search.packing.packer import PackChain, pack_costs
from search.params import PlannerParams
from search.placement.lpt import first_ranks
from search.problem import StepBatch, build_problem


def warm_up(
    tables: StepTables, spec: ModelSpec, topology: Topology, max_tokens: int, params: PlannerParams | None = None
) -> None:
    """Plan a step of one-token samples, with and without a plan before it: kernels are the same for steps of any size.

    Loads above 16 bits, which only very long samples give, are packed by kernels of their own.
    """
    short: dict[str, Any] = {"max_iterations": 1, "starts": 1, "alternations": 1, "placement_swaps": 1, "extra_rows": 0}
    params = replace(params or PlannerParams(), **short, max_received_rows=0)
    batch = _tiny_batch(spec, 2 * topology.data_parallel_size * topology.row_multiple)
    job = (tables, spec, topology, max_tokens, params)
    plan = plan_step(batch, *job)
    plan_step(batch, *job, previous=plan)
    local_experts = spec.num_experts // topology.expert_model_parallel_size
    if max_tokens * min(spec.top_k, local_experts) >= 1 << 16:
        problem = build_problem(batch, *job)
        costs = pack_costs(problem, first_ranks(problem))
        wide = costs._replace(loads=costs.loads.astype(np.int32))
        cell_of = plan.row_N * topology.data_parallel_size + plan.slot_N
        PackChain(problem, wide, cell_of, plan.num_rows, seed_state(0)).roughness()


def _tiny_batch(spec: ModelSpec, samples: int) -> StepBatch:
    """Return samples of one token each, whose experts take turns."""
    ones, numbers = np.ones(samples, np.int64), np.arange(samples)
    counts = np.zeros((samples, spec.num_moe_layers, spec.num_experts), np.int32)
    chosen_NK = (numbers[:, None] * spec.top_k + np.arange(spec.top_k)) % spec.num_experts
    counts[numbers[:, None], :, chosen_NK] = 1
    return StepBatch(ones, counts, numbers.astype(np.str_), ones)

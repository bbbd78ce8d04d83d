"""What the table does not show: imbalance of the batches, replanning, movement, speed, memory, growth, determinism.

Each check yields ``CheckRecord`` lists of one key, lazily, so that a run can be stopped and resumed between them.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from methods import our_plan, plan_ns
from records import CheckRecord
from regimes import HERE, Instance, Regime, load_instance, load_tables, with_layers, with_prompts

from search import Plan, PlannerParams
from search.joint import SEEDS, row_candidates
from search.kernels import seed_state
from search.packing.packer import PackChain, pack_costs
from search.placement.lpt import identity_placement, lpt_placement, ranks_of_slots

DRIFT_STEPS, DRIFT_SEEDS, DRIFT_BUDGET_S = 10, 2, 2.0
SPEED_PROPOSALS = 1_000_000
GROWTH_PROMPTS = (16, 32, 64, 128, 256)
GROWTH_LAYERS = (12, 24, 48, 96)


@dataclass(frozen=True, slots=True)
class Check:
    """Name what is measured on one regime and batch, and how."""

    name: str
    regime: Regime
    instance: int
    variant: str
    run: Callable[[], dict[str, float]]

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of its records."""
        return self.name, self.regime.name, self.instance, self.variant

    def records(self) -> list[CheckRecord]:
        """Measure, and return one record per quantity."""
        return [CheckRecord(*self.key, quantity, float(value)) for quantity, value in self.run().items()]


def all_checks(regimes: dict[str, Regime], seeds: int, *, quick: bool = False) -> Iterator[Check]:
    """Yield every check of the given regimes."""
    steps = 3 if quick else DRIFT_STEPS
    for regime in regimes.values():
        for number in regime.instances(seeds):
            yield Check("imbalance", regime, number, "step totals", lambda r=regime, n=number: _imbalance(r, n))
    if (regime := regimes.get("math-long")) is not None:
        yield Check("speed", regime, 0, "one core", lambda r=regime: _speed(r))
        for number in range(seeds):
            yield Check("replan", regime, number, "next step", lambda r=regime, n=number: _replan(r, n))
        for number in range(min(seeds, DRIFT_SEEDS)):
            yield Check("drift", regime, number, f"{steps} steps", lambda r=regime, n=number: _drift(r, n, steps))
        yield Check("determinism", regime, 0, "plan bytes", lambda r=regime: _determinism(r))
        for prompts in GROWTH_PROMPTS[: 2 if quick else None]:
            yield Check("growth in samples", regime, 0, str(prompts * 16), lambda r=regime, p=prompts: _grown(r, p, 0))
        for layers in GROWTH_LAYERS[: 2 if quick else None]:
            yield Check("growth in layers", regime, 0, str(layers), lambda r=regime, n=layers: _grown(r, 0, n))
    if (regime := regimes.get("giant")) is not None:
        for seconds in (5, 20):
            yield Check("memory", regime, 0, f"{seconds} s", lambda r=regime, s=seconds: _memory(r, s))


def _imbalance(regime: Regime, number: int) -> dict[str, float]:
    """Return the most loaded rank over the mean by step totals: mean, least and largest over layers."""
    instance, found = load_instance(regime, number), {}
    for name, place in (("identity", identity_placement), ("LPT", lpt_placement)):
        ratio_L = instance.imbalance(place(instance.problem))
        found |= {f"{name} mean": ratio_L.mean(), f"{name} least": ratio_L.min(), f"{name} most": ratio_L.max()}
    hottest_L = instance.problem.counts.sum(axis=0, dtype=np.int64).max(axis=1)
    total = int(instance.problem.counts[:, 0].sum(dtype=np.int64))
    return found | {"hottest expert over mean rank": (hottest_L * instance.problem.num_ranks / total).mean()}


def _percent(plan: Plan, instance: Instance) -> float:
    return 100 * instance.ideal_ns / plan_ns(plan, instance)


def moved_share(old: Plan, new: Plan) -> float:
    """Return the share of experts that change their EP rank."""
    per_rank = old.placement_LE.shape[1] // old.topology.expert_model_parallel_size
    return float((old.placement_LE // per_rank != new.placement_LE // per_rank).mean())


def _replan(regime: Regime, number: int) -> dict[str, float]:
    """Plan step 1 of a stream from the plan of step 0 and from scratch, in percent of the ideal."""
    first = load_instance(regime, number)
    previous = our_plan(first, 2.0, seed=number)
    after = load_instance(regime, number, step=1)
    found = {}
    free = replace(PlannerParams(), stickiness=0.0)
    for name, seconds, old, params in (
        ("from previous, 0.5 s", 0.5, previous, PlannerParams()),
        ("from previous, moves free, 0.5 s", 0.5, previous, free),
        ("from scratch, 0.5 s", 0.5, None, PlannerParams()), ("from scratch, 2 s", 2.0, None, PlannerParams()),
    ):  # fmt: skip
        start = time.perf_counter()
        plan = our_plan(after, seconds, seed=number, params=params, previous=old)
        found |= {name: _percent(plan, after), f"{name}: measured s": time.perf_counter() - start}
        found[f"{name}: moved share"] = moved_share(previous, plan)
    return found


def _drift(regime: Regime, number: int, steps: int) -> dict[str, float]:
    """Plan a drifting stream step by step, each from the plan before, sticky, free to move, and from scratch."""
    params = PlannerParams()
    policies = {"sticky": params, "stickiness 0": replace(params, stickiness=0.0), "from scratch": None}
    start = our_plan(load_instance(regime, number), DRIFT_BUDGET_S, seed=number)
    before = dict.fromkeys(policies, start)
    found: dict[str, float] = {}
    for step in range(1, steps + 1):
        instance = load_instance(regime, number, step=step)
        for name, given in policies.items():
            old = before[name]
            plan = our_plan(instance, DRIFT_BUDGET_S, seed=number, params=given, previous=old if given else None)
            found |= {f"{name}: moved share, step {step}": moved_share(old, plan)}
            found |= {f"{name}: step s, step {step}": plan.predicted.step_time_s}
            found |= {f"{name}: moving s, step {step}": plan.moves.seconds}
            before[name] = plan
    return found


def _speed(regime: Regime) -> dict[str, float]:
    """Time the annealing kernel alone on one thread, hot and cold; a proposal refused by the cap is not priced."""
    problem = load_instance(regime, 0).problem
    costs = pack_costs(problem, ranks_of_slots(lpt_placement(problem), problem.num_ranks))
    rows = row_candidates(problem, 3)[-1]
    cell_of = next(cell_of for pack in SEEDS if (cell_of := pack(problem, rows)) is not None)
    found: dict[str, float] = {}
    for name in ("whole schedule", "cold"):
        chain = PackChain(problem, costs, cell_of, rows, seed_state(1))
        whole = problem.params.hot_temperature * chain.roughness()
        hot = whole if name == "whole schedule" else problem.params.cold_temperature
        chain.run(hot, 1.0, lambda proposals, *_: proposals / 10_000)
        chain = PackChain(problem, costs, chain.best_cell_of, rows, seed_state(2))
        start = time.process_time()
        chain.run(hot, 1.0, lambda proposals, *_: proposals / SPEED_PROPOSALS)
        spent = time.process_time() - start
        found |= {f"{name}: proposals per s": chain.proposals / spent, f"{name}: priced per s": chain.priced / spent}
    return found


def _alone(regime: Regime, number: int, *options: str, hash_seed: str = "0") -> dict[str, Any]:
    """Plan a batch in a fresh process; see one_plan.py."""
    load_tables(regime)  # so that the process need not fit
    program = [sys.executable, str(HERE / "one_plan.py"), regime.name, str(number)]
    command = [*program, "--shared", str(regime.shared), *options]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONHASHSEED": hash_seed}
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def _determinism(regime: Regime) -> dict[str, float]:
    """Return 1 for each pair of runs with the same plan bytes (iteration budget): processes, threads, hash seeds."""
    runs = {(threads, seed): _alone(regime, 0, "--threads", str(threads), hash_seed=seed)["sha256"]
            for threads, seed in itertools.product((1, 2), ("0", "1"))}  # fmt: skip
    again = _alone(regime, 0, "--threads", "2")["sha256"]
    return {
        "two processes": again == runs[2, "0"],
        "1 and 2 threads": runs[1, "0"] == runs[2, "0"],
        "two hash seeds": runs[2, "0"] == runs[2, "1"],
        "all the same": len({again, *runs.values()}) == 1,
    }


def _memory(regime: Regime, seconds: int) -> dict[str, float]:
    got = _alone(regime, 0, "--seconds", str(seconds))
    return {name: got[name] for name in ("peak_gib", "planning_gib", "batch_gib", "plan_s", "percent")}


def _grown(regime: Regime, prompts: int, layers: int) -> dict[str, float]:
    """Plan a smaller or larger step with proposals in proportion to its samples; CPU seconds and peak memory."""
    assert regime.workload is not None
    samples = (prompts or regime.workload.num_prompts) * regime.workload.rollouts
    load_tables(with_layers(regime, layers) if layers else regime)
    given = ("--iterations", str(100 * samples), "--prompts", str(prompts), "--layers", str(layers), "--threads", "1")
    got = _alone(with_prompts(regime, prompts) if prompts else regime, 0, *given)
    return {name: got[name] for name in ("cpu_s", "plan_s", "peak_gib", "planning_gib", "batch_gib", "percent")}

"""What errors of times do to plans: one batch planned with four kinds of times, all four priced by measured curves.

* ``token counts``: every table is a straight line through zero, time proportional to tokens and rows; slopes are such
  that the batch's totals equal the model's, so that only the shape of the line is wrong.
* ``fitted baseline``: physics alone, no learned residual. ``model``: the library's.
* ``measured curves``: what prices the plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from held_out import measurements_of
from models import CAP, DEEPSEEK_V2_LITE, load_cost_model, topology
from raw_curves import RawCurves
from records import CheckRecord

from costmodels import CostModel, StepTables, freeze_tables, lookup_many_ns
from costmodels.freezing.pricer import Pricer
from costmodels.learned.residual import Residual
from costmodels.tables import table_nodes
from profiler import ModelSpec, Topology, load_model
from routepack_tune import load_step_batch
from routepack_tune.steps.generator import WorkloadParams, make_step_batch
from search import Plan, StepBatch, StopCriterion, build_problem, plan_step
from search.baselines.catalog import price_packing

CHECK = "plans"
GPU = "H200"
ITERATIONS, QUICK_ITERATIONS = 1_500_000, 60_000
BATCHES = 3
TOKENS, BASELINE, MODEL, CURVES = "token counts", "fitted baseline", "model", "measured curves"


@dataclass(frozen=True, slots=True)
class Work:
    """Name one batch to plan."""

    name: str
    spec: ModelSpec
    topology: Topology
    batch: StepBatch


def all_works(shared: Path, *, quick: bool) -> Iterator[Work]:
    """Yield the batches: real routes of two models where present, synthetic ones of a measured shape."""
    count = 1 if quick else BATCHES
    for name, spec, pattern in (("gpt-oss-20b, real routes", load_model("gpt-oss-20b"), "gptoss20b-r1lengths-step*"),
                                ("V2-Lite, real routes", DEEPSEEK_V2_LITE, "v2lite-r1lengths-step*")):  # fmt: skip
        for path in sorted((shared / "routing").glob(f"{pattern}.npz"))[:count]:
            yield Work(f"{name}, {path.stem[-6:]}", spec, topology(), load_step_batch(path, spec))
    spec, workload = load_model("Qwen3-30B-A3B"), WorkloadParams(64, 16, 5000, 0.9, CAP)
    if quick:
        workload = replace(workload, num_prompts=16)
    for seed in range(count):
        yield Work(f"Qwen3-30B-A3B, synthetic, seed {seed}", spec, topology(16, 16),
                   make_step_batch(spec, workload, seed=seed))  # fmt: skip


def plan_records(work: Work, shared: Path, *, quick: bool) -> Iterator[CheckRecord]:
    """Yield the step times that measured curves give to the plan of every kind of times, and how they compare."""
    measured = measurements_of(GPU, shared)
    assert measured is not None
    model = load_cost_model(GPU, shared, quick=quick)
    tables = freeze_tables(model, work.spec, work.topology, CAP)
    curves = curve_tables(RawCurves(measured, model), tables, work)
    kinds = {
        TOKENS: token_tables(tables, work),
        BASELINE: freeze_tables(without_trees(model), work.spec, work.topology, CAP),
        MODEL: tables,
        CURVES: curves,
    }
    stop = QUICK_ITERATIONS if quick else ITERATIONS
    step_s = {}
    for kind, priced_by in kinds.items():
        plan = plan_step(
            work.batch, priced_by, work.spec, work.topology, CAP, seed=0, stop=StopCriterion(max_iterations=stop)
        )
        step_s[kind] = price(plan, curves, work)
        yield CheckRecord(CHECK, work.name, f"planned by {kind}: step, s", step_s[kind])
        promised = plan.predicted.step_time_s
        yield CheckRecord(CHECK, work.name, f"planned by {kind}: promised over priced - 1, %",
                          100 * (promised / step_s[kind] - 1))  # fmt: skip
    for kind in (TOKENS, BASELINE, MODEL):
        yield CheckRecord(CHECK, work.name, f"planned by {kind}: slower than planned by {CURVES}, %",
                          100 * (step_s[kind] / step_s[CURVES] - 1))  # fmt: skip


def price(plan: Plan, tables: StepTables, work: Work) -> float:
    """Return the step time of a plan by other tables, seconds."""
    problem = build_problem(work.batch, tables, work.spec, work.topology, CAP)
    priced = price_packing(problem, (plan.row_N, plan.slot_N, plan.num_rows), plan.placement_LE)
    return float(priced.step_time().step_time_s)


def without_trees(model: CostModel) -> CostModel:
    """Return the cost model with physics alone."""
    models = {
        key: replace(one, known=Residual(), unseen=Residual(), mixes={}, reasons=("residuals taken out",))
        for key, one in model.models.items()
    }
    return replace(model, models=models, tables=None, parity={})


def curve_tables(curves: RawCurves, tables: StepTables, work: Work) -> StepTables:
    """Return tables whose nodes are read off measured curves (running maximum, as every table)."""
    pricer = Pricer(curves, work.spec, work.topology, tables.max_tokens)  # type: ignore[arg-type]
    tokens = table_nodes(tables.max_tokens, tables.tokens_shift)
    rows = table_nodes(tables.max_rows, tables.rows_shift)
    kinds = pricer.classes()
    return replace(
        tables,
        sequence_ns=np.stack([_table(pricer.sequence_ns(tokens, kind)) for kind in kinds]),
        cell_ns=np.stack([_table(pricer.cell_ns(tokens, kind)) for kind in kinds]),
        expert_rank_ns=_table(pricer.expert_rank_ns(rows)),
        exchange_ns=_table(pricer.exchange_ns(rows)),
    )


def _table(time_ns: np.ndarray) -> np.ndarray:
    return np.maximum.accumulate(np.rint(time_ns).astype(np.int64))


def token_tables(tables: StepTables, work: Work) -> StepTables:
    """Return straight lines through zero with the model's totals over the batch."""
    lengths = np.asarray(work.batch.lengths, dtype=np.int64)
    tokens = table_nodes(tables.max_tokens, tables.tokens_shift)
    rows = table_nodes(tables.max_rows, tables.rows_shift)
    blocks = work.topology.data_parallel_size // tables.slots_per_block
    cells = max(1, round(lengths.sum() / tables.max_tokens / work.topology.data_parallel_size))
    mean_rows = lengths.sum() * tables.top_k / (cells * blocks * work.topology.expert_model_parallel_size)
    mean_rows = min(int(mean_rows), tables.max_rows)

    def line(table: np.ndarray, shift: int, at: np.ndarray, nodes: np.ndarray) -> np.ndarray:
        slope = lookup_many_ns(table, shift, at).sum() / at.sum()
        return np.rint(slope * nodes).astype(np.int64)

    full = np.array([tables.max_tokens])
    busy = np.array([mean_rows])
    return replace(
        tables,
        sequence_ns=np.stack([line(table, tables.length_shift, lengths, tokens) for table in tables.sequence_ns]),
        cell_ns=np.stack([line(table, tables.tokens_shift, full, tokens) for table in tables.cell_ns]),
        expert_rank_ns=line(tables.expert_rank_ns, tables.rows_shift, busy, rows),
        exchange_ns=line(tables.exchange_ns, tables.rows_shift, busy, rows),
    )

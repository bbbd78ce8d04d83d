"""What is planned: the named regimes of synthetic step batches, the real batches, and their frozen cost tables.

Names, shapes, caps and topologies are those of the project's workload table (README.md beside this file). The generator
is ``routepack_tune.steps.generator``; all that it makes is synthetic. Times come from published H200 timings.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

import routepack_tune
from costmodels import CostModel, StepTables, fit_cost_model, freeze_tables, tables_key
from profiler import ModelSpec, Topology, import_published, load_model
from routepack_tune import load_step_batch
from routepack_tune.steps.generator import WorkloadParams, make_step_batch
from search import Problem, StepBatch, balanced_ns, build_problem, lower_bound_ns
from search.problem import row_range

HERE = Path(__file__).parent
CACHE = HERE.parent / ".cache"
SHARED = HERE.parents[2] / "shared" / "data"
BUNDLED_TIMINGS = Path(routepack_tune.__file__).parent / "example" / "timings" / "h200_sxm"


@dataclass(frozen=True, slots=True)
class Regime:
    """Name one kind of step: model, parallel sizes, cap, and where its batches come from."""

    name: str
    spec: ModelSpec
    topology: Topology
    max_tokens: int
    shared: Path
    """Folder of public inputs: GPU timings and real routes."""
    workload: WorkloadParams | None = None
    """Of synthetic batches."""
    files: tuple[Path, ...] = ()
    """Of real batches."""

    @property
    def timings(self) -> Path:
        """The published H200 timings that price it: the full tables where present, else the bundled excerpt."""
        full = self.shared / "gpu-timings" / "h200_sxm"
        return full if full.is_dir() else BUNDLED_TIMINGS

    @property
    def real(self) -> bool:
        """Whether the routes are real."""
        return bool(self.files)

    def instances(self, seeds: int) -> range:
        """Return the numbers of the batches to plan: seeds, or all the real steps there are (at most ``seeds``)."""
        return range(min(seeds, len(self.files)) if self.real else seeds)

    def batch(self, instance: int, step: int = 0) -> StepBatch:
        """Return a batch: of the stream that seed ``instance`` starts, or the real step of that number."""
        if self.workload is None:
            return load_step_batch(self.files[instance], self.spec)
        return make_step_batch(self.spec, self.workload, seed=instance, step=step)


@dataclass(frozen=True)
class Instance:
    """Hold one batch ready to plan, with what every plan of it is compared with."""

    regime: Regime
    number: int
    batch: StepBatch
    tables: StepTables
    problem: Problem = field(init=False)

    def __post_init__(self) -> None:
        regime = self.regime
        problem = build_problem(self.batch, self.tables, regime.spec, regime.topology, regime.max_tokens)
        object.__setattr__(self, "problem", problem)

    @functools.cached_property
    def ideal_ns(self) -> int:
        """The forced-balanced ideal in the least rows: 100 percent."""
        return balanced_ns(self.problem, row_range(self.problem).start)

    @functools.cached_property
    def bound_ns(self) -> int:
        """The proven lower bound."""
        return lower_bound_ns(self.problem)

    def imbalance(self, placement_LE: np.ndarray) -> np.ndarray:
        """Return the most loaded EP rank over the mean, by step totals, [L]."""
        totals = self.problem.counts.sum(axis=0, dtype=np.int64)
        by_slot = np.take_along_axis(totals, np.argsort(placement_LE, axis=1, kind="stable"), axis=1)
        ranks = by_slot.reshape(len(totals), self.problem.num_ranks, -1).sum(axis=2)
        return ranks.max(axis=1) / ranks.mean(axis=1)


def load_instance(regime: Regime, number: int, step: int = 0) -> Instance:
    """Return one batch of a regime with its problem."""
    return Instance(regime, number, regime.batch(number, step), load_tables(regime))


def shaped(name: str, hidden: int, heads: tuple[int, int], experts: tuple[int, int, int], layers: int) -> ModelSpec:
    """Return a model of ``layers`` equal layers with full attention: (heads, kv heads), (experts, top-k, width)."""
    return replace(
        load_model("Qwen3-30B-A3B"), name=name, hidden_size=hidden, num_attention_heads=heads[0],
        num_key_value_heads=heads[1], num_experts=experts[0], top_k=experts[1], moe_intermediate_size=experts[2],
        windows=(0,) * layers, moe_layers=(True,) * layers,
    )  # fmt: skip


def with_layers(regime: Regime, layers: int) -> Regime:
    """Return the regime with a model of another depth."""
    spec = replace(regime.spec, windows=(0,) * layers, moe_layers=(True,) * layers)
    return replace(regime, spec=spec)


def with_prompts(regime: Regime, prompts: int) -> Regime:
    """Return the regime with another number of prompts a step."""
    assert regime.workload is not None
    return replace(regime, workload=replace(regime.workload, num_prompts=prompts))


DEEPSEEK_V2_LITE = ModelSpec(
    name="DeepSeek-V2-Lite", hidden_size=2048, num_attention_heads=16, num_key_value_heads=16, qk_head_dim=192,
    v_head_dim=128, attention="mla", q_lora_rank=0, kv_lora_rank=512, qk_rope_head_dim=64, num_experts=64, top_k=6,
    moe_intermediate_size=1408, shared_intermediate_size=2 * 1408, dense_intermediate_size=10944, windows=(0,) * 27,
    moe_layers=(False,) + (True,) * 26,
)  # fmt: skip


def _sizes(slots: int, ranks: int) -> Topology:
    return Topology(data_parallel_size=slots, expert_model_parallel_size=ranks)


def all_regimes(shared: Path = SHARED) -> dict[str, Regime]:
    """Return every regime by name; the real ones only where their files are present."""
    qwen, giant = load_model("Qwen3-30B-A3B"), load_model("Qwen3-235B-A22B")
    # The attention of these two is not given by the workload table: common shapes of their width are taken.
    short = shaped("24 layers, 256 experts", 1536, (16, 2), (256, 8, 256), 24)
    agentic = shaped("47 layers, 64 experts", 2048, (32, 4), (64, 4, 1536), 47)
    one_domain = WorkloadParams(64, 8, 250, 0.5, 8192, base_sd=0.65, domain_sd=0, num_domains=1, expert_correlation=0.9)
    mild = WorkloadParams(64, 16, 3000, 0.8, 32768, base_sd=0.30, domain_sd=0.28, prompt_sd=0.20, sample_sd=0.12)
    math = WorkloadParams(64, 16, 5000, 0.9, 32768)
    synthetic = (
        ("gsm8k-short", short, (16, 8), one_domain),
        ("math-long", qwen, (16, 16), math),
        ("math-long-ep32", qwen, (32, 32), math),
        ("agentic-long", agentic, (16, 8), WorkloadParams(96, 16, 28000, 0.75, 65536)),
        ("moderate-skew", qwen, (16, 16), mild),
        ("giant", giant, (64, 64), replace(math, num_prompts=256)),
    )
    real = (
        ("real-gptoss", load_model("gpt-oss-20b"), "gptoss20b-r1lengths-step*.npz"),
        ("real-v2lite", DEEPSEEK_V2_LITE, "v2lite-r1lengths-step*.npz"),
    )
    regimes = [
        Regime(name, spec, _sizes(*sizes), workload.max_tokens, shared, workload)
        for name, spec, sizes, workload in synthetic
    ]
    for name, spec, pattern in real:
        if files := tuple(sorted((shared / "routing").glob(pattern))):
            regimes.append(Regime(name, spec, _sizes(8, 8), 32768, shared, files=files))
    return {regime.name: regime for regime in regimes}


def load_tables(regime: Regime) -> StepTables:
    """Return the frozen tables of a regime; fitted once per folder of timings, then read from the cache."""
    folder = CACHE / ("h200-bundled" if regime.timings == BUNDLED_TIMINGS else "h200-full")
    key = tables_key(regime.spec, regime.topology, regime.max_tokens)
    path = folder / f"tables-{key[:16]}.npz"
    if not path.is_file():
        freeze_tables(_cost_model(folder / "costmodel", regime), regime.spec, regime.topology, regime.max_tokens).save(
            path
        )
    return StepTables.load(path)


def _cost_model(folder: Path, regime: Regime) -> CostModel:
    if not (folder / "costmodel.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        measured = import_published(regime.timings)
        fit_cost_model(measured, regime.spec, regime.topology, regime.max_tokens).save(folder)
    return CostModel.load(folder)

"""Cost models of the published tables: fitted once per GPU and version of the library, then read from a cache."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from held_out import measurements_of, quick_sample

import costmodels
from costmodels import CostModel, FitParams, fit_cost_model
from profiler import Measurements, ModelSpec, Observer, Topology, load_model
from profiler.files import content_hash

HERE = Path(__file__).parent
CACHE = HERE.parent / ".cache"
CAP = 32768


def topology(slots: int = 8, ranks: int = 8) -> Topology:
    """Return data-parallel slots and expert-parallel ranks, nothing else parallel."""
    return Topology(data_parallel_size=slots, expert_model_parallel_size=ranks)


def fit_params(*, quick: bool) -> FitParams:
    """Return the library's defaults, or ones that take seconds."""
    return FitParams(num_trees=60, folds=3) if quick else FitParams()


class Clock(Observer):
    """Take the processor time of every operation's fit, validation included, seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.process_time()

    def advance(self, stage: str, message: str = "") -> None:
        """Note what the part that is done took."""
        now = time.process_time()
        self.seconds[message], self._last = now - self._last, now


def fit_and_keep(gpu: str, shared: Path, *, quick: bool) -> tuple[CostModel, Clock]:
    """Fit the cost model of a GPU's published tables and keep it for :func:`load_cost_model`."""
    clock, measured = Clock(), measured_rows(gpu, shared, quick=quick)
    params = fit_params(quick=quick)
    model = fit_cost_model(measured, load_model("Qwen3-30B-A3B"), topology(), CAP, params, clock)
    model.save(_folder(gpu, shared, quick=quick))
    return model, clock


def load_cost_model(gpu: str, shared: Path, *, quick: bool) -> CostModel:
    """Return the cost model of a GPU's published tables, fitted where the cache has none of this version."""
    folder = _folder(gpu, shared, quick=quick)
    if not (folder / "costmodel.json").is_file():
        fit_and_keep(gpu, shared, quick=quick)
    return CostModel.load(folder)


def measured_rows(gpu: str, shared: Path, *, quick: bool) -> Measurements:
    """Return the rows that are fitted: all, or a sample."""
    measured = measurements_of(gpu, shared)
    assert measured is not None
    return quick_sample(measured) if quick else measured


def _folder(gpu: str, shared: Path, *, quick: bool) -> Path:
    files = measured_rows(gpu, shared, quick=False).meta["provenance"]["files"]
    key = content_hash([_sources(), files, fit_params(quick=quick), quick])[:16]
    (CACHE / "03_cost_models").mkdir(parents=True, exist_ok=True)
    return CACHE / "03_cost_models" / f"{gpu}-{key}"


def _sources() -> str:
    """Return a hash of the package's source, rooms included: a change of it is another model."""
    digest = hashlib.sha256()
    for path in sorted(Path(costmodels.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def seconds_of(action: Callable[[], object]) -> float:
    """Return the processor time of an action: what else runs on the machine does not count."""
    start = time.process_time()
    action()
    return time.process_time() - start


DEEPSEEK_V2_LITE = ModelSpec(
    name="DeepSeek-V2-Lite", hidden_size=2048, num_attention_heads=16, num_key_value_heads=16, qk_head_dim=192,
    v_head_dim=128, attention="mla", q_lora_rank=0, kv_lora_rank=512, qk_rope_head_dim=64, num_experts=64, top_k=6,
    moe_intermediate_size=1408, shared_intermediate_size=2 * 1408, dense_intermediate_size=10944, windows=(0,) * 27,
    moe_layers=(False,) + (True,) * 26,
)  # fmt: skip

"""What ``study.json`` holds: its schema, and what in it must agree."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from costmodels import FitParams
from profiler import DeviceFingerprint, ModelSpec, ProfileParams, Topology
from profiler.params import MOST_TOKENS, check_number
from profiler.readers import build
from routepack_tune.bundle_file import CostModelFacts
from search import PlannerParams, TuneParams
from search.tuning.objective import BatchScore, Interval

Numbers = dict[str, float]


@dataclass(frozen=True)
class StudyConfig:
    """The configuration that was in force."""

    schema_version: int
    model: ModelSpec
    topology: Topology
    max_tokens_per_microbatch: int
    planner: PlannerParams
    profile: ProfileParams
    fit: FitParams
    tune: TuneParams

    def __post_init__(self) -> None:
        check_number("max_tokens_per_microbatch", self.max_tokens_per_microbatch, 1, MOST_TOKENS, whole=True)

    @property
    def caps(self) -> set[int]:
        """Caps that a trial could take."""
        return {self.max_tokens_per_microbatch, *self.tune.caps}


@dataclass(frozen=True)
class Step:
    """A step batch that was tuned on or held out."""

    name: str
    file: str
    data_hash: str


@dataclass(frozen=True)
class Workload:
    """Numbers of a step batch."""

    name: str
    samples: int
    tokens: int
    length_quantiles: list[float]
    hottest_over_mean: float
    effective_experts: float

    def __post_init__(self) -> None:
        numbers = (self.samples, self.tokens, self.hottest_over_mean, self.effective_experts, *self.length_quantiles)
        if len(self.length_quantiles) != 11 or not all(number > 0 for number in numbers):
            raise ValueError(f"expected positive numbers of step batch {self.name!r:.60}, with 11 quantiles")


@dataclass(frozen=True)
class Environment:
    """Software and machine that began the study."""

    versions: dict[str, str]
    machine: dict[str, str | int]


@dataclass(frozen=True)
class Setting:
    """A trial's whole settings."""

    number: int
    value: float
    params: PlannerParams
    max_tokens: int
    scores: tuple[BatchScore, ...] = ()


@dataclass(frozen=True)
class Trial:
    """A finished trial."""

    number: int
    value: float | None
    params: Numbers
    state: Literal["complete", "pruned", "infeasible"]
    batches: int


@dataclass(frozen=True)
class FrontPoint:
    """A trial that no other beats in both objectives."""

    number: int
    step_value: float
    plan_value: float
    params: Numbers


@dataclass(frozen=True)
class Holdout:
    """The winner and the defaults on batches that no trial saw."""

    best: tuple[BatchScore, ...]
    default_settings: tuple[BatchScore, ...]
    means: dict[Literal["best", "default_settings"], Numbers]
    gain: Interval | None
    cost_gain: Interval | None
    seeds: list[int]
    rests_on: str

    def __post_init__(self) -> None:
        seconds = [(s.step_time_s, s.lower_bound_s, s.reference_step_s) for s in (*self.best, *self.default_settings)]
        if set(self.means) != {"best", "default_settings"} or not all(second > 0 for one in seconds for second in one):
            raise ValueError("expected the means of best and default settings, and positive times of every batch")
        there = [bool(part) for part in (self.best, self.default_settings, self.gain, self.cost_gain)]
        if len(set(there)) > 1:
            raise ValueError("expected scores and gains of both settings, or of neither")


@dataclass(frozen=True)
class Summary:
    """The outcome of a study."""

    study: str
    signature: dict[str, Any]
    names: dict[Literal["tuned", "holdout"], list[str]]
    trials: dict[str, int]
    finalists: list[int]
    best: Setting
    default: Setting | None
    history: list[Trial]
    pareto: list[FrontPoint]
    importances: Numbers
    holdout: Holdout
    planning: str
    export: Literal["best", "defaults"]
    export_reason: str
    overhead: Numbers


@dataclass(frozen=True)
class StudyDocument:
    """The whole file."""

    schema_version: int
    study_name: str
    state: Literal["running", "finished"]
    signature: dict[str, Any]
    config: StudyConfig
    steps: list[Step]
    storage: str
    fingerprint: DeviceFingerprint
    cost_model: CostModelFacts
    workload: list[Workload]
    environment: Environment
    tables_hash: str
    notes: list[str]
    files: dict[str, str]
    tracking: dict[str, str]
    summary: Summary | None
    trials: int = 0

    def __post_init__(self) -> None:
        config, summary, signed = self.config, self.summary, self.signature
        if not re.fullmatch(r"[\w.-]{1,100}", self.study_name):
            raise ValueError(f"expected a study's name of letters, digits, dot and dash, got {self.study_name!r:.60}")
        own = config.max_tokens_per_microbatch
        tables = {"tables.npz" if cap == own else f"tables-{cap}.npz" for cap in config.caps}
        if self.files.keys() != {*tables, "costmodel.json", "recheck.npz"}:
            raise ValueError(f"expected the hashes of {', '.join(sorted(tables))}, costmodel.json and recheck.npz")
        names = [step.name for step in self.steps]
        if not names or names != [row.name for row in self.workload] or len(set(names)) != len(names):
            raise ValueError("expected step batches, each once, and the numbers of each")
        facts = {
            "batches": {step.name: step.data_hash for step in self.steps},
            "tables": self.tables_hash,
            "base": asdict(config.planner),
        }
        for name, ours in facts.items():
            if signed.get(name) != ours:
                raise ValueError(f"its {name} and those of its signature differ")
        if summary is not None:
            if summary.study != self.study_name or summary.signature != signed:
                raise ValueError("its summary is that of another study")
            for setting in filter(None, (summary.best, summary.default)):
                if setting.max_tokens not in config.caps or setting.number < 0:
                    raise ValueError(f"trial {setting.number} has a cap of {setting.max_tokens} tokens, which is none")


def check_document(document: Mapping[str, Any], where: str) -> None:
    """Raise RoutePackError unless a study's document has every part, of the right type, and its parts agree."""
    build(StudyDocument, document, where)

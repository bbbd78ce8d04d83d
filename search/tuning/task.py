"""What a study tunes on and towards: its settings, its step batches and the space that it may search.

A setting is a dictionary from knob to value: the names of ``TUNABLE``, and ``max_tokens`` (the microbatch cap) where
the user allows several caps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from costmodels import StepTables
from profiler import ModelSpec, RoutePackError, Topology
from profiler.files import canonical_json
from profiler.params import MOST_SEED, MOST_TOKENS, check_number, check_settings
from search.params import PlannerParams, Range, tunable_ranges
from search.problem import StepBatch

SAMPLERS = ("tpe", "gp", "cmaes")
CAP = "max_tokens"
"""Name of the microbatch cap among the knobs."""
MOST_CAPS = 16
_SHOWN = 4
"""Names shown of a list of differences."""
_WORDS = {
    "batches": "step batches",
    "tables": "times of cost model, model, topology or cap:",
    "base": "planner settings",
    "space": "tunable ranges or caps",
    "objective": "tune settings",
}


@dataclass(frozen=True, slots=True)
class TuneParams:
    """Settings of a study."""

    holdout_share: float = 0.25
    """Share of the step batches, the latest ones, on which only the winner is tried; at least one where there are
    two."""
    holdout_seeds: int = 5
    """Seeds, none used in a trial, with which winner and defaults plan every held-out batch."""
    hidden_planning_s: float | None = None
    """Slack of the job: planning time (processor seconds a step) that hides behind the rollout's tail or
    log-probability passes. Only what exceeds it is charged. None: 2 s, or what the default settings take where that is
    more."""
    two_objectives: bool = False
    """Search step time and planning time as two objectives instead of their sum; no trial is stopped early then."""
    sampler: str = "tpe"
    """Who proposes settings: tpe, gp (Gaussian process; needs torch) or cmaes."""
    caps: tuple[int, ...] = ()
    """Microbatch caps, tokens, that may be tried besides the configured one."""
    tracking_uri: str = ""
    """MLflow tracking URI; empty: an SQLite file in the study's folder."""
    experiment: str = "routepack-tune"
    """MLflow experiment the study's runs belong to."""

    def __post_init__(self) -> None:
        check_settings(self, {"holdout_share": (0, 0.99), "holdout_seeds": (1, 1000)})
        if self.hidden_planning_s is not None:
            check_number("hidden_planning_s", self.hidden_planning_s, 0, 1e6)
        if not isinstance(self.caps, tuple) or len(set(self.caps)) != len(self.caps) or len(self.caps) > MOST_CAPS:
            raise ValueError(
                f"Expected caps to be at most {MOST_CAPS} numbers of tokens, none twice, got {self.caps!r:.80}."
            )
        for cap in self.caps:
            check_number("every cap", cap, 1, MOST_TOKENS, whole=True)
        checks = [
            ("sampler", f"one of {', '.join(SAMPLERS)}", self.sampler in SAMPLERS),
            ("sampler", "tpe or gp with two_objectives", not (self.two_objectives and self.sampler == "cmaes")),
            ("experiment", "a name", 0 < len(self.experiment.strip()) <= 250 and self.experiment.isprintable()),
        ]
        for name, wanted, holds in checks:
            if not holds:
                raise ValueError(f"Expected {name} {wanted}, got {getattr(self, name)!r}.")


@dataclass(frozen=True, slots=True)
class TuneTask:
    """What a study tunes on: named batches of one job, oldest first."""

    names: tuple[str, ...]
    batches: tuple[StepBatch, ...]
    tables: StepTables
    spec: ModelSpec
    topology: Topology
    max_tokens: int
    base: PlannerParams
    params: TuneParams
    seed: int = 0
    tables_by_cap: Mapping[int, StepTables] = field(default_factory=dict)
    """Frozen times for every further cap of ``params.caps``."""
    enqueue: tuple[Mapping[str, Any], ...] = ()
    """Settings of knobs inside ``space`` to try right after the defaults, such as the best of other clusters."""

    def __post_init__(self) -> None:
        check_number("seed", self.seed, 0, MOST_SEED, whole=True)

    @property
    def num_holdout(self) -> int:
        """Batches held out: the share rounded, at least one where there are two."""
        count = len(self.batches)
        if count < 2 or self.params.holdout_share == 0:
            return 0
        return min(count - 1, max(1, round(count * self.params.holdout_share)))

    @property
    def tuned(self) -> range:
        """Indices of the batches that trials plan: all but the latest ones."""
        return range(len(self.batches) - self.num_holdout)

    @property
    def held_out(self) -> range:
        """Indices of the batches kept for the final comparison."""
        return range(len(self.tuned), len(self.batches))

    @property
    def space(self) -> dict[str, Range]:
        """Ranges of the planner's knobs in this study."""
        return tunable_ranges(self.base)

    @property
    def caps(self) -> tuple[int, ...]:
        """All caps a trial may take, ascending."""
        return tuple(sorted({self.max_tokens, *self.params.caps}))

    @property
    def directions(self) -> list[Literal["minimize"]]:
        """Optuna's directions: one objective, or step time and planning time."""
        return ["minimize"] * (2 if self.params.two_objectives else 1)

    @property
    def given_settings(self) -> list[dict[str, Any]]:
        """Settings to try before any search: the defaults, then the enqueued ones, completed by the defaults."""
        defaults = {name: getattr(self.base, name) for name in self.space}
        if len(self.caps) > 1:
            defaults[CAP] = self.max_tokens
        return [defaults, *({**defaults, **setting} for setting in self.enqueue)]

    def planner_of(self, setting: Mapping[str, Any]) -> tuple[PlannerParams, int]:
        """Return the planner's parameters and the cap of a setting."""
        knobs = {name: value for name, value in setting.items() if name != CAP}
        return replace(self.base, **knobs), int(setting.get(CAP, self.max_tokens))

    @property
    def signature(self) -> dict[str, Any]:
        """What must not change when a study is resumed, as JSON reads it: hashes of data, the rest in words."""
        space: dict[str, Any] = {name: asdict(knob) for name, knob in self.space.items()}
        if len(self.caps) > 1:
            space[CAP] = {str(cap): self.tables_of(cap).tables_hash for cap in self.caps}
        signature = {
            "batches": dict(zip(self.names, (b.data_hash for b in self.batches), strict=True)),
            "tables": self.tables.tables_hash,
            "space": space,
            "base": asdict(self.base),
            "objective": {
                "directions": self.directions,
                "holdout": self.num_holdout,
                "hidden_planning_s": self.params.hidden_planning_s,
            },
            "seed": self.seed,
        }
        return json.loads(canonical_json(signature))

    def check_same(self, stored: Mapping[str, Any], where: str) -> None:
        """Refuse the signature of a study that was made from other inputs."""
        wanted = self.signature
        if changed := [key for key in wanted if stored.get(key) != wanted[key]]:
            details = [difference(_WORDS.get(key, key), stored.get(key), wanted[key]) for key in changed]
            raise RoutePackError(
                f"{where} was made from other inputs ({'; '.join(details)}): its trials cannot be compared with new "
                "ones. Go back to the earlier inputs, give another --out, or begin afresh with --new-study."
            )

    def tables_of(self, cap: int) -> StepTables:
        """Return the frozen times of a cap."""
        return self.tables if cap == self.max_tokens else self.tables_by_cap[cap]


def difference(name: str, old: Any, new: Any) -> str:
    """Say in one line how a value changed: entries added, removed, and from what to what; hashes by their begin."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return re.sub(r"\b([0-9a-f]{8})[0-9a-f]{56}\b", r"\1", f"{name} {old} -> {new}")
    found = {
        "added": [key for key in new if key not in old],
        "removed": [key for key in old if key not in new],
        "changed": [difference(key, old[key], new[key]) for key in new if key in old and old[key] != new[key]],
    }
    said = []
    for word, items in found.items():
        more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
        if items:
            said.append(f"{word} {', '.join(items[:_SHOWN])}{more}")
    return f"{name}: {', '.join(said)}"

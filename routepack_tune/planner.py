"""The planner of a training job: one bundle's settings and times, applied to one step batch after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.errors import RoutePackError
from routepack_tune.job import Job, PlannedJob, check_job
from routepack_tune.steps.traces import LAYOUT, batch_from_arrays, load_step_batch

if TYPE_CHECKING:
    import numpy as np

    from costmodels import StepTables
    from profiler import DeviceFingerprint, ModelSpec, Observer, Topology
    from search import Plan, PlannerParams, StepBatch, StopCriterion, StreamingPlanner


@dataclass(frozen=True, slots=True)
class Planner:
    """Tuned parameters and frozen times, which plan steps; :func:`routepack_tune.load_planner` makes it."""

    spec: ModelSpec
    topology: Topology
    max_tokens: int
    params: PlannerParams
    tables: StepTables
    fingerprint: DeviceFingerprint
    """The device whose times are in the tables."""
    dtype: str = ""
    """The number type whose times they are; empty where nobody said it."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Study, trial, MLflow run, hashes of data and cost model."""
    notes: tuple[str, ...] = ()
    """What loading had to say about this device."""
    bundle_hash: str = ""
    """Content hash of the bundle that this was loaded from; empty where it was not."""

    @property
    def job(self) -> tuple[StepTables, ModelSpec, Topology, int, PlannerParams]:
        """What ``search`` needs beside a batch, in the order of its functions' arguments."""
        return self.tables, self.spec, self.topology, self.max_tokens, self.params

    @property
    def origin(self) -> dict[str, Any]:
        """What every plan says of where its planner comes from: the bundle's hash, and its place in a registry."""
        found = {"bundle_hash": self.bundle_hash or None, "registry": self.provenance.get("registry")}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def planned_job(self) -> PlannedJob:
        """What this planner was made for."""
        return PlannedJob(self.spec, self.topology, self.max_tokens, self.dtype)

    def check_job(self, job: Job | Mapping[str, Any]) -> None:
        """Compare this planner with the job that runs it, as far as ``job`` states it.

        A mapping may use the names of ``routepack.yaml``, Megatron-LM or verl: ``model`` (name, config or spec),
        parallel sizes (``expert_model_parallel_size`` or ``ep``), ``max_tokens_per_microbatch``, ``dtype``.

        Raises
        ------
        RoutePackError
            If something differs; the message names all differences.
        """
        check_job(self.planned_job, job, "This planner")

    def warm_up(self) -> None:
        """Compile all that a plan of this job runs, streaming included; loading a bundle does so already.

        Where numba finds nothing kept from before this takes half a minute; else a fraction of a second.
        """
        from search import warm_up

        warm_up(*self.job)

    def batch(self, **arrays: np.ndarray) -> StepBatch:
        """Check the arrays of one step (the names of a step batch file) and return the batch."""
        return batch_from_arrays(arrays, self.spec)

    def plan(
        self,
        batch: StepBatch | Mapping[str, Any] | Path | str,
        seed: int = 0,
        previous: Plan | None = None,
        stop: StopCriterion | None = None,
        observer: Observer | None = None,
    ) -> Plan:
        """Plan one step.

        Parameters
        ----------
        batch
            A checked batch, the arrays of one by name, or the path of a step batch file.
        seed
            Equal batch, bundle and seed give an equal plan, unless ``stop`` is a wall time.
        previous
            The last step's plan: experts move away from it only where that pays.
        stop
            A budget (:class:`StopCriterion`); None: the tuned number of iterations.

        Raises
        ------
        RoutePackError
            If the batch is wrong, holds a sample above the cap, or no plan keeps the settings' limits.
        """
        from search import plan_step

        checked = self._checked(batch)
        how: dict[str, Any] = {"stop": stop, "previous": previous, "observer": observer, "origin": self.origin}
        return plan_step(checked, *self.job, seed=seed, **how)

    def _checked(self, batch: Any) -> StepBatch:
        from search import StepBatch

        if isinstance(batch, StepBatch):
            return batch
        if isinstance(batch, (str, Path)):
            return load_step_batch(batch, self.spec, self.max_tokens)
        if isinstance(batch, Mapping):
            return batch_from_arrays(batch, self.spec)
        raise RoutePackError(
            f"Expected a step batch, a mapping with its arrays ({', '.join(LAYOUT)}) or the path of its file, got "
            f"{type(batch).__name__}. planner.batch(lengths=..., expert_counts=...) makes one."
        )

    def stream(self, seed: int = 0, previous: Plan | None = None) -> StreamingPlanner:
        """Return a planner that takes samples one by one while rollouts finish (see ``search.StreamingPlanner``).

        Its plan depends on timing: one process streams and plans, and sends ``plan.json`` to the others.
        """
        from search import StreamingPlanner

        return StreamingPlanner(*self.job, seed=seed, previous=previous, origin=self.origin)

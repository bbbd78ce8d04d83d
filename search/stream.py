"""Plan a step while its rollouts still finish, so that little is left to do when the last one arrives.

Every time a tenth more samples are there, those so far are planned under a small budget. What carries over is the
placement: which experts run hot shows long before the last sample does.

Invariants: samples enter only through :meth:`StreamingPlanner.add`, each checked at once; the sealed batch is ordered
by id whatever the order of arrival; a provisional plan never changes constraints or prices of the final one, only the
placement its search starts from.
"""

from __future__ import annotations

import contextlib
import math
import operator
import threading
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import fields, replace
from typing import Any, Self

import numpy as np

from costmodels import StepTables
from profiler import ModelSpec, RoutePackError, Topology
from search.checks import check_tables
from search.joint import plan_step
from search.params import PlannerParams, StopCriterion
from search.placement.lpt import ranks_of_slots
from search.placement.placer import check_previous
from search.plan import Plan
from search.problem import StepBatch, check_lengths, check_padding, known_tokens, prompt_numbers

PROVISIONAL_ITERATIONS = 50_000
"""Packing proposals of a provisional plan: its placement is kept, its packing is not."""


class StreamingPlanner:
    """Collect the samples of one step as they finish; plan in the background; :meth:`seal` gives batch and plan.

    Samples may be added from several threads. A planner serves one step; use it as a context manager, or call
    :meth:`close`, so that the worker ends even if the step is abandoned.

    **With the background worker the plan depends on timing**: exactly ONE process collects and plans, and sends
    ``plan.json`` to the others. With ``background=False`` ``add`` itself plans whenever a tenth more samples are there,
    and the plan is a pure function of samples, order of arrival and seed (under an iteration budget).

    Parameters are those of :func:`search.joint.plan_step`; ``num_threads`` is for the final plan, the worker uses one.
    """

    def __init__(
        self,
        tables: StepTables,
        spec: ModelSpec,
        topology: Topology,
        max_tokens: int,
        params: PlannerParams | None = None,
        *,
        seed: int = 0,
        previous: Plan | None = None,
        num_threads: int | None = None,
        background: bool = True,
        origin: Mapping[str, Any] | None = None,
    ) -> None:
        self._job = (tables, spec, topology, max_tokens)
        self._params = params or PlannerParams()
        check_tables(*self._job)
        check_padding(self._params, spec)
        if previous is not None:  # not only when the step is sealed
            check_previous(previous, spec, topology)
        self._seed, self._previous, self._num_threads = seed, previous, num_threads
        self._background, self._origin = background, origin
        self._samples: dict[str, StepBatch] = {}
        self._lock = threading.Lock()  # guards the samples, _tried and who may submit
        self._closed = threading.Event()
        self._tried = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="routepack-stream")
        self._plans: list[Future[None]] = []
        self.provisional: Plan | None = None
        """The newest feasible plan, over the samples it names in ``sample_ids``; None before there is one."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def num_samples(self) -> int:
        """Samples added so far."""
        return len(self._samples)

    def add(
        self,
        sample_id: int | str,
        length: int,
        expert_counts: np.ndarray,
        known_tokens: int | None = None,
        prompt_id: Hashable = None,
    ) -> None:
        """Take one finished sample; with the background worker this never waits for planning.

        ``sample_id`` names it within the step, ``length`` counts the tokens of prompt and response, ``expert_counts``
        [L, E] the tokens that use each logical expert of each MoE layer, integers, copied. ``known_tokens`` have known
        routes; None: all of them, or all but the last sampled one if layer 0 adds up to that. The ``prompt_id`` that
        the sample answers is kept in the batch if every sample has one.

        Raises
        ------
        RoutePackError
            If the sample cannot be right or fits no microbatch (it is not added then), or the planner is closed.
        """
        _, spec, _, max_tokens = self._job
        name = str(sample_id)
        sample = _checked_sample(name, length, np.asarray(expert_counts), known_tokens, prompt_id, spec)
        check_lengths(sample, max_tokens, self._params.sequence_alignment)
        with self._lock:
            if self._closed.is_set():
                raise RoutePackError(f"Sample {name!r} came after its step was sealed or closed. Open a new stream.")
            if name in self._samples:
                raise RoutePackError(f"Sample id {name!r} was added twice; ids must be distinct within a step.")
            self._samples[name] = sample
            if not self._due():
                return
            plan = self._worker.submit(self._plan_so_far)
            self._plans.append(plan)
        if not self._background:
            wait([plan])  # what went wrong is raised by seal

    def seal(
        self, stop: StopCriterion | None = None, order: Sequence[int | str] | None = None
    ) -> tuple[StepBatch, Plan]:
        """Stop the worker and return the batch and its final plan; the planner takes no further samples.

        ``stop`` is the budget of the final search (None: the params' iterations), counted from when the worker has
        ended; ``order`` holds the sample ids in the order of the batch (None: whole numbers by value, then other ids
        as text).

        Raises
        ------
        RoutePackError
            If ``order`` does not name every sample once, or as :func:`search.joint.plan_step`. A bug met in the
            background is raised as it was.
        """
        with self._lock:
            names = sorted(self._samples, key=_id_key) if order is None else [str(name) for name in order]
            if sorted(names) != sorted(self._samples):
                odd = ", ".join(sorted(set(names) ^ set(self._samples))[:3]) or "none, some are named twice"
                raise RoutePackError(
                    f"order names {len(names)} samples, {len(self._samples)} were added; only one side has: {odd}. "
                    "Name every sample once."
                )
            if not names:
                raise RoutePackError("The step is empty: 0 samples were added. Skip it, or check what dropped them.")
            self._closed.set()
        self.close()
        for plan in self._plans:
            plan.result()
        batch = _joined([self._samples[name] for name in names])
        return batch, self._plan(batch, self._params, stop, self._num_threads)

    def close(self) -> None:
        """Stop and join the worker without planning; safe to call again."""
        with self._lock:
            self._closed.set()
        self._worker.shutdown()

    def _due(self) -> bool:
        """Tell whether enough samples came since the last provisional plan: a tenth more, at least one a DP slot."""
        count = len(self._samples)
        return count >= self._job[2].data_parallel_size and count > self._tried and 10 * count >= 11 * self._tried

    def _plan_so_far(self) -> None:
        """Replace the provisional plan if the samples so far can be planned; one plan may serve several requests."""
        with self._lock:
            if self._closed.is_set() or not self._due():
                return
            self._tried = len(self._samples)
            samples = [self._samples[name] for name in sorted(self._samples, key=_id_key)]
        budget = _ProvisionalBudget(min(PROVISIONAL_ITERATIONS, self._params.max_iterations))
        budget.closed = self._closed
        threads = 1 if self._background else self._num_threads
        with contextlib.suppress(RoutePackError):  # not yet: too few samples for the rows, or sealed meanwhile
            self.provisional = self._plan(_joined(samples), replace(self._params, starts=1), budget, threads)

    def _plan(
        self, batch: StepBatch, params: PlannerParams, stop: StopCriterion | None, num_threads: int | None
    ) -> Plan:
        """Plan samples from where the provisional plan has its experts."""
        start = None
        if self.provisional is not None:
            start = ranks_of_slots(self.provisional.placement_LE, self._job[2].expert_model_parallel_size)
        given, seed, previous = (batch, *self._job, params), self._seed, self._previous
        how: dict[str, Any] = {"start": start, "num_threads": num_threads, "origin": self._origin}
        return plan_step(*given, seed=seed, stop=stop, previous=previous, **how)


class _ProvisionalBudget(StopCriterion):
    """Iterations, but a search whose planner closes is given up at once."""

    closed: threading.Event

    def progress(self, iterations: int, idle: int = 0, gap: float = math.inf) -> float:
        if self.closed.is_set():
            raise RoutePackError("The step was sealed or closed.")
        return super().progress(iterations)


def _id_key(name: str) -> tuple[bool, int, str]:
    number = name.isdecimal()
    return not number, int(name) if number else 0, name


def _joined(samples: list[StepBatch]) -> StepBatch:
    """Return one batch of several; without prompts where a sample has none."""
    parts = {field.name: [getattr(sample, field.name) for sample in samples] for field in fields(StepBatch)}
    prompts = parts.pop("prompt_ids")
    known = None if any(prompt is None for prompt in prompts) else prompt_numbers([prompt[0] for prompt in prompts])
    return StepBatch(**{name: np.concatenate(part) for name, part in parts.items()}, prompt_ids=known)


def _checked_sample(
    name: str, length: int, counts: np.ndarray, known: int | None, prompt_id: Hashable, spec: ModelSpec
) -> StepBatch:
    """Return a batch of one sample after checking everything but the cap."""
    lengths, names = _whole(length, name, "length"), np.array([name])
    if lengths[0] < 1:
        raise RoutePackError(f"Sample {name!r} has length {lengths[0]}; lengths are at least 1. Drop the sample.")
    shape = (spec.num_moe_layers, spec.num_experts)
    if counts.shape != shape or counts.dtype.kind not in "iu":
        raise RoutePackError(
            f"Sample {name!r}: expected expert_counts as integers of shape {shape} ({spec.name}'s MoE layers x logical "
            f"experts), got {counts.dtype} {counts.shape}. Is it a sample of another model?"
        )
    prompt_numbers([prompt_id])  # refused here, not when the step is sealed
    given = None if known is None else _whole(known, name, "known_tokens")
    return StepBatch(
        lengths=lengths,
        expert_counts=counts.astype(np.int32)[None],
        sample_ids=names,
        known_tokens=known_tokens(counts[None], lengths, names, spec.top_k, given, "Sample"),
        prompt_ids=None if prompt_id is None else np.fromiter([prompt_id], dtype=object),
    )


def _whole(value: int, name: str, what: str) -> np.ndarray:
    """Return a whole number as an array [1] int64."""
    try:
        return np.array([operator.index(value)], np.int64)
    except (TypeError, OverflowError):
        raise RoutePackError(f"Sample {name!r}: {what} is {value!r:.80}, expected a whole number.") from None

"""Plan a step while its rollouts still finish, so that little is left to do when the last one arrives.

Every time a tenth more samples are there, those so far are planned under a small budget. What carries over to the next
provisional plan and to the final one is the placement: which experts run hot shows long before the last sample does.

Invariants: samples enter only through :meth:`StreamingPlanner.add`, each checked at once; the sealed batch is ordered
by id whatever the order of arrival; a provisional plan never changes constraints or prices of the final one, only the
placement its search starts from.

Shape suffixes: N samples, L MoE layers, E experts.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import numpy as np

from costmodels import StepTables
from profiler import ModelSpec, RoutePackError, Topology
from search.joint import plan_step
from search.params import PlannerParams
from search.placement.lpt import ranks_of_slots
from search.plan import Plan
from search.problem import StepBatch, check_lengths
from search.stop import MaxIterations, StopCriterion

PROVISIONAL_ITERATIONS = 50_000
"""Packing proposals of a provisional plan: its placement is kept, its packing is not."""


class _Closed(Exception):
    """Ends a provisional plan that nobody waits for any more."""


@dataclass(slots=True)
class _ProvisionalBudget:
    """Stop after some iterations; give up at once when the planner closes."""

    budget: MaxIterations
    closed: threading.Event
    name: str = "provisional"

    def reset(self) -> None:
        """Give up if the planner has closed."""
        self.progress(0)

    def progress(self, iterations: int, idle: int = 0, gap: float = math.inf) -> float:
        """Return the share of the iterations spent."""
        if self.closed.is_set():
            raise _Closed
        return self.budget.progress(iterations, idle, gap)


class StreamingPlanner:
    """Collect the samples of one step as they finish; plan in the background; :meth:`seal` gives batch and plan.

    Samples may be added from several threads. A planner serves one step; use it as a context manager, or call
    :meth:`close`, so that the worker ends even if the step is abandoned.

    **With the background worker the plan depends on timing**: how far planning has come when a step is sealed decides
    where its final search starts. So exactly ONE process collects and plans, and sends ``plan.json`` to the others;
    ranks that each stream the same samples would disagree. With ``background=False`` the plan is a pure function of
    the samples, their order of arrival and the seed (under an iteration budget), and ``add`` takes as long as planning
    does whenever a tenth more samples have arrived.

    Parameters
    ----------
    tables, spec, topology, max_tokens, params
        As for :func:`search.joint.plan_step`.
    seed
        Seed of the final and of all provisional plans.
    previous
        The last step's plan: experts move away from it only where that pays.
    num_threads
        Threads of the final plan; the background worker uses one.
    background
        Plan provisionally in a worker thread (True), or inside ``add`` at fixed numbers of samples.
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
    ) -> None:
        self._job = (tables, spec, topology, max_tokens)
        self._params = params or PlannerParams()
        self._seed, self._previous, self._num_threads = seed, previous, num_threads
        self._background = background
        self._samples: dict[str, StepBatch] = {}
        self._changed = threading.Condition()  # guards the samples, _tried and _worker
        self._closed = threading.Event()
        self._tried = 0
        self._worker: threading.Thread | None = None
        self._provisional: Plan | None = None
        self._bug: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def num_samples(self) -> int:
        """Samples added so far."""
        return len(self._samples)

    @property
    def provisional(self) -> Plan | None:
        """The newest feasible plan, over the samples it names in ``sample_ids``; None before there is one."""
        return self._provisional

    def add(
        self,
        sample_id: int | str,
        length: int,
        expert_counts: np.ndarray,
        known_tokens: int | None = None,
        prompt_id: int | None = None,
    ) -> None:
        """Take one finished sample; with the background worker this never waits for planning.

        Parameters
        ----------
        sample_id
            Its name, distinct within the step.
        length
            Tokens of prompt and response.
        expert_counts
            [L, E] integer: tokens of the sample that use each logical expert; copied.
        known_tokens
            Tokens with known routes. None: all of them, or all but the last sampled one if layer 0 adds up to that.
        prompt_id
            Which prompt the sample answers; kept in the batch if every sample has one.

        Raises
        ------
        RoutePackError
            If the sample cannot be right or fits no microbatch (it is not added then), or the planner is closed.
        """
        _, spec, _, max_tokens = self._job
        sample = _checked_sample(sample_id, length, expert_counts, known_tokens, prompt_id, spec)
        check_lengths(sample, max_tokens, self._params.sequence_alignment)
        name = str(sample_id)
        with self._changed:
            if self._closed.is_set():
                raise RoutePackError(f"Sample {name!r} came after its step was sealed or closed. Open a new stream.")
            if name in self._samples:
                raise RoutePackError(f"Sample id {name!r} was added twice; ids must be distinct within a step.")
            self._samples[name] = sample
            if not self._due():
                return
            if not self._background:
                self._plan_so_far(self._take(), self._num_threads)
            elif self._worker is None:
                self._worker = threading.Thread(target=self._work, name="routepack-stream", daemon=True)
                self._worker.start()
            else:
                self._changed.notify()

    def seal(
        self, stop: StopCriterion | None = None, order: Sequence[int | str] | None = None
    ) -> tuple[StepBatch, Plan]:
        """Stop the worker and return the batch and its final plan; the planner takes no further samples.

        Parameters
        ----------
        stop
            Budget of the final search (None: the params' iterations), counted from when the worker has ended.
        order
            The sample ids in the order of the batch. None: whole numbers by value, then other ids as text.

        Raises
        ------
        RoutePackError
            If ``order`` does not name every sample once, or as :func:`search.joint.plan_step`. A bug met in the
            background is raised as it was.
        """
        with self._changed:
            names = sorted(self._samples, key=_id_key) if order is None else [str(name) for name in order]
            if sorted(names) != sorted(self._samples):
                odd = sorted(set(names) ^ set(self._samples))[:3]
                raise RoutePackError(
                    f"order names {len(names)} samples, {len(self._samples)} were added"
                    + (f"; only one side has {', '.join(odd)}" if odd else "")
                    + ". Name every sample once."
                )
            if not names:
                raise RoutePackError(
                    "The step is empty: 0 samples were added. Skip the step, or check what dropped them."
                )
            self._closed.set()
        self.close()
        if self._bug is not None:
            raise self._bug
        batch = _joined([self._samples[name] for name in names])
        plan = plan_step(
            batch, *self._job, self._params, seed=self._seed, stop=stop, previous=self._previous,
            num_threads=self._num_threads, start=self._warm_ranks(),
        )  # fmt: skip
        return batch, plan

    def close(self) -> None:
        """Stop and join the worker without planning; safe to call again."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
            worker = self._worker
        if worker is not None:
            worker.join()

    def _due(self) -> bool:
        """Tell whether enough samples came since the last provisional plan: a tenth more, at least one a DP slot."""
        count = len(self._samples)
        return count >= self._job[2].data_parallel_size and count > self._tried and 10 * count >= 11 * self._tried

    def _take(self) -> list[StepBatch]:
        """Return the samples so far, by id, and mark them as tried."""
        self._tried = len(self._samples)
        return [self._samples[name] for name in sorted(self._samples, key=_id_key)]

    def _work(self) -> None:
        while self._bug is None:
            with self._changed:
                self._changed.wait_for(lambda: self._closed.is_set() or self._due())
                if self._closed.is_set():
                    return
                samples = self._take()
            self._plan_so_far(samples, 1)

    def _plan_so_far(self, samples: list[StepBatch], num_threads: int | None) -> None:
        """Replace the provisional plan if these samples can be planned; keep what no user could cause for ``seal``."""
        budget = MaxIterations(min(PROVISIONAL_ITERATIONS, self._params.max_iterations))
        try:
            self._provisional = plan_step(
                _joined(samples), *self._job, replace(self._params, starts=1), seed=self._seed,
                stop=_ProvisionalBudget(budget, self._closed), previous=self._previous,
                num_threads=num_threads, start=self._warm_ranks(),
            )  # fmt: skip
        except (_Closed, RoutePackError):
            pass  # not yet: too few samples for the rows, or the step was sealed meanwhile
        except Exception as error:
            self._bug = error

    def _warm_ranks(self) -> np.ndarray | None:
        """Return the rank of every expert in the provisional plan, [L, E]."""
        if self._provisional is None:
            return None
        return ranks_of_slots(self._provisional.placement_LE, self._job[2].expert_model_parallel_size)


def _id_key(name: str) -> tuple[bool, int, str]:
    number = name.isdecimal()
    return not number, int(name) if number else 0, name


def _joined(samples: list[StepBatch]) -> StepBatch:
    """Return one batch of several."""
    prompts = [s.prompt_ids for s in samples if s.prompt_ids is not None]
    return StepBatch(
        lengths=np.concatenate([s.lengths for s in samples]),
        expert_counts=np.concatenate([s.expert_counts for s in samples]),
        sample_ids=np.concatenate([s.sample_ids for s in samples]),
        known_tokens=np.concatenate([s.known_tokens for s in samples]),
        prompt_ids=np.concatenate(prompts) if len(prompts) == len(samples) else None,
    )


def _checked_sample(
    sample_id: int | str,
    length: int,
    expert_counts: np.ndarray,
    known_tokens: int | None,
    prompt_id: int | None,
    spec: ModelSpec,
) -> StepBatch:
    """Return a batch of one sample after checking everything but the cap."""
    who = f"Sample {str(sample_id)!r}"
    length = _whole(length, f"{who}: length")
    if length < 1:
        raise RoutePackError(f"{who} has length {length}; lengths are at least 1. Drop the sample.")
    counts = np.asarray(expert_counts)
    shape = (spec.num_moe_layers, spec.num_experts)
    if counts.shape != shape or counts.dtype.kind not in "iu":
        raise RoutePackError(
            f"{who}: expected expert_counts as integers of shape {shape} ({spec.name}'s MoE layers x logical experts), "
            f"got {counts.dtype} {counts.shape}. Is it a sample of another model?"
        )
    sums = counts.sum(axis=1, dtype=np.int64)
    if known_tokens is None:  # engines never route the last sampled token
        known = length - 1 if sums[0] == spec.top_k * (length - 1) else length
    else:
        known = _whole(known_tokens, f"{who}: known_tokens")
    if not 0 <= known <= length:
        raise RoutePackError(f"{who} has known_tokens {known}, outside 0..{length} (its length).")
    if (sums != spec.top_k * known).any():
        layer = int(np.argmax(sums != spec.top_k * known))
        raise RoutePackError(
            f"{who} layer {layer}: counts add up to {int(sums[layer])}, expected {spec.top_k * known} = top_k "
            f"{spec.top_k} x {known} known tokens, the same in every layer. Give known_tokens where routes are "
            "partly unknown."
        )
    wrong = np.argwhere((counts < 0) | (counts > known))
    if wrong.size:
        layer, expert = wrong[0]
        raise RoutePackError(
            f"{who} layer {layer}: expert {expert} has {int(counts[layer, expert])} tokens of {known}: a token picks "
            "an expert at most once. Check the layout [layers, experts]."
        )
    return StepBatch(
        lengths=np.array([length], np.int64),
        expert_counts=counts.astype(np.int32)[None],
        sample_ids=np.array([str(sample_id)]),
        known_tokens=np.array([known], np.int64),
        prompt_ids=None if prompt_id is None else np.array([_whole(prompt_id, f"{who}: prompt_id")], np.int64),
    )


def _whole(value: int, what: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise RoutePackError(f"{what} is {value!r}, expected a whole number.") from None

"""Seeded synthetic step batches: RL rollouts whose lengths and expert loads look like real ones.

Everything made here is *synthetic* and says so wherever it is shown. The recipe reproduces what real routes show: rank
imbalance of 1.3-4.0 at step level that persists along a sequence, is nearly independent between layers and falls only
slowly with more samples. Popularity is correlated between neighbouring expert ids and tilted by domain, prompt and
sample; lengths are log-normal, strongly correlated among the rollouts of one prompt, and cut at the cap.

Shape suffixes: N samples, L MoE layers, E experts, S rollouts of one prompt.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass

if TYPE_CHECKING:
    from profiler import ModelSpec
    from search import StepBatch


Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True, config=ConfigDict(allow_inf_nan=False))
class WorkloadParams:
    """Describe a stream of step batches."""

    num_prompts: PositiveInt = 32
    """Prompts of one optimizer step."""
    rollouts: PositiveInt = 8
    """Samples of each prompt."""
    median_tokens: Annotated[float, Field(ge=1)] = 5000.0
    """Median length of a sample."""
    sigma: NonNegativeFloat = 0.9
    """Standard deviation of the logarithm of the length."""
    max_tokens: PositiveInt = 32768
    """Lengths are cut here; the spike at the cap is real workloads' too."""
    prompt_correlation: Share = 0.65
    """Share of the length's variance that a prompt's rollouts have in common."""
    base_sd: NonNegativeFloat = 0.55
    """Tilt of the expert popularity that all samples share, in logits; then by domain, by prompt and by sample."""
    domain_sd: NonNegativeFloat = 0.45
    prompt_sd: NonNegativeFloat = 0.30
    sample_sd: NonNegativeFloat = 0.20
    num_domains: PositiveInt = 4
    """Domains that prompts are drawn from."""
    expert_correlation: Share = 0.5
    """Correlation of popularity between neighbouring expert ids."""
    layer_correlation: Share = 0.3
    """Correlation of popularity between neighbouring layers."""
    drift: Share = 0.15
    """Share of the base's and domains' standard deviation that is new in every step."""


def make_step_batch(
    shape: ModelSpec | tuple[int, int, int], params: WorkloadParams | None = None, *, seed: int = 0, step: int = 0
) -> StepBatch:
    """Make step batch number ``step`` of the stream that ``seed`` starts: equal pairs give equal batches.

    ``shape`` is the model, or its MoE layers, experts and top-k; the default workload is 32 prompts x 8 rollouts of a
    long-reasoning mix. Batches of one seed share the (slowly drifting) popularity of experts.
    """
    from search import StepBatch

    params = params or WorkloadParams()
    if not isinstance(shape, tuple):
        shape = shape.num_moe_layers, shape.num_experts, shape.top_k
    layers, experts, top_k = shape
    popularity = _drifting_popularity(layers, experts, params, seed, step)
    lengths, counts, names = [], [], []
    for prompt in range(params.num_prompts):
        rng = np.random.default_rng([seed, 2, step, prompt])
        lengths.append(_draw_lengths(params, rng))
        counts.append(_draw_counts(popularity, lengths[-1], top_k, params, rng))
        names += [f"p{prompt}r{rollout}" for rollout in range(params.rollouts)]
    length_N = np.concatenate(lengths)
    prompt_ids = np.repeat(np.arange(params.num_prompts, dtype=np.int64), params.rollouts)
    return StepBatch(length_N, np.concatenate(counts), np.array(names), length_N.copy(), prompt_ids)


def _drifting_popularity(layers: int, experts: int, params: WorkloadParams, seed: int, step: int) -> np.ndarray:
    """Return the logits of every domain, [domains, L, E]: base plus domain, each partly redrawn per step."""
    logits = np.zeros((params.num_domains, layers, experts))
    for stream, share in (([seed, 0], math.sqrt(1 - params.drift**2)), ([seed, 1, step], params.drift)):
        rng = np.random.default_rng(stream)
        logits += share * params.base_sd * _field(1, layers, experts, params, rng)
        logits += share * params.domain_sd * _field(params.num_domains, layers, experts, params, rng)
    return logits


def _field(count: int, layers: int, experts: int, params: WorkloadParams, rng: np.random.Generator) -> np.ndarray:
    """Return ``count`` unit Gaussian fields, [count, L, E], AR(1) over experts and over layers."""
    noise = rng.standard_normal((count, layers, experts))
    for axis, rho in ((2, params.expert_correlation), (1, params.layer_correlation)):
        moved = np.moveaxis(noise, axis, 0)
        fresh = math.sqrt(1 - rho**2)
        for i in range(1, moved.shape[0]):
            moved[i] = rho * moved[i - 1] + fresh * moved[i]
    return noise


def _draw_lengths(params: WorkloadParams, rng: np.random.Generator) -> np.ndarray:
    """Return the lengths of one prompt's rollouts, [S] int64."""
    shared = math.sqrt(params.prompt_correlation) * rng.standard_normal()
    own = math.sqrt(1 - params.prompt_correlation) * rng.standard_normal(params.rollouts)
    lengths = params.median_tokens * np.exp(params.sigma * (shared + own))
    return np.clip(np.rint(lengths), 1, params.max_tokens).astype(np.int64)


def _draw_counts(
    popularity: np.ndarray, lengths: np.ndarray, top_k: int, params: WorkloadParams, rng: np.random.Generator
) -> np.ndarray:
    """Return the expert counts of one prompt's rollouts, [S, L, E] int32; each layer sums to top_k x length."""
    _, layers, experts = popularity.shape
    logits = popularity[rng.integers(params.num_domains)][None]
    logits = logits + params.prompt_sd * _field(1, layers, experts, params, rng)
    logits = logits + params.sample_sd * _field(len(lengths), layers, experts, params, rng)
    shares = np.exp(logits - logits.max(axis=2, keepdims=True))
    shares /= shares.sum(axis=2, keepdims=True)
    counts = rng.multinomial(top_k * lengths[:, None], shares)
    return _cut_at_length(counts, shares, lengths, rng).astype(np.int32)


def _cut_at_length(counts: np.ndarray, shares: np.ndarray, lengths: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Give what exceeds the length (a token picks an expert once) to the experts with room, by popularity."""
    limit = np.broadcast_to(lengths[:, None], counts.shape[:2])
    for i, layer in np.argwhere((counts > limit[:, :, None]).any(axis=2)):
        row, most = counts[i, layer], limit[i, layer]
        while (surplus := int(np.maximum(row - most, 0).sum())) > 0:
            np.minimum(row, most, out=row)
            room = np.where(row < most, shares[i, layer], 0.0)
            row += rng.multinomial(surplus, room / room.sum())
    return counts

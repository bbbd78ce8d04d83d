"""Correct frozen tables by a factor per component, from measured times of whole training steps.

A step takes as long as its slowest EP block, and a block the sum of its components. The factors beta minimise

    sum over steps ((measured - components @ beta) / measured)^2 + ridge * |beta - 1|^2

so that without evidence tables stay as they are. Where a job also measured components, each is one more row. Which
block is the slowest depends on the factors: both are found in turn. Components that rise and fall together cannot be
told apart: the most alike are given one factor in common until the condition number of the scaled columns is at most
:data:`MOST_CONDITION` (Belsley, Kuh and Welsch, "Regression Diagnostics", 1980: 30). Nothing is corrected where that
leaves one factor for all, where steps are few, or where held-out steps are predicted no better than before.

Shape suffixes: S steps, B EP blocks, C components, G groups of components, R rows of a step: its time, its groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from costmodels.tables import TABLES, StepTables
from profiler import RoutePackError

COMPONENTS = ("attention", "experts", "exchange", "rest")
LEAST_STEPS = 8
LEAST_SHARE = 0.02
"""A component below this share of the predicted time keeps its times: step times say nothing of it."""
MOST_CONDITION = 30.0
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)
RIDGE_SLACK = 1.1
"""The least ridge within this of the least error is taken: the pull biases factors, which errors do not show."""
LEAST_GAIN = 0.1
"""The held-out error must fall by at least this share, and by more than twice the standard error of its squares."""
LEAST_FACTOR, MOST_FACTOR = 0.25, 4.0
"""Factors outside are no error of scale but of units, or another device."""
OUTLYING_MADS, OUTLYING_LOG = 5.0, 0.25
"""Steps this far from the median error, in robust standard deviations and in log of time, are set aside (a checkpoint
or a straggler inside)."""
MOST_OUTLYING = 0.2
ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Rescale:
    """Hold the factors on a cost model's components and the evidence for them."""

    factors: dict[str, float]
    """By component; 1 where it keeps its times."""
    standard_errors: dict[str, float | None]
    """With the ridge read as prior knowledge centred on 1; None where the component keeps its times."""
    groups: tuple[tuple[str, ...], ...]
    """Components with one factor in common."""
    ridge: float
    steps: int
    """Steps used."""
    set_aside: tuple[int, ...]
    """Indices of outlying steps, which were not used."""
    error_before_pct: float
    """Root mean square relative error of the predicted step time, tables as they are."""
    error_after_pct: float
    """The same with factors of all steps but the predicted one."""


def fit_rescale(blocks_SBC: np.ndarray, measured_S: np.ndarray, parts_SC: np.ndarray | None = None) -> Rescale:
    """Find the factors that bring predicted components to measured step times.

    ``blocks_SBC`` are predicted seconds of every component in every block of the plan that ran, ``measured_S`` measured
    seconds of the step, ``parts_SC`` of components where known, NaN elsewhere.
    """
    used = _inliers(np.log(measured_S / blocks_SBC.sum(axis=2).max(axis=1)))
    if used.size < LEAST_STEPS:
        raise RoutePackError(
            f"{used.size} steps with a usable measured time are too few to correct the cost model by: give at least "
            f"{LEAST_STEPS}."
        )
    # From here on seconds are shares of the step's measured time, and factors are sought as deviations from 1.
    blocks_SBC = blocks_SBC[used] / measured_S[used, None, None]
    parts_SC = np.full_like(blocks_SBC[:, 0], np.nan) if parts_SC is None else parts_SC[used] / measured_S[used, None]
    slowest_S = blocks_SBC.sum(axis=2).argmax(axis=1)
    for _ in range(ROUNDS):
        groups, rows_SRG, off_SR = _least_squares(blocks_SBC[np.arange(used.size), slowest_S], parts_SC)
        deviation_G, ridge = _deviation(rows_SRG, off_SR)
        factors_C = _spread(groups, 1.0 + deviation_G, 1.0)
        before_S, slowest_S = slowest_S, (blocks_SBC @ factors_C).argmax(axis=1)
        if (before_S == slowest_S).all():
            break
    before_S, after_S = blocks_SBC.sum(axis=2).max(axis=1) - 1.0, np.empty(used.size)
    for step in range(used.size):
        others = np.arange(used.size) != step
        held_out_G, _ = _deviation(rows_SRG[others], off_SR[others])
        after_S[step] = (blocks_SBC[step] @ _spread(groups, 1.0 + held_out_G, 1.0)).max() - 1.0
    _check_outcome(factors_C, before_S, after_S)
    errors_C = _spread(groups, _standard_errors(rows_SRG, off_SR, deviation_G, ridge), np.nan)
    return Rescale(
        factors=dict(zip(COMPONENTS, factors_C.tolist(), strict=True)),
        standard_errors={n: None if np.isnan(e) else float(e) for n, e in zip(COMPONENTS, errors_C, strict=True)},
        groups=tuple(tuple(COMPONENTS[c] for c in group) for group in groups),
        ridge=ridge,
        steps=used.size,
        set_aside=tuple(np.setdiff1d(np.arange(measured_S.size), used).tolist()),
        error_before_pct=100.0 * _rms(before_S),
        error_after_pct=100.0 * _rms(after_S),
    )


def rescaled_tables(tables: StepTables, factors: Mapping[str, float], note: str) -> StepTables:
    """Return tables with every component's times multiplied by its factor and rounded; ``note`` joins their notes."""
    components = dict(zip(TABLES, ("attention", "attention", "experts", "exchange"), strict=True))
    # Rounding keeps the order: tables never fall.
    scaled = {n: np.rint(getattr(tables, n) * factors[of]).astype(np.int64) for n, of in components.items()}
    fixed_ns = round(tables.row_fixed_ns * factors["rest"])
    return replace(tables, **scaled, row_fixed_ns=fixed_ns, notes=(*tables.notes, note))


def _inliers(log_error_S: np.ndarray) -> np.ndarray:
    """Return the indices of steps that are not set aside; all of them where too many would be."""
    distance_S = np.abs(log_error_S - np.median(log_error_S))
    limit = max(OUTLYING_MADS * 1.4826 * float(np.median(distance_S)), OUTLYING_LOG)
    inside = np.flatnonzero(distance_S <= limit)
    return inside if inside.size >= (1 - MOST_OUTLYING) * log_error_S.size else np.arange(log_error_S.size)


def _least_squares(share_SC: np.ndarray, part_SC: np.ndarray) -> tuple[list[tuple[int, ...]], np.ndarray, np.ndarray]:
    """Return groups, rows [S, R, G], residuals [S, R] with all factors 1 (rows that are not known are 0)."""
    kept = np.flatnonzero((share_SC / share_SC.sum(axis=1, keepdims=True)).mean(axis=0) >= LEAST_SHARE)
    groups: list[tuple[int, ...]] = [(int(c),) for c in kept]
    while True:
        share_SG, part_SG = (np.stack([x[:, g].sum(axis=1) for g in groups], axis=1) for x in (share_SC, part_SC))
        known_SG = np.isfinite(part_SG)  # False where any component of the group is unknown
        part_SGG = np.where(known_SG, share_SG, 0.0)[:, :, None] * np.eye(len(groups))
        rows_SRG = np.concatenate([share_SG[:, None], part_SGG], axis=1)
        columns = rows_SRG.reshape(-1, len(groups))
        columns = columns / np.linalg.norm(columns, axis=0)
        if np.linalg.cond(columns) <= MOST_CONDITION:
            break
        alike_GG = columns.T @ columns - 2.0 * np.eye(len(groups))
        low, high = sorted(int(g) for g in np.unravel_index(alike_GG.argmax(), alike_GG.shape))
        groups[low] += groups.pop(high)
    if len(groups) == 1 < kept.size:
        raise RoutePackError(
            f"The components ({', '.join(COMPONENTS[c] for c in kept)}) rise and fall together in these "
            f"{len(share_SC)} steps (condition number above {MOST_CONDITION:g}), and one factor for all would change "
            "no plan. Give steps of more varied lengths and routes, or columns attention_s, experts_s and exchange_s."
        )
    off_SG = np.where(known_SG, part_SG - share_SG, 0.0)
    return groups, rows_SRG, np.column_stack([1.0 - share_SC.sum(axis=1), off_SG])


def _deviation(rows_SRG: np.ndarray, off_SR: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the deviations [G], and their ridge: the least whose leave-one-out error is near the least."""
    gram_SGG = np.einsum("srg,srh->sgh", rows_SRG, rows_SRG)
    moment_SG = np.einsum("srg,sr->sg", rows_SRG, off_SR)
    gram_GG, moment_G = gram_SGG.sum(axis=0), moment_SG.sum(axis=0)
    errors = []
    for ridge in RIDGES:
        others_SG = _solved(gram_GG - gram_SGG, moment_G - moment_SG, ridge)
        errors.append(_rms(off_SR[:, 0] - (rows_SRG[:, 0] * others_SG).sum(axis=1)))
    ridge = next(r for r, error in zip(RIDGES, errors, strict=True) if error <= RIDGE_SLACK * min(errors))
    return _solved(gram_GG, moment_G, ridge), ridge


def _solved(gram: np.ndarray, moment: np.ndarray, ridge: float) -> np.ndarray:
    return np.asarray(np.linalg.solve(gram + ridge * np.eye(gram.shape[-1]), moment[..., None])[..., 0])


def _standard_errors(rows_SRG: np.ndarray, off_SR: np.ndarray, deviation_G: np.ndarray, ridge: float) -> np.ndarray:
    rows, off = rows_SRG.reshape(-1, deviation_G.size), off_SR.reshape(-1)
    gram_GG = rows.T @ rows
    inverse_GG = np.linalg.inv(gram_GG + ridge * np.eye(deviation_G.size))
    freedom = np.count_nonzero(rows.any(axis=1)) - float(np.trace(inverse_GG @ gram_GG))
    variance = float(np.sum((off - rows @ deviation_G) ** 2)) / max(1.0, freedom)
    return np.asarray(np.sqrt(variance * np.diag(inverse_GG)))


def _spread(groups: list[tuple[int, ...]], values_G: np.ndarray, other: float) -> np.ndarray:
    """Return every component's value of its group, ``other`` where it is in none, [C]."""
    values_C = np.full(len(COMPONENTS), other)
    for group, value in zip(groups, values_G, strict=True):
        values_C[list(group)] = value
    return values_C


def _check_outcome(factors_C: np.ndarray, before_S: np.ndarray, after_S: np.ndarray) -> None:
    if wrong := [(n, f) for n, f in zip(COMPONENTS, factors_C, strict=True) if not LEAST_FACTOR <= f <= MOST_FACTOR]:
        raise RoutePackError(
            f"The factor on {wrong[0][0]} would be {wrong[0][1]:.3g}, outside {LEAST_FACTOR:g} to {MOST_FACTOR:g}: "
            "that is no error of scale. Check the unit of the measured times (seconds), or profile this device again."
        )
    before, after, gain_S = _rms(before_S), _rms(after_S), before_S**2 - after_S**2
    sure = gain_S.mean() > 2.0 * gain_S.std(ddof=1) / np.sqrt(gain_S.size)
    if not (sure and after <= (1 - LEAST_GAIN) * before):
        raise RoutePackError(
            f"Corrected times predict held-out steps no better: error {100 * before:.2f}% before, {100 * after:.2f}% "
            f"after (at least {100 * LEAST_GAIN:g}% less, beyond chance, is asked). Keep the tables."
        )


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))

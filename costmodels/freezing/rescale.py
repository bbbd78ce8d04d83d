"""Correct frozen tables by a factor per component, from measured times of whole training steps.

A step takes as long as its slowest EP block, and a block the sum of its components: attention, experts, exchange and
the rest (fixed cost of rows). The factors beta minimise

    sum over steps ((measured - components @ beta) / measured)^2 + ridge * |beta - 1|^2

so that without evidence tables stay as they are. Where a job also measured components, each is one more row. Which
block is the slowest depends on the factors: both are found in turn. The ridge is the least of :data:`RIDGES` whose
leave-one-out error is near the least one; errors reported are those of steps that had no
part in choosing factors or ridge.

Components that rise and fall together cannot be told apart: the most alike are given one factor in common until the
condition number of the scaled columns is at most :data:`MOST_CONDITION` (Belsley, Kuh and Welsch, "Regression
Diagnostics", 1980: 30). Nothing is corrected where that leaves one factor for all, where steps are few, or where
held-out steps are predicted no better than before.

Shape suffixes: S steps, B EP blocks, C components, G groups of components, P ridges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from costmodels.tables import StepTables
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
    condition: float
    steps: int
    """Steps used."""
    set_aside: tuple[int, ...]
    """Indices of outlying steps, which were not used."""
    error_before_pct: float
    """Root mean square relative error of the predicted step time, tables as they are."""
    error_after_pct: float
    """The same with factors of all steps but the predicted one."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return asdict(self)


def fit_rescale(blocks_SBC: np.ndarray, measured_S: np.ndarray, parts_SC: np.ndarray | None = None) -> Rescale:
    """Find the factors that bring predicted components to measured step times.

    Parameters
    ----------
    blocks_SBC
        Predicted seconds of every component in every block of the plan that ran.
    measured_S
        Measured seconds of the step.
    parts_SC
        Measured seconds of components where known, NaN elsewhere; None: only step times are known.

    Raises
    ------
    RoutePackError
        If steps are too few, components too much alike, a factor is out of range, or held-out steps gain nothing.
    """
    _check(blocks_SBC, measured_S)
    used = _inliers(np.log(measured_S / blocks_SBC.sum(axis=2).max(axis=1)))
    set_aside = tuple(np.setdiff1d(np.arange(measured_S.size), used).tolist())
    _check(blocks_SBC[used], measured_S[used])
    blocks_SBC, measured_S = blocks_SBC[used], measured_S[used]
    parts_SC = np.full((used.size, len(COMPONENTS)), np.nan) if parts_SC is None else parts_SC[used]
    slowest_S = blocks_SBC.sum(axis=2).argmax(axis=1)
    for _ in range(ROUNDS):
        system = _System.of(blocks_SBC, slowest_S, measured_S, parts_SC)
        factors_C = system.factors()
        again_S = (blocks_SBC @ factors_C).argmax(axis=1)
        if (again_S == slowest_S).all():
            break
        slowest_S = again_S
    held_out_S = (blocks_SBC @ system.held_out_factors()[:, :, None])[:, :, 0].max(axis=1)
    before_S, after_S = (p / measured_S - 1.0 for p in (blocks_SBC.sum(axis=2).max(axis=1), held_out_S))
    _check_outcome(factors_C, before_S, after_S)
    errors_C = system.standard_errors()
    return Rescale(
        factors={name: float(factor) for name, factor in zip(COMPONENTS, factors_C, strict=True)},
        standard_errors={n: None if np.isnan(e) else float(e) for n, e in zip(COMPONENTS, errors_C, strict=True)},
        groups=tuple(tuple(COMPONENTS[c] for c in group) for group in system.groups),
        ridge=system.ridge, condition=system.condition, steps=int(used.size), set_aside=set_aside,
        error_before_pct=100.0 * _rms(before_S), error_after_pct=100.0 * _rms(after_S),
    )  # fmt: skip


def rescaled_tables(tables: StepTables, factors: Mapping[str, float], note: str) -> StepTables:
    """Return tables with every component's times multiplied by its factor and rounded; ``note`` joins their notes."""

    def scaled(table: np.ndarray, component: str) -> np.ndarray:
        return np.rint(table * factors[component]).astype(np.int64)  # rounding keeps the order: tables never fall

    return replace(
        tables,
        sequence_ns=tuple(scaled(table, "attention") for table in tables.sequence_ns),
        cell_ns=tuple(scaled(table, "attention") for table in tables.cell_ns),
        expert_rank_ns=scaled(tables.expert_rank_ns, "experts"),
        exchange_ns=scaled(tables.exchange_ns, "exchange"),
        row_fixed_ns=round(tables.row_fixed_ns * factors["rest"]),
        notes=(*tables.notes, note),
    )


@dataclass(frozen=True, slots=True)
class _System:
    """Hold the least squares, one group of rows a step, in deviations of the factors from 1."""

    groups: tuple[tuple[int, ...], ...]
    gram_SGG: np.ndarray
    moment_SG: np.ndarray
    row_SG: np.ndarray
    """The step's own row: shares of its measured time."""
    residual_S: np.ndarray
    """Its relative residual with all factors 1."""
    squares: float
    """Sum of the squared residuals of all rows with all factors 1."""
    rows: int
    condition: float
    ridge: float

    @classmethod
    def of(cls, blocks_SBC: np.ndarray, slowest_S: np.ndarray, measured_S: np.ndarray, parts_SC: np.ndarray) -> _System:
        """Build the system of the slowest blocks, with components that are too much alike joined."""
        steps = np.arange(measured_S.size)
        x_SC = blocks_SBC[steps, slowest_S] / measured_S[:, None]
        y_SC = parts_SC / measured_S[:, None]
        kept = np.flatnonzero((x_SC / x_SC.sum(axis=1, keepdims=True)).mean(axis=0) >= LEAST_SHARE)
        groups: list[tuple[int, ...]] = [(int(c),) for c in kept]
        joined = False
        while True:
            row_SG = np.stack([x_SC[:, g].sum(axis=1) for g in groups], axis=1)
            part_SG = np.stack([y_SC[:, g].sum(axis=1) for g in groups], axis=1)  # NaN where a component is unknown
            known_SG = np.isfinite(part_SG)
            extra_SG = np.where(known_SG, row_SG, 0.0)
            gram_SGG = row_SG[:, :, None] * row_SG[:, None, :]
            diagonal = np.arange(len(groups))
            gram_SGG[:, diagonal, diagonal] += extra_SG**2
            alike_GG, condition = _alike(gram_SGG.sum(axis=0))
            if condition <= MOST_CONDITION:
                break
            first, second = np.unravel_index(alike_GG.argmax(), alike_GG.shape)
            low, high = sorted((int(first), int(second)))
            groups[low] += groups.pop(high)
            joined = True
        if joined and len(groups) == 1:
            raise RoutePackError(
                f"The components ({', '.join(COMPONENTS[c] for c in kept)}) rise and fall together in these "
                f"{measured_S.size} steps (condition number above {MOST_CONDITION:g}), and one factor for all would "
                "change no plan. Give steps of more varied lengths and routes, or columns attention_s, experts_s and "
                "exchange_s."
            )
        residual_S = 1.0 - x_SC.sum(axis=1)
        off_SG = np.where(known_SG, part_SG - row_SG, 0.0)
        found = cls(
            groups=tuple(groups), gram_SGG=gram_SGG, row_SG=row_SG, residual_S=residual_S,
            moment_SG=row_SG * residual_S[:, None] + extra_SG * off_SG,
            squares=float((residual_S**2).sum() + (off_SG**2).sum()), rows=int(measured_S.size + known_SG.sum()),
            condition=condition, ridge=RIDGES[0],
        )  # fmt: skip
        return replace(found, ridge=found._best_ridge(np.ones(measured_S.size, dtype=bool)))

    def factors(self) -> np.ndarray:
        """Return the factors of all steps, [C]."""
        return self._spread(self._deviations(self.gram_SGG.sum(axis=0), self.moment_SG.sum(axis=0), self.ridge))

    def held_out_factors(self) -> np.ndarray:
        """Return for every step the factors and ridge that the others choose, [S, C]."""
        found = []
        for step in range(self.residual_S.size):
            others = np.arange(self.residual_S.size) != step
            gram, moment = self.gram_SGG[others].sum(axis=0), self.moment_SG[others].sum(axis=0)
            found.append(self._spread(self._deviations(gram, moment, self._best_ridge(others))))
        return np.stack(found)

    def standard_errors(self) -> np.ndarray:
        """Return the standard errors of the factors, [C]; NaN where a component keeps its times."""
        gram, moment = self.gram_SGG.sum(axis=0), self.moment_SG.sum(axis=0)
        inverse = np.linalg.inv(gram + self.ridge * np.eye(len(gram)))
        deviation = inverse @ moment
        squares = self.squares - 2 * deviation @ moment + deviation @ gram @ deviation
        variance = max(0.0, squares) / max(1.0, self.rows - float(np.trace(inverse @ gram)))
        errors = np.full(len(COMPONENTS), np.nan)
        for group, error in zip(self.groups, np.sqrt(variance * np.diag(inverse)), strict=True):
            errors[list(group)] = error
        return errors

    def _best_ridge(self, used_S: np.ndarray) -> float:
        """Return the least ridge whose leave-one-out error among the used steps is near the least."""
        gram_SGG, moment_SG = self.gram_SGG[used_S], self.moment_SG[used_S]
        gram_SGG, moment_SG = gram_SGG.sum(axis=0) - gram_SGG, moment_SG.sum(axis=0) - moment_SG
        errors = []
        for ridge in RIDGES:
            deviation_SG = self._deviations(gram_SGG, moment_SG, ridge)
            errors.append(_rms(self.residual_S[used_S] - (self.row_SG[used_S] * deviation_SG).sum(axis=1)))
        return next(r for r, error in zip(RIDGES, errors, strict=True) if error <= RIDGE_SLACK * min(errors))

    @staticmethod
    def _deviations(gram: np.ndarray, moment: np.ndarray, ridge: float) -> np.ndarray:
        solved = np.linalg.solve(gram + ridge * np.eye(gram.shape[-1]), moment[..., None])
        return np.asarray(solved[..., 0])

    def _spread(self, deviation_G: np.ndarray) -> np.ndarray:
        factors = np.ones(len(COMPONENTS))
        for group, deviation in zip(self.groups, deviation_G, strict=True):
            factors[list(group)] += deviation
        return factors


def _check(blocks_SBC: np.ndarray, measured_S: np.ndarray) -> None:
    if measured_S.size < LEAST_STEPS:
        raise RoutePackError(
            f"{measured_S.size} steps with a usable measured time are too few to correct the cost model by: give at "
            f"least {LEAST_STEPS}."
        )
    if not (np.isfinite(blocks_SBC).all() and (blocks_SBC >= 0).all() and blocks_SBC.sum(axis=2).max(axis=1).min() > 0):
        raise ValueError("Expected finite predicted components, not negative and not all 0.")
    if not (np.isfinite(measured_S).all() and (measured_S > 0).all()):
        raise ValueError("Expected finite measured times above 0.")


def _inliers(log_error_S: np.ndarray) -> np.ndarray:
    """Return the indices of steps that are not set aside; all of them where too many would be."""
    distance_S = np.abs(log_error_S - np.median(log_error_S))
    limit = max(OUTLYING_MADS * 1.4826 * float(np.median(distance_S)), OUTLYING_LOG)
    inside = np.flatnonzero(distance_S <= limit)
    return inside if inside.size >= (1 - MOST_OUTLYING) * log_error_S.size else np.arange(log_error_S.size)


def _alike(gram_GG: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the cosines between columns (-1 on the diagonal) and the condition number of the scaled columns."""
    norm = np.sqrt(np.diag(gram_GG))
    cosine = gram_GG / np.outer(norm, norm)
    values = np.linalg.eigvalsh(cosine)
    condition = float(np.sqrt(values[-1] / max(values[0], 1e-15)))
    return cosine - 2.0 * np.eye(len(norm)), condition


def _check_outcome(factors_C: np.ndarray, before_S: np.ndarray, after_S: np.ndarray) -> None:
    wrong = [(n, f) for n, f in zip(COMPONENTS, factors_C, strict=True) if not LEAST_FACTOR <= f <= MOST_FACTOR]
    if wrong:
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

"""What a check of a bundle found: the numbers, the verdict's words, and the statistics behind them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_tune.steps.workload import Shift

if TYPE_CHECKING:
    from costmodels.freezing.rescale import Rescale

ADVISED_EXIT_CODE = 3
LEAST_TIMED = 5
"""Fewer measured steps give no verdict on the times."""
LEAST_COMPARED = 3
"""Fewer batches planned with both settings give no verdict on the settings."""
LEAST_LOSS_PCT = 0.5


@dataclass(frozen=True, slots=True)
class Prediction:
    """How measured step times compare with predicted ones; percent of the predicted time."""

    steps: int
    given_plans: int
    """Steps whose plan was given; the others were planned again."""
    median_pct: float
    low_pct: float
    high_pct: float
    """95 % interval of the median (order statistics; the range where steps are few)."""
    trend_pct: float
    trend_low_pct: float
    trend_high_pct: float
    """Change from one step to the next: the median of pairwise slopes with its 95 % interval (Theil and Sen)."""
    allowed_pct: float
    stated: bool
    """Whether the allowed error is the cost model's own interval."""

    @property
    def outside(self) -> bool | None:
        """Tell whether the interval lies beyond the allowed error; None with too few steps."""
        if self.steps < LEAST_TIMED:
            return None
        return self.low_pct > self.allowed_pct or self.high_pct < -100.0 * (1 - 1 / (1 + self.allowed_pct / 100.0))


@dataclass(frozen=True, slots=True)
class Comparison:
    """What tuned settings gain over untuned ones on recent batches: step and exposed planning time, percent."""

    batches: int
    gain_pct: float
    low_pct: float
    high_pct: float

    @property
    def lost(self) -> bool | None:
        """Tell whether tuned settings are surely worse; None with too few batches."""
        return None if self.batches < LEAST_COMPARED else self.high_pct < 0 and self.gain_pct < -LEAST_LOSS_PCT


@dataclass(frozen=True, slots=True)
class DriftReport:
    """Everything :func:`routepack_tune.drift.check` found."""

    verdict: str
    reasons: tuple[str, ...]
    batches: int
    prediction: Prediction | None
    shifts: tuple[Shift, ...]
    comparison: Comparison | None
    notes: tuple[str, ...]
    refit: Rescale | None = None
    refit_refused: str = ""

    @property
    def exit_code(self) -> int:
        """0 where the bundle fits, 3 where something is to be done."""
        return 0 if self.verdict == "fits" else ADVISED_EXIT_CODE

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return what a person should read, verdict first."""
        found = [f"Verdict: {self.verdict}" + (f" ({'; '.join(self.reasons)})" if self.reasons else "")]
        if p := self.prediction:
            found.append(
                f"  {p.steps} measured steps: {p.median_pct:+.1f}% of the predicted time (95% {p.low_pct:+.1f} to "
                f"{p.high_pct:+.1f}; allowed {p.allowed_pct:.1f}{'' if p.stated else ', assumed'}), trend "
                f"{p.trend_pct:+.2f}% a step (95% {p.trend_low_pct:+.2f} to {p.trend_high_pct:+.2f})"
            )
        for s in self.shifts:
            mark = ", shifted" if s.shifted else ""
            found.append(
                f"  {s.name}: {s.change_pct:+.0f}% (distance {s.distance_pct:.0f}, limit {s.limit_pct:.0f}{mark})"
            )
        if c := self.comparison:
            found.append(
                f"  tuned against untuned settings on {c.batches} batches: {c.gain_pct:+.2f}% (95% {c.low_pct:+.2f} to "
                f"{c.high_pct:+.2f}; more is better)"
            )
        if r := self.refit:
            for name, factor in r.factors.items():
                error = r.standard_errors[name]
                found.append(f"  refit {name}: x {factor:.3f}" + (" (kept)" if error is None else f" +- {error:.3f}"))
            found.append(
                f"  refit on {r.steps} steps, {len(r.set_aside)} set aside, ridge {r.ridge:g}: held-out error "
                f"{r.error_before_pct:.2f}% before, {r.error_after_pct:.2f}% after"
            )
        return [*found, *(f"  note: {note}" for note in self.notes)]


def median_interval(values: np.ndarray) -> tuple[float, float, float]:
    """Return the median and its 95 % interval by order statistics; the range where values are few."""
    from scipy.stats import quantile_test

    median = float(np.median(values))
    found = quantile_test(values, q=median, p=0.5).confidence_interval(0.95)
    low, high = np.where(np.isfinite(found), found, (values.min(), values.max())).tolist()
    return median, low, high


def trend_interval(values: np.ndarray) -> tuple[float, float, float]:
    """Return the median of pairwise slopes and its 95 % interval (Sen 1968); zeros for a single value."""
    from scipy.stats import theilslopes

    if values.size < 2:
        return 0.0, 0.0, 0.0
    found = theilslopes(values, alpha=0.95)
    return float(found.slope), float(found.low_slope), float(found.high_slope)

"""What a check of a bundle found: the verdict, what it rests on, and the statistics behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from costmodels.freezing.rescale import Rescale

PROFILE, TUNE, FITS = "re-profile", "re-tune", "fits"
ADVISED_EXIT_CODE = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """What was compared, and what to do where it lies beyond its limit."""

    name: str
    advice: str
    """``re-profile`` (tuning again follows from it) or ``re-tune``."""
    beyond: bool
    text: str
    numbers: Mapping[str, Any]
    """Percent where a name ends with ``_pct``; ``low`` and ``high`` are ends of 95 % intervals."""


@dataclass(frozen=True, slots=True)
class DriftReport:
    """Everything :func:`routepack_tune.drift.check` found."""

    findings: tuple[Finding, ...]
    batches: int
    notes: tuple[str, ...]
    refit: Rescale | None = None
    refit_refused: str = ""

    @property
    def verdict(self) -> str:
        """``fits``, or the first thing to be done."""
        advised = {one.advice for one in self.findings if one.beyond}
        return PROFILE if PROFILE in advised else TUNE if TUNE in advised else FITS

    @property
    def exit_code(self) -> int:
        """0 where the bundle fits, 3 where something is to be done."""
        return 0 if self.verdict == FITS else ADVISED_EXIT_CODE

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {"verdict": self.verdict, **asdict(self)}

    def lines(self) -> list[str]:
        """Return what a person should read, verdict first."""
        beyond = ", ".join(one.name for one in self.findings if one.beyond)
        found = [f"Verdict: {self.verdict}" + (f" ({beyond})" if beyond else "")]
        found += [f"  {one.name}: {one.text}" for one in self.findings]
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

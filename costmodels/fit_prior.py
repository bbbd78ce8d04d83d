"""Join an operation's model to a sibling GPU's: choose the prior, refit the physics, learn the discrepancy.

Everything is decided by rows held out in groups (sizes nobody timed here, shapes nobody timed here), the same folds for
the model without a prior and with it. A prior that does not lower the held-out error is refused, and the model says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from costmodels.features import Columns, size_of, take
from costmodels.learned.baseline import fit_baseline
from costmodels.learned.intervals import calibrate
from costmodels.learned.predictor import PRIOR_RESIDUAL, OperationModel, Prior, blend
from costmodels.learned.residual import fit_discrepancy
from costmodels.learned.validation import (
    GAIN_NEEDED,
    SHAPES,
    SIZES,
    HeldOut,
    error_summary,
    held_out_folds,
    hold_out,
    log_error,
)
from costmodels.params import FitParams

if TYPE_CHECKING:
    from costmodels.cost_model import CostModel

PRIOR_PULL = 0.1
"""Weight of the pull to the prior's parameters: five times that to the defaults, for they were measured."""
CLEARLY = 0.95
"""Share of the discrepancy's held-out error below which the refit alone is preferred to it."""
FEW_ROWS = 30
"""Below this the discrepancy is averaged with a plain scale, which shrinks it."""
LEAST_ROWS = 5
"""Fewer rows than this cannot tell whether a prior helps: it is used, refitted, and the model says so."""
SHARES = (0.0, 0.5, 1.0)
"""Weights of the prior's route that are tried against the own model's."""
LEAST_BLEND_ROWS = 100
"""Below this only all or nothing is tried: the held-out error of so few rows cannot tell more."""

Parts = tuple[str, ...]
"""Members of the discrepancy."""


@dataclass(frozen=True)
class _Route:
    """Hold the rows timed on the new GPU as one prior sees them."""

    columns: Columns
    time_us: np.ndarray
    prior: CostModel
    source: OperationModel
    residual: np.ndarray
    """What the prior learned beyond its formula, on every row."""

    def fit(self, kept: np.ndarray | slice, candidates: Sequence[Parts], params: FitParams) -> list[Prior]:
        """Refit the baseline to the kept rows, pulled to the prior's parameters, and every candidate's discrepancy."""
        operation, columns, residual = self.source.operation, take(self.columns, kept), self.residual[kept]
        centre = {n: replace(operation.parameters[n], default=value) for n, value in self.source.parameters.items()}
        # baseline x residual = time is the same as baseline = time / residual.
        bare_us, pulled = self.time_us[kept] / np.exp(residual), replace(params, baseline_pull=PRIOR_PULL)
        parameters = fit_baseline(replace(operation, parameters=centre), columns, bare_us, pulled)
        target = np.log(self.time_us[kept] / (operation.baseline(columns, parameters) * np.exp(residual)))
        inputs = {**operation.derive(columns), PRIOR_RESIDUAL: residual}
        name, data_hash = self.prior.fingerprint.name, self.prior.data_hash
        return [
            Prior(self.source, name, data_hash, parameters, fit_discrepancy(parts, inputs, target, params))
            for parts in candidates
        ]

    def held_out(self, fold: np.ndarray, candidates: Sequence[Parts], params: FitParams) -> list[np.ndarray]:
        """Return, for each candidate, microseconds of every row from the other folds."""
        found = [np.empty_like(self.time_us) for _ in candidates]
        for k in np.unique(fold):
            test = fold == k
            for predicted_us, prior in zip(found, self.fit(~test, candidates, params), strict=True):
                predicted_us[test] = prior.predict_us(take(self.columns, test))
        return found

    def error(self, predicted_us: np.ndarray) -> float:
        """Return the mean absolute log error of predictions of every row."""
        return float(log_error(predicted_us, self.time_us).mean())


def join_prior(
    own: OperationModel, found: Mapping[str, HeldOut | None], columns: Columns, time_us: np.ndarray, params: FitParams,
    priors: Sequence[CostModel], arch: str,
) -> tuple[OperationModel, HeldOut | None]:  # fmt: skip
    """Return the own model, ``found`` its validation, joined to the best prior, or with the reason why none helps."""
    operation, direction = own.operation, own.direction
    offered = [(prior, model) for prior in priors if (model := prior.models.get((operation.name, direction)))]
    if not offered:
        return replace(own, reasons=(*own.reasons, f"no prior holds {operation.name} {direction}")), found[SIZES]
    folds = {
        split: fold
        for split in (SIZES, SHAPES)
        if split in found and (fold := held_out_folds(operation, columns, split, params.folds, LEAST_ROWS)) is not None
    }
    route, why = _choose(columns, time_us, offered, arch, folds.get(SIZES, np.arange(time_us.size) % 2), params)
    if SIZES not in folds:
        (prior,) = route.fit(slice(None), [()], params)
        reason = f"{why}; {time_us.size} rows cannot tell whether it helps"
        return replace(own, prior=prior, reasons=(*own.reasons, reason)), found[SIZES]
    candidates = _candidates(time_us.size, params)
    with_prior = {split: route.held_out(fold, candidates, params) for split, fold in folds.items()}
    plain, learned = (sum(route.error(of_split[i]) for of_split in with_prior.values()) for i in (0, 1))
    # The discrepancy is shrunk by itself: only where it clearly hurts is it left out.
    best = 0 if plain < CLEARLY * learned else 1
    shares, joint, said, validation = {}, {}, [], dict(own.validation)
    for split in folds:
        alone = found[split] or hold_out(
            operation, columns, time_us, own.parameters, split, params, wanted=(), least_rows=LEAST_ROWS
        )
        assert alone is not None
        shares[split], joint[split], errors, words = _weighed(alone, with_prior[split][best])
        validation[split] = {"rows": int(time_us.size), **validation.get(split, {}), **errors}
        said.append(f"{split} {words}")
    if not any(shares.values()):
        return replace(own, reasons=(*own.reasons, f"{why}: refused, {', '.join(said)}")), found[SIZES]
    (prior,) = route.fit(slice(None), [candidates[best]], params)
    # Where no shape could be held out, what helps in unseen sizes is taken to help in unseen shapes.
    unseen_share = shares.get(SHAPES, float(shares[SIZES] > 0))
    by = " + ".join(candidates[best]) or "the refit alone"
    model = replace(
        own,
        prior=replace(prior, seen_share=shares[SIZES], unseen_share=unseen_share),
        reasons=(*own.reasons, f"{why}: {', '.join(said)}; discrepancy by {by}"),
        validation=validation,
        intervals=calibrate(size_of(operation, columns), log_error(joint[SIZES].model_us, time_us)),
    )
    return model, joint[SIZES]


def _choose(
    columns: Columns, time_us: np.ndarray, offered: Sequence[tuple[CostModel, OperationModel]], arch: str,
    fold: np.ndarray, params: FitParams,
) -> tuple[_Route, str]:  # fmt: skip
    """Return the best prior's route, and a clause that says which and why: of this architecture, else of any."""
    same = [(prior, source) for prior, source in offered if arch and prior.fingerprint.arch == arch]
    routes = [_Route(columns, time_us, *pair, pair[1].log_residual(columns)) for pair in same or offered]
    errors = [route.error(route.held_out(fold, [()], params)[0]) for route in routes] if len(routes) > 1 else [0.0]
    best = routes[int(np.argmin(errors))]
    device = best.prior.fingerprint
    if same:
        why = f"prior {device.name} ({device.arch}, the same architecture"
    else:
        why = f"prior {device.name} ({device.arch or 'architecture unknown'}, another architecture than "
        why += arch or "unknown"
    if len(routes) > 1:
        named = zip(routes, errors, strict=True)
        of = ", ".join(f"{route.prior.fingerprint.name} {100 * error:.1f} %" for route, error in named)
        why += f"; least held-out error of {of}"
    if same and len(same) < len(offered):
        passed = [prior.fingerprint.name for prior, _ in offered if prior.fingerprint.arch != arch]
        why += f"; {', '.join(passed)} passed over for its architecture"
    return best, f"{why})"


def _weighed(alone: HeldOut, prior_us: np.ndarray) -> tuple[float, HeldOut, dict[str, Any], str]:
    """Return the prior's share with the least held-out error, what it predicts, its errors, and both in words."""
    without_us = alone.model_us if alone.useful() else alone.baseline_us
    tried = SHARES if prior_us.size >= LEAST_BLEND_ROWS else (SHARES[0], SHARES[-1])
    blends = [blend(without_us, prior_us, share) for share in tried]
    errors = [float(log_error(predicted_us, alone.true_us).mean()) for predicted_us in blends]
    place = int(np.argmin(errors))
    if errors[place] < GAIN_NEEDED * errors[0]:
        used, error = f"with a share of {tried[place]:g}", errors[place]
    else:
        place, used, error = 0, "with it", min(errors[1:])
    report = {
        name: error_summary(us, alone.true_us) for name, us in (("without_prior", without_us), ("model", blends[place]))
    }
    words = f"{100 * errors[0]:.1f} % without it, {100 * error:.1f} % {used}"
    return tried[place], replace(alone, model_us=blends[place]), report, words


def _candidates(rows: int, params: FitParams) -> list[Parts]:
    """Return the discrepancies that this many rows can carry, the refit alone first."""
    if rows < FEW_ROWS:
        return [(), ("scale", "smooth", "trees")]
    # A Gaussian process costs the cube of its rows; where they are many, trees know as much.
    return [(), ("smooth", "trees") if rows < params.small_rows else ("trees",)]

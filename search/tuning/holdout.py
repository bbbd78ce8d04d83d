"""Is the winner better on batches it has not seen? Pairs of plans, and a bootstrap interval of the mean gain.

Winner and defaults plan every held-out batch with the same fresh seeds. Each goes on from its own plan of the batch
before, as in training, unlike in trials: a setting that lives on placements that only the defaults keep up to date
shows it here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from profiler import Observer
from search.tuning.objective import BatchScore, Scorer, study_value
from search.tuning.task import TuneTask

RESAMPLES = 10_000
LEVEL = 95


@dataclass(frozen=True, slots=True)
class Interval:
    """The mean gain over the defaults and its bootstrap interval; percent."""

    gain_pct: float
    low_pct: float
    high_pct: float


def compare_on_holdout(task: TuneTask, setting: Mapping[str, Any], observer: Observer | None = None) -> dict[str, Any]:
    """Plan the held-out batches with a setting and with the defaults; return scores, gain and interval."""
    observer, scorer = observer or Observer(), Scorer(task)
    seeds = tuple(task.seed + 1 + k for k in range(task.params.holdout_seeds))
    same = task.planner_of(setting) == task.planner_of({})
    observer.start("held-out batches", len(seeds) * len(task.held_out) * (1 if same else 2))
    defaults = _in_turn(scorer, {}, seeds, [], observer)
    best = defaults if same else _in_turn(scorer, setting, seeds, defaults, observer)
    observer.finish("held-out batches")
    rests_on = f"{len(task.held_out)} batches x {len(seeds)} seeds"
    if len(task.held_out) < 2:
        rests_on = f"one batch and {len(seeds)} seeds: it says nothing of other batches" if best else "no batch"
    found: dict[str, Any] = {
        "best": [asdict(score) for score in best],
        "default_settings": [asdict(score) for score in defaults],
        **dict.fromkeys(("gain_pct", "low_pct", "high_pct", "best_value", "default_value")),
        "seeds": list(seeds),
        "rests_on": rests_on,
    }
    if best:
        values = np.array([score.value(task.params) for score in best]).reshape(len(seeds), -1)
        found |= asdict(bootstrap_gain(1 - values.T, task.seed))
        found |= {"best_value": study_value(best, task.params), "default_value": study_value(defaults, task.params)}
    return found


def bootstrap_gain(gain_BS: np.ndarray, seed: int) -> Interval:
    """Return the mean of gains [batch, seed] and its 95% percentile interval, in percent.

    Batches are drawn with replacement, then seeds within each drawn batch. With one batch only its seeds are drawn.
    """
    batches, seeds = gain_BS.shape
    rng = np.random.default_rng(seed)
    batch_RB = rng.integers(batches, size=(RESAMPLES, batches))
    seed_RBS = rng.integers(seeds, size=(RESAMPLES, batches, seeds))
    means = gain_BS[batch_RB[:, :, None], seed_RBS].mean(axis=(1, 2))
    low, high = np.percentile(means, [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return Interval(100 * float(gain_BS.mean()), 100 * float(low), 100 * float(high))


def choose_export(best_number: int, is_default: bool, holdout: Mapping[str, Any]) -> tuple[str, str]:
    """Return what to export, ``best`` or ``defaults``, and why: without a proven gain it is the defaults."""
    if is_default:
        return "defaults", "No trial did better than the defaults on the tuning batches."
    if holdout["gain_pct"] is None:
        return "defaults", f"No batch was held out, so that nothing shows whether trial {best_number} generalises."
    told = (
        f"gain of {holdout['gain_pct']:.2f}% on held-out batches, {LEVEL}% interval {holdout['low_pct']:.2f} to "
        f"{holdout['high_pct']:.2f}% ({holdout['rests_on']})"
    )
    if holdout["low_pct"] > 0:
        return "best", f"Trial {best_number}: {told}."
    return "defaults", f"Trial {best_number}: {told}; it does not lie above zero."


def _in_turn(
    scorer: Scorer,
    setting: Mapping[str, Any],
    seeds: Sequence[int],
    references: Sequence[BatchScore],
    observer: Observer,
) -> list[BatchScore]:
    """Plan the held-out batches one after another, once a seed, each from the plan before; the first one from a plan of
    the last tuned batch."""
    held_out, scores = scorer.task.held_out, list[BatchScore]()
    for seed in seeds if held_out else ():
        previous, _ = scorer.planned(setting, held_out[0] - 1, seed)
        for index in held_out:
            reference = references[len(scores)] if references else None
            previous, score = scorer.planned(setting, index, seed, previous, reference)
            scores.append(score)
            observer.advance("held-out batches", score.name)
    return scores

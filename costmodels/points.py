"""Choose which cases of a new GPU to time, so that few points say most.

Both ends of every size range come first, for a size outside what was timed is extrapolated; the rest are the cases
nearest to the centres of k-means clusters over the logs of the raw features and the dimensionless inputs of the trees.
On the published tables neither farthest points nor points chosen by the physics' sensitivity did better.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from costmodels.features import Columns, Operation

LLOYD_PASSES = 50


def choose_points(
    operation: Operation, candidates: Columns, count: int, seed: int = 0, timed: Sequence[int] = ()
) -> np.ndarray:
    """Return the positions of ``count`` more candidates to time, ascending and distinct.

    ``candidates`` holds the operation's raw features of every case that could be timed; ``timed`` are positions that
    are timed already: they stand for clusters of their own, and the ends of the sizes are taken to be among them.
    Where routing was drawn at random and is not known row by row, give only cases whose features are exact: one noisy
    point in twenty costs more than a case of a better place gains.

    Raises
    ------
    ValueError
        If ``count`` is below 1.
    """
    if not count >= 1:
        raise ValueError(f"Expected count >= 1, got {count}.")
    place, fixed = _place(operation, candidates), list(timed)
    if count + len(fixed) >= len(place):
        return np.setdiff1d(np.arange(len(place)), fixed)
    chosen = [] if fixed else _ends(operation, candidates, place)[:count]
    missing = count - len(chosen)
    centres = _centres_between(place, fixed, missing, seed) if fixed else _centres(place, missing, seed)
    for centre in centres:
        distance = ((place - centre) ** 2).sum(axis=1)
        distance[fixed + chosen] = np.inf
        chosen.append(int(np.argmin(distance)))
    return np.array(sorted(chosen), dtype=np.int64)


def every_end(operation: Operation, candidates: Columns) -> list[int]:
    """Return few positions that hold the least and the largest value of every feature that is no shape."""
    place = _place(operation, candidates)
    middle = np.median(place, axis=0)
    names = [name for name in operation.features if name not in operation.shape and name not in operation.zero_allowed]
    ends = [candidates[name] == end for name in names for end in (candidates[name].min(), candidates[name].max())]
    chosen: list[int] = []
    # Ends that few cases hold come first: those cases often hold others too.
    for holders in sorted(ends, key=lambda holders: int(holders.sum())):
        if not holders[chosen].any():
            rows = np.flatnonzero(holders)
            shared = np.sum([one[rows] for one in ends], axis=0)
            rows = rows[shared == shared.max()]
            chosen.append(int(rows[np.argmin(((place[rows] - middle) ** 2).sum(axis=1))]))
    return chosen


def random_points(operation: Operation, candidates: Columns, count: int, seed: int = 0) -> np.ndarray:
    """Return ``count`` positions drawn evenly: what a design must beat."""
    total = candidates[operation.size[0]].size
    return np.sort(np.random.default_rng(seed).choice(total, min(count, total), replace=False))


def _place(operation: Operation, candidates: Columns) -> np.ndarray:
    """Return [candidates, varying features] logs and dimensionless inputs, each scaled to unit spread."""
    logs = [np.log(candidates[name] + (1.0 if name in operation.zero_allowed else 0.0)) for name in operation.features]
    derived = operation.derive(candidates)
    place = np.stack([*logs, *(derived[name] for name in operation.dimensionless)], axis=1)
    spread = place.std(axis=0)
    varying = spread > 1e-9
    return np.asarray((place[:, varying] - place[:, varying].mean(axis=0)) / spread[varying])


def _ends(operation: Operation, candidates: Columns, place: np.ndarray) -> list[int]:
    """Return, for the least and the largest value of every size, the case most like the others."""
    middle, ends = np.median(place, axis=0), []
    for name in operation.size:
        for value in (candidates[name].min(), candidates[name].max()):
            rows = np.flatnonzero(candidates[name] == value)
            ends.append(int(rows[np.argmin(((place[rows] - middle) ** 2).sum(axis=1))]))
    return list(dict.fromkeys(ends))


def _centres(place: np.ndarray, count: int, seed: int) -> np.ndarray:
    if count < 1:
        return place[:0]
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    # One thread: the sums of several differ in their last bits, and a tie would choose another point.
    with threadpool_limits(1):
        return np.asarray(KMeans(count, n_init=1, random_state=seed).fit(place).cluster_centers_)


def _centres_between(place: np.ndarray, fixed: list[int], count: int, seed: int) -> np.ndarray:
    """Return ``count`` centres of k-means clusters where the ``fixed`` places are centres that never move."""
    rng = np.random.default_rng(seed)
    centres = place[fixed]
    nearest = _squares(place, centres).min(axis=1)
    for _ in range(count):
        # As in k-means++: far places are likelier, and one that is a centre already has no chance.
        weight = nearest if nearest.sum() > 0 else np.ones_like(nearest)
        centres = np.vstack([centres, place[rng.choice(len(place), p=weight / weight.sum())]])
        nearest = np.minimum(nearest, ((place - centres[-1]) ** 2).sum(axis=1))
    label = np.full(len(place), -1)
    for _ in range(LLOYD_PASSES):
        before, label = label, _squares(place, centres).argmin(axis=1)
        if np.array_equal(before, label):
            break
        for k in range(len(fixed), len(centres)):
            if (label == k).any():
                centres[k] = place[label == k].mean(axis=0)
    return np.asarray(centres[len(fixed) :])


def _squares(place: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Return squared distances [places, centres], summed in one order whatever the machine."""
    total = np.zeros((len(place), len(centres)))
    for d in range(place.shape[1]):
        total += (place[:, d, None] - centres[None, :, d]) ** 2
    return total

"""Choose which cases of a new GPU to time, so that few points say most.

Both ends of every size range come first, for a size outside what was timed is extrapolated; the rest are the cases
nearest to the centres of k-means clusters over the logs of the raw features and the dimensionless inputs of the trees.
On the published tables neither farthest points nor points chosen by the physics' sensitivity did better.
"""

from __future__ import annotations

import numpy as np

from costmodels.features import Columns, Operation


def choose_points(operation: Operation, candidates: Columns, count: int, seed: int = 0) -> np.ndarray:
    """Return the positions of ``count`` candidates to time, ascending and distinct.

    ``candidates`` holds the operation's raw features of every case that could be timed. Where routing was drawn at
    random and is not known row by row, give only cases whose features are exact: one noisy point in twenty costs more
    than a case of a better place gains.

    Raises
    ------
    ValueError
        If ``count`` is below 1.
    """
    if not count >= 1:
        raise ValueError(f"Expected count >= 1, got {count}.")
    place = _place(operation, candidates)
    if count >= len(place):
        return np.arange(len(place))
    chosen = _ends(operation, candidates, place)[:count]
    for centre in _centres(place, count - len(chosen), seed):
        distance = ((place - centre) ** 2).sum(axis=1)
        distance[chosen] = np.inf
        chosen.append(int(np.argmin(distance)))
    return np.array(sorted(chosen), dtype=np.int64)


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

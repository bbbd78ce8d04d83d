"""Choose what a sweep times next: k-means over the features, more where held-out errors are above the target.

Every class of cases has one fixed succession of batches, a function of the pool and the seed alone. The first batch
holds both ends of every range, a case of every pattern, and centres of k-means clusters, half of them among the user's
own steps where those are known; each later one holds more centres, with what came before as clusters of its own. Times
decide only how many batches an operation gets: a killed sweep therefore goes on with the same cases.

The error of an operation is that of :func:`costmodels.fit.fit_operation`, joined to the priors where there are any:
median over rows held out by size, the worse of both directions. On the published tables neither farthest points nor
points chosen by the physics' sensitivity did better than k-means.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from costmodels.cost_model import CostModel
from costmodels.features import Columns, Operation, take
from costmodels.fit import fit_operation
from costmodels.learned.smooth import squares
from costmodels.operations import DIRECTIONS, OPERATIONS
from costmodels.params import FitParams
from profiler import ProfileParams
from profiler.cases.case import Case, doubtful_cases
from profiler.cases.design import SEEN, Round, by_class, even_choice, points_by_class
from profiler.files import arrays_hash

FIRST_POINTS = 20
"""Cases of a class in the first batch: with a sibling's prior they mostly suffice."""
MORE_POINTS = 10
SEEN_SHARE = 0.5
"""Part of a batch's cluster centres that is sought among the user's own steps."""
LLOYD_PASSES = 50

Rows = Sequence[Mapping[str, Any]]


class KMeansChooser:
    """Choose rounds for :func:`profiler.profile_device` on a device ``arch``; ``priors``: cost models of siblings."""

    def __init__(self, params: FitParams | None = None, priors: Sequence[CostModel] = (), arch: str = "") -> None:
        self.params, self.priors, self.arch = params or FitParams(), tuple(priors), arch
        self._known: dict[str, float | None] = {}
        """Errors by the hash of the rows they were found on."""

    def next_round(
        self, pool: Sequence[Case], timed: Collection[Case], rows: Iterable[Mapping[str, Any]], params: ProfileParams
    ) -> Round:
        """Return what completes the batches begun; when all are, the next of operations above the target error."""
        done, caps = {id(case) for case in timed}, points_by_class(pool, params.max_points)
        begun: list[Case] = []
        following: list[tuple[str, list[Case]]] = []
        for key, cases in by_class(pool).items():
            whole = list(batches(OPERATIONS.get(key[0]), cases, caps[key], params.seed))
            missing = [[case for case in batch if id(case) not in done] for batch in whole]
            last = max((i for i, batch in enumerate(whole) if len(missing[i]) < len(batch)), default=0)
            begun += [case for batch in missing[: last + 1] for case in batch]
            following.append((key[0], next(filter(None, missing), [])))
        errors: dict[str, float] = {} if begun else self.errors_pct(list(rows))
        above = {op for op, _ in following if not errors.get(op, np.inf) <= params.target_error}
        chosen = begun or [case for op, batch in following if op in above for case in batch]
        wanted = {id(case) for case in chosen}
        stopped_by = "" if chosen else "max_points" if above else "target_error"
        return Round(tuple(case for case in pool if id(case) in wanted), errors, stopped_by)

    def errors_pct(self, rows: Rows) -> dict[str, float]:
        """Return every operation's held-out median error, percent; those with too few rows to judge are absent."""
        doubts, found = doubtful_cases(rows), {}
        for op, operation in OPERATIONS.items():
            sides = [(direction, _columns(operation, direction, rows, doubts)) for direction in DIRECTIONS]
            errors = [self._error_pct(operation, direction, columns) for direction, columns in sides if columns]
            known = [error for error in errors if error is not None]
            if errors and len(known) == len(errors):
                found[op] = max(known)
        return found

    def _error_pct(self, operation: Operation, direction: str, columns: Columns) -> float | None:
        key = arrays_hash(**columns) + operation.name + direction
        if key not in self._known:
            _, found = fit_operation(operation, direction, columns, self.params, self.priors, self.arch)
            known = None if found is None else float(np.median(np.abs(found.model_us / found.true_us - 1)))
            self._known[key] = known and 100.0 * known
        return self._known[key]


def batches(operation: Operation | None, cases: Sequence[Case], cap: int, seed: int) -> Iterator[list[Case]]:
    """Yield the batches of one class, at most ``cap`` cases in all; ``cases`` in an order that is always the same."""
    if operation is None:
        # Timed, but priced by nothing yet: no error will ever say that it needs less.
        yield even_choice(cases, cap)
        return
    positive = [name for name in operation.features if name not in operation.zero_allowed]
    some = [case for case in cases if all(case.features[name] > 0 for name in positive)]
    empty = [case for case in cases if any(case.features[name] <= 0 for name in positive)][:1]
    columns = {name: np.array([case.features[name] for case in some], dtype=np.float64) for name in operation.features}
    chosen = _ends_and_patterns(operation, some, columns)[: max(1, min(FIRST_POINTS, cap) - len(empty))]
    more = min(FIRST_POINTS, cap) - len(empty) - len(chosen)
    chosen += _more(operation, some, columns, chosen, more, seed)
    yield empty + [some[i] for i in chosen]
    while (more := min(MORE_POINTS, cap - len(empty) - len(chosen), len(some) - len(chosen))) > 0:
        fresh = _more(operation, some, columns, chosen, more, seed)
        yield [some[i] for i in fresh]
        chosen += fresh


def _ends_and_patterns(operation: Operation, cases: Sequence[Case], columns: Columns) -> list[int]:
    chosen = every_end(operation, columns)
    held = {cases[i].pattern for i in chosen}
    patterns = np.array([case.pattern for case in cases])
    for pattern in sorted(set(patterns.tolist()) - held):
        members = np.flatnonzero(patterns == pattern)
        among = take(columns, members)
        # The one case that stands for a pattern best is the centre of its only cluster.
        size = np.log(np.stack([among[name] + 1.0 for name in operation.features]))
        distance = ((size - np.median(size, axis=1, keepdims=True)) ** 2).sum(axis=0)
        chosen.append(int(members[np.argmin(distance)]))
    return chosen


def _more(
    operation: Operation, cases: Sequence[Case], columns: Columns, chosen: list[int], count: int, seed: int
) -> list[int]:
    """Return ``count`` more positions, the user's own steps preferred."""
    found: list[int] = []
    own = [i for i, case in enumerate(cases) if case.pattern == SEEN]
    wanted = min(round(count * SEEN_SHARE), len(own) - len(set(own) & set(chosen)))
    if wanted > 0:
        part = np.array(sorted({*own, *chosen}))
        timed = np.searchsorted(part, chosen).tolist()
        found = part[choose_points(operation, take(columns, part), wanted, seed, timed)].tolist()
    if count - len(found) > 0:
        found += choose_points(operation, columns, count - len(found), seed, [*chosen, *found]).tolist()
    return found


def choose_points(
    operation: Operation, candidates: Columns, count: int, seed: int = 0, timed: Sequence[int] = ()
) -> np.ndarray:
    """Return the positions of ``count`` more candidates to time, ascending and distinct.

    ``candidates`` holds the operation's raw features of every case that could be timed; ``timed`` are positions that
    are timed already: they stand for clusters of their own, and the ends of the sizes are taken to be among them.
    Where routing was drawn at random and is not known row by row, give only cases whose features are exact: one noisy
    point in twenty costs more than a case of a better place gains.
    """
    if not count >= 1:
        raise ValueError(f"Expected count >= 1, got {count}.")
    place, timed = _place(operation, candidates), list(timed)
    if count + len(timed) >= len(place):
        return np.setdiff1d(np.arange(len(place)), timed)
    chosen = [] if timed else every_end(operation, candidates)[:count]
    for centre in _centres(place, timed + chosen, count - len(chosen), seed):
        distance = ((place - centre) ** 2).sum(axis=1)
        distance[timed + chosen] = np.inf
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


def _place(operation: Operation, candidates: Columns) -> np.ndarray:
    """Return [candidates, varying features] logs and dimensionless inputs, each scaled to unit spread."""
    logs = [np.log(candidates[name] + (1.0 if name in operation.zero_allowed else 0.0)) for name in operation.features]
    derived = operation.derive(candidates)
    place = np.stack([*logs, *(derived[name] for name in operation.dimensionless)], axis=1)
    spread = place.std(axis=0)
    varying = spread > 1e-9
    return np.asarray((place[:, varying] - place[:, varying].mean(axis=0)) / spread[varying])


def _centres(place: np.ndarray, fixed: list[int], count: int, seed: int) -> np.ndarray:
    """Return ``count`` centres of k-means clusters where the ``fixed`` places are centres that never move."""
    rng = np.random.default_rng(seed)
    centres = place[fixed]
    nearest = squares(place, centres).min(axis=1)
    for _ in range(count):
        # As in k-means++: far places are likelier, and one that is a centre already has no chance.
        weight = nearest if nearest.sum() > 0 else np.ones_like(nearest)
        centres = np.vstack([centres, place[rng.choice(len(place), p=weight / weight.sum())]])
        nearest = np.minimum(nearest, ((place - centres[-1]) ** 2).sum(axis=1))
    label = np.full(len(place), -1)
    for _ in range(LLOYD_PASSES):
        before, label = label, squares(place, centres).argmin(axis=1)
        if np.array_equal(before, label):
            break
        for k in range(len(fixed), len(centres)):
            if (label == k).any():
                centres[k] = place[label == k].mean(axis=0)
    return np.asarray(centres[len(fixed) :])


def _columns(operation: Operation, direction: str, rows: Rows, doubts: set[str]) -> Columns:
    kept = [row for row in rows if (row["op"], row["direction"], row["status"]) == (operation.name, direction, "ok")]
    kept = [row for row in kept if row["case_id"] not in doubts]
    names = (*operation.features, "time_us")
    return {name: np.array([row.get(name, 0) for row in kept], dtype=np.float64) for name in names} if kept else {}

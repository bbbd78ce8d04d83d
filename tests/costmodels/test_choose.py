"""The chooser on synthetic formulas: every case of the pool has a time that a test can compute."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from costmodels.choose import FIRST_POINTS, MORE_POINTS, KMeansChooser, batches, choose_points
from costmodels.operations import OPERATIONS
from profiler import ProfileParams, Topology, load_model
from profiler.cases.case import Rates, Seen
from profiler.cases.design import Design, by_class, points_by_class

FAST = Rates(1e15, 1e15, 1e13, 1e-6, 1 << 40)
SEEN = Seen(
    cells=tuple(tuple(range(100 + i, 1000, 170 + 13 * i)) for i in range(20)),
    rank_rows=tuple(tuple(int(x) for x in np.random.default_rng(i).integers(0, 900, 16)) for i in range(20)),
)
EXPERTS = OPERATIONS["experts"]
ALLOWED = 60
JOB = """
import sys
sys.path.insert(0, {folder!r})
from test_choose import first_round
print(*[case.case_id("forward", "") for case in first_round()])
"""


def pool(seen=None, model="Qwen3-30B-A3B"):
    topology = Topology(data_parallel_size=8, expert_model_parallel_size=8)
    return Design(load_model(model), topology, 8192, ProfileParams(), FAST, 2, seen or Seen()).cases


def first_round():
    return KMeansChooser().next_round(pool(SEEN), (), (), ProfileParams()).cases


def rows_of(cases, true_us, noise=0.0, backward=True):
    rows, rng = [], np.random.default_rng(0)
    for case in cases:
        features = {name: np.float64(value) for name, value in case.features.items()}
        time_us = 30.0 if 0 in (features.get("rows"),) else float(true_us(case.op, features))
        for direction, factor in (("forward", 1.0), ("backward", 2.0))[: 1 + backward]:
            measured = time_us * factor * float(np.exp(noise * rng.standard_normal()))
            rows.append({
                **case.features, "op": case.op, "direction": direction, "status": "ok", "time_us": measured,
                "case_id": case.case_id(direction, "x"), "looks": 1,
            })  # fmt: skip
    return rows


@pytest.fixture
def true_us(synthetic):
    def us(op, features):
        return synthetic.true_us[op](features) if op in synthetic.true_us else 5.0 + features["tokens"] / 100.0

    return us


def test_the_first_round_holds_both_ends_of_every_range_and_every_pattern():
    cases, chosen = pool(SEEN, "gpt-oss-20b"), None
    chosen = by_class(KMeansChooser().next_round(cases, (), (), ProfileParams()).cases)
    for key, among in by_class(cases).items():
        operation = OPERATIONS.get(key[0])
        assert {case.pattern for case in chosen[key]} == {case.pattern for case in among}
        for name in () if operation is None else set(operation.features) - set(operation.zero_allowed):
            values = {case.features[name] for case in among if case.features.get("rows", 1)}
            assert {min(values), max(values)} <= {case.features[name] for case in chosen[key]}
        assert len(chosen[key]) <= ProfileParams().max_points


def test_the_users_own_steps_are_preferred():
    for key, chosen in by_class(first_round()).items():
        own = sum(case.pattern == "seen" for case in chosen)
        if key[0] in ("attention", "experts"):
            total = sum(case.pattern == "seen" for case in by_class(pool(SEEN))[key])
            assert own / total > 2 * (len(chosen) - own) / len(by_class(pool(SEEN))[key])


def test_a_round_is_a_function_of_pool_and_seed_alone():
    cases, params = pool(SEEN), ProfileParams()
    first = KMeansChooser().next_round(cases, (), (), params).cases
    shuffled = [cases[i] for i in np.random.default_rng(1).permutation(len(cases))]
    again = KMeansChooser().next_round(shuffled, (), (), params).cases
    assert {id(case) for case in again} == {id(case) for case in first}
    other = KMeansChooser().next_round(cases, (), (), ProfileParams(seed=1)).cases
    assert {id(case) for case in other} != {id(case) for case in first}


def test_no_hash_seed_and_no_number_of_threads_changes_a_round():
    job = JOB.format(folder=str(Path(__file__).parent))
    answers = set()
    for seed, threads in (("1", "1"), ("77", "2")):
        env = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": threads}
        root = Path(__file__).parents[2]
        done = subprocess.run(
            [sys.executable, "-c", job], capture_output=True, text=True, check=True, cwd=root, env=env
        )
        answers.add(done.stdout)
    assert answers == {" ".join(case.case_id("forward", "") for case in first_round()) + "\n"}


@pytest.mark.parametrize("cap", [6, 20, 47])
def test_batches_never_repeat_a_case_nor_pass_the_cap(cap):
    cases = pool()
    for key, among in by_class(cases).items():
        found = list(batches(OPERATIONS.get(key[0]), among, cap, 0))
        flat = [id(case) for batch in found for case in batch]
        assert len(set(flat)) == len(flat) == min(cap, len(among))
        assert all(len(batch) <= MORE_POINTS for batch in found[1:]) or OPERATIONS.get(key[0]) is None


def test_what_was_begun_is_completed_first(true_us):
    cases, params = pool(), ProfileParams()
    first = KMeansChooser().next_round(cases, (), (), params).cases
    half = first[: len(first) // 2]
    found = KMeansChooser().next_round(cases, half, rows_of(half, true_us), params)
    assert {id(case) for case in found.cases} == {id(case) for case in first} - {id(case) for case in half}
    assert not found.stopped_by


def run(cases, true_us, params, backward=True):
    timed, rounds = [], []
    chooser = KMeansChooser()
    while len(rounds) < 10:
        found = chooser.next_round(cases, timed, rows_of(timed, true_us, backward=backward), params)
        rounds.append(found)
        if found.stopped_by:
            break
        timed += found.cases
    return timed, rounds


def test_rounds_end_at_the_target_with_few_points(true_us):
    cases = pool()
    timed, rounds = run(cases, true_us, ProfileParams(target_error=ALLOWED))
    assert rounds[-1].stopped_by == "target_error"
    assert all(error <= ALLOWED for error in rounds[-1].errors_pct.values())
    assert {"attention", "dense", "experts"} <= set(rounds[-1].errors_pct)
    caps = points_by_class(cases, FIRST_POINTS)
    for key, chosen in by_class(timed).items():
        if key[1] == 0 and key[0] in ("attention", "experts"):
            assert len(chosen) <= max(FIRST_POINTS, caps[key])


def test_only_operations_above_the_target_get_more_and_the_cap_ends_them(true_us):
    cases = [case for case in pool() if case.op in ("dense", "experts")]

    def noisy(op, features):
        # Experts no model can learn: a time that jumps with every row.
        jump = 1.0 + 4.0 * ((features.get("rows", 0) * 7919) % 13) if op == "experts" else 1.0
        return true_us(op, features) * jump

    timed, rounds = run(cases, noisy, ProfileParams(target_error=15.0, max_points=40), backward=False)
    assert rounds[-1].stopped_by == "max_points"
    assert rounds[-1].errors_pct["experts"] > 15.0 >= rounds[-1].errors_pct["dense"]
    assert sum(case.op == "experts" for case in timed) == 40
    assert {case.op for found in rounds[2:-1] for case in found.cases} == {"experts"}


def test_a_prior_lowers_the_error_of_few_points(fitted, true_us):
    cases = [case for case in pool() if case.op == "experts"]
    first = KMeansChooser().next_round(cases, (), (), ProfileParams()).cases
    rows = [row for row in rows_of(first, true_us, 0.01) if row["direction"] == "forward"]
    alone = KMeansChooser().errors_pct(rows)["experts"]
    joined = KMeansChooser(priors=[fitted], arch=fitted.fingerprint.arch).errors_pct(rows)["experts"]
    assert joined < alone


@pytest.fixture
def candidates(synthetic):
    rows = synthetic.measurements(ops=("experts",)).rows
    return {name: np.asarray(rows[name], dtype=np.float64) for name in EXPERTS.features}


def test_chosen_points_hold_both_ends_and_repeat(candidates):
    chosen = choose_points(EXPERTS, candidates, 20)
    assert np.unique(chosen).size == 20
    for name in set(EXPERTS.features) - set(EXPERTS.shape) - set(EXPERTS.zero_allowed):
        assert {candidates[name].min(), candidates[name].max()} <= set(candidates[name][chosen])
    assert np.array_equal(chosen, choose_points(EXPERTS, candidates, 20))
    assert not np.array_equal(chosen, choose_points(EXPERTS, candidates, 20, seed=1))


def test_chosen_points_cover_the_cases_better_than_random_ones(candidates):
    logs = np.log(np.stack([candidates[name] for name in ("rows", "hidden_size", "inter_size", "max_rows")], axis=1))

    def gap(chosen):
        return np.sqrt(((logs[:, None] - logs[None, chosen]) ** 2).sum(axis=2)).min(axis=1).mean()

    drawn = [np.random.default_rng(seed).choice(len(logs), 20, replace=False) for seed in range(10)]
    assert gap(choose_points(EXPERTS, candidates, 20)) < np.mean([gap(one) for one in drawn])


def test_no_more_points_than_cases_and_not_less_than_one(candidates):
    few = {name: column[:7] for name, column in candidates.items()}
    assert choose_points(EXPERTS, few, 20).tolist() == list(range(7))
    assert choose_points(EXPERTS, few, 1).size == 1
    with pytest.raises(ValueError, match="count >= 1"):
        choose_points(EXPERTS, few, 0)

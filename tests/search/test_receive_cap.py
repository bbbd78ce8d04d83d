"""The receive cap: hard, exact, and never part of a price."""

from dataclasses import replace

import numpy as np
import pytest
from strategies import TOPOLOGIES, make_batch, make_spec, make_tables

from profiler import RoutePackError, Topology
from search import PlannerParams, build_problem, evaluate, plan_step
from search.kernels import over_cap_ns

SMALL = PlannerParams(max_iterations=20_000, placement_swaps=500, starts=2)
TOPOLOGY = TOPOLOGIES[2]


@pytest.fixture(scope="module")
def case():
    rng, spec = np.random.default_rng(6), make_spec()
    lengths = np.clip(np.exp(rng.normal(2.5, 0.8, 40)), 1, 64).astype(int)
    batch = make_batch(rng, spec, lengths, skew=1.5, unknown=1)
    return batch, make_tables(rng, spec, TOPOLOGY, 64), spec, TOPOLOGY, 64


def test_receive_cap_is_hard(case):
    free = plan_step(*case, SMALL)
    problem = build_problem(*case)
    hottest = evaluate(problem, free.row_N, free.slot_N, free.placement_LE, free.num_rows).rank_rows_RBPL.max()
    cap = int(hottest * 0.9)
    capped = plan_step(*case, replace(SMALL, max_received_rows=cap))
    priced = evaluate(problem, capped.row_N, capped.slot_N, capped.placement_LE, capped.num_rows)
    assert priced.rank_rows_RBPL.max() <= cap
    assert capped.predicted == priced.step_time()
    # What is kept free moves the search's own limit, never the job's.
    slack = build_problem(*case, replace(SMALL, max_received_rows=cap, receive_slack=0.1))
    assert slack.receive_wall[0] == round(0.9 * cap)
    assert slack.params.max_received_rows == cap
    with pytest.raises(RoutePackError, match="above max_received_rows = 3"):
        plan_step(*case, replace(SMALL, max_received_rows=3))


def test_a_receive_cap_never_shows_in_a_price(case):
    # Its charge once stood in the experts' table: a plan of 1e-4 s read thousands of seconds, and so did the default.
    free = plan_step(*case, SMALL)
    problem = build_problem(*case)
    hottest = evaluate(problem, free.row_N, free.slot_N, free.placement_LE, free.num_rows).rank_rows_RBPL.max()
    loose = plan_step(*case, replace(SMALL, max_received_rows=int(hottest) * 10))
    tight = plan_step(*case, replace(SMALL, max_received_rows=int(hottest * 0.9)))
    assert (loose.predicted, loose.default, loose.lower_bound_s) == (free.predicted, free.default, free.lower_bound_s)
    assert (tight.default, tight.lower_bound_s) == (free.default, free.lower_bound_s)
    assert free.lower_bound_s <= tight.predicted.step_time_s < 2 * free.predicted.step_time_s


def test_the_receive_cap_costs_nothing_up_to_itself(case):
    problem = build_problem(*case, replace(SMALL, max_received_rows=165))
    assert [over_cap_ns(rows, *problem.receive_wall) for rows in (0, 162, 165)] == [0, 0, 0]
    assert over_cap_ns(166, *problem.receive_wall) > problem.expert_ns.max()


def test_the_largest_objective_fits_int64(case):
    # 8 blocks, 94 layers, 20 rows, the hottest rank far above the cap: 1e19 once, above what int64 holds.
    tokens, top_k, layers, blocks = 4_194_304, 8, 94, 8
    problem = build_problem(*case, replace(SMALL, max_received_rows=1))
    routed = np.broadcast_to(np.int64(tokens * top_k), (1, layers, 1))  # all of a layer's rows on one expert
    big = replace(problem, counts=routed, topology=Topology(data_parallel_size=blocks))
    assert big.num_blocks == blocks
    cap, row_ns = big.receive_wall
    worst = layers * over_cap_ns(tokens * top_k, cap, row_ns)  # no packing's peaks add up to more
    assert 0 < (blocks + 1) * worst < 2**62
    assert row_ns > 1_000_000

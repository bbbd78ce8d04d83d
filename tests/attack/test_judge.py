"""The attack's judge: it agrees with the product on what is right, and sees every kind of wrong."""

from dataclasses import replace

import numpy as np
import pytest


@pytest.fixture(scope="module")
def planned(pristine):
    import doors

    return doors.planner().plan(doors.step()), doors.step(), doors.planner()


def test_a_plan_is_right(planned):
    import judge

    plan, batch, planner = planned
    judge.check_plan(plan, batch, planner.job)
    judge.check_tables(planner.tables, planner.spec, planner.topology, planner.max_tokens)
    judge.check_spec(planner.spec)
    judge.check_params(planner.params)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: {"row_N": p.row_N + 1},
        lambda p: {"slot_N": np.zeros_like(p.slot_N)},
        lambda p: {"placement_LE": np.zeros_like(p.placement_LE)},
        lambda p: {"placement_LE": p.placement_LE[:, ::-1]},
        lambda p: {"predicted": replace(p.predicted, attention_s=-p.predicted.attention_s)},
        lambda p: {"predicted": replace(p.predicted, step_time_s=float("nan"))},
        lambda p: {"lower_bound_s": 2 * p.predicted.step_time_s},
    ],
)
def test_a_plan_with_one_thing_wrong_is_seen(planned, change):
    import judge

    plan, batch, planner = planned
    with pytest.raises(judge.Wrong):
        judge.check_plan(replace(plan, **change(plan)), batch, planner.job)


def test_tables_of_another_job_are_seen(planned):
    import judge

    _, _, planner = planned
    job = planner.spec, planner.topology, planner.max_tokens
    for wrong in ({"top_k": 3}, {"num_moe_layers": 1}, {"max_tokens": 1}, {"row_fixed_ns": -1}, {"notes": (1,)}):
        tables = object.__new__(type(planner.tables))
        for name in type(planner.tables).__dataclass_fields__:
            object.__setattr__(tables, name, wrong.get(name, getattr(planner.tables, name)))
        with pytest.raises(judge.Wrong):
            judge.check_tables(tables, *job)

"""A small part of the attack: changed inputs are refused in one clear line, or what comes of them is right."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

DOORS = {"plan": 60, "bundle": 40, "model": 40, "yaml": 30}


@pytest.mark.parametrize("door", DOORS)
def test_a_changed_input_is_refused_in_one_line_or_rightly_accepted(attack, door):
    seen = set()

    @settings(max_examples=DOORS[door], derandomize=True, suppress_health_check=list(HealthCheck), database=None)
    @given(seed=st.integers(0, 2**32 - 1))
    def refused_or_right(seed):
        outcome, said = attack(door, seed)
        seen.add(outcome)
        assert outcome in ("clear", "accepted"), said

    refused_or_right()
    assert "clear" in seen


@pytest.mark.parametrize("door", DOORS)
def test_equal_seeds_change_a_door_alike(pristine, tmp_path, door):
    import operators
    import walk

    told = []
    for copy in ("a", "b"):
        walk.copy_job(door, tmp_path / copy)
        said = walk.DOORS[door].mutate(operators.seeded(door, 7), tmp_path / copy)
        told.append((said, {p.name: p.read_bytes() for p in sorted((tmp_path / copy).rglob("*")) if p.is_file()}))
    assert told[0] == told[1]

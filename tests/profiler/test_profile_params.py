import dataclasses

import pytest

from profiler import ProfileParams

NAN = float("nan")


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(ProfileParams) if f.type in ("int", "float")])
def test_not_a_number_is_never_accepted(field):
    with pytest.raises(ValueError, match=field):
        ProfileParams(**{field: NAN})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_points", 5), ("max_points", 10.0), ("repeats", 0), ("min_repeats", 8), ("threads", -1), ("seed", True),
        ("max_case_seconds", float("inf")),
        ("max_memory_gib", -1), ("dtype", "int8"), ("max_drift", 0),
        ("target_error", 0), ("max_minutes", -1), ("max_minutes", float("inf")),
    ],
)  # fmt: skip
def test_values_out_of_range_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        ProfileParams(**{field: value})


def test_params_are_frozen_and_say_what_each_field_means():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ProfileParams().repeats = 1

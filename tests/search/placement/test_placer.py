"""Placement passes: as many swaps as the settings say, unless wall time says otherwise."""

import numpy as np
import pytest

from search.placement.placer import PLACEMENT_SHARE, place_rows

LAYERS, EXPERTS = 5, 4


@pytest.mark.parametrize(
    ("step", "room", "scale"),
    [
        (0.0, 0.0, 1), (0.0, 0.05, 1),  # iterations: no time passes
        (0.001, 0.0, 1), (0.001, 0.05, 10), (0.001, 0.5, PLACEMENT_SHARE / 0.005),
        (0.1, 0.0, PLACEMENT_SHARE / 0.5), (0.1, 0.05, PLACEMENT_SHARE / 0.5),
    ],
)  # fmt: skip
def test_a_pass_takes_its_room_of_the_wall_time_and_no_more_than_its_share(step, room, scale):
    asked = []

    def improve(layer, ranks, swaps):
        """Take ``step`` of the budget's wall time and change nothing."""
        asked.append((layer, swaps))
        return 0, ranks

    start = np.zeros((LAYERS, EXPERTS), np.int64)
    place_rows(improve, [start], 1000, lambda: step * len(asked), room)
    swaps = pytest.approx(1000 * scale, abs=1)
    assert asked[0] == (0, 1000)
    again = [(0, swaps)] if scale > 1 else []  # the layer that showed the time gets its share as well
    assert asked[1:] == [*again, *((layer, swaps) for layer in range(1, LAYERS))]


def test_every_layer_takes_the_best_of_its_starts():
    starts = [np.full((LAYERS, EXPERTS), rank) for rank in (4, 0, 2)]
    best = place_rows(lambda layer, ranks, swaps: (abs(ranks[0] - layer), ranks), starts, 1000)
    assert best[:, 0].tolist() == [0, 0, 2, 4, 4]  # ties: the first

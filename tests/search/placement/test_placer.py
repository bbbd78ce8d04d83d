"""Placement passes: as many swaps as the settings say, unless wall time says otherwise."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from search.placement.placer import PLACEMENT_SHARE, place_rows

LAYERS, EXPERTS = 5, 4


@dataclass
class CountedLoads:
    """Stand in for the loads of layers: improving one takes ``step`` of the budget's wall time and changes nothing."""

    step: float
    num_layers: int = LAYERS
    now: float = 0.0
    swaps: list[tuple[int, int]] = field(default_factory=list)

    def improve(self, layer, rank_of, residence, swaps, seed):
        self.now += self.step
        self.swaps.append((layer, swaps))
        return 0, rank_of


@pytest.mark.parametrize(
    ("step", "room", "scale"),
    [
        (0.0, 0.0, 1), (0.0, 0.05, 1),  # iterations: no time passes
        (0.001, 0.0, 1), (0.001, 0.05, 10), (0.001, 0.5, PLACEMENT_SHARE / 0.005),
        (0.1, 0.0, PLACEMENT_SHARE / 0.5), (0.1, 0.05, PLACEMENT_SHARE / 0.5),
    ],
)  # fmt: skip
def test_a_pass_takes_its_room_of_the_wall_time_and_no_more_than_its_share(step, room, scale):
    loads = CountedLoads(step)
    start = np.zeros((LAYERS, EXPERTS), np.int64)
    place_rows(loads, [start], None, 1000, 0, lambda: loads.now, room)
    swaps = pytest.approx(1000 * scale, abs=1)
    assert loads.swaps[0] == (0, 1000)
    again = [(0, swaps)] if scale > 1 else []  # the layer that showed the time gets its share as well
    assert loads.swaps[1:] == [*again, *((layer, swaps) for layer in range(1, LAYERS))]


def test_every_layer_takes_the_best_of_its_starts():
    class Loads(CountedLoads):
        def improve(self, layer, rank_of, residence, swaps, seed):
            return int(abs(rank_of[0] - layer)), rank_of

    starts = [np.full((LAYERS, EXPERTS), rank) for rank in (4, 0, 2)]
    assert place_rows(Loads(0.0), starts, None, 1000, 0)[:, 0].tolist() == [0, 0, 2, 4, 4]  # ties: the first

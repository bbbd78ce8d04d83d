"""Draw the README's picture from a finished quickstart: predicted step times, and expert-rank load before and after.

routepack quickstart --out quickstart
python experiments/00_readme_picture/run.py quickstart
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import routepack_tune as rt
from routepack_tune.reports.comparison import compare_planners, loads_before_and_after
from routepack_tune.reports.figures import STYLE
from routepack_tune.reports.quickstart import plot_rank_load, plot_time_split

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "before-after.png"


@matplotlib.rc_context(STYLE)
def draw(folder: Path) -> None:
    """Write the picture from the bundle and the last (held-out) step batch of a quickstart's folder."""
    planner = rt.load_planner(folder / "bundle")
    earlier, batch = (rt.load_step_batch(path, planner.spec) for path in rt.list_step_files(folder / "steps")[-2:])
    before, after = loads_before_and_after(planner, batch, planner.plan(batch, previous=planner.plan(earlier)))
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.6), width_ratios=(2.3, 1, 1), layout="constrained")
    figure.set_facecolor("white")
    plot_time_split(compare_planners(planner, [batch], earlier), axes[0])
    limit = max(abs(before.relative_LP - 1).max(), abs(after.relative_LP - 1).max()) + 1
    plot_rank_load(before, "rows of each EP rank over the mean: default", limit, axes[1])
    plot_rank_load(after, "RoutePack-Tune", limit, axes[2])
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=90)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))

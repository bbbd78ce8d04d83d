"""The five verbs on real gpt-oss-20b routes and published H200 times, beside the published planners.

Tunes on steps 00-03 (the last one held out) and plans steps 04 and 05, which tuning never sees. Writes results.csv and
figure.png beside this file. All step times are predicted; planning times are measured on this machine.

    python experiments/01_real_routes/run.py [--shared ../shared/data] [--work DIR] [--trials 20]
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from functools import partial
from pathlib import Path

import routepack_tune as rt
from routepack_tune.reports.comparison import Outcome, compare_planners
from routepack_tune.reports.figures import panels, save_png
from routepack_tune.reports.quickstart import plot_time_split

HERE = Path(__file__).parent
CONFIG = """\
model: gpt-oss-20b
topology:
  data_parallel_size: 8
  expert_model_parallel_size: 8
max_tokens_per_microbatch: 32768
"""
TUNED_ON = [f"gptoss20b-r1lengths-step0{k}.npz" for k in range(4)]
PLANNED = [f"gptoss20b-r1lengths-step0{k}.npz" for k in (4, 5)]


def run(data: Path, work: Path, trials: int) -> list[Outcome]:
    """Run profile, fit, tune, deploy and plan; return the mean outcome of every planner on the unseen steps, which
    follow the last one that tuning saw."""
    config = work / "routepack.yaml"
    config.write_text(CONFIG)
    rt.profile(config, work / "measurements", published=data / "gpu-timings" / "h200_sxm")
    rt.fit(work / "measurements", config, work / "costmodel")
    steps = [data / "routing" / name for name in TUNED_ON]
    study = rt.tune(steps, work / "costmodel", config, work / "study", trials=trials)
    print(study["summary"]["export_reason"])
    rt.deploy(work / "study", work / "bundle")
    planner = rt.load_planner(work / "bundle")
    before, *batches = (rt.load_step_batch(data / "routing" / name, planner.spec) for name in (TUNED_ON[-1], *PLANNED))
    for name, batch in zip(PLANNED, batches, strict=True):
        plan = planner.plan(batch)
        print(f"{name}, moves free: gap to the proven bound {plan.gap:.2%}, counters {plan.counters}")
    return compare_planners(planner, batches, before)


def report(outcomes: list[Outcome]) -> None:
    """Print the table and write results.csv and figure.png."""
    with (HERE / "results.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        named = ("step_s", "attention_s", "experts_s", "rest_s", "move_s", "free_s")
        writer.writerow(["planner", *named, "rows", "lost_share", "plan_s_measured", "speed_over_default"])
        default_s = outcomes[0].total_s
        for o in outcomes:
            times, speed = [f"{getattr(o, name):.4f}" for name in named], default_s / o.total_s
            writer.writerow([o.planner, *times, o.rows, f"{o.lost_share:.4f}", f"{o.plan_s:.3f}", f"{speed:.3f}"])
            print(
                f"{o.planner:42s} {o.step_s:7.3f} + {o.move_s:5.3f} s {speed:5.2f}x "
                f"(moves free {default_s / o.free_s:5.2f}x)  lost {o.lost_share:6.1%}  plan {o.plan_s:.2f} s"
            )
    save_png(panels(7.2, 0.62 * len(outcomes) + 1.2, partial(plot_time_split, outcomes)), HERE / "figure.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=HERE.parents[2] / "shared" / "data")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--trials", type=int, default=20)
    given = parser.parse_args()
    if not (given.shared / "routing").is_dir():
        raise SystemExit(f"No real routes under {given.shared}: give their folder with --shared.")
    with tempfile.TemporaryDirectory() as scratch:
        report(run(given.shared, given.work or Path(scratch), given.trials))

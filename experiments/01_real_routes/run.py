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


def run(data: Path, work: Path, trials: int) -> dict[str, list[Outcome]]:
    """Run profile, fit, tune, deploy and plan; return the outcome of every planner on each unseen step."""
    config = work / "routepack.yaml"
    config.write_text(CONFIG)
    rt.profile(config, work / "measurements", published=data / "gpu-timings" / "h200_sxm")
    rt.fit(work / "measurements", config, work / "costmodel")
    steps = [data / "routing" / name for name in TUNED_ON]
    study = rt.tune(steps, work / "costmodel", config, work / "study", trials=trials)
    print(study["summary"]["export_reason"])
    rt.deploy(work / "study", work / "bundle")
    planner = rt.load_planner(work / "bundle")
    outcomes = {}
    for name in PLANNED:
        plan = rt.plan(data / "routing" / name, work / f"{name}.json", planner)
        print(f"{name}: gap to the proven bound {plan.gap:.2%}, counters {plan.counters}")
        outcomes[name] = compare_planners(planner, [rt.load_step_batch(data / "routing" / name, planner.spec)])
    return outcomes


def report(outcomes: dict[str, list[Outcome]]) -> None:
    """Print the table and write results.csv and figure.png."""
    with (HERE / "results.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["step", "planner", "predicted_step_s", "attention_s", "experts_s", "rest_s", "rows",
                         "lost_to_imbalance", "plan_s_measured", "speed_over_default"])  # fmt: skip
        for step, listed in outcomes.items():
            default = listed[0].step_s
            for o in listed:
                times = [f"{seconds:.4f}" for seconds in (o.step_s, o.attention_s, o.experts_s, o.rest_s)]
                speed = default / o.step_s
                writer.writerow(
                    [step, o.planner, *times, o.rows, f"{o.lost_share:.4f}", f"{o.plan_s:.3f}", f"{speed:.3f}"]
                )
                print(f"{step[-10:-4]} {o.planner:42s} {o.step_s:7.3f} s  {speed:5.2f}x  lost {o.lost_share:6.1%}")
    last = outcomes[PLANNED[-1]]
    save_png(panels(7.2, 0.62 * len(last) + 1.2, partial(plot_time_split, last)), HERE / "figure.png")


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

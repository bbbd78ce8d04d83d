"""Plan one batch in a process of its own and print what it took as JSON: for peak memory and for determinism.

python experiments/02_planner/one_plan.py REGIME INSTANCE [--iterations N | --seconds S] [--threads T]
    [--prompts P] [--layers L] [--shared DIR]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from contextlib import suppress
from pathlib import Path

from regimes import SHARED, all_regimes, load_instance, with_layers, with_prompts

from search import StopCriterion, plan_step


def main() -> None:
    """Plan and print."""
    given = _arguments()
    regime = all_regimes(given.shared)[given.regime]
    if given.prompts:
        regime = with_prompts(regime, given.prompts)
    if given.layers:
        regime = with_layers(regime, given.layers)
    # Compiled code is loaded before the clock starts.
    small = load_instance(all_regimes(given.shared)["gsm8k-short"], 0)
    plan_step(small.batch, small.tables, small.regime.spec, small.regime.topology, small.regime.max_tokens,
              stop=StopCriterion(max_iterations=4096), num_threads=given.threads)  # fmt: skip
    idle_gib = memory_gib("VmRSS")
    with suppress(OSError):  # Linux: let the peak count from here, where that is allowed
        Path("/proc/self/clear_refs").write_text("5")
    instance = load_instance(regime, given.instance)
    stop = StopCriterion(max_runtime=given.seconds) if given.seconds else StopCriterion(max_iterations=given.iterations)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    plan = plan_step(
        instance.batch, instance.tables, regime.spec, regime.topology, regime.max_tokens, seed=given.instance,
        stop=stop, num_threads=given.threads,
    )  # fmt: skip
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    print(json.dumps({
        "sha256": hashlib.sha256(json.dumps(plan.to_dict(), sort_keys=True).encode()).hexdigest(),
        "plan_s": wall_s,
        "cpu_s": cpu_s,
        "batch_gib": instance.problem.counts.nbytes / 2**30,
        "peak_gib": memory_gib("VmHWM"),
        "planning_gib": memory_gib("VmHWM") - idle_gib,
        "percent": instance.ideal_ns * 1e-7 / plan.predicted.step_time_s / instance.tables.pipeline_stages,
    }))  # fmt: skip


def memory_gib(field: str) -> float:
    """Return a size of this process that Linux reports, GiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 2**20 for line in lines if line.startswith(field))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("regime")
    parser.add_argument("instance", type=int)
    parser.add_argument("--iterations", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=0)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--shared", type=Path, default=SHARED)
    return parser.parse_args()


if __name__ == "__main__":
    main()

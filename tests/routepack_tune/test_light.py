"""``import routepack_tune`` is light: training jobs and the command's help never wait for what they do not use."""

from __future__ import annotations

import subprocess
import sys

from patience import PATIENCE_S


def test_import_is_light(blocker):
    code = blocker + "import routepack_tune; print(sorted(routepack_tune.__all__))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("load_planner", "profile", "fit", "tune", "deploy", "plan"):
        assert name in done.stdout


def test_names_of_the_search_come_when_asked_for():
    code = (
        "import sys, routepack_tune; before = 'numba' in sys.modules, 'torch' in sys.modules\n"
        "import search\n"
        "assert routepack_tune.Plan is search.Plan and routepack_tune.StepBatch is search.StepBatch\n"
        "from routepack_tune import *\n"
        "print(before, relayout.__name__, hasattr(routepack_tune, 'Nonsense'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(False, False) routepack_tune.trainers.relayout False\n"

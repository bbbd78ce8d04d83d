"""``import routepack_tune`` is light: training jobs and the command's help never wait for what they do not use."""

from __future__ import annotations

import subprocess
import sys


def test_import_is_light(blocker):
    code = blocker + "import routepack_tune; print(sorted(routepack_tune.__all__))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("load_planner", "profile", "fit", "tune", "deploy", "plan"):
        assert name in done.stdout


def test_exported_names_exist():
    import routepack_tune

    for name in routepack_tune.__all__:
        assert getattr(routepack_tune, name) is not None

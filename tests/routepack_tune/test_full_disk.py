"""A disk without room is one line that names the file; nothing is half-written, and the same command goes on later."""

import shutil
import subprocess
import sys

import pytest

from routepack_tune.quickstart import EXAMPLE

FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
from routepack_tune.cli import main
sys.exit(main(sys.argv[2:]))
"""
TINY = ("--costmodel", "costmodel", "--config", "routepack.yaml")
VERBS = {
    "plan": (200, ("plan", "steps/step03.npz", *TINY, "--out", "made/plan.json"), "made/plan.json"),
    "check": (200, ("check", "bundle", "steps", "--out", "made/report.json"), "made/report.json"),
    "deploy": (200, ("deploy", "study", "--out", "made/bundle"), "made/bundle"),
    "profile": (
        2000,
        ("profile", "--published", EXAMPLE / "timings" / "h200_sxm", "--config", "routepack.yaml", "--out", "made"),
        "made/measurements.parquet",
    ),
    "tune": (500, ("tune", "steps", *TINY, "--trials", "1", "--out", "made"), "made"),
}
"""Most bytes of a file, the command, what it makes."""


def run(folder, most, arguments):
    command = [sys.executable, "-c", FULL, str(most), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("verb", VERBS)
def test_no_room_is_one_line_and_the_same_command_goes_on(study_template, tmp_path, verb):
    most, arguments, makes = VERBS[verb]
    folder = shutil.copytree(study_template.folder, tmp_path / "job")
    if verb == "check":
        assert run(folder, 1 << 40, ("deploy", "study", "--out", "bundle")).returncode == 0
    done = run(folder, most, arguments)
    assert done.returncode == 1, done.stderr
    said = [line for line in done.stderr.splitlines() if not line.startswith(("Warning: Compiled code", "Note:"))]
    assert said[-1].startswith("Error: "), done.stderr
    assert "File too large" in said[-1]
    assert "Traceback" not in done.stderr
    assert verb == "tune" or not (folder / makes).exists()
    assert not [path for path in folder.rglob(".*") if path.suffix in (".tmp", ".old", ".claim")]
    again = run(folder, 1 << 40, arguments)
    assert again.returncode in ((0, 3) if verb == "check" else (0,)), again.stderr
    assert (folder / makes).exists()

"""``--json``: one document on stdout, the keys that docs/tuning.md lists, the numbers that the text shows."""

from __future__ import annotations

import json
import re
import shutil
from importlib import resources
from pathlib import Path

import pytest

from routepack_tune import api, facts
from routepack_tune.cli import main
from routepack_tune.quickstart import QuickstartResult
from routepack_tune.reports.comparison import Outcome
from routepack_tune.tracking.registry import RolledBack

EXAMPLE = Path(str(resources.files("routepack_tune"))) / "example"
PAGE = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## Verbs in scripts")[1].split("\n## ")[0]
TABLE = dict(re.findall(r"^\| `(\w+)` \| (`.*`) \|$", SECTION, re.MULTILINE))
KEYS = {verb: set(re.findall(r"`(\w+)`", keys)) for verb, keys in TABLE.items()}


@pytest.fixture
def ask(capsys):
    """Run a verb with ``--json``; return its exit code and the one document that stdout holds."""

    def asked(verb, *arguments):
        capsys.readouterr()
        code = main([verb, *map(str, arguments), "--json"])
        out = capsys.readouterr().out
        assert len(out.splitlines()) == 1
        document = json.loads(out)
        assert set(document) == KEYS[verb]
        return code, document

    return asked


def test_every_verb_is_documented():
    assert set(KEYS) == {"profile", "fit", "tune", "deploy", "plan", "check", "rollback", "quickstart"}


def test_plan(ask, job):
    out = job.folder / "plan.json"
    code, said = ask("plan", job.step, "--costmodel", job.costmodel, "--config", job.config, "--out", out)
    plan = json.loads(out.read_text())
    assert (code, said["plan"]) == (0, str(out))
    for name in ("predicted", "default", "lower_bound_s", "gap", "plan_hash", "notes", "counters"):
        assert said[name] == plan[name]
    assert said["rows"] == plan["num_microbatches"]
    assert said["moves"] == {"priced": False, "experts": 0, "bytes": 0, "seconds": 0.0}
    assert said["step_and_moves_s"] == plan["predicted"]["step_time_s"]
    assert said["speedup"] == pytest.approx(plan["default"]["step_time_s"] / plan["predicted"]["step_time_s"])


def test_tune_deploy_and_check(ask, study_template, small_ranges, tmp_path):
    folder = shutil.copytree(study_template.folder, tmp_path / "job")
    study, bundle, report = folder / "study", tmp_path / "bundle", tmp_path / "report.json"
    given = ("--costmodel", folder / "costmodel", "--config", folder / "routepack.yaml")
    code, said = ask("tune", folder / "steps", *given, "--out", study, "--trials", 3)
    summary = json.loads((study / "study.json").read_text())["summary"]
    assert (code, said["study"], said["report"]) == (0, str(study), str(study / "tuning-report.html"))
    assert said["summary"] == {name: value for name, value in summary.items() if name not in facts.LONG}
    code, said = ask("deploy", study, "--out", bundle, "--register", "mine")
    assert (code, said["bundle"], said["registered"]) == (0, str(bundle), "models:/mine@champion")
    assert said["export"] == summary["export"]
    code, said = ask("check", bundle, folder / "steps", "--out", report)
    assert said == json.loads(report.read_text())
    assert code == (0 if said["verdict"] == "fits" else 3)


def test_rollback(ask, monkeypatch):
    monkeypatch.setattr(api, "rollback", lambda *_: RolledBack("1", ""))
    assert ask("rollback", "mine") == (0, {"name": "mine", "champion": "1", "previous": None})


def test_profile(ask, job):
    out = job.folder / "measurements"
    published = EXAMPLE / "timings" / "h200_sxm"
    code, said = ask("profile", "--published", published, "--config", job.config, "--out", out, "--report")
    assert (code, said["measurements"], said["device"]["origin"]) == (0, str(out), "published")
    assert Path(said["report"]).is_file()
    assert said["rows"]["attention"] > 0


def test_quickstart(ask, monkeypatch, tmp_path):
    outcome = Outcome("default", 2.0, 1.0, 1.0, 0.0, 0.5, 2.0, float("nan"), 3, 0.1)
    made = QuickstartResult([outcome], "Tuning gained.", {"fit": 1.0}, tmp_path / "report.html")
    monkeypatch.setattr("routepack_tune.quickstart.quickstart", lambda *_, **__: made)
    code, said = ask("quickstart")
    assert (code, said["report"], said["synthetic"]) == (0, str(tmp_path / "report.html"), True)
    assert (said["outcomes"][0]["step_s"], said["outcomes"][0]["lost_share"]) == (2.0, None)
    assert said["outcomes"][0]["total_s"] == 2.5


def test_an_error_stays_one_line_on_stderr(capsys, job):
    given = ("--costmodel", job.costmodel, "--config", job.config, "--out", job.folder / "p")
    assert main([str(argument) for argument in ("plan", job.steps / "no.npz", *given, "--json")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Error: Step batch not found")
    assert len(err.splitlines()) == 1

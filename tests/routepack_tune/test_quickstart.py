"""The bundled example: small, attributed, synthetic where it says so; the whole quickstart runs as the slow test."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from profiler import RoutePackError, import_published
from routepack_tune.cli import main
from routepack_tune.config import load_config
from routepack_tune.quickstart import NUM_STEPS, WORKLOAD, QuickstartResult, quickstart
from routepack_tune.reports.comparison import Outcome
from routepack_tune.summaries import print_quickstart

EXAMPLE = Path(str(resources.files("routepack_tune"))) / "example"


def test_example_is_small_and_attributed():
    files = [path for path in EXAMPLE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 2_000_000
    attribution = (EXAMPLE / "ATTRIBUTION.md").read_text()
    for words in ("aiconfigurator 0.7.0", "Apache License, Version 2.0", "NVIDIA", "no value was changed", "synthetic"):
        assert words in attribution
    assert "Apache License" in (EXAMPLE / "LICENSE-aiconfigurator").read_text()
    for path in (EXAMPLE / "timings").rglob("*.parquet"):
        assert path.name in attribution


def test_excerpt_holds_both_models_shapes():
    found = import_published(EXAMPLE / "timings" / "h200_sxm")
    experts, attention = found.select(op="experts"), found.select(op="attention")
    assert set(experts.rows["hidden_size"].tolist()) == {2048}
    shapes = set(zip(attention.rows["num_heads"].tolist(), attention.rows["window"].tolist(), strict=True))
    assert {(32, 0), (64, 0), (64, 128)} <= shapes
    assert len(found.select(op="alltoall")) > 0
    assert len(found.select(op="dense")) > 0
    assert np.isfinite(found.rows["time_us"]).all()
    assert found.meta["fingerprint"]["origin"] == "published"


def test_example_configuration_and_workload_agree():
    settings = load_config(EXAMPLE / "routepack.yaml")
    assert settings.model.name == "Qwen3-30B-A3B"
    assert settings.max_tokens_per_microbatch >= WORKLOAD.max_tokens


def test_foreign_folder_is_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("x")
    assert main(["quickstart", "--out", str(tmp_path)]) == 1
    assert "no quickstart folder" in capsys.readouterr().err
    with pytest.raises(RoutePackError, match="is a file, a folder is to be written there"):
        quickstart(tmp_path / "thesis.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.slow
def test_quickstart_ends_with_a_table_and_a_report(tmp_path, capsys):
    assert main(["quickstart", "--out", str(tmp_path / "q")]) == 0
    captured = capsys.readouterr()
    assert {line.split(":")[0] for line in captured.err.splitlines()} == {"Note"}
    for words in ("first-fit decreasing + identity", "Karmarkar-Karp on FLOPs + LPT", "RoutePack-Tune", "synthetic",
                  "predicted", "report.html"):  # fmt: skip
        assert words in captured.out
    done = json.loads((tmp_path / "q" / "quickstart.json").read_text())
    assert sum(done["seconds"].values()) < 300
    times = [one["step_s"] for one in done["outcomes"]]
    assert times[-1] == min(times)
    assert len(list((tmp_path / "q" / "steps").glob("*.npz"))) == NUM_STEPS
    assert "synthetic" in (tmp_path / "q" / "report.html").read_text()


def test_the_table_fits_a_terminal_of_80_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = ("Karmarkar-Karp on tokens + identity", "RoutePack-Tune (default settings)")
    outcomes = [Outcome(name, 7.344, 3.0, 3.0, 1.344, 0.123, 7.25, 0.2517, 9, 0.463) for name in names]
    print_quickstart(QuickstartResult(outcomes, "Tuning did not gain.", {"fit": 1.0}, tmp_path / "report.html"))
    out = capsys.readouterr().out
    assert "…" not in out
    assert all(word in out for word in ("7.344", "0.123", "1.00x", "1.03x", "25.2%", "0.463", "Tuning did not gain."))

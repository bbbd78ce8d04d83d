"""The profile's page: data apart from pictures, opened in a real browser; it says what is wrong."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import partial

import numpy as np
import pytest
from patience import PATIENCE_S

from profiler import DeviceFingerprint, Measurements
from profiler.cases.case import case_id, causal_pairs
from routepack_tune.reports.figures import panels
from routepack_tune.reports.profile import (
    anchor_course,
    failures,
    far_from,
    operation_rows,
    peak_tflops,
    plot_throughput,
    plot_times,
    profile_page,
    quantiles_by_size,
)

DEVICE = DeviceFingerprint(
    kind="cuda", vendor="nvidia", arch="sm_90", name="NVIDIA H100", units=132, memory_gib=80, interconnect="NVLink",
    ranks_per_node=8, software={"torch": "2.13.0"}, clock_max_mhz=1830,
)  # fmt: skip
STEADY = {"steady": True, "problems": [], "busy_share": 0.91, "drift": 0.02, "foreign_cpu_share": 0.01}
READINGS = [{"case_id": "a", "time_us": t, "readings": {"clock_mhz": c}}
            for t, c in ((100.0, 1830), (101.0, 1800), (99.0, 1830))]  # fmt: skip


def row(op, features, time_us, **more):
    values = {"op": op, "direction": "forward", "status": "ok", "source": "measured", "dtype": "bfloat16",
              "time_us": time_us, "repeats_us": [time_us], "pattern": "single", **features, **more}  # fmt: skip
    return {"case_id": case_id(op, values["direction"], "bfloat16", features), **values}


FEW = [row("dense", {"tokens": 8, "n": 8, "k": 8}, 5.0)]


def rows_of_a_device():
    """Return rows by formulas with a little noise, one dense row five times too slow and one that failed; synthetic."""
    rng = np.random.default_rng(0)
    heads = {"num_heads": 8, "num_kv_heads": 8, "qk_head_dim": 64, "v_head_dim": 64, "window": 0}
    for i, tokens in enumerate(np.geomspace(64, 16384, 16).astype(int).tolist()):
        noise = float(np.exp(0.01 * rng.normal()))
        f = {"tokens": tokens, "n": 1024, "k": 1024}
        slow = 5.0 if i == 9 else 1.0
        yield row("dense", f, slow * noise * (5 + tokens * 2 * 1024 * 1024 / 5e8), flag="slow" if slow > 1 else "")
        pairs = int(causal_pairs(tokens, 0))
        a = {"tokens": tokens, "pairs": pairs, "num_sequences": 1, "max_length": tokens, **heads}
        yield row("attention", a, noise * (8 + 4 * 64 * 8 * pairs / 3e8))
        yield row(
            "alltoall", {"bytes": tokens * 2048, "inter_bytes": 0, "ranks": 8}, noise * (20 + tokens * 2048 / 3e5)
        )
    empty = dict.fromkeys(("rows", "active_experts", "padded_rows", "max_rows", "router_tokens"), 0)
    yield row("experts", {**empty, "local_experts": 4, "hidden_size": 64, "inter_size": 32, "num_experts": 8}, 12.0)
    failed = row("dense", {"tokens": 99999, "n": 1024, "k": 1024}, None, status="oom", message="no <room>")
    yield {**failed, "repeats_us": []}


def measured(rows=None, **meta):
    return Measurements.from_rows(rows_of_a_device() if rows is None else rows, {
        "fingerprint": DEVICE.to_dict(), "model": {"name": "tiny"}, "dtype": "bfloat16", "steadiness": STEADY,
        "anchor": {"readings": READINGS, "drift": 0.02}, "params": {"max_drift": 0.25}, **meta,
    })  # fmt: skip


@pytest.fixture(scope="module")
def plain():
    return measured()


def test_every_operation_knows_its_physics_and_its_doubtful_rows(plain):
    found = {rows.name.removesuffix(" forward"): rows for rows in operation_rows(plain)}
    assert set(found) == {"attention", "dense", "experts", "alltoall"}
    dense, alltoall = found["dense"].rows, found["alltoall"].rows
    assert np.flatnonzero(dense["doubtful"]).tolist() == [9]
    assert dense["flagged"].sum() == 1
    clean = dense[~dense["doubtful"]]
    np.testing.assert_allclose(clean["physics_us"], clean["time_us"], rtol=0.15)
    # 16384 x 1024 x 1024 in its time; all-to-all computes nothing but moves its bytes.
    assert dense["rate"].iloc[-1] == pytest.approx(2 * 16384 * 1024 * 1024 / dense["time_us"].iloc[-1] / 1e6)
    assert (found["dense"].unit, found["alltoall"].unit) == ("TFLOP/s", "GB/s")
    leaves = 16384 * 2048 * 7 / 8
    assert alltoall["gbps"].iloc[-1] == pytest.approx(leaves / alltoall["time_us"].iloc[-1] / 1e3)
    assert found["experts"].rows["physics_us"].isna().all()
    # Timed here, experts route no tokens: their rows are their size.
    counts = {"rows": 512, "active_experts": 4, "padded_rows": 512, "max_rows": 128, "router_tokens": 0}
    shape = {"local_experts": 4, "hidden_size": 64, "inter_size": 32, "num_experts": 8}
    (timed,) = operation_rows(Measurements.from_rows([row("experts", counts | shape, 30.0)], plain.meta))
    assert (timed.size_label, timed.rows["size"].tolist()) == ("rows", [512])


def test_a_row_far_from_the_line_is_doubtful_by_the_scatter_of_the_others():
    time, line = np.array([100.0, 101.0, 99.0, 100.0, 130.0]), np.full(5, 100.0)
    assert far_from(time, line).tolist() == [False, False, False, False, True]
    assert not far_from(time, np.full(5, np.nan)).any()
    # The same 30% is nothing where all rows scatter.
    assert not far_from(np.array([70.0, 140.0, 95.0, 80.0, 130.0]), line).any()


def test_the_peak_comes_from_silicon_and_clock_or_is_unknown():
    assert peak_tflops(DEVICE.to_dict(), "bfloat16") == pytest.approx(989.4, abs=0.5)  # NVIDIA states 989.
    assert peak_tflops(DEVICE.to_dict(), "float32") == 0
    assert peak_tflops({"arch": "x86_64", "units": 2}, "bfloat16") == 0
    stated = {"gpu": {"float16_tc_flops": 312e12}}
    assert peak_tflops({"arch": "sm_80"}, "float16", stated) == 312
    assert peak_tflops({"arch": "sm_80"}, "float32", stated) == 0


def test_the_anchors_course_is_relative():
    course = anchor_course(READINGS)
    assert course["time"].to_dict() == {1: 1.0, 2: 1.01, 3: 0.99}
    assert course["clock"].tolist() == pytest.approx([1, 1800 / 1830, 1])
    course = anchor_course([{"case_id": "a", "time_us": 2.0, "readings": {}}])
    assert course["time"].tolist() == [1.0]
    assert course["clock"].isna().all()


def test_pictures_are_drawn_on_given_axes(plain):
    (ax,) = panels(
        4, 3, partial(plot_times, next(rows for rows in operation_rows(plain) if rows.name == "dense forward"))
    ).axes
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert ax.get_xlabel() == "tokens"


def test_the_page_says_what_failed_what_is_doubtful_and_what_was_left_out(plain):
    failed = {"op": "dense", "direction": "forward", "status": "oom", "message": "no <room>", "rows": 1}
    assert failures(plain) == [failed]
    limit = {"op": "dense", "what": "tokens", "wanted": 9000, "designed": 4000, "reason": "needs 9 GiB"}
    rounds = [{"cases": 20, "errors_pct": {"dense": 8.25}, "minutes": 0.5, "stopped_by": ""},
              {"cases": 10, "errors_pct": {"dense": 4.1}, "minutes": 0.3, "stopped_by": "target_error"}]  # fmt: skip
    ranks = [{"rank": r, "host": "node1", "device": "NVIDIA H100", "speed": s} for r, s in ((0, 1.0), (1, 1.08))]
    text = profile_page(measured(limits=[limit], rounds=rounds, ranks=ranks))
    for words in ("no &lt;room&gt;", "1 doubtful rows", "needs 9 GiB", "8.2", "target error", "Slowest: rank 1",
                  "<b>Yes.</b>", "measured times", "With nothing to do it takes 12.0"):  # fmt: skip
        assert words in text, words
    # Nothing is loaded: every reference is to a part of the page or holds its data.
    assert not re.search(r'\b(src|href)="(?!#|data:)', text)
    assert "<script" not in text


def test_the_verdict_of_an_unsteady_profile_leads_the_page():
    bad = {**STEADY, "steady": False, "problems": ["other processes used 23% of the CPU that this one may use"]}
    text = profile_page(measured(FEW, steadiness=bad))
    assert "<b>No.</b>" in text
    assert text.index("used 23%") < text.index("Operations")


def test_what_held_clocks_down_is_a_fact_beside_their_fall():
    held = {"the power cap": 4, "heat": 1}
    text = profile_page(measured(FEW, steadiness={**STEADY, "clock_fall": 0.124, "held_by": held}))
    fall = "<dt>lowest clock under the highest</dt><dd>12.4%</dd>"
    assert f"{fall}<dt>clocks held down by</dt><dd>the power cap at 4 looks, heat at 1 look</dd>" in text
    assert "<b>Yes.</b>" in text
    for more in ({}, {"held_by": {}}, {"held_by": None}):
        assert "clocks held down by" not in profile_page(measured(FEW, steadiness={**STEADY, **more}))


def test_what_may_train_but_is_not_timed_is_one_fact_where_it_is_so():
    def fact(arch, kernel="torch: ampere_bf16_gemm x8", **software):
        device = {**DEVICE.to_dict(), "arch": arch, "software": software}
        experts = [{**one, "kernel": kernel} for one in rows_of_a_device() if one["op"] == "experts"]
        text = profile_page(measured(experts, fingerprint=device))
        found = re.search(r"<dt>timed, but may train otherwise</dt><dd>(.*?)</dd>", text)
        return found and found.group(1)

    assert fact("sm_90", torch="2.13.0") is None
    assert fact("sm_80", "transformer-engine: ampere_bf16_gemm x8") is None
    packages = {"flash-attn-3": "3.0", "deep-gemm": "2.0", "flash-attn": "2.8"}
    assert fact("sm_90", **packages) == "FlashAttention 3, DeepGEMM: installed here, but no kernel of theirs is timed"
    assert "DeepEP: installed here" in fact("sm_80", **{"deep-ep": "1.2"})
    assert "is a loop over experts with a synchronisation" in fact("sm_80")


def test_published_tables_are_called_so():
    rows = [{**one, "source": "published"} for one in FEW]
    fingerprint = {**DEVICE.to_dict(), "origin": "published", "clock_max_mhz": 0}
    text = profile_page(Measurements.from_rows(rows, {"fingerprint": fingerprint, "model": None}))
    assert "published times" in text
    assert "measured times" not in text
    assert "against the best that was seen" in text
    assert "Was the device steady" not in text
    assert "<b>As far as can be told, yes:</b>" in text
    assert "no single model" in text
    assert "MiB L2" not in text
    told = {"gpu": {"float16_tc_flops": 989e12, "mem_bw": 4.8e12}}
    meta = {
        "fingerprint": {**fingerprint, "l2_mib": 50},
        "model": {"name": ""},
        "system": told,
        "doubts": ["Table x: slow."],
    }
    text = profile_page(Measurements.from_rows([{**one, "dtype": "float16"} for one in rows], meta))
    assert "The arithmetic peak is 989 TFLOP/s" in text
    assert text.index("<b>No.</b>") < text.index("Table x: slow.") < text.index("Operations")
    assert "no single model" not in text
    assert "50 MiB L2" in text


def test_every_profile_says_what_plans_will_price(plain):
    text = profile_page(plain)
    said = "plans price: attention cores (backward assumed), projections and dense layers (backward assumed), experts"
    assert said in text
    assert "they do not price: router and permute (not measured), fixed cost of a row, LM head and loss" in text


def test_thousands_of_rows_are_bands_and_densities_and_no_rate_is_impossible():
    """12,000 rows of four shapes; one computes 2,000 TFLOP/s and is flagged."""
    rng = np.random.default_rng(0)
    rows = []
    for tokens in np.repeat(np.geomspace(1, 16384, 15).astype(int), 800).tolist():
        f = {"tokens": tokens, "n": int(rng.choice([512, 1024, 2048, 4096])), "k": 4096}
        rows.append(row("dense", f, float(5 + 2 * tokens * f["n"] * f["k"] / 5e8) * float(np.exp(0.1 * rng.normal()))))
    f = {"tokens": 16384, "n": 4096, "k": 4096}
    rows.append(row("dense", f, 2 * 16384 * 4096**2 / 2e15 * 1e6, flag="faster than the device's peak allows"))
    (dense,) = operation_rows(measured(rows))
    band = quantiles_by_size(dense.rows)
    assert len(band) == 15
    assert (band["low"] < band["middle"]).all()
    assert (band["middle"] < band["high"]).all()
    times, rates = panels(8, 3, partial(plot_times, dense), partial(plot_throughput, dense, 989.0)).axes
    drawn = [line.get_xdata().size for line in times.get_lines()]
    assert max(drawn) <= 150
    for line in times.get_lines()[:2]:
        assert (np.diff(line.get_xdata()) > 0).all()
    assert len(rates.collections) == 1
    text = profile_page(measured(rows))
    assert "101%" not in text
    best = re.search(r"(\d+) TFLOP/s</td>", text)
    assert best is not None
    assert int(best[1]) < 989
    assert len(text) < 400_000


def test_the_page_opens_in_a_browser(tmp_path, plain):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here to open the page")
    path, image = tmp_path / "profile.html", tmp_path / "page.png"
    path.write_text(text := profile_page(plain))
    # The anchor, and every operation but the experts, which were timed with nothing to do.
    assert text.count("<svg") == 1 + len(list(operation_rows(plain))) - 1
    assert text.rstrip().endswith("</html>")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}"]
    shot = [browser, *options, "--window-size=1000,4000", f"--screenshot={image}", path.as_uri()]
    subprocess.run(shot, capture_output=True, timeout=PATIENCE_S, check=True)
    import matplotlib.image

    pixels = matplotlib.image.imread(image)[..., :3]
    blue = (pixels[..., 2] - pixels[..., 0] > 0.4).sum()
    # The measured points are blue and nothing else on the page is.
    assert blue > 300

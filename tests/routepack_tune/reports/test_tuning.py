"""The tuning report: right numbers, nothing loaded, and a real browser that draws it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from patience import PATIENCE_S

from routepack_tune.reports.figures import save_png
from routepack_tune.reports.tuning import best_so_far, outcomes, pictures, tuning_page
from routepack_tune.study.folder import read_study

HISTORY = [
    {"number": 3, "value": 0.2, "params": {}, "state": "pruned", "batches": 1},
    {"number": 0, "value": 1.0, "params": {}, "state": "complete", "batches": 2},
    {"number": 2, "value": 0.95, "params": {}, "state": "complete", "batches": 2},
    {"number": 1, "value": None, "params": {}, "state": "infeasible", "batches": 0},
    {"number": 4, "value": 0.97, "params": {}, "state": "complete", "batches": 2},
]
FRONT = [
    {"number": 0, "step_value": 1.0, "plan_value": 1.0, "params": {}},
    {"number": 4, "step_value": 0.97, "plan_value": 3.0, "params": {}},
]


def score(name, seed, step_s, move_s=0.0, plan_s=0.5):
    return {"name": name, "seed": seed, "step_time_s": step_s, "move_s": move_s, "plan_s": plan_s, "default_s": 12.0,
            "lower_bound_s": 7.0, "reference_step_s": 10.0, "reference_plan_s": 1.0}  # fmt: skip


@pytest.fixture
def document(study_template):
    """A real study's document with outcomes whose numbers are known by hand."""
    known = read_study(study_template.folder / "study")
    summary = known["summary"]
    summary |= {
        "names": {"tuned": ["early", "late"], "holdout": ["new <1>"]},
        "history": HISTORY, "pareto": FRONT, "importances": {"starts": 0.7, "stickiness": 0.3},
        "trials": {"complete": 3, "infeasible": 1, "pruned": 1, "failed": 0, "duplicate": 2},
        "export": "best", "export_reason": "Trial 2: gain of 4.00% & more.",
        "overhead": {"planning_s": 95.0, "total_s": 100.0},
    }  # fmt: skip
    summary["best"] |= {"number": 2, "value": 0.95, "scores": [score("late", 0, 9.0), score("early", 0, 8.0, 1.0)]}
    summary["holdout"] |= {
        "best": [score("new <1>", 1, 9.0, 0.5), score("new <1>", 2, 9.0, 0.7)],
        "default_settings": [score("new <1>", 1, 10.0), score("new <1>", 2, 10.0)],
        "gain": {"gain_pct": 4.0, "low_pct": 3.5, "high_pct": 4.5}, "seeds": [1, 2],
        "means": {"default_settings": {"step_time_s": 9.8, "move_s": 0.2, "plan_s": 1.0},
                  "best": {"step_time_s": 9.0, "move_s": 0.6, "plan_s": 0.5}},
    }  # fmt: skip
    return known


def test_only_complete_trials_are_in_the_best_so_far():
    assert best_so_far(HISTORY).to_dict() == {0: 1.0, 2: 0.95, 4: 0.95}
    assert best_so_far([]).empty


def test_batches_are_means_over_seeds_with_moves(document):
    early, late, held = outcomes(document["summary"]).itertuples()
    assert [one.kind for one in (early, late, held)] == ["tuned on", "tuned on", "held out"]
    assert (held.default_plan_s, held.before_s, held.after_s) == pytest.approx((12.0, 10.0, 9.6))
    assert held.gain_pct == pytest.approx(4.0)
    assert (early.Index, early.before_s, early.after_s) == ("early", 10.0, 9.0)
    assert (late.Index, late.before_plan_s, late.after_plan_s) == ("late", 1.0, 0.5)


def test_pictures_draw_what_there_is(document, tmp_path):
    summary = document["summary"]
    drawn = pictures(summary)
    assert set(drawn) == {"history", "importances", "pareto"}
    for name, figure in drawn.items():
        save_png(figure, tmp_path / f"{name}.png")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
    assert set(pictures({**summary, "pareto": [], "importances": {}})) == {"history"}
    (bars,) = drawn["importances"].axes
    assert [label.get_text() for label in bars.get_yticklabels()] == ["stickiness", "starts"]
    assert [bar.get_width() for bar in bars.patches] == pytest.approx([30.0, 70.0])
    lines = drawn["history"].axes[0].get_lines()
    assert [list(line.get_xdata()) for line in lines[3:]] == [[3], [1]]
    assert [line.get_label() for line in lines[3:]] == ["stopped early", "infeasible"]
    top = drawn["history"].axes[0].get_ylim()[1]
    assert [list(line.get_ydata()) for line in lines[3:]] == [[0.2], [top]]  # the mean of what it saw; no cost at all
    assert top > 1.0
    assert bars.get_xlabel().endswith("(rough: 3 complete trials, 2 settings)")
    summary["trials"]["complete"] = 20
    assert "rough" not in pictures(summary)["importances"].axes[0].get_xlabel()
    assert list(lines[2].get_ydata()) == [1.0, 0.95, 0.95]
    assert list(drawn["pareto"].axes[0].get_lines()[0].get_xdata()) == [1.0, 3.0]


def test_a_trial_stopped_early_far_off_does_not_flatten_the_picture(document):
    far = {"number": 5, "value": 80.0, "params": {}, "state": "pruned", "batches": 1}
    (ax,) = pictures({**document["summary"], "history": [*HISTORY, far]})["history"].axes
    assert ax.get_ylim()[1] < 1.1
    assert list(ax.get_lines()[3].get_ydata()) == [0.2, ax.get_ylim()[1]]


def test_page_says_what_is_exported_and_why(document):
    text = tuning_page(document)
    for words in (
        "trial 2", "gain +4.00%, 95% interval +3.50 to +4.50%", "Trial 2: gain of 4.00% &amp; more.", "new &lt;1&gt;",
        "3 complete, 1 stopped early, 1 infeasible, 2 duplicates skipped", "Of 100 s in trials 95 s were planning",
        "<b>9.8 → 9 s</b>", "<b>0.2 → 0.6 s</b>", "<b>1 → 0.5 s</b>", "planning is free up to",
    ):  # fmt: skip
        assert words in text
    document["summary"] |= {"export": "defaults", "export_reason": "it does not lie above zero"}
    text = tuning_page(document)
    assert "<b>default settings</b>" in text
    assert "<b>9.8 s</b>" in text
    assert "it does not lie above zero" in text


def test_page_without_hold_out_or_defaults_is_whole(document):
    summary = document["summary"]
    summary["names"]["holdout"] = []
    summary["default"] = None
    summary["holdout"] |= {
        "best": [], "default_settings": [], "gain": None, "means": {"best": {}, "default_settings": {}},
    }  # fmt: skip
    assert "nothing held out" in tuning_page(document)


def test_page_loads_nothing(document):
    class Parser(HTMLParser):
        def handle_starttag(self, tag, attrs):
            assert tag not in ("script", "link", "iframe", "object")
            for name, value in attrs:
                if name in ("src", "href", "xlink:href"):
                    assert value.startswith(("#", "data:"))

    Parser().feed(tuning_page(document))


@pytest.fixture(scope="module")
def chromium():
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not found:
        pytest.skip("no Chromium on this machine")
    return found


def browse(chromium, page, folder, *arguments):
    return subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", *arguments,
         page.as_uri()],
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    ).stdout  # fmt: skip


def test_a_real_browser_draws_the_page(document, chromium, tmp_path):
    """The browser lays the page out: a script that only the test adds writes down what became of it."""
    page = tmp_path / "report.html"
    page.write_text(tuning_page(document))
    probe = """<script>
      const all = [...document.querySelectorAll("section, svg, .card")];
      const boxes = all.map(e => [e.tagName, e.getBoundingClientRect()]);
      document.title = JSON.stringify({
        flat: boxes.filter(([, box]) => box.width < 50 || box.height < 20).length,
        svg: boxes.filter(([tag]) => tag === "svg").length,
        sections: document.querySelectorAll("section").length,
        words: document.querySelectorAll("svg text").length,
        wide: document.documentElement.scrollWidth - window.innerWidth,
      })</script></body>"""
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text().replace("</body>", probe))
    dom = browse(chromium, probed, tmp_path, "--window-size=1000,2000", "--dump-dom")
    seen = json.loads(re.search(r"<title>(.*?)</title>", dom).group(1))
    assert seen["sections"] == 8
    assert seen["svg"] == 3
    assert seen["flat"] == 0
    assert seen["words"] > 40
    assert seen["wide"] <= 0


def test_a_screenshot_has_the_page_on_it(document, chromium, tmp_path):
    import numpy as np
    from matplotlib import image

    page = tmp_path / "report.html"
    page.write_text(tuning_page(document))
    picture = tmp_path / "page.png"
    browse(chromium, page, tmp_path, "--window-size=1000,2400", "--hide-scrollbars", f"--screenshot={picture}")
    pixels = image.imread(picture)[..., :3]
    assert pixels.shape[:2] == (2400, 1000)
    green = np.abs(pixels - np.array([0x10, 0xB9, 0x81]) / 255).max(axis=2) < 0.02
    assert green.sum() > 500  # bars and lines of the tuned settings

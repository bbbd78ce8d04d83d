"""The one page behind every report: every kind of block, everything escaped, nothing loaded."""

from __future__ import annotations

from html.parser import HTMLParser

from markupsafe import Markup

from profiler import DeviceFingerprint, Measurements
from routepack_tune.reports.page import Table, page, verdict
from routepack_tune.reports.profile import profile_page
from routepack_tune.reports.tuning import tuning_page
from routepack_tune.study.folder import read_study

HOSTILE = '<script>alert(\'"&x")</script>'


class Parts(HTMLParser):
    """Count tags and gather the text that a browser would show."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.said = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.said.append(data)


def assert_harmless(text):
    parts = Parts(text)
    assert "script" not in parts.tags
    assert HOSTILE in "".join(parts.said)
    return parts


def test_every_place_of_the_page_escapes():
    for place in range(12):
        words = [HOSTILE if k == place else "plain" for k in range(12)]
        blocks = [
            words[0],
            Table({words[1]: "{cell}"}, [{"cell": words[2]}]),
            verdict(words[3], words[4]),
            {words[5]: words[6]},
            [words[7]],
        ]
        sections, tiles = [(words[8], words[9], blocks)], [(words[10], words[11], True)]
        assert_harmless(page("title", "subtitle", sections, tiles))
    assert_harmless(page(HOSTILE, "subtitle", []))
    assert_harmless(page("title", HOSTILE, []))


def test_blocks_become_what_they_are():
    table = Table({"name": "{name}", "n": "{n:02}"}, [{"name": "a", "n": 1}, {"name": "b", "n": 2}], tuned=[1])
    facts = {"text": "a fact named like a field", "none": ""}
    text = page("t", "s", [("all", "measured", ["words", table, verdict("said.", "No."), facts, ["line"]])])
    for part in ('<p class="soft">words</p>', '<tr class="tuned"><td>b</td><td>02</td></tr>', "<p><b>No.</b> said.</p>",
                 "<dl><dt>text</dt><dd>a fact named like a field</dd></dl>", "<ul><li>line</li></ul>",
                 '<span class="mark">measured</span>'):  # fmt: skip
        assert part in text, part
    assert Parts(page("t", "s", [("x", "", [Markup("<svg></svg>")])])).tags.count("svg") == 1


def test_what_is_empty_is_not_shown():
    text = page("t", "s", [("gone", "measured", ["", Table({"head": "{head}"}, []), {"none": ""}, []])])
    assert "gone" not in text
    assert "<section>" not in text


def test_names_of_a_profile_are_escaped():
    rows = [{"op": "dense", "direction": "forward", "status": "oom", "message": HOSTILE, "source": "measured",
             "dtype": "bfloat16", "time_us": None, "repeats_us": [], "tokens": 8, "n": 8, "k": 8}]  # fmt: skip
    device = DeviceFingerprint("cpu", HOSTILE, HOSTILE, HOSTILE, 1, 1, HOSTILE, 8, {HOSTILE: HOSTILE}, "measured")
    ranks = [{"rank": rank, "host": HOSTILE, "device": HOSTILE, "speed": 1.0} for rank in (0, 1)]
    limits = [{"op": HOSTILE, "what": HOSTILE, "wanted": 2, "designed": 1, "reason": HOSTILE}]
    meta = {"fingerprint": device.to_dict(), "model": {"name": HOSTILE}, "ranks": ranks, "limits": limits,
            "steadiness": {"steady": False, "problems": [HOSTILE]}}  # fmt: skip
    assert_harmless(profile_page(Measurements.from_rows(rows, meta)))


def test_names_of_a_study_are_escaped(study_template):
    document = read_study(study_template.folder / "study")
    summary = document["summary"]
    summary["names"] = {"tuned": [HOSTILE], "holdout": [HOSTILE]}
    summary["export_reason"] = document["study_name"] = document["fingerprint"]["name"] = HOSTILE
    document["config"]["model"]["name"] = HOSTILE
    summary["best"]["scores"] = [{**score, "name": HOSTILE} for score in summary["best"]["scores"]]
    assert_harmless(tuning_page(document))

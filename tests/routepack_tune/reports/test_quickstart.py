"""The report: its data is computed apart from its pictures, and the page loads nothing."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler import Topology
from routepack_tune.bundle import untuned_planner
from routepack_tune.config import load_config
from routepack_tune.reports.comparison import (
    Outcome,
    RankLoad,
    compare_planners,
    loads_before_and_after,
    lost_share,
    our_name,
    rank_load,
)
from routepack_tune.reports.figures import as_svg, panels, plot_bars
from routepack_tune.reports.quickstart import plot_rank_load, plot_time_split, quickstart_page
from routepack_tune.steps.traces import load_step_batch
from search import BASELINES, DEFAULT_BASELINE, build_problem, price_baseline


def outcome(name, step_s, lost=0.1):
    return Outcome(name, step_s, step_s / 2, step_s / 4, step_s / 4, 0.0, step_s, lost, 3, 0.01)


OURS = "RoutePack-Tune (tuned settings)"


@given(st.integers(1, 3), st.integers(1, 2), st.integers(1, 4), st.integers(1, 3), st.integers(0, 10**6))
def test_rank_load_is_relative_to_every_rows_mean(rows, blocks, ranks, layers, seed):
    loads = np.random.default_rng(seed).integers(1, 100, (rows, blocks, ranks, layers))
    found = rank_load(loads)
    assert found.relative_LP.shape == (layers, ranks)
    assert found.relative_LP.mean(axis=1) == pytest.approx(np.ones(layers))
    assert found.hottest.min() >= 1 - 1e-12
    slow = [loads[r, b, :, i].max() / loads[r, b, :, i].mean()
            for r in range(rows) for b in range(blocks) for i in range(layers)]  # fmt: skip
    assert found.hottest == pytest.approx(np.array(slow))


def test_rank_load_without_rows_is_even():
    found = rank_load(np.zeros((2, 1, 4, 3), np.int64))
    assert (found.relative_LP == 1).all()
    assert found.hottest.size == 0


def extents(figure, artists):
    """Boxes of drawn artists, in pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return [one.get_window_extent(canvas.get_renderer()) for one in artists]


def apart(boxes):
    return all(not one.overlaps(other) for k, one in enumerate(boxes) for other in boxes[:k])


LONG = ("first-fit decreasing + identity", "Karmarkar-Karp on FLOPs + identity", "x" * 70, "a name of " + "words " * 9)


def test_bars_of_any_names_keep_names_values_and_legend_apart():
    found = [outcome(name, 2.0 + k) for k, name in enumerate((*LONG, OURS))]
    figure = panels(7.2, 0.62 * len(found) + 1.2, partial(plot_time_split, found))
    (ax,) = figure.axes
    names, legend = ax.get_yticklabels(), ax.get_legend()
    assert [one.get_text().replace("\n", " ") for one in names[:2]] == list(LONG[:2])  # the names of the table
    assert names[-1].get_fontweight() == "bold"
    assert names[0].get_fontweight() == "normal"
    boxes = extents(figure, [*names, *ax.texts, *ax.patches, legend])
    labels, values = boxes[: len(names)], boxes[len(names) : len(names) + len(found)]
    assert apart(labels)
    assert apart(values)
    assert min(box.x0 for box in labels) >= 0
    bars = [box for box, patch in zip(boxes[2 * len(found) : -1], ax.patches, strict=True) if patch.get_alpha() is None]
    for value in values:
        beside = [bar.x1 for bar in bars if bar.y0 < (value.y0 + value.y1) / 2 < bar.y1]
        assert value.x0 - max(beside) > 3
    assert 0 < boxes[-1].y0 - max(bar.y1 for bar in bars) < 40  # the legend is close, and lies on nothing


def test_bars_by_file_name_keep_apart():
    names = {f"gptoss20b-r1lengths-of-a-long-run-step{k:06d}": 1.0 + k for k in range(6)}
    figure = panels(7.2, 0.28 * len(names) + 0.8, partial(plot_bars, names, "gain, %"))
    boxes = extents(figure, figure.axes[0].get_yticklabels())
    assert apart(boxes)
    assert min(box.x0 for box in boxes) >= 0


@pytest.mark.parametrize(
    ("off", "said"), [(0.0, "within 1 %"), (0.004, "within 1 %"), (0.031, "within 4 %"), (0.5, "")]
)
def test_a_map_that_looks_empty_says_why(off, said):
    load = RankLoad(np.array([[1 + off, 1 - off], [1.0, 1.0]]), np.ones(4))
    figure = panels(3, 3, partial(plot_rank_load, load, "after", 1.5))
    words = " ".join(text.get_text() for text in figure.axes[0].texts)
    assert (f"all {said} of the mean" == words) if said else not words


@pytest.fixture
def planner(job):
    return untuned_planner(job.costmodel, load_config(job.config))


def test_comparison_covers_default_baselines_and_tuned(job, planner):
    batches = [load_step_batch(job.steps / f"step0{i}.npz", planner.spec) for i in (0, 1)]
    found = compare_planners(planner, batches)
    assert found[0].planner == DEFAULT_BASELINE
    ours = found[-1]
    assert ours.planner == "RoutePack-Tune (default settings)"  # no study, no tuned settings
    assert our_name(dataclasses.replace(planner, provenance={"export": "best"})) == OURS
    assert {one.planner for one in found} <= {*BASELINES, ours.planner}
    problem = build_problem(batches[0], planner.tables, planner.spec, planner.topology, planner.max_tokens)
    priced, rows = price_baseline(problem, DEFAULT_BASELINE)
    other = build_problem(batches[1], planner.tables, planner.spec, planner.topology, planner.max_tokens)
    default_s = priced.step_time().step_time_s
    assert found[0].step_s == pytest.approx(
        (default_s + price_baseline(other, DEFAULT_BASELINE)[0].step_time().step_time_s) / 2
    )
    assert lost_share(problem, default_s, rows) == pytest.approx(1 - _ideal(problem, rows) / default_s)
    for one in found:
        assert one.step_s == pytest.approx(one.attention_s + one.experts_s + one.rest_s)
        assert 0 <= one.lost_share < 1
        assert one.total_s == one.step_s + one.move_s
        moving = one is ours or "LPT" in one.planner
        assert (one.move_s > 0) == moving  # experts in place never move
    previous = planner.plan(batches[0])
    chain = [previous := planner.plan(batch, previous=previous) for batch in batches]
    fresh = [planner.plan(batch) for batch in batches]
    assert ours.step_s == pytest.approx(np.mean([plan.predicted.step_time_s for plan in chain]))
    assert ours.move_s == pytest.approx(np.mean([plan.moves.seconds for plan in chain]))
    assert ours.free_s == pytest.approx(np.mean([plan.predicted.step_time_s for plan in fresh]))


@pytest.mark.parametrize("changed", [{"sequence_alignment": 32}, {"couple_blocks": True}])
def test_every_contestant_pays_the_planners_own_prices(job, planner, changed):
    """The default plan without the settings' alignment or coupling would be cheaper than the tuned plan may be."""
    topology = dataclasses.replace(planner.topology, data_parallel_size=4)
    paying = dataclasses.replace(planner, topology=topology, params=dataclasses.replace(planner.params, **changed))
    batch = load_step_batch(job.step, planner.spec)
    free = dataclasses.replace(paying, params=planner.params)
    found, cheap = (compare_planners(one, [batch])[0] for one in (paying, free))
    problem = build_problem(batch, paying.tables, paying.spec, topology, paying.max_tokens, paying.params)
    priced, _ = price_baseline(problem, DEFAULT_BASELINE)
    assert found.step_s == pytest.approx(priced.step_time().step_time_s)
    assert found.step_s > cheap.step_s
    before, _ = loads_before_and_after(paying, batch, paying.plan(batch))
    assert before.relative_LP == pytest.approx(rank_load(priced.rank_rows_RBPL).relative_LP)


def _ideal(problem, rows):
    from search import balanced_ns

    return balanced_ns(problem, rows) * 1e-9 / problem.tables.pipeline_stages


@pytest.fixture(scope="module")
def report():
    loads = tuple(rank_load(np.random.default_rng(seed).integers(1, 100, (2, 1, 4, 3))) for seed in (0, 1))
    spec, notes = SimpleNamespace(name="tiny & synthetic"), ["backward is assumed 2x forward"]
    planner = SimpleNamespace(spec=spec, topology=Topology(data_parallel_size=2), max_tokens=8, notes=notes)
    device = {"name": "<H200>", "arch": "sm_90", "origin": "published"}
    summary = {
        "names": {"tuned": ["a"], "holdout": ["b"]},
        "best": {"number": 1},
        "export": "best",
        "export_reason": "step time and moves gain +0.40%",
    }
    study = {"fingerprint": device, "config": {"topology": {}}, "summary": summary, "tables_hash": "0"}
    found = [outcome(DEFAULT_BASELINE, 2.0, 0.4), outcome("first-fit decreasing + LPT", 1.5), outcome(OURS, 1.0)]
    return quickstart_page(planner, study, found, loads)


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.found += [v for k, v in attrs if k in ("src", "href", "xlink:href") and not v.startswith(("#", "data:"))]


def test_page_is_whole_and_loads_nothing(report):
    page = report
    links = Links()
    links.feed(page)
    assert links.found == []
    assert not {"script", "link", "iframe"} & set(links.tags)
    assert links.tags.count("svg") == 2
    assert "url(http" not in page
    assert "tiny &amp; synthetic on 2 data-parallel slots" in page
    assert "&lt;H200&gt;" in page
    for words in (
        "synthetic batches, predicted times",
        "assumed",
        "2.00x",
        "40.0% → 10.0%",
        "Tuning gained. step time and moves gain +0.40%",
    ):
        assert words in page
    assert "prefers-color-scheme" in page
    assert page.rstrip().endswith("</html>")


def test_ids_of_pictures_do_not_collide(report):
    page = report
    clips = [set(re.findall(r'<clipPath id="([^"]+)"', svg)) for svg in page.split("<svg")[1:]]
    assert sum(map(len, clips)) == len(set().union(*clips))


def test_tiles_compare_with_default_and_best_baseline(report):
    tiles = re.findall(r'<div class="card(?: good)?"><b>([^<]+)</b>', report)
    assert tiles == ["2.00x", "1.50x", "40.0% → 10.0%", "0.01 s"]


def test_text_takes_the_colour_of_the_page():
    assert "currentColor" in as_svg(panels(4, 3, partial(plot_bars, {"x": 1.0}, "x")), "x")

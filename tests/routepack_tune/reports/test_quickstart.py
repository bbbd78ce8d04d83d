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
    TUNED,
    Outcome,
    compare_planners,
    loads_before_and_after,
    lost_share,
    rank_load,
)
from routepack_tune.reports.figures import as_svg, panels, plot_bars
from routepack_tune.reports.quickstart import quickstart_page, short_name
from routepack_tune.steps.traces import load_step_batch
from search import BASELINES, DEFAULT_BASELINE, build_problem, price_baseline


def outcome(name, step_s, lost=0.1):
    return Outcome(name, step_s, step_s / 2, step_s / 4, step_s / 4, lost, 3, 0.01)


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


def test_names_fit_under_bars():
    assert short_name(DEFAULT_BASELINE) == "FFD + identity"
    assert short_name(TUNED) == "RoutePack-Tune"


@pytest.fixture
def planner(job):
    return untuned_planner(job.costmodel, load_config(job.config))


def test_comparison_covers_default_baselines_and_tuned(job, planner):
    batches = [load_step_batch(job.steps / f"step0{i}.npz", planner.spec) for i in (0, 1)]
    found = compare_planners(planner, batches)
    assert found[0].planner == DEFAULT_BASELINE
    assert found[-1].planner == TUNED
    assert {one.planner for one in found} <= {*BASELINES, TUNED}
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
    summary = {"names": {"tuned": ["a"], "holdout": ["b"]}, "best": {"number": 1}}
    study = {"fingerprint": device, "config": {"topology": {}}, "summary": summary, "tables_hash": "0"}
    found = [outcome(DEFAULT_BASELINE, 2.0, 0.4), outcome("first-fit decreasing + LPT", 1.5), outcome(TUNED, 1.0)]
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
    for words in ("synthetic batches, predicted times", "assumed", "2.00x", "40.0% → 10.0%"):
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

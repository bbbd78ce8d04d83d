"""The published H200 tables, where the shared folder is beside the checkout."""

from pathlib import Path

import numpy as np
import pytest

from costmodels import FitParams, fit_cost_model, freeze_tables, lookup_many_ns
from profiler import Topology, import_published, load_model

TABLES = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "gpu-timings" / "h200_sxm"
CAP = 32768

pytestmark = [
    pytest.mark.slow,  # three quarters of a minute for its one fit
    pytest.mark.skipif(not TABLES.is_dir(), reason="shared/data/gpu-timings is not beside the checkout"),
]


@pytest.fixture(scope="module")
def h200():
    topology = Topology(data_parallel_size=8, expert_model_parallel_size=8)
    params = FitParams(num_trees=150, folds=3)
    return fit_cost_model(import_published(TABLES), load_model("Qwen3-30B-A3B"), topology, CAP, params)


@pytest.mark.parametrize(("op", "median_pct"), [("attention", 4.0), ("experts", 4.0), ("dense", 3.0)])
def test_unseen_sizes_are_near_and_nearer_than_what_one_could_pick_instead(h200, op, median_pct):
    errors = h200.validation[f"{op}/forward"]["unseen sizes"]
    assert errors["model"]["median_pct"] < median_pct
    assert errors["model"]["mape_pct"] < 0.8 * errors["baseline"]["mape_pct"]
    assert errors["model"]["mape_pct"] < errors["lightgbm_alone"]["mape_pct"]


@pytest.mark.parametrize(("op", "median_pct"), [("attention", 2.0), ("experts", 6.0)])
def test_unseen_shapes(h200, op, median_pct):
    errors = h200.validation[f"{op}/forward"]["unseen shapes"]
    assert errors["model"]["median_pct"] < median_pct
    assert errors["model"]["mape_pct"] < 0.9 * errors["baseline"]["mape_pct"]


@pytest.mark.parametrize(("op", "median_pct", "p95_pct"), [("attention", 2.8, 7.5), ("experts", 5.5, 25.0)])
def test_largest_sizes_from_smaller_ones(h200, op, median_pct, p95_pct):
    errors = h200.validation[f"{op}/forward"]["largest sizes"]
    assert errors["model"]["median_pct"] < median_pct
    assert errors["model"]["p95_pct"] < p95_pct


@pytest.mark.parametrize("op", ["attention", "experts", "dense"])
def test_intervals_cover_what_they_say_inside_the_timed_sizes(h200, op):
    assert 86.0 <= h200.validation[f"{op}/forward"]["intervals"]["inside_pct"] <= 94.0


def test_times_of_an_untimed_shape_are_nearly_convex(h200):
    """Waves of trees in sizes nobody timed would be dodged by a planner; the lower convex hull lies within 1 %."""
    tables = freeze_tables(h200, load_model("gpt-oss-20b"), h200.topology, CAP)
    rows = np.arange(tables.expert_rank_ns.size) << tables.rows_shift
    # An even share of 3 to 12 microbatches of full cells, and half as much again for the slowest rank.
    asked = (rows >= CAP * 4 / 4) & (rows <= CAP * 4 * 1.5)
    time_ns = tables.expert_rank_ns[asked].astype(np.float64)
    hull = _lower_hull(rows[asked].astype(np.float64), time_ns)
    assert (time_ns / hull).max() < 1.01


def _lower_hull(x, y):
    kept = []
    for k in range(x.size):
        while len(kept) > 1 and (y[kept[-1]] - y[kept[-2]]) * (x[k] - x[kept[-2]]) >= (y[k] - y[kept[-2]]) * (
            x[kept[-1]] - x[kept[-2]]
        ):
            kept.pop()
        kept.append(k)
    return np.interp(x, x[kept], y[kept])


def test_times_are_physical(h200):
    """Large work runs at 300 to 850 TFLOP/s; the assumed backward factors are divided out."""
    tables, spec = h200.tables, h200.spec
    rows = CAP * spec.top_k
    experts_ns = int(lookup_many_ns(tables.expert_rank_ns, tables.rows_shift, rows)) / 3.0
    assert 300 < 6 * rows * spec.hidden_size * spec.moe_intermediate_size / experts_ns / 1e3 < 850
    long_ns = int(lookup_many_ns(tables.sequence_ns[0], tables.length_shift, CAP))
    heads = spec.num_attention_heads * spec.qk_head_dim
    assert 300 < 4 * heads * CAP * CAP / 2 / long_ns / 1e3 < 850
    short_ns = CAP // 512 * int(lookup_many_ns(tables.sequence_ns[0], tables.length_shift, 512))
    assert long_ns > 8 * short_ns
    assert np.diff(tables.exchange_ns).min() >= 0


def test_a_shape_without_rows_is_priced_and_named(h200):
    tables = freeze_tables(h200, load_model("gpt-oss-20b"), h200.topology, CAP)
    assert any("shape (local_experts 4, hidden_size 2880" in note for note in tables.notes)
    assert tables.measured_rows_max == 0
    rows = CAP * 4
    tflops = 6 * rows * 2880 * 2880 / (int(lookup_many_ns(tables.expert_rank_ns, tables.rows_shift, rows)) / 3.0) / 1e3
    assert 500 < tflops < 900

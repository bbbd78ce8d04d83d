"""Failures of other projects that the timed operations must not repeat (numbers of the field-case list)."""

import numpy as np
import pytest
from oracles import experts_slow

from profiler import ProfileParams
from profiler.cases.case import Case, cell_case, experts_case
from profiler.kernels.attention import packed_starts
from profiler.kernels.works import WORKS

torch = pytest.importorskip("torch", reason="torch is not installed")
backends = pytest.importorskip("profiler.device.backend")
timer = pytest.importorskip("profiler.timer")

HALF_EMPTY = (162, 0, 2577, 446, 0, 83)
PARAMS = ProfileParams(dtype="float32", threads=1, repeats=1, min_repeats=1, max_case_seconds=2.0)


@pytest.fixture(scope="module")
def backend():
    return backends.TorchBackend("cpu", PARAMS)


def experts(counts, hidden=16, inter=24, dtype=""):
    return experts_case("", counts, hidden, inter, len(counts), dtype)


@pytest.mark.parametrize("counts", [HALF_EMPTY, (0,) * 6, (0, 0, 0, 0, 0, 1)])
def test_fc_31_experts_without_tokens_compute_what_a_loop_over_experts_does(backend, counts):
    run, inputs = WORKS["experts"](experts(counts), backend)
    output, expected = run(), experts_slow(*inputs, counts)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    upstream = torch.randn_like(output)
    own, right = (torch.autograd.grad(tensor, inputs, upstream) for tensor in (output, expected))
    assert all(tensor.isfinite().all() for tensor in (output, *own))
    torch.testing.assert_close(own, right, rtol=1e-3, atol=1e-3)
    for expert in np.flatnonzero(np.array(counts) == 0):
        assert not own[1][expert].any()
        assert not own[2][expert].any()


@pytest.mark.parametrize("counts", [HALF_EMPTY, (0,) * 6])
def test_fc_31_they_are_timed_in_both_directions_and_name_their_kernel(backend, counts):
    rows = timer.time_case(experts(counts), backend, PARAMS)
    assert [(row["direction"], row["status"]) for row in rows] == [("forward", "ok"), ("backward", "ok")]
    # on some devices a grouped GEMM is a slow loop under the same name; the row says what ran.
    assert all(row["time_us"] > 0 and "mm" in row["kernel"] for row in rows)


def test_fc_31_an_unsupported_type_is_a_row_that_says_so(backend):
    """Eight-bit grouped GEMMs do not exist on CPUs: a recorded skip, no crash."""
    rows = timer.time_case(experts((16, 16), 32, 32, "float8_e4m3fn"), backend, PARAMS)
    assert [row["status"] for row in rows] == ["unsupported"] * 2
    assert all("CPU" in row["message"] for row in rows)
    plain = timer.time_case(experts((16, 16), 32, 32), backend, PARAMS)
    assert {row["case_id"] for row in rows}.isdisjoint(row["case_id"] for row in plain)


def test_eight_bit_experts_differentiate_in_the_type_of_the_sweep(monkeypatch):
    """The forward product alone is stood in for: de-scaled and multiplied in bfloat16, which CPUs can."""

    def product(a, b, scale_a, recipe_a, scale_b, recipe_b, offs, output_dtype):
        assert a.dtype == b.dtype == torch.float8_e4m3fn
        assert recipe_a == recipe_b == torch.nn.functional.ScalingType.RowWise
        assert (scale_a.shape, scale_b.shape) == (a.shape[:1], (b.shape[0], b.shape[2]))
        rows, weight = a.float() * scale_a[:, None], b.float() * scale_b[:, None]
        both = (tensor.to(output_dtype) for tensor in (rows, weight))
        return torch.nn.functional.grouped_mm(*both, offs=offs)

    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", product)
    backend = backends.TorchBackend("cpu", ProfileParams(dtype="bfloat16", threads=1))
    counts = (16, 0, 48)
    run, inputs = WORKS["experts"](experts(counts, 64, 32, "float8_e4m3fn"), backend)
    output, expected = run(), experts_slow(*inputs, counts)
    upstream = torch.randn_like(output)
    own, right = (torch.autograd.grad(tensor, inputs, upstream) for tensor in (output, expected))
    for found, wanted in ((output, expected), *zip(own, right, strict=True)):
        assert found.dtype == torch.bfloat16
        error = (found.float() - wanted.float()).norm() / wanted.float().norm()
        assert error < 0.1


def test_r_14_sequences_without_tokens_are_left_out(backend):
    lengths, kept = (3, 0, 5, 0), (3, 5)
    for op in ("attention", "linear_attention"):
        case, without = (cell_case(op, "", parts, (2, 2, 8, 8)) for parts in (lengths, kept))
        assert case.features == without.features
        output, expected = (WORKS[op](one, backends.TorchBackend("cpu", PARAMS))[0]() for one in (case, without))
        torch.testing.assert_close(output, expected)
        with pytest.raises(ValueError, match="at least one sequence"):
            cell_case(op, "", (0, 0), (2, 2, 8, 8))


def test_r_14_packed_kernels_never_see_length_zero_or_a_longest_length_of_one(backend):
    case = cell_case("attention", "", (1, 0, 1), (2, 2, 8, 8))
    starts, longest = packed_starts(case, backend)
    assert starts.tolist() == [0, 1, 2]
    assert longest == 2
    # One token attends to itself alone.
    run, (_, _, value) = WORKS["attention"](case, backend)
    torch.testing.assert_close(run(), value)


def test_r_22_rows_that_no_expert_owns_are_refused(backend):
    """A grouped GEMM leaves them uninitialised; a sum over the output would read them."""
    features = {**experts((3, 2)).features, "rows": 8}
    with pytest.raises(ValueError, match="add up to 8 rows, got 5"):
        WORKS["experts"](Case("experts", "", features, (3, 2)), backend)
    rows = timer.time_case(Case("experts", "", features, (3, 2)), backend, PARAMS)
    assert {row["status"] for row in rows} == {"unsupported"}


@pytest.fixture
def poisoned_memory():
    """Uninitialised memory holds NaN: what torch's deterministic mode does."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_r_22_no_operation_reads_memory_that_nobody_wrote(backend, poisoned_memory):
    assert torch.empty(3).isnan().all()
    lengths = (3, 70)
    linear = cell_case("linear_attention", "", lengths, (2, 2, 8, 8))
    for case in (linear, experts(HALF_EMPTY)):
        run, inputs = WORKS[case.op](case, backend)
        output = run()
        gradients = torch.autograd.grad(output, inputs, torch.ones_like(output))
        assert all(tensor.isfinite().all() for tensor in (output, *gradients))

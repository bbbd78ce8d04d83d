"""Kernels of other libraries: picked where they can be imported on CUDA, fed what their documentation asks for.

No such library can run here. Stand-ins with the same signature, made of torch's CPU operations, take their place in
``sys.modules``: they show that what we pass is right, not how fast anything is.
"""

import sys
import types

import pytest
from oracles import delta_rule_slow, experts_slow

from profiler import ProfileParams
from profiler.cases.case import OPERATIONS, Case, cell_case, experts_case
from profiler.kernels.works import LIBRARIES, WORKS, Work, make_work
from profiler.timer import backward_of

torch = pytest.importorskip("torch", reason="torch is not installed")
backends = pytest.importorskip("profiler.device.backend")

LENGTHS = (5, 0, 3)
COUNTS = (4, 0, 3)
ATTENTION = cell_case("attention", "", LENGTHS, (4, 2, 8, 8), 0)
WINDOWED = cell_case("attention", "", LENGTHS, (4, 2, 8, 8), 2)
EXPERTS = experts_case("", COUNTS, 16, 24, 3)
EMPTY = experts_case("", (0, 0, 0), 16, 24, 3)
DENSE = Case("dense", "", {"tokens": 3, "n": 5, "k": 7})
LINEAR = cell_case("linear_attention", "", LENGTHS, (4, 2, 8, 8))


@pytest.fixture
def cuda_like():
    """A backend that says it is CUDA, with tensors on the CPU."""
    backend = backends.TorchBackend("cpu", ProfileParams(dtype="bfloat16", threads=1))
    backend.kind = "cuda"
    return backend


@pytest.fixture
def libraries(monkeypatch):
    """Install the stand-ins; what the attention kernel was called with is in the returned list."""
    calls = []

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size):
        calls.append((cu_seqlens_q.tolist(), cu_seqlens_q.dtype, max_seqlen_q, causal, window_size))
        assert cu_seqlens_k is cu_seqlens_q
        assert max_seqlen_k == max_seqlen_q
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1) + 0 * q + 0 * k.sum()

    def chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens):
        lengths = cu_seqlens.diff().tolist()
        return delta_rule_slow(*(t[0].float() for t in (q, k, v, g, beta)), lengths)[None].to(v.dtype), None

    class GroupedLinear(torch.nn.Module):
        def __init__(self, num_gemms, in_features, out_features, bias, params_dtype, device):
            super().__init__()
            shape = (out_features, in_features)
            make = (torch.randn(shape, dtype=params_dtype, device=device) * in_features**-0.5 for _ in range(num_gemms))
            self.weights = torch.nn.ParameterList(make)

        def forward(self, inp, m_splits):
            parts = zip(inp.split(m_splits), self.weights, strict=True)
            return torch.cat([rows @ weight.T for rows, weight in parts])

    for module, name, value in (
        ("flash_attn", "flash_attn_varlen_func", flash_attn_varlen_func),
        ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", chunk_gated_delta_rule),
        ("transformer_engine.pytorch", "GroupedLinear", GroupedLinear),
    ):
        path = module.split(".")
        for i in range(1, len(path)):
            monkeypatch.setitem(sys.modules, ".".join(path[:i]), types.ModuleType(path[0]))
        made = types.ModuleType(module)
        setattr(made, name, value)
        monkeypatch.setitem(sys.modules, module, made)
    return calls


def picked(case, backend):
    return make_work(case, backend).library


def test_torch_has_a_kernel_of_every_operation_that_computes():
    assert set(LIBRARIES) < set(WORKS) == {name for name, one in OPERATIONS.items() if not one.exchange}


def test_libraries_are_used_on_cuda_where_they_can_be_imported(libraries, cuda_like):
    names = [picked(case, cuda_like) for case in (ATTENTION, LINEAR, EXPERTS)]
    assert names == ["flash-attn", "flash-linear-attention", "transformer-engine"]


def test_torch_runs_what_libraries_cannot(libraries, cuda_like):
    assert picked(EMPTY, cuda_like) == "torch"
    wide = cell_case("attention", "", (8,), (2, 2, 512, 512), 0)
    assert picked(wide, cuda_like) == "torch"
    float8 = Case("experts", "", EXPERTS.features, COUNTS, "float8_e4m3fn")
    assert picked(float8, cuda_like) == "torch"
    cuda_like.dtype, cuda_like.dtype_name = torch.float32, "float32"
    assert picked(ATTENTION, cuda_like) == "torch"


def test_torch_runs_everything_on_a_cpu_and_without_libraries(libraries, cuda_like, monkeypatch):
    cpu = backends.TorchBackend("cpu", ProfileParams(dtype="bfloat16", threads=1))
    assert {picked(case, cpu) for case in (ATTENTION, LINEAR, EXPERTS)} == {"torch"}
    # An import that fails half-way (built for another torch) is as good as none.
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert picked(ATTENTION, cuda_like) == "torch"


def test_attention_is_packed_as_flash_attn_asks(libraries, cuda_like):
    for case, window in ((ATTENTION, (-1, -1)), (WINDOWED, (1, 0))):
        run, inputs = make_work(case, cuda_like)[:2]
        output = run()
        assert output.shape == (8, 4, 8)
        assert libraries.pop() == ([0, 5, 8], torch.int32, 5, True, window)
        assert torch.autograd.grad(output.sum(), inputs)[2].any()


def test_experts_by_a_library_equal_the_loop(libraries, cuda_like):
    run, (rows, *weights) = make_work(EXPERTS, cuda_like)[:2]
    output = run()
    expected = experts_slow(rows, weights[:3], weights[3:], COUNTS)
    torch.testing.assert_close(output, expected)
    assert len(torch.autograd.grad(output.sum(), (rows, *weights))) == 7


def test_linear_attention_by_a_library_is_that_of_torch(libraries, cuda_like):
    """Same inputs by the same seed: both kernels get them in the form that their documentation asks for."""
    by_library = make_work(LINEAR, cuda_like).run()
    cpu = backends.TorchBackend("cpu", ProfileParams(dtype="bfloat16", threads=1))
    by_torch = make_work(LINEAR, cpu).run()
    torch.testing.assert_close(by_library, by_torch, rtol=0.02, atol=0.01)


class _Spoiling(torch.autograd.Function):
    """A linear layer whose backward empties what it saved, as Transformer Engine's does."""

    @staticmethod
    def forward(ctx, rows, weight):
        ctx.kept = [rows.detach().clone()]
        ctx.save_for_backward(weight)
        return rows @ weight.T

    @staticmethod
    def backward(ctx, upstream):
        (weight,), rows = ctx.saved_tensors, ctx.kept[0]
        given = upstream.T @ rows if rows.numel() else torch.zeros_like(weight)
        ctx.kept[0] = rows.new_empty(0)
        return upstream @ weight, given


def spoiling_work(case, backend):
    rows, weight = backend.tensor(4, 8), backend.tensor(6, 8)
    return lambda: _Spoiling.apply(rows, weight), (rows, weight)


@pytest.fixture
def installed(monkeypatch):
    """Put a library in the place of an operation's; ``build`` makes its run from a case and a backend."""

    def install(op, name, build):
        monkeypatch.setitem(LIBRARIES, op, (name, build))

    return install


def gradients(work, times):
    """Return the gradients of so many backward runs, as they are timed."""
    output = work.run()
    upstream = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    run, prepare = backward_of(work, output, upstream)
    found = []
    for _ in range(times):
        prepare()
        found.append(run())
    return found


@pytest.mark.parametrize("op", ["attention", "linear_attention", "dense", "router", "experts"])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_second_backward_gives_what_the_first_gave(libraries, cuda_like, op, kind):
    backend = cuda_like if kind == "cuda" else backends.TorchBackend("cpu", ProfileParams(dtype="float32", threads=1))
    cases = {
        "attention": ATTENTION,
        "linear_attention": LINEAR,
        "experts": EXPERTS,
        "dense": DENSE,
        "router": Case("router", "", {"tokens": 5, "hidden_size": 8, "num_experts": 4, "top_k": 2}),
    }
    first, second = gradients(make_work(cases[op], backend), 2)
    assert any(gradient.any() for gradient in first)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)


def test_a_library_that_clears_what_it_saved_is_run_forward_before_every_backward(installed, cuda_like):
    # Transformer Engine's grouped linear empties its inputs after the first backward: every later one over the same
    # graph left out the weights' gradients and was timed at about half, status "ok".
    installed("experts", "spoiler", spoiling_work)
    work = make_work(EXPERTS, cuda_like)
    assert work.library == "spoiler"
    assert all(weight.any() for _, weight in gradients(work, 3))
    kept = Work(*spoiling_work(EXPERTS, cuda_like))
    assert [bool(weight.any()) for _, weight in gradients(kept, 2)] == [True, False]  # what happened


def test_a_library_that_fails_gives_way_with_its_reason(installed, cuda_like):
    def asserts(case, backend):
        raise AssertionError("FP8 is not supported on this device")

    installed("dense", "picky", asserts)
    with pytest.warns(UserWarning, match="picky cannot run dense here .*FP8 is not supported"):
        assert make_work(DENSE, cuda_like).library == "torch"


def test_a_python_loop_is_not_timed_on_cuda_unless_asked_for(cuda_like):
    with pytest.raises(NotImplementedError, match=r"needs flash-linear-attention.*profile\.time_loops"):
        make_work(LINEAR, cuda_like)
    cuda_like.times_loops = True
    assert make_work(LINEAR, cuda_like).library == "torch"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize(
    ("case", "module"),
    [(ATTENTION, "flash_attn"), (LINEAR, "fla.ops.gated_delta_rule"), (EXPERTS, "transformer_engine.pytorch")],
)
def test_our_calls_match_the_real_packages(case, module):
    """On a card with the package the library's kernel runs there and back; make_work would warn and take torch's."""
    pytest.importorskip(module, reason="not installed")
    backend = backends.TorchBackend("cuda", ProfileParams(dtype="bfloat16"))
    assert make_work(case, backend).library == LIBRARIES[case.op][0]

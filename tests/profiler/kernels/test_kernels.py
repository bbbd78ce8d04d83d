"""Kernels of other libraries: picked where they can be imported on CUDA, fed what their documentation asks for.

No such library can run here. Stand-ins with the same signature, made of torch's CPU operations, take their place in
``sys.modules``: they show that what we pass is right, not how fast anything is.
"""

import sys
import types

import pytest
from oracles import delta_rule_slow, experts_slow

from profiler import ProfileParams
from profiler.cases.case import Case, attention_features, experts_features, linear_attention_features
from profiler.cases.operations import OPERATIONS
from profiler.kernels.choose import TorchKernel, pick_kernel
from profiler.kernels.works import KERNELS, WORKS

torch = pytest.importorskip("torch", reason="torch is not installed")
backends = pytest.importorskip("profiler.device.backend")

LENGTHS = (5, 0, 3)
COUNTS = (4, 0, 3)
ATTENTION = Case("attention", "", attention_features(LENGTHS, (4, 2, 8, 8), 0), LENGTHS)
WINDOWED = Case("attention", "", attention_features(LENGTHS, (4, 2, 8, 8), 2), LENGTHS)
EXPERTS = Case("experts", "", experts_features(COUNTS, 16, 24, 3), COUNTS)
EMPTY = Case("experts", "", experts_features((0, 0, 0), 16, 24, 3), (0, 0, 0))
LINEAR = Case("linear_attention", "", linear_attention_features(LENGTHS, (4, 2, 8, 8)), LENGTHS)


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
    return pick_kernel(KERNELS[case.op], case, backend).name


def test_every_operation_ends_with_torchs_own():
    assert set(KERNELS) == set(WORKS) == {name for name, one in OPERATIONS.items() if not one.exchange}
    assert all(isinstance(kernels[-1], TorchKernel) for kernels in KERNELS.values())


def test_libraries_are_used_on_cuda_where_they_can_be_imported(libraries, cuda_like):
    names = [picked(case, cuda_like) for case in (ATTENTION, LINEAR, EXPERTS)]
    assert names == ["flash-attn", "flash-linear-attention", "transformer-engine"]


def test_torch_runs_what_libraries_cannot(libraries, cuda_like):
    assert picked(EMPTY, cuda_like) == "torch"
    wide = Case("attention", "", attention_features((8,), (2, 2, 512, 512), 0), (8,))
    assert picked(wide, cuda_like) == "torch"
    float8 = Case("experts", "", EXPERTS.features, COUNTS, "float8_e4m3fn")
    assert picked(float8, cuda_like) == "torch"
    cuda_like.dtype = torch.float32
    assert picked(ATTENTION, cuda_like) == "torch"


def test_torch_runs_everything_on_a_cpu_and_without_libraries(libraries, cuda_like, monkeypatch):
    cpu = backends.TorchBackend("cpu", ProfileParams(dtype="bfloat16", threads=1))
    assert {picked(case, cpu) for case in (ATTENTION, LINEAR, EXPERTS)} == {"torch"}
    # An import that fails half-way (built for another torch) is as good as none.
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert picked(ATTENTION, cuda_like) == "torch"


def test_attention_is_packed_as_flash_attn_asks(libraries, cuda_like):
    for case, window in ((ATTENTION, (-1, -1)), (WINDOWED, (1, 0))):
        run, inputs = WORKS["attention"](case, cuda_like)
        output = run()
        assert output.shape == (8, 4, 8)
        assert libraries.pop() == ([0, 5, 8], torch.int32, 5, True, window)
        assert torch.autograd.grad(output.sum(), inputs)[2].any()


def test_experts_by_a_library_equal_the_loop(libraries, cuda_like):
    run, (rows, *weights) = WORKS["experts"](EXPERTS, cuda_like)
    output = run()
    expected = experts_slow(rows, weights[:3], weights[3:], COUNTS)
    torch.testing.assert_close(output, expected)
    assert len(torch.autograd.grad(output.sum(), (rows, *weights))) == 7


def test_linear_attention_by_a_library_is_that_of_torch(libraries, cuda_like):
    """Same inputs by the same seed: both kernels get them in the form that their documentation asks for."""
    by_library = WORKS["linear_attention"](LINEAR, cuda_like)[0]()
    cpu = backends.TorchBackend("cpu", ProfileParams(dtype="bfloat16", threads=1))
    by_torch = WORKS["linear_attention"](LINEAR, cpu)[0]()
    torch.testing.assert_close(by_library, by_torch, rtol=0.02, atol=0.01)

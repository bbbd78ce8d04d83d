import math

import pytest

from profiler import ProfileParams
from profiler.cases.case import Case, cell_case, experts_case
from profiler.kernels.attention import attention_work
from profiler.kernels.gemms import dense_work, experts_work

torch = pytest.importorskip("torch", reason="torch is not installed")
backends = pytest.importorskip("profiler.device.backend")


@pytest.fixture(scope="module")
def backend():
    return backends.TorchBackend("cpu", ProfileParams(dtype="float32", threads=1))


def naive_attention(query, key, value, lengths, window):
    """Every pair of every head written out."""
    heads, group = query.shape[1], query.shape[1] // key.shape[1]
    outputs = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        position = torch.arange(len(q))
        distance = position[:, None] - position[None]
        seen = (distance >= 0) & (distance < window) if window else distance >= 0
        per_head = []
        for head in range(heads):
            scores = q[:, head] @ k[:, head // group].T / math.sqrt(q.shape[-1])
            per_head.append(scores.masked_fill(~seen, -math.inf).softmax(-1) @ v[:, head // group])
        outputs.append(torch.stack(per_head, dim=1))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [0, 4, 16])
@pytest.mark.parametrize("heads", [(4, 4, 8, 8), (4, 2, 8, 8), (2, 2, 12, 8)], ids=["mha", "gqa", "mla"])
@pytest.mark.parametrize("lengths", [(13,), (1, 4, 16, 17, 5)])
def test_attention_equals_the_written_out_one(backend, heads, window, lengths):
    case = cell_case("attention", "", lengths, heads, window)
    run, inputs = attention_work(case, backend)
    output, expected = run(), naive_attention(*inputs, list(lengths), window)
    assert output.shape == (sum(lengths), heads[0], heads[3])
    torch.testing.assert_close(output, expected)
    upstream = torch.randn_like(output)
    own, right = (torch.autograd.grad(tensor, inputs, upstream) for tensor in (output, expected))
    torch.testing.assert_close(own, right)


# FC-31: empty groups, and a rank without any row.
@pytest.mark.parametrize("counts", [(162, 0, 2577, 446, 0, 83), (0,) * 6, (0, 0, 1, 0, 0, 0), (0, 5)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_equal_a_loop_over_them_also_when_groups_are_empty(counts, dtype):
    backend = backends.TorchBackend("cpu", ProfileParams(dtype=dtype, threads=1))
    hidden, inter = 16, 24
    case = experts_case("", counts, hidden, inter, len(counts))
    run, inputs = experts_work(case, backend)
    rows, gate_up, down = inputs
    parts = []
    for part, both, back in zip(rows.split(counts), gate_up, down, strict=True):
        gate, up = (part @ both.T).chunk(2, dim=-1)
        parts.append((torch.nn.functional.silu(gate) * up) @ back.T)
    output, expected = run(), torch.cat(parts)
    assert output.shape == (sum(counts), hidden)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == "float32" else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(output, expected, **tolerance)
    upstream = torch.randn_like(output)
    own, right = (torch.autograd.grad(tensor, inputs, upstream) for tensor in (output, expected))
    for gradient, wanted, like in zip(own, right, inputs, strict=True):
        assert gradient.shape == like.shape
        assert gradient.isfinite().all()
        torch.testing.assert_close(gradient, wanted, rtol=tolerance["rtol"], atol=tolerance["atol"] * 30)
    empty = [i for i, count in enumerate(counts) if count == 0]
    assert not own[1][empty].any()
    assert not own[2][empty].any()


def test_dense_is_one_gemm(backend):
    run, (tokens, weight) = dense_work(Case("dense", "", {"tokens": 3, "n": 5, "k": 7}), backend)
    torch.testing.assert_close(run(), tokens @ weight.T)
    assert (tokens.shape, weight.shape) == ((3, 7), (5, 7))

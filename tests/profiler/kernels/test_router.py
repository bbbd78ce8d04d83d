"""The router with its permutation: against a token-by-token version, and what it does to the rows in between."""

import pytest
from oracles import router_slow

from profiler import ProfileParams
from profiler.cases.case import Case
from profiler.kernels.gemms import router_work

torch = pytest.importorskip("torch", reason="torch is not installed")
backends = pytest.importorskip("profiler.device.backend")


def router(tokens, hidden, experts, top_k, dtype="float32"):
    backend = backends.TorchBackend("cpu", ProfileParams(dtype=dtype, threads=1))
    features = {"tokens": tokens, "hidden_size": hidden, "num_experts": experts, "top_k": top_k}
    return router_work(Case("router", "", features), backend)


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(17, 8, 2), (1, 4, 1), (30, 6, 6), (5, 64, 8)])
def test_a_router_equals_the_loop_over_tokens(tokens, experts, top_k):
    run, inputs = router(tokens, 12, experts, top_k)
    output, expected = run(), router_slow(*inputs, top_k)
    torch.testing.assert_close(output, expected)
    upstream = torch.randn_like(output)
    own, right = (torch.autograd.grad(tensor, inputs, upstream) for tensor in (output, expected))
    torch.testing.assert_close(own[0], right[0])
    # Shares add up to one and all of a token's rows are its own: the output does not depend on the choice.
    torch.testing.assert_close(own[1], right[1], atol=1e-5, rtol=0)


def test_rows_are_gathered_in_the_order_of_their_experts(monkeypatch):
    """What experts read: each expert's rows beside one another, tokens in order inside."""
    run, (tokens, weight) = router(40, 16, 8, 3)
    seen = []
    select = torch.Tensor.index_select

    def spy(self, dim, index):
        seen.append(index)
        return select(self, dim, index)

    monkeypatch.setattr(torch.Tensor, "index_select", spy)
    run()
    gathered = seen[0].tolist()
    chosen = torch.softmax(tokens @ weight.T, -1).topk(3, -1).indices.tolist()
    assert gathered == [token for expert in range(8) for token in range(40) if expert in chosen[token]]


def test_sixteen_bit_routers_are_finite_and_keep_their_type():
    run, inputs = router(64, 32, 16, 4, "bfloat16")
    output = run()
    gradients = torch.autograd.grad(output, inputs, torch.randn_like(output))
    assert output.dtype == torch.bfloat16
    assert all(tensor.isfinite().all() for tensor in (output, *gradients))
    torch.testing.assert_close(output, inputs[0], rtol=0.05, atol=0.05)

"""The chunked gated delta rule against the recurrence that defines it, token by token."""

import pytest
from oracles import delta_rule_slow

from profiler import ProfileParams
from profiler.cases.case import CHUNK_TOKENS, cell_case
from profiler.kernels.attention import chunked_core, linear_attention_work

torch = pytest.importorskip("torch", reason="torch is not installed")
backends = pytest.importorskip("profiler.device.backend")

LENGTHS = [(1,), (CHUNK_TOKENS,), (150,), (3, 130, CHUNK_TOKENS, 1, 70), (5, 5, 5)]


@pytest.fixture(scope="module")
def backend():
    return backends.TorchBackend("cpu", ProfileParams(dtype="float32", threads=1))


def inputs_of(lengths, heads=2, key_dim=6, value_dim=10, dtype=torch.float64, decay=1.0):
    torch.manual_seed(0)
    tokens = sum(lengths)
    query, key = (torch.nn.functional.normalize(torch.randn(tokens, heads, key_dim, dtype=dtype), dim=-1) for _ in "qk")
    value = torch.randn(tokens, heads, value_dim, dtype=dtype)
    logs = -decay * torch.rand(tokens, heads, dtype=dtype)
    return tuple(t.requires_grad_() for t in (query, key, value, logs, torch.rand(tokens, heads, dtype=dtype)))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("decay", [0.02, 1.0], ids=["long memory", "short memory"])
def test_chunks_equal_the_recurrence(backend, lengths, decay):
    inputs = inputs_of(lengths, decay=decay)
    output, expected = chunked_core(lengths, backend)(*inputs), delta_rule_slow(*inputs, lengths)
    assert output.shape == expected.shape
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)
    upstream = torch.randn_like(expected)
    own, right = (torch.autograd.grad(tensor, inputs, upstream.to(tensor.dtype)) for tensor in (output, expected))
    torch.testing.assert_close(own, right, rtol=1e-3, atol=1e-4)


def test_strong_decay_neither_overflows_nor_hides_a_gradient(backend):
    """Decays of many orders of magnitude inside one chunk: exp of a positive difference would be infinite."""
    inputs = inputs_of((200,), dtype=torch.float32, decay=60.0)
    output = chunked_core((200,), backend)(*inputs)
    gradients = torch.autograd.grad(output.sum(), inputs)
    assert output.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    torch.testing.assert_close(output, delta_rule_slow(*inputs, (200,)), rtol=1e-4, atol=1e-5)


def test_sequences_do_not_see_one_another(backend):
    """A packed cell is its sequences, one by one: chunks never cross a border."""
    lengths = (70, 3, 129)
    inputs = inputs_of(lengths, dtype=torch.float32)
    packed = chunked_core(lengths, backend)(*inputs)
    parts = zip(*(tensor.split(lengths) for tensor in inputs), strict=True)
    alone = [chunked_core((n,), backend)(*part) for n, part in zip(lengths, parts, strict=True)]
    torch.testing.assert_close(packed, torch.cat(alone))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_case_runs_with_shared_keys_in_both_directions(dtype):
    """Value heads share key heads, as in Qwen3-Next; the output is in the sweep's type."""
    backend = backends.TorchBackend("cpu", ProfileParams(dtype=dtype, threads=1))
    lengths, heads = (100, 0, 28), (4, 2, 16, 8)
    run, inputs = linear_attention_work(cell_case("linear_attention", "", lengths, heads), backend)
    output = run()
    assert output.shape == (128, 4, 8)
    assert output.dtype == backend.dtype
    gradients = torch.autograd.grad(output, inputs, torch.randn_like(output))
    assert all(tensor.isfinite().all() for tensor in (output, *gradients))
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_steps_of_the_chain_are_those_of_the_longest_sequence(backend, monkeypatch):
    """Work is linear: eight short sequences take one step together, not one each."""
    import profiler.kernels.attention as module

    seen = []
    chain = module._chain

    def spy(parts):
        seen.append([len(step) for step in parts[0]])
        return chain(parts)

    monkeypatch.setattr(module, "_chain", spy)
    for lengths in ((CHUNK_TOKENS,) * 8, (CHUNK_TOKENS * 3, 10, CHUNK_TOKENS + 1)):
        chunked_core(lengths, backend)(*inputs_of(lengths, dtype=torch.float32))
    assert seen == [[8], [3, 2, 1]]

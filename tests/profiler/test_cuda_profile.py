import pytest

from profiler import ModelSpec, ProfileParams, Topology, profile_device

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
CONFIG = {
    "hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


def test_the_same_sweep_runs_on_cuda(tmp_path):
    params = ProfileParams(max_points=9, repeats=3, max_drift=1e9)
    topology = Topology(data_parallel_size=4, expert_model_parallel_size=4)
    measurements = profile_device(ModelSpec.from_config(CONFIG, "small"), topology, 8192, params, tmp_path, "cuda")
    for op in ("attention", "dense", "experts"):
        for direction in ("forward", "backward"):
            rows = measurements.select(op=op, direction=direction)
            assert (rows.rows["status"] == "ok").sum() > len(rows) * 0.8, set(rows.rows["message"])
    assert measurements.meta["fingerprint"]["arch"].startswith("sm_")
    assert measurements.meta["dtype"] == "bfloat16"

"""A small profile, and processes that run it: forks of one server that has imported torch and the profiler already."""

import multiprocessing
import os
import socket
import sys
import time
from datetime import timedelta

from patience import PATIENCE_S

from profiler import ModelSpec, Observer, ProfileParams, RoutePackError, Topology, profile_device

MODEL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 64,
}  # fmt: skip
SPEC = ModelSpec.from_config(MODEL, "small")
TOPOLOGY = Topology(data_parallel_size=2, expert_model_parallel_size=2)
CAP = 256
PARAMS = {
    "max_points": 6, "repeats": 2, "min_repeats": 1, "max_case_seconds": 30.0, "threads": 1, "dtype": "float32",
    "max_drift": 1e9,
}  # fmt: skip
SMALL_FLUSH = 1 << 20


class Printer(Observer):
    def advance(self, what, message=""):
        print(message, flush=True)


def profile(out, spec=SPEC, observer=None, **params):
    return profile_device(spec, TOPOLOGY, CAP, ProfileParams(**{**PARAMS, **params}), out, "cpu", observer)


def fail_in_an_exchange(moment):
    """Let rank 1 fail in its 13th exchange, ``before`` or ``after`` it entered."""
    import torch.distributed as dist

    from profiler.ranks import ranks

    if moment == "before":  # the other waits as long inside
        ranks.EXCHANGE_PATIENCE = timedelta(seconds=15)
    exchange, calls = dist.all_to_all_single, [0]

    def breaks(*args, **kwargs):
        calls[0] += 1
        if calls[0] > 12 and moment == "before":
            raise ValueError("planted")
        exchange(*args, **kwargs)
        if calls[0] > 12:
            raise ValueError("planted")

    if os.environ["RANK"] == "1":
        dist.all_to_all_single = breaks


def _job(out, log, environment, moment):
    with open(log, "wb") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    os.environ.update(environment)
    from profiler.device import backend

    backend.FLUSH_BYTES["cpu"] = SMALL_FLUSH
    if moment:
        fail_in_an_exchange(moment)
    try:
        profile(out, observer=Printer())
    except RoutePackError as error:
        print(f"Error: {error}")
        sys.exit(1)


def start_job(out, moment="", **environment):
    """Start a process that profiles into a folder; what it prints goes into a file beside it, ``process.log``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "pyarrow.parquet", "profiler"])
    log = out.with_name(f"{out.name}-{environment.get('RANK', 0)}.log")
    process = context.Process(target=_job, args=(out, log, environment, moment), daemon=True)
    process.log = log
    process.start()
    return process


def start_ranks(out, moment="", per_node=1):
    """Start two ranks, on one pretended node each or both on one, without a launcher that cleans up after them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": str(per_node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [start_job(out, moment, RANK=str(rank), LOCAL_RANK=str(rank % per_node), **common) for rank in range(2)]


def finish(process, seconds=PATIENCE_S):
    """Return the exit status of a process and what it printed."""
    process.join(seconds)
    assert process.exitcode is not None, process.log.read_text()
    return process.exitcode, process.log.read_text()


def wait_for_rows(out, rows):
    deadline = time.monotonic() + PATIENCE_S
    journal = out / "cases.jsonl"
    while not journal.exists() or journal.read_text().count('{"rows"') < rows:
        assert time.monotonic() < deadline, "no rows were written"
        time.sleep(0.02)

"""What a profile is asked for: the job's parallel sizes, and how many cases are timed how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from math import gcd, isqrt
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profiler.model_spec import ModelSpec

FLOAT8 = "float8_e4m3fn"
EXCHANGES = {"nccl": "nccl_perf", "deepep": "deepep_normal_perf"}
"""Libraries whose all-to-all can be imported, with the name of their published table; a job exchanges through one."""
DTYPES = ("auto", "bfloat16", "float16", "float32", FLOAT8)


MOST_RANKS = 2**20
MOST_TOKENS = 2**24
"""Most tokens of a microbatch on one DP slot."""
MOST_SEED = 2**31 - 1
MOST_TEXT = 1000
"""Most characters of a setting."""


def check_number(name: str, value: object, least: float, most: float, *, whole: bool = False) -> None:
    """Raise ValueError unless a value is a number of a range, both ends allowed; no bool and no text is one."""
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not least <= value <= most:
        kind = "an integer" if whole else "a number"
        raise ValueError(f"Expected {name} to be {kind} from {least} to {most}, got {value!r:.80}.")


def check_settings(settings: Any, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Raise ValueError unless every plain field of a dataclass is of its type, and its numbers lie in their ranges."""
    for field in fields(settings):
        name, value, kind = field.name, getattr(settings, field.name), str(field.type)
        if name in ranges:
            check_number(name, value, *ranges[name], whole=kind == "int")
        elif kind == "bool" and not isinstance(value, bool):
            raise ValueError(f"Expected {name} to be true or false, got {value!r:.80}.")
        elif kind == "str" and not (isinstance(value, str) and len(value) <= MOST_TEXT and value.isprintable()):
            raise ValueError(
                f"Expected {name} to be one line of text, at most {MOST_TEXT} characters, got {value!r:.80}."
            )


def divisors(number: int) -> list[int]:
    """Return every divisor, ascending."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest(size: int, legal: Iterable[int]) -> str:
    """Name the legal sizes next to one that is not: below and above."""
    sizes = sorted(legal)
    return " or ".join(map(str, [n for n in sizes if n < size][-1:] + [n for n in sizes if n > size][:1]))


@dataclass(frozen=True, slots=True)
class Topology:
    """The parallel sizes of the training job (names of Megatron-LM's arguments).

    Inside one pipeline stage ranks are numbered ``q = tp + TP * (cp + CP * dp)``; the expert grid folds the same ranks
    as ``block = q // (ETP * EP)``, ``ep = (q % (ETP * EP)) // ETP``, ``etp = q % ETP`` (Megatron-LM's default order
    tp-cp-ep-dp-pp). A *DP slot* is one data-parallel rank, all its TP x CP ranks together; an *EP block* is the ranks
    that exchange tokens for one MoE layer.
    """

    data_parallel_size: int = 1
    """DP slots: data-parallel ranks, each all its TP x CP ranks together."""
    tensor_model_parallel_size: int = 1
    """Ranks that share every dense weight and, with sequence parallelism, the tokens of a slot."""
    context_parallel_size: int = 1
    """Ranks that share one sequence by position."""
    pipeline_model_parallel_size: int = 1
    """Stages; layers are taken as evenly spread over them."""
    expert_model_parallel_size: int = 1
    """EP ranks of a block: experts are spread over them."""
    expert_tensor_parallel_size: int = 1
    """Ranks that share every expert's weights."""
    virtual_pipeline_model_parallel_size: int = 1
    """Model chunks per stage; the row count must be a multiple of the pipeline size when above 1."""

    def __post_init__(self) -> None:
        check_settings(self, {field.name: (1, MOST_RANKS) for field in fields(self)})
        if self.ranks_per_stage > MOST_RANKS:
            raise ValueError(
                f"A stage of {self.ranks_per_stage} ranks (tensor x context x data) is above what is supported: "
                f"{MOST_RANKS}."
            )
        dense, block = self.ranks_per_slot, self.ranks_per_block
        if block not in (legal := self.legal_blocks()):
            if self.ranks_per_stage % block == 0:
                wrong = f"An EP block of {block} ranks straddles DP slots of {dense}: one must divide the other"
            else:
                wrong = (
                    f"A stage has {self.ranks_per_stage} ranks (tensor {self.tensor_model_parallel_size} x context "
                    f"{self.context_parallel_size} x data {self.data_parallel_size}); expert_model_parallel_size x "
                    f"expert_tensor_parallel_size = {block} must divide it"
                )
            raise ValueError(f"{wrong}. Nearest sizes of a block: {nearest(block, legal)}.")

    def legal_blocks(self) -> list[int]:
        """Return the sizes that an EP block of this stage may have."""
        dense = self.ranks_per_slot
        return [size for size in divisors(self.ranks_per_stage) if size % dense == 0 or dense % size == 0]

    @property
    def ranks_per_stage(self) -> int:
        """Ranks of one pipeline stage (TP x CP x DP)."""
        return self.ranks_per_slot * self.data_parallel_size

    @property
    def ranks_per_slot(self) -> int:
        """Ranks of one DP slot inside a stage (TP x CP)."""
        return self.tensor_model_parallel_size * self.context_parallel_size

    @property
    def ranks_per_block(self) -> int:
        """Ranks of one EP block (ETP x EP)."""
        return self.expert_model_parallel_size * self.expert_tensor_parallel_size

    @property
    def slots_per_block(self) -> int:
        """DP slots whose tokens meet in one block; 1 where a slot spreads over several blocks."""
        return max(1, self.ranks_per_block // self.ranks_per_slot)

    @property
    def blocks_per_slot(self) -> int:
        """Blocks over which one slot's tokens spread by position; 1 where a block holds whole slots."""
        return max(1, self.ranks_per_slot // self.ranks_per_block)

    @property
    def num_blocks(self) -> int:
        """Groups of DP slots that wait for one another inside a row."""
        return self.data_parallel_size // self.slots_per_block

    @property
    def row_multiple(self) -> int:
        """Number that the row count must be a multiple of (Megatron's interleaved schedule)."""
        return self.pipeline_model_parallel_size if self.virtual_pipeline_model_parallel_size > 1 else 1


def check_sizes(spec: ModelSpec, topology: Topology) -> None:
    """Raise ValueError where a model cannot be cut into the parts of a topology, naming the nearest sizes."""
    etp, kv_heads = topology.expert_tensor_parallel_size, spec.num_key_value_heads
    blocks = topology.legal_blocks()
    heads = gcd(spec.num_attention_heads, spec.linear_num_value_heads, spec.linear_num_key_heads)
    linear = f" and {spec.linear_num_key_heads} linear ones" if spec.linear_layers else ""
    for name, what, legal in (
        (
            "expert_model_parallel_size",
            f"{spec.num_experts} experts",
            [size for size in divisors(spec.num_experts) if size * etp in blocks],
        ),
        (
            "expert_tensor_parallel_size",
            f"experts, {spec.moe_intermediate_size} wide",
            divisors(spec.moe_intermediate_size),
        ),
        (
            "tensor_model_parallel_size",
            f"{spec.num_attention_heads} attention heads ({kv_heads} of keys and values){linear}",
            # Ranks beyond the key-value heads hold copies of them.
            [size for size in divisors(heads) if kv_heads % size == 0 or size % kv_heads == 0],
        ),
    ):
        if (size := getattr(topology, name)) not in legal:
            raise ValueError(
                f"{name} = {size} cannot divide the {what} of {spec.name}. Nearest: {nearest(size, legal)}."
            )
    stages = topology.pipeline_model_parallel_size * topology.virtual_pipeline_model_parallel_size
    if stages > spec.num_layers:
        raise ValueError(
            f"pipeline_model_parallel_size x virtual_pipeline_model_parallel_size = {stages} stages are more than the "
            f"{spec.num_layers} layers of {spec.name}. At most: {spec.num_layers}."
        )


@dataclass(frozen=True, slots=True)
class ProfileParams:
    """How many cases are timed, how large they may be, and how each is timed; a minute or two for a small model."""

    target_error: float = 5.0
    """Rounds of cases end when no operation's held-out median error is above so many percent."""
    max_minutes: float = 10.0
    """They end too when they have taken so long, all runs in a folder together; 0 is no limit."""
    max_points: int = 50
    """Most cases per operation (per window class for attention), each timed forward and backward."""
    repeats: int = 7
    """Timed runs per case and direction, all kept."""
    min_repeats: int = 3
    """Runs that are timed even when a case has used up its time."""
    max_case_seconds: float = 4.0
    """Time for one case, warm-up and both directions together; larger sizes are left out and reported."""
    max_memory_gib: float = 0.0
    """Memory one case may take; 0 is half of what is free at the start."""
    dtype: str = "auto"
    """Number type: ``auto`` is bfloat16 where the device computes it natively, else float32; ``float8_e4m3fn`` is the
    experts' forward in 8 bits and all else in bfloat16."""
    exchange: str = "nccl"
    """Which exchange of published tables to import: ``nccl`` or ``deepep``."""
    threads: int = 0
    """CPU threads of torch; 0 is every usable core but one: with none to spare, any other work stalls all threads."""
    max_drift: float = 0.25
    """Relative drift of that case beyond which the sweep warns that the device is not steady."""
    time_loops: bool = False
    """Time kernels on CUDA that are Python loops of launches (linear attention without flash-linear-attention)."""
    retry_failed: bool = False
    """Time cases again whose last result was not ``ok``."""
    seed: int = 0
    """Seed of the drawn lengths and routings and of the order of the cases."""

    def __post_init__(self) -> None:
        check_settings(self, PROFILE_RANGES)
        if not self.min_repeats <= self.repeats:
            raise ValueError(f"Expected min_repeats <= repeats = {self.repeats}, got {self.min_repeats}.")
        for name, allowed in (("exchange", tuple(EXCHANGES)), ("dtype", DTYPES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"Expected {name} to be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")


PROFILE_RANGES = {
    "target_error": (1e-6, 1e6),
    "max_minutes": (0, 1e6),
    "max_points": (6, 100_000),
    "repeats": (1, 10_000),
    "min_repeats": (1, 10_000),
    "max_case_seconds": (1e-6, 1e6),
    "max_memory_gib": (0, 1e6),
    "threads": (0, 4096),
    "max_drift": (1e-6, 1e9),
    "seed": (0, MOST_SEED),
}
"""Least and most of each number, both allowed."""

"""Parallel sizes of the training job and Megatron's rank arithmetic.

Inside one pipeline stage ranks are numbered ``q = tp + TP * (cp + CP * dp)``; the expert grid folds the same ranks as
``block = q // (ETP * EP)``, ``ep = (q % (ETP * EP)) // ETP``, ``etp = q % ETP`` (Megatron-LM's default order
tp-cp-ep-dp-pp). A *DP slot* is one data-parallel rank, all its TP x CP ranks together; an *EP block* is the ranks that
exchange tokens for one MoE layer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Topology:
    """The parallel sizes of the training job (names of Megatron-LM's arguments)."""

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
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or not value >= 1:
                raise ValueError(f"Expected {field.name} to be an integer >= 1, got {value!r}.")
        dense, block = self.ranks_per_slot, self.ranks_per_block
        ranks = dense * self.data_parallel_size
        if ranks % block:
            raise ValueError(
                f"A stage has {ranks} ranks (tensor {self.tensor_model_parallel_size} x context "
                f"{self.context_parallel_size} x data {self.data_parallel_size}); expert_model_parallel_size x "
                f"expert_tensor_parallel_size = {block} must divide it."
            )
        if block % dense and dense % block:
            raise ValueError(f"An EP block of {block} ranks straddles DP slots of {dense}: one must divide the other.")

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

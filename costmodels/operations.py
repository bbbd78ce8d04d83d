"""The operations that are priced. To add one: write its file (features and baseline), then name it here."""

from __future__ import annotations

from costmodels.alltoall import ALLTOALL
from costmodels.attention import ATTENTION
from costmodels.dense import DENSE
from costmodels.expert_move import TRANSFER
from costmodels.experts import EXPERTS
from costmodels.features import Operation
from costmodels.linear_attention import LINEAR_ATTENTION
from costmodels.router import ROUTER

OPERATIONS: dict[str, Operation] = {
    operation.name: operation for operation in (ATTENTION, LINEAR_ATTENTION, DENSE, ROUTER, EXPERTS, ALLTOALL, TRANSFER)
}

DIRECTIONS = ("forward", "backward")

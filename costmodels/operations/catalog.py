"""The operations that are priced. To add one: write its file (features and baseline), then name it here."""

from __future__ import annotations

from costmodels.features import Operation
from costmodels.operations.alltoall import ALLTOALL
from costmodels.operations.attention import ATTENTION
from costmodels.operations.dense import DENSE
from costmodels.operations.expert_move import TRANSFER
from costmodels.operations.experts import EXPERTS
from costmodels.operations.linear_attention import LINEAR_ATTENTION
from costmodels.operations.router import ROUTER
from profiler.cases.operations import DIRECTIONS as DIRECTIONS

OPERATIONS: dict[str, Operation] = {
    operation.name: operation for operation in (ATTENTION, LINEAR_ATTENTION, DENSE, ROUTER, EXPERTS, ALLTOALL, TRANSFER)
}

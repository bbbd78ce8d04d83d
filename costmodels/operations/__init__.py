"""The operations that are priced. To add one: declare it (features and baseline), then name it here."""

from __future__ import annotations

from costmodels.features import Operation
from costmodels.operations.attention import ATTENTION, LINEAR_ATTENTION
from costmodels.operations.exchange import ALLTOALL, TRANSFER
from costmodels.operations.gemms import DENSE, EXPERTS, ROUTER
from profiler.cases.case import DIRECTIONS as DIRECTIONS

OPERATIONS: dict[str, Operation] = {
    operation.name: operation for operation in (ATTENTION, LINEAR_ATTENTION, DENSE, ROUTER, EXPERTS, ALLTOALL, TRANSFER)
}

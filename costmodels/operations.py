"""The operations that are priced. To add one: write its file (features and baseline), then name it here."""

from __future__ import annotations

from costmodels.alltoall import ALLTOALL
from costmodels.attention import ATTENTION
from costmodels.dense import DENSE
from costmodels.experts import EXPERTS
from costmodels.features import Operation

OPERATIONS: dict[str, Operation] = {operation.name: operation for operation in (ATTENTION, DENSE, EXPERTS, ALLTOALL)}

DIRECTIONS = ("forward", "backward")

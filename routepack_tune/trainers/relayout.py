"""Lay experts' tensors out for a plan's placement, and back.

A placement names the physical slot of every logical expert; weights and optimizer state must follow it, or experts get
each other's weights without any error. State therefore carries the ``placement_id`` it is laid out for: another one is
refused. Checkpoints stay in logical order.

Works on anything indexed by an integer array along its first axis: NumPy arrays and torch tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from profiler.errors import RoutePackError

if TYPE_CHECKING:
    from search import Plan

LOGICAL = "logical"
"""``placement_id`` of state in logical order."""


@dataclass(frozen=True, slots=True)
class ExpertState:
    """Hold stacked expert tensors ([E, ...] each: weights, master weights, moments) and the order they are in."""

    tensors: Mapping[str, Any]
    placement_id: str = LOGICAL


def to_physical(state: ExpertState, plan: Plan, layer_of: Callable[[str], int]) -> ExpertState:
    """Return state with expert ``physical_to_logical[layer][slot]`` at place ``slot``.

    Parameters
    ----------
    layer_of
        The MoE layer (its number among MoE layers) of a tensor, from its name.

    Raises
    ------
    RoutePackError
        If the state is already laid out, for this or another placement, or a tensor has another number of experts.
    """
    _expect(state, LOGICAL)
    return _reordered(state, plan, plan.physical_to_logical(), layer_of, plan.placement_id)


def to_logical(state: ExpertState, plan: Plan, layer_of: Callable[[str], int]) -> ExpertState:
    """Return state in logical order; the inverse of :func:`to_physical` for the same plan.

    Raises
    ------
    RoutePackError
        If the state is laid out for another placement than this plan's.
    """
    _expect(state, plan.placement_id)
    return _reordered(state, plan, plan.placement_LE, layer_of, LOGICAL)


def _expect(state: ExpertState, placement_id: str) -> None:
    if state.placement_id != placement_id:
        raise RoutePackError(
            f"Expert state is laid out for placement {state.placement_id[:16]}, not {placement_id[:16]}: loading it as "
            "it is would give experts each other's weights. Bring it back to logical order with its own plan first."
        )


def _reordered(
    state: ExpertState, plan: Plan, order_LE: Any, layer_of: Callable[[str], int], placement_id: str
) -> ExpertState:
    tensors = {}
    for name, tensor in state.tensors.items():
        layer = layer_of(name)
        if not 0 <= layer < len(order_LE) or len(tensor) != order_LE.shape[1]:
            raise RoutePackError(
                f"Tensor {name} has {len(tensor)} experts in MoE layer {layer}; the plan places {order_LE.shape[1]} "
                f"experts in {len(order_LE)} layers."
            )
        tensors[name] = tensor[order_LE[layer]]
    return ExpertState(tensors, placement_id)

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
        The MoE layer (its number among MoE layers; ``plan.model.moe_layers`` holds those among all) of a tensor, from
        its name.
    """
    _check(plan)
    return _reordered(state, plan.physical_to_logical(), layer_of, LOGICAL, plan.placement_id)


def to_logical(state: ExpertState, plan: Plan, layer_of: Callable[[str], int]) -> ExpertState:
    """Return state in logical order; the inverse of :func:`to_physical` for the same plan."""
    _check(plan)
    return _reordered(state, plan.placement_LE, layer_of, plan.placement_id, LOGICAL)


def _check(plan: Plan) -> None:
    """Refuse what is no sound plan: weights would be lost or doubled without any error."""
    from search.plan import check_form

    check_form(plan)


def _reordered(
    state: ExpertState, order_LE: Any, layer_of: Callable[[str], int], before: str, after: str
) -> ExpertState:
    if state.placement_id != before:
        raise RoutePackError(
            f"Expert state is laid out for placement {state.placement_id[:16]}, not {before[:16]}: loading it as it is "
            "would give experts each other's weights. Bring it back to logical order with its own plan first."
        )
    tensors = {}
    for name, tensor in state.tensors.items():
        layer = layer_of(name)
        if not 0 <= layer < len(order_LE) or len(tensor) != order_LE.shape[1]:
            raise RoutePackError(
                f"Tensor {name} has {len(tensor)} experts in MoE layer {layer}; the plan places {order_LE.shape[1]} "
                f"experts in {len(order_LE)} layers."
            )
        tensors[name] = tensor[order_LE[layer]]
    return ExpertState(tensors, after)

"""Expert-parallel load balancing: count, plan, move (docs/balance.md).

    record_load(model)                      count tokens per expert, on the device
    counts = expert_load(model)             [layers][E], summed over the ranks
    plan = plan_placement(counts, num_slots, ep_size)
    plan.apply(model, optimizer)            move weights and optimizer state

Planning imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from moe_core.balance.plan import (
    PlacementPlan,
    arrivals,
    max_over_mean,
    plan_placement,
    rank_loads,
)

if TYPE_CHECKING:
    from moe_core.balance.load import expert_load, record_load
    from moe_core.balance.move import Moved, move_experts

__all__ = [
    "Moved",
    "PlacementPlan",
    "arrivals",
    "expert_load",
    "max_over_mean",
    "move_experts",
    "plan_placement",
    "rank_loads",
    "record_load",
]

_WITH_TORCH = {
    "expert_load": "load",
    "record_load": "load",
    "Moved": "move",
    "move_experts": "move",
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)

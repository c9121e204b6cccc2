"""What a layer counts on its device, once per forward and not again in a recompute."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_core.routing.losses import tokens_per_expert
from moe_core.routing.recompute import in_backward

if TYPE_CHECKING:
    from collections.abc import Callable

    from moe_core.contracts import Routing


# An operator, so that a compiled layer asks at run time too whether this is a recompute.
@torch.library.custom_op("moe_core::count", mutates_args={"total"})
def _count(total: Tensor, amount: Tensor) -> None:
    if not in_backward():
        total.add_(amount)


class RoutingCounts(nn.Module):
    """Sums since the last ``reset``, over micro-batches, of this rank's real tokens.

    ``tokens_per_expert`` int64 ``[E]``: choices in training mode, before a capacity dropped any;
    ``dropped_slots`` int64 ``[]``. ``invalid_ids`` int64 ``[]``: ids out of range that became -1,
    where nobody looks at values. ``expert_load`` int64 ``[E]``, None unless ``record_load`` asked
    for it: rows that each expert is given to compute, in training or not, after a capacity dropped
    some. Not buffers: DDP would overwrite them with rank 0's.
    """

    def __init__(self, num_experts: int, device: torch.device | str) -> None:
        super().__init__()
        self.tokens_per_expert = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.dropped_slots = torch.zeros((), dtype=torch.int64, device=device)
        self.invalid_ids = torch.zeros((), dtype=torch.int64, device=device)
        self.expert_load: Tensor | None = None

    def record_load(self, on: bool = True) -> None:
        """Begin to count ``expert_load`` from 0, or stop. Compiled code is compiled anew."""
        self.expert_load = torch.zeros_like(self.tokens_per_expert) if on else None

    def add_load(self, routing: Routing) -> None:
        """``routing``: of logical ids, as it goes to the experts."""
        if self.expert_load is not None:
            kept = replace(routing, chosen_ids=None)
            _count(self.expert_load, tokens_per_expert(kept, len(self.expert_load)))

    def add_tokens(self, routing: Routing) -> None:
        _count(self.tokens_per_expert, tokens_per_expert(routing, len(self.tokens_per_expert)))

    def add_dropped(self, num_slots: Tensor) -> None:
        _count(self.dropped_slots, num_slots)

    def add_invalid(self, num_ids: Tensor) -> None:
        _count(self.invalid_ids, num_ids)

    def reset(self) -> None:
        self.tokens_per_expert.zero_()
        self.dropped_slots.zero_()
        self.invalid_ids.zero_()
        if self.expert_load is not None:
            self.expert_load.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        was_meta = self.dropped_slots.is_meta
        self.tokens_per_expert = fn(self.tokens_per_expert)
        self.dropped_slots = fn(self.dropped_slots)
        self.invalid_ids = fn(self.invalid_ids)
        if self.expert_load is not None:
            self.expert_load = fn(self.expert_load)
        if was_meta and not self.dropped_slots.is_meta:
            self.reset()
        return super()._apply(fn, recurse)

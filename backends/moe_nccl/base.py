"""What both modes share: tensor parallelism around the exchange, and faults that all ranks see."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from moe_core.activation import sum_dtype
from moe_core.contracts import BuildContext, PlanT
from moe_core.errors import InputError
from moe_core.groups import LOCAL
from moe_core.interfaces import Transport
from moe_core.placement import Placement
from moe_core.slot_map import SlotMap
from moe_nccl.channel import Channel, reduce, replicate

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.contracts import Routing


class DistributedTransport(Transport[PlanT]):
    """Tokens are equal within tp: each tp rank exchanges over its own ep group with its share of
    every expert, and the partial results are summed over tp at the very end."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__(context)
        groups = context.groups or LOCAL
        request = context.request
        self.ep = Channel(groups.ep, groups.ranks)
        self.tp = Channel(groups.tp, groups.ranks)
        placement = context.placement or Placement(context.num_experts, request.ep_size)
        self.slot_map = SlotMap(placement, context.device)
        self.per_slot = request.combine == "per_slot"
        self.pays_weight = "weight" in context.pays
        self.sums_copies = request.final_sum == "layer"
        self.dispatch_dtype: torch.dtype = getattr(torch, request.dispatch_dtype)
        self.combine_dtype: torch.dtype = getattr(torch, request.combine_dtype)
        if self.ep.size * self.tp.size == 1:  # nothing travels, so nothing is rounded for it
            self.dispatch_dtype = getattr(torch, context.dtype)
            self.combine_dtype = sum_dtype(self.dispatch_dtype)
        self.global_rank = groups.ranks[groups.rank]

    def homes(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """Physical ids → (ep rank, local slot), -1 where the id is. No host sync."""
        return self.slot_map.homes(routing)

    def enter(self, hidden_states: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
        rows, weights = replicate(self.tp, hidden_states, topk_weights)
        return rows, weights

    def leave(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        """Sums of float32/64 → summed over tp, rounded once; or left as parts for the caller."""
        if self.tp.size > 1 and not self.sums_copies:
            return total.to(self.combine_dtype)
        return reduce(self.tp, total).to(dtype)

    def shared_fault(self, fault: str | None) -> Tensor:
        """int64 ``[1]``: how many tp ranks of this ep rank have a fault. They meet in no exchange
        before the sum at the very end, where the others would wait for the one that raised."""
        mine = torch.full((1,), int(fault is not None), device=self.context.device)
        return self.tp.all_reduce("faults", mine) if self.tp.size > 1 else mine

    def raise_together(self, flags: list[int], mine: str | None) -> None:
        """``flags[r]``: ep rank r has a fault. Raises ``InputError`` on every rank if any has."""
        if not any(flags):
            return
        said = [(self.global_rank, mine)]
        for channel in (self.ep, self.tp):
            if channel.size > 1:
                parts: list[Any] = [None] * channel.size
                dist.all_gather_object(parts, said, group=channel.group)
                said = [pair for part in parts for pair in part]
        raise InputError("; ".join(f"rank {r}: {text}" for r, text in sorted(said) if text))

    def report_fault(self, message: str) -> NoReturn:
        """Take part in the step's first exchange, only to say what is wrong: all ranks raise."""
        self.exchange_counts(None, message)
        raise AssertionError("the exchange raises where a rank has a fault")

    @abstractmethod
    def exchange_counts(self, counts: Tensor | None, fault: str | None) -> list[list[int]]:
        """A step's first exchange, its one host sync. With ``fault`` this rank has nothing to send
        but that; a fault on any rank raises ``InputError`` on all."""

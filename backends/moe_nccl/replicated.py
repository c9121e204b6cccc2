"""Every ep rank sees every token and computes its own experts; the parts are summed.

What SGLang calls ``none``. ``rows="distinct"``: tokens are gathered first and each rank gets its
own back. ``rows="replicated"``: all ranks bring the same tokens and keep the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from moe_core.activation import sum_dtype
from moe_core.contracts import ExchangePlan, Handle, Pending
from moe_core.errors import MoEError
from moe_core.layouts import RankGrouped, Record, SlotList
from moe_core.local import check_weight_is_paid_once, sum_indexed
from moe_nccl import cost
from moe_nccl.base import DistributedTransport
from moe_nccl.channel import Channel, reduce, replicate, wait

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.contracts import BuildContext, Routing
    from moe_core.traffic.flow import Flow, Sent


@dataclass(frozen=True)
class ReplicatedPlan(ExchangePlan):
    """``chunk``: rows per ep rank in the gathered batch (the largest T, the rest is padding).

    ``rank_of [T, K]``: the ep rank of each of this rank's slots. ``gathered_weights [N, K]``.
    """

    chunk: int
    rank_of: Tensor
    gathered_weights: Tensor
    dtype: torch.dtype


class ReplicatedTransport(DistributedTransport[ReplicatedPlan]):
    """Gather, local experts only, sum. One host sync (the numbers of tokens)."""

    payload = "all"

    def __init__(self, context: BuildContext) -> None:
        super().__init__(context)
        self.distinct = context.request.rows == "distinct"

    def dispatch_begin(
        self, hidden_states: Tensor, routing: Routing
    ) -> Pending[tuple[Record, Handle[ReplicatedPlan]]]:
        topk_ids, topk_weights = routing.ids_and_weights()
        rows, topk_weights = self.enter(hidden_states, topk_weights)
        weights = topk_weights
        num_tokens = hidden_states.shape[0]
        counted = torch.full((1, 1), num_tokens, device=topk_ids.device)
        tokens = [row[0] for row in self.exchange_counts(counted, None)]
        rank_of, slot_of = self.homes(routing)
        mine_is = self.ep.rank
        local = slot_of.masked_fill(rank_of != mine_is, -1)
        if self.distinct:
            chunk = max(tokens)
            # Each id goes with its rank, so that the gathered batch needs no look-up.
            all_rank_of = _gather_padded(self.ep, "dispatch.ids", rank_of, chunk, -1)
            all_slot_of = _gather_padded(self.ep, "dispatch.ids", slot_of, chunk, -1)
            local = all_slot_of.masked_fill(all_rank_of != mine_is, -1)
            rows, weights = _GatherRows.apply(  # pyright: ignore[reportGeneralTypeIssues]
                self.ep, chunk, rows.to(self.dispatch_dtype), weights
            )
            rows = rows.to(hidden_states.dtype)
        else:
            if len(set(tokens)) > 1:
                self.raise_together(
                    [1],
                    f"{num_tokens} tokens, but rows='replicated' means that all "
                    f"ep ranks bring the same; they brought {tokens}",
                )
            chunk = num_tokens
            rows, weights = replicate(self.ep, rows, weights)
        weights = torch.where(local >= 0, weights, 0)
        # On a CPU counting waits for nothing; elsewhere the buffers are as large as they can get.
        num_slots = int((local >= 0).sum()) if local.device.type == "cpu" else None
        record = RankGrouped(rows=rows, topk_ids=local, topk_weights=weights, num_slots=num_slots)
        plan = ReplicatedPlan(
            num_tokens=num_tokens,
            topk_ids=topk_ids,
            topk_weights=topk_weights,
            chunk=chunk,
            rank_of=rank_of,
            gathered_weights=weights,
            dtype=hidden_states.dtype,
        )
        return Pending.ready((record, Handle(plan, self)))

    def combine_begin(self, record: Record, handle: Handle[ReplicatedPlan]) -> Pending[Tensor]:
        plan = handle.consume(self)
        if not isinstance(record, SlotList):
            raise MoEError(f"ReplicatedTransport combines slot_list, not {record.layout}")
        check_weight_is_paid_once(record, record.paid, self.context.pays)
        if self.per_slot:
            total = self._combine_slots(record, plan)
        else:
            weights = plan.gathered_weights if self.pays_weight else None
            part = sum_indexed(record.rows, record.slot_index, weights).to(self.combine_dtype)
            total = self._sum_parts(part, plan)
        if not self.sums_copies and not self.distinct:
            return Pending.ready(total.to(self.combine_dtype))
        return Pending.ready(self.leave(total, plan.dtype))

    def _combine_slots(self, record: SlotList, plan: ReplicatedPlan) -> Tensor:
        """Each slot's row lives on one rank: pick it there, then sum in slot order."""
        num_rows, top_k = record.slot_index.shape
        flat = record.slot_index.reshape(-1, 1)
        weights = plan.topk_weights if self.pays_weight else None
        # One slot each: this only puts rows in place, and sum_indexed zeroes what isn't here.
        placed = sum_indexed(record.rows, flat, None).to(record.rows.dtype)
        if not self.distinct:
            placed = reduce(self.ep, placed)  # every other rank adds zeros
            index = torch.arange(num_rows * top_k, device=flat.device).view(num_rows, top_k)
            return sum_indexed(placed, index.masked_fill(plan.topk_ids < 0, -1), weights)
        splits = [plan.chunk * top_k] * self.ep.size
        (home,), works = self.ep.exchange("combine", (placed,), splits, splits)
        wait(works)
        slots = torch.arange(plan.num_tokens * top_k, device=flat.device).view_as(plan.rank_of)
        index = (plan.rank_of * plan.chunk * top_k + slots).masked_fill(plan.rank_of < 0, -1)
        return sum_indexed(home, index, weights)

    def _sum_parts(self, part: Tensor, plan: ReplicatedPlan) -> Tensor:
        if not self.distinct:
            return reduce(self.ep, part.to(sum_dtype(plan.dtype))) if self.sums_copies else part
        splits = [plan.chunk] * self.ep.size
        (home,), works = self.ep.exchange("combine", (part,), splits, splits)
        wait(works)
        index = torch.arange(plan.num_tokens, device=part.device)[
            :, None
        ] + plan.chunk * torch.arange(self.ep.size, device=part.device)
        return sum_indexed(home, index, None)  # ranks ascending

    @classmethod
    def traffic(cls, flow: Flow) -> Sent:
        return cost.replicated(flow)

    def exchange_counts(self, counts: Tensor | None, fault: str | None) -> list[list[int]]:
        """Each rank's number of tokens; a fault on one rank raises on all."""
        mine = torch.zeros(1, 2, dtype=torch.int64, device=self.context.device)
        if counts is not None:
            mine[:, :1] = counts
        mine[:, 1] = self.shared_fault(fault)
        table = self.ep.all_gather("counts", mine).tolist()  # the one host sync
        self.raise_together([row[1] for row in table], fault)
        return table


def _gather_padded(channel: Channel, kind: str, tensor: Tensor, chunk: int, value: int) -> Tensor:
    padded = tensor.new_full((chunk, *tensor.shape[1:]), value)
    padded[: tensor.shape[0]] = tensor
    return channel.all_gather(kind, padded)


class _GatherRows(torch.autograd.Function):
    """``[T, ...]`` of each rank → ``[size * chunk, ...]``; backward sums the ranks' gradients for
    this rank's rows, in ascending rank."""

    @staticmethod
    def forward(ctx: Any, channel: Channel, chunk: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.channel, ctx.chunk, ctx.num_tokens = channel, chunk, tensors[0].shape[0]
        return tuple(
            _gather_padded(channel, "dispatch" if i == 0 else "dispatch.weights", t, chunk, 0)
            for i, t in enumerate(tensors)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        splits = [ctx.chunk] * ctx.channel.size
        home: list[Tensor] = []
        for grad in grads:
            received, work = ctx.channel.all_to_all("dispatch.backward", grad, splits, splits)
            wait([work])
            parts = received.view(ctx.channel.size, ctx.chunk, *grad.shape[1:])
            total = parts[0].to(sum_dtype(grad.dtype))
            for part in parts[1:]:
                total = total + part
            home.append(total[: ctx.num_tokens].to(grad.dtype))
        return (None, None, *home)

"""Rows travel once per (token, remote rank) and come home once per rank, or once per slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moe_core.contracts import ExchangePlan, Handle, Pending
from moe_core.convert import gather
from moe_core.errors import MoEError
from moe_core.layouts import RankGrouped, Record, SlotList
from moe_core.local import check_weight_is_paid_once, sum_indexed
from moe_nccl.base import DistributedTransport
from moe_nccl.channel import Splits, wait

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.contracts import Routing


@dataclass(frozen=True)
class AllToAllPlan(ExchangePlan):
    """``send_*``/``receive_*``: rows and (row, slot) pairs per ep rank, from this rank's view.

    ``home_index`` int64: where token t finds what comes home, -1 = nothing: ``[T, M]`` over the
    ranks it went to, ascending (per_rank), or ``[T, K]`` over its slots (per_slot).
    ``received_weights [N, K]``: the routing weights that came with the rows. ``slot_rows [T, K]``:
    the row of the send buffer that carries each slot, -1 = none.
    """

    send_rows: Splits
    receive_rows: Splits
    send_slots: Splits
    receive_slots: Splits
    home_index: Tensor
    received_weights: Tensor
    slot_rows: Tensor
    dtype: torch.dtype


class AllToAllTransport(DistributedTransport[AllToAllPlan]):
    """Four exchanges per dispatch (counts; then rows, weights and ids), one per combine.

    The counts are the one host sync. Rows go in ``dispatch_dtype``; per_rank sums come home in
    ``combine_dtype``, per_slot rows as they are.
    """

    def dispatch_begin(
        self, hidden_states: Tensor, routing: Routing
    ) -> Pending[tuple[Record, Handle[AllToAllPlan]]]:
        topk_ids, topk_weights = routing.ids_and_weights()
        rows, weights = self.enter(hidden_states, topk_weights)
        num_tokens, top_k = topk_ids.shape
        ranks = torch.arange(self.ep.size, device=topk_ids.device)
        rank_of, slot_of = self.homes(routing)
        slot_hits = rank_of[None] == ranks[:, None, None]  # [EP, T, K]
        hits = slot_hits.any(-1)  # [EP, T]: one row per (token, rank), never one per expert
        counts = torch.stack([hits.sum(1), slot_hits.sum((1, 2))], 1)
        sent, received = self.exchange_counts(counts, None)
        send_rows, send_slots = sent[0::2], sent[1::2]
        receive_rows, receive_slots = received[0::2], received[1::2]

        # In order of (rank, token); the sizes are known here, so nothing waits for the device.
        pairs = torch.nonzero_static(hits.flatten(), size=sum(send_rows)).squeeze(1)
        token, to_rank = pairs % max(num_tokens, 1), pairs // max(num_tokens, 1)
        there = rank_of[token] == to_rank[:, None]
        ids = slot_of[token].masked_fill(~there, -1).to(torch.int32)
        token_rows = _rank_index(hits, top_k)
        carried = torch.where(there, gather(weights, token, token_rows), 0)
        (out_rows, out_weights, out_ids), works = self.ep.exchange(
            "dispatch",
            (gather(rows, token, token_rows).to(self.dispatch_dtype), carried, ids),
            send_rows,
            receive_rows,
        )
        plan = AllToAllPlan(
            num_tokens=num_tokens,
            topk_ids=topk_ids,
            topk_weights=weights,
            send_rows=send_rows,
            receive_rows=receive_rows,
            send_slots=send_slots,
            receive_slots=receive_slots,
            home_index=_slot_index(rank_of) if self.per_slot else token_rows,
            received_weights=out_weights,
            slot_rows=_places(hits)
            .t()
            .gather(1, rank_of.clamp(min=0))
            .masked_fill(rank_of < 0, -1),
            dtype=hidden_states.dtype,
        )

        def finish() -> tuple[Record, Handle[AllToAllPlan]]:
            wait(works)
            record = RankGrouped(
                rows=out_rows.to(plan.dtype),
                topk_ids=out_ids.to(torch.int64),
                topk_weights=out_weights,
                num_slots=sum(receive_slots),
            )
            return record, Handle(plan, self)

        return Pending(finish)

    def combine_begin(self, record: Record, handle: Handle[AllToAllPlan]) -> Pending[Tensor]:
        plan = handle.consume(self)
        if not isinstance(record, SlotList):
            raise MoEError(f"AllToAllTransport combines slot_list, not {record.layout}")
        check_weight_is_paid_once(record, record.paid, self.context.pays)
        if self.per_slot:
            rows, send, receive = record.rows, plan.receive_slots, plan.send_slots
        else:
            weights = plan.received_weights if self.pays_weight else None
            rows = sum_indexed(record.rows, record.slot_index, weights).to(self.combine_dtype)
            send, receive = plan.receive_rows, plan.send_rows
        (home,), works = self.ep.exchange("combine", (rows,), send, receive)

        def finish() -> Tensor:
            wait(works)
            weights = plan.topk_weights if self.per_slot and self.pays_weight else None
            total = sum_indexed(home, plan.home_index, weights)
            return self.leave(total, plan.dtype)

        return Pending(finish)

    def exchange_counts(self, counts: Tensor | None, fault: str | None) -> list[list[int]]:
        """``[EP, 2]`` rows and slots per rank → what this rank sends and receives, flattened."""
        size = self.ep.size
        mine = torch.zeros(size, 3, dtype=torch.int64, device=self.context.device)
        if counts is not None:
            mine[:, :2] = counts
        mine[:, 2] = self.shared_fault(fault)
        received, work = self.ep.all_to_all("counts", mine, [1] * size, [1] * size)
        wait([work])
        sent, got = torch.stack([mine, received]).tolist()  # the one host sync
        self.raise_together([row[2] for row in got], fault)
        return [[n for row in table for n in row[:2]] for table in (sent, got)]


def _rank_index(hits: Tensor, top_k: int) -> Tensor:
    """``[EP, T]`` → ``[T, min(K, EP)]``: places of a token's rows in (rank, token) order."""
    first = _places(hits).t().sort(1).values[:, : min(top_k, hits.shape[0])]
    return first.masked_fill(first == hits.numel(), -1)


def _places(hits: Tensor) -> Tensor:
    """``[EP, T]``: the row of each hit among all hits; ``hits.numel()`` where there's none."""
    return torch.where(hits, hits.flatten().cumsum(0).view_as(hits) - 1, hits.numel())


def _slot_index(rank_of: Tensor) -> Tensor:
    """``[T, K]``: places of the slots in (rank, token, slot) order, -1 for invalid ones."""
    flat = rank_of.flatten()
    invalid = flat < 0
    order = flat.masked_fill(invalid, torch.iinfo(flat.dtype).max).argsort(stable=True)
    places = torch.empty_like(order).scatter_(
        0, order, torch.arange(order.shape[0], device=order.device)
    )
    return places.masked_fill(invalid, -1).view_as(rank_of)

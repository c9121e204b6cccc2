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
from moe_nccl import cost
from moe_nccl.base import DistributedTransport
from moe_nccl.channel import Splits, wait
from moe_nccl.spread import slot_hits, slot_places, spread

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.contracts import Routing
    from moe_core.traffic.flow import Flow, Sent


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
        rank_of, slot_of = self.homes(routing)
        of_slots = slot_hits(rank_of, self.ep.size)
        hits = of_slots.any(-1)  # [EP, T]: one row per (token, rank), never one per expert
        counts = torch.stack([hits.sum(1), of_slots.sum((1, 2))], 1)
        sent, received = self.exchange_counts(counts, None)
        send_rows, send_slots = sent[0::2], sent[1::2]
        receive_rows, receive_slots = received[0::2], received[1::2]

        # In order of (rank, token); the sizes are known here, so nothing waits for the device.
        sends = spread(rank_of, hits, sum(send_rows))
        ids = slot_of[sends.rows].masked_fill(~sends.there, -1).to(torch.int32)
        carried = torch.where(sends.there, gather(weights, sends.rows, sends.copies), 0)
        (out_rows, out_weights, out_ids), works = self.ep.exchange(
            "dispatch",
            (gather(rows, sends.rows, sends.copies).to(self.dispatch_dtype), carried, ids),
            send_rows,
            receive_rows,
        )
        plan = AllToAllPlan(
            num_tokens=topk_ids.shape[0],
            topk_ids=topk_ids,
            topk_weights=weights,
            send_rows=send_rows,
            receive_rows=receive_rows,
            send_slots=send_slots,
            receive_slots=receive_slots,
            home_index=slot_places(rank_of) if self.per_slot else sends.copies,
            received_weights=out_weights,
            slot_rows=sends.slot_copies,
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

    @classmethod
    def traffic(cls, flow: Flow) -> Sent:
        return cost.all_to_all(flow)

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

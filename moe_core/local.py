"""The transport for experts that are all here: no exchange, only the sum over the slots."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_core.activation import sum_dtype
from moe_core.contracts import ExchangePlan, Handle, IdSpace, Pending, Routing
from moe_core.errors import MoEError
from moe_core.interfaces import Transport
from moe_core.layouts import Record, SlotMajor, TokenMajor


def sum_slots(rows: Tensor, topk_ids: Tensor, topk_weights: Tensor | None) -> Tensor:
    """``rows [T, K, H]`` → ``[T, H]``: slots in ascending order, rounded once.

    With ``topk_weights`` each row is weighted first. Slots whose id is -1 are masked before the
    multiply: what their rows and weights hold (NaN included) reaches neither result nor gradient.
    """
    acc = sum_dtype(rows.dtype)
    valid = topk_ids >= 0
    total = rows.new_zeros((rows.shape[0], rows.shape[2]), dtype=acc)
    for slot in range(rows.shape[1]):
        row = torch.where(valid[:, slot, None], rows[:, slot], 0).to(acc)
        if topk_weights is not None:
            weight = torch.where(valid[:, slot], topk_weights[:, slot], 0).to(acc)
            row = row * weight[:, None]
        total = total + row
    return total.to(rows.dtype)


class LocalTransport(Transport[ExchangePlan]):
    """``token_major`` out; ``slot_major`` (or rows that are summed already) back in."""

    def dispatch_begin(
        self, hidden_states: Tensor, routing: Routing
    ) -> Pending[tuple[Record, Handle[ExchangePlan]]]:
        topk_ids, topk_weights = routing.ids_and_weights()
        plan = ExchangePlan(hidden_states.shape[0], topk_ids, topk_weights)
        record = TokenMajor(
            rows=hidden_states,
            topk_ids=topk_ids,
            topk_weights=topk_weights,
            id_space=IdSpace.LOCAL,
        )
        return Pending.ready((record, Handle(plan, self)))

    def combine_begin(self, record: Record, handle: Handle[ExchangePlan]) -> Pending[Tensor]:
        plan = handle.consume(self)
        if not isinstance(record, SlotMajor | TokenMajor):
            raise MoEError(
                f"LocalTransport combines slot_major or token_major, not {record.layout}"
            )
        owed = "weight" in self.context.pays
        if owed == ("weight" in record.paid):
            state = "twice" if owed else "never"
            raise MoEError(
                f"the routing weight would be paid {state}: {record.layout} rows say "
                f"paid={record.paid}, this transport pays {self.context.pays}"
            )
        if isinstance(record, TokenMajor):
            return Pending.ready(record.rows)
        weights = plan.topk_weights if owed else None
        return Pending.ready(sum_slots(record.rows, plan.topk_ids, weights))

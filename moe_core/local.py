"""The sums that end a combine, and the transport for experts that are all here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_core.activation import sum_dtype
from moe_core.contracts import ExchangePlan, Handle, IdSpace, Pending, Routing
from moe_core.errors import MoEError
from moe_core.interfaces import Transport
from moe_core.layouts import Record, SlotMajor, TokenMajor

if TYPE_CHECKING:
    from collections.abc import Callable


def sum_slots(rows: Tensor, topk_ids: Tensor, topk_weights: Tensor | None) -> Tensor:
    """``rows [T, K, H]`` → ``[T, H]`` in float32/64, slots in ascending order.

    With ``topk_weights`` each row is weighted first. Slots whose id is -1 are masked before the
    multiply: what their rows and weights hold (NaN included) reaches neither result nor gradient.
    """
    return _sum(lambda slot: rows[:, slot], topk_ids >= 0, topk_weights, rows)


def sum_indexed(rows: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
    """As ``sum_slots`` for ``rows [S, H]`` of which (n, k) is row ``index[n, k]``, -1 = none."""
    if not rows.shape[0]:  # nothing to pick from, and every index is -1
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    places = index.clamp(min=0)
    return _sum(lambda slot: rows.index_select(0, places[:, slot]), index >= 0, weights, rows)


def _sum(
    pick: Callable[[int], Tensor], valid: Tensor, weights: Tensor | None, like: Tensor
) -> Tensor:
    acc = sum_dtype(like.dtype)
    total = like.new_zeros((valid.shape[0], like.shape[-1]), dtype=acc)
    for slot in range(valid.shape[1]):
        row = torch.where(valid[:, slot, None], pick(slot), 0).to(acc)
        if weights is not None:
            row = row * torch.where(valid[:, slot], weights[:, slot], 0).to(acc)[:, None]
        total = total + row
    return total


def check_weight_is_paid_once(record: Record, paid: tuple[str, ...], pays: tuple[str, ...]) -> None:
    """Raises ``MoEError`` where a transport and the rows disagree on who weights."""
    owed = "weight" in pays
    if owed == ("weight" in paid):
        state = "twice" if owed else "never"
        raise MoEError(
            f"the routing weight would be paid {state}: {record.layout} rows say paid={paid}, "
            f"the transport pays {pays}"
        )


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
        check_weight_is_paid_once(record, record.paid, self.context.pays)
        if isinstance(record, TokenMajor):
            return Pending.ready(record.rows)
        weights = plan.topk_weights if "weight" in self.context.pays else None
        total = sum_slots(record.rows, plan.topk_ids, weights)
        return Pending.ready(total.to(record.rows.dtype))

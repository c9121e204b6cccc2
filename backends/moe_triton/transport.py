"""The local transport: slots sorted by expert on the way out, results summed on the way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_core.contracts import ExchangePlan, Handle, IdSpace, Pending, Routing
from moe_core.errors import MoEError
from moe_core.interfaces import Transport
from moe_core.layouts import Indexed, Record, SlotMajor, TokenMajor
from moe_core.local import check_weight_is_paid_once
from moe_triton.reduce import sum_rows
from moe_triton.sorting import sort_slots

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SortedPlan(ExchangePlan):
    """``places`` integer ``[N, K]``: negative for a slot whose result nobody may read. After a sort
    a slot's place among the sorted ones, else the ids themselves. ``is_sorted`` tells which."""

    places: Tensor
    is_sorted: bool

    @property
    def slot_rows(self) -> Tensor | None:
        """int64, for those who trace a call: the place of each slot among the experts' rows."""
        return self.places.long() if self.is_sorted else None


class TritonTransport(Transport[SortedPlan]):
    """All experts are here. ``indexed`` out (one launch for few slots, three for many), or
    ``token_major`` for runners that sort by themselves; ``slot_major`` back in, summed in one
    launch with the weight where that is this part's to pay, or rows that are summed already.

    Sums as ``moe_core.local.sum_slots`` does, to the bit. Nothing waits for the device.
    """

    def dispatch_begin(
        self, hidden_states: Tensor, routing: Routing
    ) -> Pending[tuple[Record, Handle[SortedPlan]]]:
        topk_ids, topk_weights = routing.ids_and_weights()
        num_tokens = hidden_states.shape[0]
        if self.context.gives != "indexed":
            plan = SortedPlan(num_tokens, topk_ids, topk_weights, topk_ids, False)
            record = TokenMajor(hidden_states, topk_ids, topk_weights, IdSpace.LOCAL)
            return Pending.ready((record, Handle(plan, self)))
        token_ids, slot_rows, counts, starts = sort_slots(topk_ids, self.context.num_local_experts)
        plan = SortedPlan(num_tokens, topk_ids, topk_weights, slot_rows, True)
        indexed = Indexed(hidden_states, token_ids, slot_rows, counts, starts, topk_weights)
        return Pending.ready((indexed, Handle(plan, self)))

    def combine_begin(self, record: Record, handle: Handle[SortedPlan]) -> Pending[Tensor]:
        plan = handle.consume(self)
        if not isinstance(record, SlotMajor | TokenMajor):
            raise MoEError(
                f"TritonTransport combines slot_major or token_major, not {record.layout}"
            )
        check_weight_is_paid_once(record, record.paid, self.context.pays)
        if isinstance(record, TokenMajor):
            return Pending.ready(record.rows)
        weights = plan.topk_weights if "weight" in self.context.pays else None
        return Pending.ready(sum_rows(record.rows, plan.places, weights))

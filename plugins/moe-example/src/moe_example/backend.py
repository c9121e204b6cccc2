"""The parts that the manifest names. T tokens, K slots each; H hidden, I intermediate size."""

from __future__ import annotations

import torch
from moe_core import ExchangePlan, ExpertRunner, Handle, InputError, Routing, Transport
from moe_core.activation import activate, sum_dtype
from moe_core.contracts import ExpertWeights, Pending
from moe_core.layouts import Record, SlotMajor, TokenMajor
from moe_core.local import check_weight_is_paid_once, sum_slots
from torch import Tensor

Dispatched = tuple[Record, Handle[ExchangePlan]]


class LocalTransport(Transport[ExchangePlan]):
    """All experts are here: rows leave as they come, and a token's slots are summed at the end."""

    def dispatch_begin(self, hidden_states: Tensor, routing: Routing) -> Pending[Dispatched]:
        ids, weights = routing.ids_and_weights()
        plan = ExchangePlan(hidden_states.shape[0], ids, weights)
        return Pending.ready((TokenMajor(hidden_states, ids, weights), Handle(plan, self)))

    def combine_begin(self, record: Record, handle: Handle[ExchangePlan]) -> Pending[Tensor]:
        plan = handle.consume(self)
        if not isinstance(record, SlotMajor):
            raise InputError(f"LocalTransport takes slot_major rows, not {record.layout}")
        check_weight_is_paid_once(record, record.paid, self.context.pays)
        weights = plan.topk_weights if "weight" in self.context.pays else None
        total = sum_slots(record.rows, plan.topk_ids, weights)  # in float32 or float64
        return Pending.ready(total.to(record.rows.dtype))


class GatherRunner(ExpertRunner):
    """``token_major`` in, ``slot_major`` out: batched products over all (token, slot) pairs."""

    def run(self, record: Record, weights: ExpertWeights) -> Record:
        if not isinstance(record, TokenMajor):
            raise InputError(f"GatherRunner takes token_major rows, not {record.layout}")
        experts = record.topk_ids.clamp(min=0)
        # Empty slots are masked on both ends: no number gets out of them, no gradient in.
        valid = (record.topk_ids >= 0).unsqueeze(-1)
        x = torch.where(valid, record.rows.unsqueeze(1), 0)
        h = torch.einsum("tkh,tkih->tki", x, _per_slot(weights.w13, experts))
        h = activate(h, weights.activation, weights.w13_layout)
        y = torch.einsum("tki,tkhi->tkh", h, _per_slot(weights.w2, experts))
        return SlotMajor(torch.where(valid, y, 0), record.paid)

    def workspace_bytes(self, num_tokens: int, top_k: int) -> int:
        """Without gradients: a copy of ``w13`` per slot, float64 on the way through activate."""
        ask, size = self.context.request, getattr(torch, self.context.dtype).itemsize
        rows = ask.intermediate_size // ask.tp_size * (1 + ask.gated)
        return num_tokens * top_k * ((rows + 3) * ask.hidden_size * size + 4 * rows * 8)


def _per_slot(weights: Tensor, experts: Tensor) -> Tensor:
    """``[E, ...]`` → ``[T, K, ...]``. Slots of one expert add up their gradients in float32/64."""
    if torch.is_grad_enabled() and weights.requires_grad:
        return weights.to(sum_dtype(weights.dtype))[experts].to(weights.dtype)  # exact both ways
    return weights[experts]

"""The oracle: the definition of a MoE layer as loops, on any device, up to float64.

It shares no numeric code with the other backends. Each expert row is computed in float32
(float64 if the layer is) and rounded once to the layer's dtype.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_core.contracts import ExchangePlan, ExpertWeights, Handle, IdSpace, Pending, Routing
from moe_core.errors import MoEError
from moe_core.interfaces import ExpertRunner, Transport
from moe_core.layouts import ExpertContiguous, Record, SlotMajor, TokenMajor

if TYPE_CHECKING:
    from moe_core.config import Activation


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def activate(h: Tensor, activation: Activation, w13_layout: str) -> Tensor:
    """``[..., 2I]`` → ``[..., I]`` with a gate, ``[..., I]`` → ``[..., I]`` without."""
    if not activation.gated:
        gate, up = h, None
    elif w13_layout == "interleaved":
        gate, up = h[..., 0::2], h[..., 1::2]
    else:
        half = h.shape[-1] // 2
        gate, up = h[..., :half], h[..., half:]
        if w13_layout == "up_gate":
            gate, up = up, gate
    limit, before = activation.limit, activation.limit_form == "before"
    if limit is not None and before:
        gate = torch.minimum(gate, torch.full_like(gate, limit))
    if limit is not None and up is not None:
        up = up.clip(-limit, limit)
    if activation.alpha is not None:
        assert up is not None  # the config refuses alpha without a gate
        return gate * torch.sigmoid(activation.alpha * gate) * (up + 1)
    if activation.name == "silu":
        gate = gate * torch.sigmoid(gate)
    elif activation.name == "gelu":
        gate = gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
    elif activation.name == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        gate = gate * 0.5 * (1 + torch.tanh(inner))
    elif activation.name in ("relu", "relu2"):
        gate = torch.where(gate > 0, gate, torch.zeros_like(gate))
        gate = gate * gate if activation.name == "relu2" else gate
    if limit is not None and not before:
        gate = torch.minimum(gate, torch.full_like(gate, limit))
    return gate if up is None else gate * up


def expert_forward(x: Tensor, expert: int, weights: ExpertWeights) -> Tensor:
    """``x [n, H]`` through one expert, in float32/64: ``W2·(act(W1·x) ⊙ W3·x)``."""
    h = wide(x) @ wide(weights.w13[expert]).T
    if weights.w13_bias is not None:
        h = h + wide(weights.w13_bias[expert])
    y = activate(h, weights.activation, weights.w13_layout) @ wide(weights.w2[expert]).T
    if weights.w2_bias is not None:
        y = y + wide(weights.w2_bias[expert])
    return y


class ReferenceRunner(ExpertRunner):
    """One expert after the other, only the rows that chose it."""

    batch_invariant = False  # a matmul's bits may depend on how many rows it has

    def run(self, record: Record, weights: ExpertWeights) -> Record:
        if isinstance(record, TokenMajor):
            return self._run_tokens(record, weights)
        if isinstance(record, ExpertContiguous):
            return self._run_contiguous(record, weights)
        raise MoEError(
            f"ReferenceRunner takes token_major or expert_contiguous, not {record.layout}"
        )

    def _expert(self, x: Tensor, w: Tensor, expert: int, weights: ExpertWeights) -> Tensor:
        pays, on_input = "weight" in self.context.pays, self.context.request.weight_on_input
        if pays and on_input:
            x = (wide(x) * wide(w)[:, None]).to(x.dtype)
        y = expert_forward(x, expert, weights)
        if pays and not on_input:
            y = y * wide(w)[:, None]
        return y.to(x.dtype)

    def _paid(self, record: TokenMajor | ExpertContiguous) -> tuple[str, ...]:
        return record.paid + tuple(d for d in self.context.pays if d == "weight")

    def _run_tokens(self, record: TokenMajor, weights: ExpertWeights) -> SlotMajor:
        n, k = record.topk_ids.shape
        out = record.rows.new_zeros((n, k, record.rows.shape[1]))
        for expert in range(weights.num_local_experts):
            token, slot = (record.topk_ids == expert).nonzero(as_tuple=True)
            y = self._expert(record.rows[token], record.topk_weights[token, slot], expert, weights)
            out = out.index_put((token, slot), y)
        return SlotMajor(rows=out, paid=self._paid(record))

    def _run_contiguous(self, record: ExpertContiguous, weights: ExpertWeights) -> ExpertContiguous:
        out = torch.zeros_like(record.rows)
        counts, starts = record.tokens_per_expert.tolist(), record.expert_starts.tolist()
        for expert in range(weights.num_local_experts):
            rows = torch.arange(starts[expert], starts[expert] + counts[expert], device=out.device)
            y = self._expert(record.rows[rows], record.row_weights[rows], expert, weights)
            out = out.index_put((rows,), y)
        return replace(record, rows=out, paid=self._paid(record))


class ReferenceTransport(Transport[ExchangePlan]):
    """Everything is here; the combine is the definition, one slot after the other."""

    def dispatch_begin(
        self, hidden_states: Tensor, routing: Routing
    ) -> Pending[tuple[Record, Handle[ExchangePlan]]]:
        ids, weights = routing.ids_and_weights()
        record = TokenMajor(
            rows=hidden_states, topk_ids=ids, topk_weights=weights, id_space=IdSpace.LOCAL
        )
        return Pending.ready((record, Handle(ExchangePlan(len(hidden_states), ids, weights), self)))

    def combine_begin(self, record: Record, handle: Handle[ExchangePlan]) -> Pending[Tensor]:
        plan = handle.consume(self)
        if not isinstance(record, SlotMajor):
            raise MoEError(f"ReferenceTransport combines slot_major, not {record.layout}")
        weigh = "weight" in self.context.pays
        if weigh == ("weight" in record.paid):
            raise MoEError(f"the routing weight must be paid once: rows say paid={record.paid}")
        total = wide(record.rows.new_zeros((plan.num_tokens, record.rows.shape[2])))
        for slot in range(plan.topk_ids.shape[1]):
            (token,) = (plan.topk_ids[:, slot] >= 0).nonzero(as_tuple=True)
            row = wide(record.rows[token, slot])
            if weigh:
                row = row * wide(plan.topk_weights[token, slot])[:, None]
            total = total.index_add(0, token, row)
        return Pending.ready(total.to(record.rows.dtype))

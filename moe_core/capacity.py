"""Capacity: how many choices an expert takes from one rank.

Decided at the source rank before anything travels, in token, then slot order, so that the answer
can be explained from one rank's routing and is the same with every backend.

Shapes: T tokens on this rank, K choices per token, E experts, H hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from moe_core.contracts import INVALID, Routing

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.config import MoEConfig


def drop_over_capacity(routing: Routing, config: MoEConfig) -> tuple[Routing, Tensor]:
    """The routing with -1 and weight 0 for every choice over capacity; int64 ``[]`` how many.

    ``expert_capacity`` is taken of the real tokens (``token_mask``). The other weights stay as
    they are. What was chosen stays in ``chosen_ids``; dropping twice is dropping once.
    """
    ids, weights = routing.ids_and_weights()
    flat = torch.where(ids < 0, config.num_experts, ids).flatten()
    ordered, order = torch.sort(flat, stable=True)
    starts = torch.searchsorted(
        ordered, torch.arange(config.num_experts + 1, device=ids.device), side="left"
    )
    place = torch.arange(len(flat), device=ids.device) - starts[ordered]
    kept = (place < _capacity(routing, config)) & (ordered < config.num_experts)
    kept = torch.zeros_like(kept).scatter(0, order, kept).view(ids.shape)
    dropped = ((ids >= 0) & ~kept).sum()
    capped = replace(
        routing,
        topk_ids=torch.where(kept, ids, INVALID),
        topk_weights=torch.where(kept, weights, 0.0),
        chosen_ids=ids if routing.chosen_ids is None else routing.chosen_ids,
    )
    return capped, dropped


def pad_to_capacity(
    hidden_states: Tensor, routing: Routing, config: MoEConfig
) -> tuple[Tensor, Routing]:
    """``config.padding_tokens(T)`` tokens of zeros after ``hidden_states [T, H]``, with weight 0
    for the experts that have room: with them each has exactly its capacity.

    ``routing`` has been through ``drop_over_capacity``. Slots that nobody needs are -1.
    """
    ids, weights = routing.ids_and_weights()
    num_padding = config.padding_tokens(ids.shape[0])
    experts = torch.arange(config.num_experts, device=ids.device)
    bins = torch.where(ids < 0, config.num_experts, ids).flatten()
    counts = torch.zeros(config.num_experts + 1, dtype=torch.int64, device=ids.device)
    counts = counts.scatter_add(0, bins, torch.ones_like(bins))[experts]
    ends = (_capacity(routing, config) - counts).cumsum(0)  # never negative: it was dropped
    slots = torch.arange(num_padding * config.top_k, device=ids.device)
    owner = torch.searchsorted(ends, slots, side="right")
    owner = torch.where(owner < config.num_experts, owner, INVALID).view(num_padding, config.top_k)
    rows = hidden_states.new_zeros(num_padding, hidden_states.shape[1])
    padded = Routing(
        torch.cat([ids, owner]),
        torch.cat([weights, weights.new_zeros(owner.shape)]),
        id_space=routing.id_space,
    )
    return torch.cat([hidden_states, rows]), padded


def _capacity(routing: Routing, config: MoEConfig) -> Any:
    """An int, or an int64 tensor where padding is masked: nothing waits for the host."""
    assert routing.topk_ids is not None
    mask = routing.token_mask
    return config.expert_capacity(routing.topk_ids.shape[0] if mask is None else mask.sum())  # pyright: ignore[reportArgumentType]

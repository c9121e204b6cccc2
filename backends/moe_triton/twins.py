"""What each kernel of the grouped products computes, in plain torch: loops over experts, and
derivatives by autograd. In the dtype of what they are given, so float64 makes them an oracle.

Arguments are named as in ``moe_triton.tiles`` and in the kernels; ``sorted_token_ids`` None means
that rows are found by position. Rows of nobody come back as zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moe_core.activation import activate, sum_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from moe_core.config import Activation


@dataclass(frozen=True)
class Places:
    """Which positions are whose, and where their rows are. ``capacity`` replaces the starts."""

    tokens_per_expert: Tensor
    expert_starts: Tensor | None = None
    sorted_token_ids: Tensor | None = None
    top_k: int = 1
    capacity: int = 0

    def experts(self) -> Iterator[tuple[int, Tensor]]:
        """``(expert, its positions)`` for all, those without rows as well."""
        for expert, count in enumerate(self.tokens_per_expert.tolist()):
            starts = self.expert_starts
            start = expert * self.capacity if starts is None else int(starts[expert])
            yield expert, torch.arange(start, start + count)

    def tokens(self, position: Tensor) -> Tensor:
        return self.slots(position) // self.top_k

    def slots(self, position: Tensor) -> Tensor:
        ids = self.sorted_token_ids
        return position if ids is None else ids[position].long()


def _flat(rows: Tensor) -> Tensor:
    return rows.reshape(-1, rows.shape[-1])


def finish(
    pre: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    activation: Activation,
    w13_layout: str,
) -> Tensor:
    """From a first product ``[n, W]`` to the activation ``[n, I]``, not rounded in between.
    ``weight`` ``[n]``: a routing weight on the input."""
    wide = sum_dtype(pre.dtype)
    h = pre.to(wide) if weight is None else pre.to(wide) * weight.to(wide)[:, None]
    h = h if bias is None else h + bias.to(wide)
    return activate(h, activation, w13_layout, wide)


def up(
    x: Tensor,
    w13: Tensor,
    w13_bias: Tensor | None,
    row_weights: Tensor | None,
    places: Places,
    num_positions: int,
    activation: Activation,
    w13_layout: str,
) -> tuple[Tensor, Tensor]:
    """``up_kernel``: the activation ``[R, I]`` and the first product ``[R, W]``. ``row_weights``
    only where they are applied on the input."""
    inner = w13.shape[1] // (2 if activation.gated else 1)
    act, pre = x.new_zeros(num_positions, inner), x.new_zeros(num_positions, w13.shape[1])
    for expert, position in places.experts():
        h = _flat(x)[places.tokens(position)] @ w13[expert].mT
        bias = None if w13_bias is None else w13_bias[expert]
        weight = None if row_weights is None else row_weights.view(-1)[places.slots(position)]
        pre[position] = h
        act[position] = finish(h, bias, weight, activation, w13_layout).to(x.dtype)
    return act, pre


def down(
    rows: Tensor,
    w: Tensor,
    bias: Tensor | None,
    row_weights: Tensor | None,
    places: Places,
    *,
    by_slot: bool,
) -> Tensor:
    """``down_kernel``: ``[R, out_size]``, by slot or by position."""
    out, wide = rows.new_zeros(rows.shape[0], w.shape[1]), sum_dtype(rows.dtype)
    for expert, position in places.experts():
        y = (rows[position] @ w[expert].mT).to(wide)
        if bias is not None:
            y = y + bias[expert].to(wide)
        if row_weights is not None:
            y = y * row_weights.view(-1)[places.slots(position)].to(wide)[:, None]
        out[places.slots(position) if by_slot else position] = y.to(rows.dtype)
    return out


def down_backward(
    grad: Tensor,
    w2: Tensor,
    w13_bias: Tensor | None,
    row_weights: Tensor | None,
    pre: Tensor,
    places: Places,
    activation: Activation,
    w13_layout: str,
    *,
    on_input: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``down_backward_kernel``: ``grad_pre [R, W]`` (before a weight on the input), ``act [R, I]``
    with the weight on the output, and by slot the weight's gradient ``[R]`` in float32, without
    the output bias's share."""
    wide = sum_dtype(grad.dtype)
    grad_pre, act = torch.zeros_like(pre), pre.new_zeros(pre.shape[0], w2.shape[2])
    by_weight = pre.new_zeros(pre.shape[0], dtype=wide)
    for expert, position in places.experts():
        slot = places.slots(position)
        u = (_flat(grad)[slot] @ w2[expert]).to(wide)
        ones = pre.new_ones(len(slot), dtype=wide)
        weight = ones if row_weights is None else row_weights.view(-1)[slot].to(wide)
        on_in, on_out = (weight, ones) if on_input else (ones, weight)
        bias = None if w13_bias is None else w13_bias[expert].to(wide)
        with torch.enable_grad():
            # the activation's own derivative: of bias + weight * pre by that sum
            scaled = (pre[position].to(wide) * on_in[:, None]).requires_grad_()
            value = finish(scaled, bias, None, activation, w13_layout)
            (by_scaled,) = torch.autograd.grad(value, scaled, u * on_out[:, None])
        value = value.detach()
        grad_pre[position] = by_scaled.to(pre.dtype)
        act[position] = (value * on_out[:, None]).to(pre.dtype)
        products = by_scaled * pre[position].to(wide) if on_input else u * value
        by_weight[slot] = products.sum(1)
    return grad_pre, act, by_weight


def outer(
    a: Tensor,
    b: Tensor,
    row_weights: Tensor | None,
    places: Places,
    *,
    a_by_slot: bool,
    b_by_token: bool,
) -> Tensor:
    """``outer_kernel``: ``[E, a's size, b's size]``."""
    out = a.new_zeros(len(places.tokens_per_expert), a.shape[-1], b.shape[-1])
    for expert, position in places.experts():
        ours = _flat(a)[places.slots(position) if a_by_slot else position]
        theirs = _flat(b)[places.tokens(position) if b_by_token else position]
        if row_weights is not None:
            weight = row_weights.view(-1)[places.slots(position)].to(sum_dtype(b.dtype))
            theirs = (theirs * weight[:, None]).to(b.dtype)
        out[expert] = ours.mT @ theirs
    return out


def bias_backward(
    rows: Tensor, row_weights: Tensor | None, places: Places, *, by_slot: bool
) -> Tensor:
    """``bias_backward_kernel``: ``[E, size]``."""
    out = rows.new_zeros(len(places.tokens_per_expert), rows.shape[-1])
    for expert, position in places.experts():
        mine = _flat(rows)[places.slots(position) if by_slot else position]
        mine = mine.to(sum_dtype(rows.dtype))
        if row_weights is not None:
            mine = mine * row_weights.view(-1)[places.slots(position)].to(mine.dtype)[:, None]
        out[expert] = mine.sum(0).to(rows.dtype)
    return out


def bias_product(grad: Tensor, bias: Tensor, places: Places, num_positions: int) -> Tensor:
    """``bias_product_kernel``: by slot ``[R]``, in float32."""
    wide = sum_dtype(grad.dtype)
    out = grad.new_zeros(num_positions, dtype=wide)
    for expert, position in places.experts():
        slot = places.slots(position)
        out[slot] = _flat(grad)[slot].to(wide) @ bias[expert].to(wide)
    return out

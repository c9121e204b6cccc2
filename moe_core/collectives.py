"""Sums over process groups, and the two ends of a region where each rank computes a part of one.

Gradients are summed in float32 (float64 where they are) and rounded once, whatever their dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from moe_core.activation import sum_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor
    from torch.distributed import ProcessGroup


def sum_over(value: Tensor, groups: Iterable[ProcessGroup]) -> Tensor:
    """The sum of the ranks' values, a new tensor without a gradient. Collective over each group."""
    value = value.detach().clone(memory_format=torch.contiguous_format)
    for group in groups:
        dist.all_reduce(value, group=group)
    return value


def sum_widely(value: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    """``total(value)`` in ``sum_dtype``, rounded once to the value's dtype."""
    return total(value.to(sum_dtype(value.dtype))).to(value.dtype)


def enter(total: Callable[[Tensor], Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors that all ranks hold alike and each computes a part from: their gradients are summed.

    ``total``: tensor → the sum of the ranks' ones, a new tensor; collective.
    """
    return _Enter.apply(total, *tensors)  # pyright: ignore[reportReturnType]


def leave(total: Callable[[Tensor], Tensor], part: Tensor) -> Tensor:
    """The parts summed, on all ranks; each part's gradient is the sum's."""
    return _Leave.apply(total, part)  # pyright: ignore[reportReturnType]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.total = total
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (None, *(sum_widely(g, ctx.total) for g in grads))


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Any, part: Tensor) -> Tensor:
        return total(part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, grads[0]

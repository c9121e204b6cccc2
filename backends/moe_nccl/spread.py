"""Which copy of a row goes where, as indices: what every exchange of rows is made from.

``dest [N, K]``: for each slot of N rows the destination it is bound for, -1 = none. A row is copied
once per destination, not once per slot; copies lie in the order (destination, row). No host sync.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Spread:
    """P copies of N rows over ``size`` destinations.

    ``rows`` int64 ``[P]``: the row that each copy is of. ``there`` bool ``[P, K]``: which of its
    slots are bound for its destination. ``copies`` int64 ``[N, min(K, size)]``: places of a row's
    copies, destinations ascending, -1 = no more. ``slot_copies`` int64 ``[N, K]``: place of the
    copy that carries each slot, -1 = none.
    """

    rows: Tensor
    there: Tensor
    copies: Tensor
    slot_copies: Tensor


def slot_hits(dest: Tensor, size: int) -> Tensor:
    """bool ``[size, N, K]``: which slots are bound for each destination."""
    return dest[None] == torch.arange(size, device=dest.device)[:, None, None]


def spread(dest: Tensor, hits: Tensor, num_copies: int) -> Spread:
    """``hits`` bool ``[size, N]``: rows with a slot for each destination, ``num_copies`` True."""
    num_rows = max(hits.shape[1], 1)
    pairs = torch.nonzero_static(hits.flatten(), size=num_copies).squeeze(1)
    rows, to = pairs % num_rows, pairs // num_rows
    places = torch.where(hits, hits.flatten().cumsum(0).view_as(hits) - 1, hits.numel()).t()
    first = places.sort(1).values[:, : min(dest.shape[1], hits.shape[0])]
    return Spread(
        rows=rows,
        there=dest[rows] == to[:, None],
        copies=first.masked_fill(first == hits.numel(), -1),
        slot_copies=places.gather(1, dest.clamp(min=0)).masked_fill(dest < 0, -1),
    )


def slot_places(dest: Tensor) -> Tensor:
    """``[N, K]``: places of the slots in (destination, row, slot) order, -1 for invalid ones."""
    flat = dest.flatten()
    invalid = flat < 0
    order = flat.masked_fill(invalid, torch.iinfo(flat.dtype).max).argsort(stable=True)
    return inverse(order).masked_fill(invalid, -1).view_as(dest)


def inverse(order: Tensor) -> Tensor:
    """The permutation that undoes ``order [n]``."""
    places = torch.arange(order.shape[0], device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


def transposed(lengths: Tensor, total: int) -> Tensor:
    """int64 ``[total]``: where each element of segments (b, a) lies among segments (a, b).

    ``lengths [A, B]``: of segment (a, b); together ``total``.
    """
    flat, turned = lengths.flatten(), lengths.t().flatten()
    starts = (flat.cumsum(0) - flat).view_as(lengths).t().flatten()
    shift = starts - (turned.cumsum(0) - turned)
    shifts = torch.repeat_interleave(shift, turned, output_size=total)
    return shifts + torch.arange(total, device=lengths.device)

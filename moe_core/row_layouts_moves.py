"""The collectives under ``moe_core.row_layouts``: rows from those who own them to those who need
them, and sums of parts on the way home. No padding: every exchange has lengths of its own.

A *holding* is a tuple, place among the ranks → number of the group that holds the same rows. A
group's rows are those that its ranks own, one rank after the other.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from moe_core.activation import sum_dtype
from moe_core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

Holding = tuple[int, ...]
Owned = tuple[int, ...]
"""Place → rows that this rank owns."""


class Mover:
    """Carries rows among ``ranks`` (global). Two movers of the same ranks share a group.

    ``sent_bytes``: kind of exchange → bytes that this rank sent to others; ``collectives``: kind →
    how many.
    """

    def __init__(self, ranks: Sequence[int], own: int, *, with_group: bool) -> None:
        self.ranks, self.place = tuple(ranks), ranks.index(own)
        self.places = range(len(ranks))
        self.group = _group_of(self.ranks) if with_group else None
        self.sent_bytes: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()

    def members(self, holding: Holding, place: int) -> list[int]:
        """Places of those who hold the same rows."""
        return [i for i in self.places if holding[i] == holding[place]]

    def shares(self, counts: Sequence[int], holding: Holding) -> Owned:
        """``counts[i]`` rows are held at place i; each is owned by one of those who hold it. The
        shares are those of ``torch.tensor_split``."""
        sizes, seen, owned = Counter(holding), Counter[int](), list[int]()
        for count, group in zip(counts, holding, strict=True):
            share, extra = divmod(count, sizes[group])
            owned.append(share + (seen[group] < extra))
            seen[group] += 1
        return tuple(owned)

    def copy(
        self, kind: str, rows: Tensor, owned: Owned, source: Holding, target: Holding
    ) -> Tensor:
        """Rows as ``source`` holds them → as ``target`` does. What a rank lacks comes once, from
        its owner; where no rank lacks any nothing is communicated."""
        me, received = self.place, list[Any]()
        wanted = self.members(target, me)
        if lacks(source, target):
            mine = _chunk(rows, owned, source, me)
            moves = [target[p] == target[me] and source[p] != source[me] for p in self.places]
            received = self.all_to_all(
                kind,
                torch.cat([mine if moving else mine[:0] for moving in moves]),
                [owned[me] if moving else 0 for moving in moves],
                [n if moving else 0 for n, moving in zip(owned, moves, strict=True)],
            )
        return torch.cat(
            [
                _chunk(rows, owned, source, o) if source[o] == source[me] else received[o]
                for o in wanted
            ]
        )

    def sum(
        self, kind: str, parts: Tensor, owned: Owned, source: Holding, target: Holding
    ) -> Tensor:
        """Each rank's part of its rows → the sums of those who hold the same, as ``target`` holds
        them. Summed where a row is owned, ranks ascending, in float32 (float64), rounded once."""
        me = self.place
        same = self.members(source, me)
        others = [p in same and p != me for p in self.places]
        received = [parts[:0]] * len(self.ranks)
        if len(same) > 1:
            received = self.all_to_all(
                kind,
                torch.cat([_chunk(parts, owned, source, p) for p in same if p != me]),
                [n if other else 0 for n, other in zip(owned, others, strict=True)],
                [owned[me] if other else 0 for other in others],
            )
        received[me] = _chunk(parts, owned, source, me)
        total = received[same[0]].to(sum_dtype(parts.dtype))
        for p in same[1:]:
            total = total + received[p]
        return self.copy(kind, total.to(parts.dtype), owned, tuple(self.places), target)

    def all_to_all(
        self, kind: str, rows: Tensor, send: list[int], receive: list[int]
    ) -> list[Tensor]:
        """Contiguous rows for each rank, in order → those from each rank. In bytes: any dtype
        travels."""
        width = rows.shape[1:]
        out = rows.new_empty((sum(receive), *width))
        row_bytes = math.prod(width) * rows.element_size()
        self.collectives[kind] += 1
        self.sent_bytes[kind] += sum(send) * row_bytes
        dist.all_to_all_single(
            out.view(-1).view(torch.uint8).view(sum(receive), row_bytes),
            rows.view(-1).view(torch.uint8).view(sum(send), row_bytes),
            receive,
            send,
            group=self.group,
        )
        return list(out.split(receive))

    def exchange_sizes(self, mine: Sequence[Any], device: torch.device) -> list[list[int]]:
        """Integers of each rank (numbers or tensors) → those of all. The one host sync."""
        row = torch.empty(len(mine), dtype=torch.int64, device=device)
        for place, value in zip(row, mine, strict=True):
            # a number is filled in on the device; copied there it would make the host wait
            place.copy_(value) if isinstance(value, torch.Tensor) else place.fill_(value)
        table = row.new_empty(len(self.ranks), len(mine))
        self.collectives["sizes"] += 1
        self.sent_bytes["sizes"] += row.numel() * row.element_size() * (len(self.ranks) - 1)
        dist.all_gather(list(table.unbind()), row, group=self.group)
        return table.tolist()

    def raise_together(self, fault: str | None, dtype: str | None = None) -> None:
        """Raises ``InputError`` on all ranks if any has a fault, with all ranks' faults, or if
        there are several dtypes."""
        said: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(said, (fault, dtype), group=self.group)
        faults = [f"rank {r}: {t}" for r, (t, _) in zip(self.ranks, said, strict=True) if t]
        dtypes = [dtype for _, dtype in said]
        if not faults and len(set(dtypes)) > 1:
            faults.append(f"what came back differs in dtype: {dtypes} on ranks {[*self.ranks]}")
        if faults:
            raise InputError("; ".join(faults))


class Moved(torch.autograd.Function):
    """``forward(rows)``, whose gradient is ``scale * backward(gradient)``."""

    @staticmethod
    def forward(
        ctx: Any,
        forward: Callable[[Tensor], Tensor],
        backward: Callable[[Tensor], Tensor],
        scale: float,
        rows: Tensor,
    ) -> Tensor:
        ctx.way_back, ctx.scale = backward, scale
        return forward(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad = ctx.way_back(grads[0])
        return None, None, None, grad if ctx.scale == 1 else grad * ctx.scale


def lacks(source: Holding, target: Holding) -> bool:
    """Whether any rank lacks a row on its way from one holding to another."""
    return len(set(zip(target, source, strict=True))) > len(set(target))


def closure(start: int, partitions: Sequence[dict[int, int]]) -> set[int]:
    """Ranks that ``start`` is connected with by being in one group of any of the partitions
    (rank → number of its group)."""
    found, new = {start}, {start}
    while new:
        touched = [{groups[rank] for rank in new} for groups in partitions]
        new = {
            rank
            for groups, numbers in zip(partitions, touched, strict=True)
            for rank, number in groups.items()
            if number in numbers
        } - found
        found |= new
    return found


def _chunk(rows: Tensor, owned: Owned, holding: Holding, owner: int) -> Tensor:
    """What ``owner`` owns of the rows that its group holds."""
    before = zip(owned[:owner], holding, strict=False)
    start = sum(n for n, group in before if group == holding[owner])
    return rows[start : start + owned[owner]]


# Compared with the default group, as in moe_core.groups: a new one makes the old ones void.
_made: dict[tuple[int, ...], tuple[ProcessGroup, ProcessGroup]] = {}


def _group_of(ranks: tuple[int, ...]) -> ProcessGroup:
    """Made once for the same ranks; collective over them the first time."""
    default = cast("ProcessGroup", dist.group.WORLD)
    if ranks == tuple(range(dist.get_world_size())):
        return default
    known = _made.get(ranks)
    if known is None or known[0] is not default:
        group = dist.new_group(list(ranks), use_local_synchronization=True)
        known = _made[ranks] = (default, cast("ProcessGroup", group))
    return known[1]

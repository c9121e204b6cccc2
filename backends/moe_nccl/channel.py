"""Collectives of one process group, differentiable, in bytes so that any dtype travels.

The backward of an exchange is the reverse exchange over the same split sizes: no new counts, no new
host sync. All tensors of one call go out (and their gradients come back) in the order given, on
every rank, also where a rank has nothing to send: nobody waits for a collective that never comes.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from moe_core import environment, tracing
from moe_core.collectives import enter, leave
from moe_core.errors import MoEError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

Splits = list[int]


class Channel:
    """``collectives`` counts exchanges and ``bytes_sent`` what each rank of the group was sent,
    both by kind and since the layer was built (backward too, which no trace sees). With
    ``MOE_DEBUG_COLLECTIVES=1`` (read when built) the ranks compare number, kind and sizes before
    each exchange and raise alike."""

    def __init__(self, group: ProcessGroup | None, ranks: Sequence[int] = (0,)) -> None:
        """``ranks``: global ranks of the layer, in the order of its widths."""
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.global_ranks = [ranks[0]] if group is None else dist.get_process_group_ranks(group)
        self.places = [ranks.index(r) for r in self.global_ranks]
        self.collectives: Counter[str] = Counter()
        self.bytes_sent: dict[str, list[int]] = {}
        self._debug = environment.debug_collectives()

    def exchange(
        self, kind: str, tensors: Sequence[Tensor], send: Splits, receive: Splits
    ) -> tuple[tuple[Tensor, ...], list[Any]]:
        """Rows of each tensor to the ranks, ``send[r]`` of them to rank r. Differentiable.

        Returns the tensors and what to ``wait`` for before reading them.
        """
        works: list[Any] = []
        received = _Exchange.apply(self, kind, send, receive, works, *tensors)
        return received, works  # pyright: ignore[reportReturnType]

    def all_to_all(self, kind: str, tensor: Tensor, send: Splits, receive: Splits) -> Any:
        """One exchange, begun; no gradient. → (result, work)."""
        self._announce(kind, send, receive)
        tensor = _dense(tensor)
        out = tensor.new_empty((sum(receive), *tensor.shape[1:]))
        if self.size == 1:
            out.copy_(tensor)
            return out, None
        self._count_bytes(kind, send, tensor)
        work = dist.all_to_all_single(
            _bytes(out), _bytes(tensor), receive, send, group=self.group, async_op=True
        )
        return out, (work, tensor)  # the tensor must live until the work is done

    def all_gather(self, kind: str, tensor: Tensor) -> Tensor:
        """``[n, ...]``, n equal on all ranks → ``[size * n, ...]``. No gradient."""
        self._announce(kind, [len(tensor)] * self.size, [len(tensor)] * self.size)
        tensor = _dense(tensor)
        out = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        if self.size == 1 or not tensor.numel():
            return out.copy_(tensor) if self.size == 1 else out
        self._count_bytes(kind, [len(tensor)] * self.size, tensor)
        dist.all_gather_into_tensor(_bytes(out), _bytes(tensor), group=self.group)
        return out

    def all_reduce(self, kind: str, tensor: Tensor) -> Tensor:
        """The sum over the ranks, in a new tensor. No gradient."""
        self._announce(kind, [len(tensor)], [len(tensor)])
        out = tensor.clone(memory_format=torch.contiguous_format)
        if self.size > 1 and out.numel():
            dist.all_reduce(out, group=self.group)
        return out

    def _announce(self, kind: str, send: Splits, receive: Splits) -> None:
        self.collectives[kind] += 1
        call = tracing.current()
        if call is not None and self.size > 1:
            call.collectives.append(kind)
        if self._debug and self.size > 1:
            self._cross_check(kind, send, receive)

    def _count_bytes(self, kind: str, send: Splits, tensor: Tensor) -> None:
        call, row = tracing.current(), tensor.element_size() * math.prod(tensor.shape[1:])
        sent = self.bytes_sent.setdefault(kind, [0] * self.size)
        for peer, rows in enumerate(send):
            if peer == self.rank or not rows:
                continue
            sent[peer] += rows * row
            if call is not None:
                call.add_traffic(kind, self.places[self.rank], self.places[peer], rows * row)

    def _cross_check(self, kind: str, send: Splits, receive: Splits) -> None:
        said: list[Any] = [None] * self.size
        number = self.collectives.total()
        dist.all_gather_object(said, (number, kind, send, receive), group=self.group)
        faults = [
            f"rank {r} is at collective {n} ({k}), rank 0 at {said[0][0]} ({said[0][1]})"
            for r, (n, k, _, _) in enumerate(said)
            if (n, k) != said[0][:2]
        ]
        if not faults and len(send) == self.size:
            faults = [
                f"rank {a} sends {said[a][2][b]} rows to rank {b}, which expects {said[b][3][a]}"
                for a in range(self.size)
                for b in range(self.size)
                if said[a][2][b] != said[b][3][a]
            ]
        if faults:
            raise MoEError("ranks disagree before a collective: " + "; ".join(faults))


def wait(works: list[Any]) -> None:
    """Until the exchanges begun are done; their results may be read from here on."""
    for work, _ in filter(None, works):
        work.wait()
    works.clear()


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        channel: Channel,
        kind: str,
        send: Splits,
        receive: Splits,
        works: list[Any],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.channel, ctx.kind, ctx.send, ctx.receive = channel, kind, send, receive
        out: list[Tensor] = []
        for i, tensor in enumerate(tensors):
            received, work = channel.all_to_all(f"{kind}.{i}" if i else kind, tensor, send, receive)
            out.append(received)
            works.append(work)
        ctx.mark_non_differentiable(*(t for t in out if not t.is_floating_point()))
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        home: list[Tensor | None] = []
        for i, grad in enumerate(grads):
            if not grad.is_floating_point():
                home.append(None)
                continue
            kind = f"{ctx.kind}.{i}" if i else ctx.kind
            received, work = ctx.channel.all_to_all(f"{kind}.backward", grad, ctx.receive, ctx.send)
            wait([work])
            home.append(received)
        return (None, None, None, None, None, *home)


def replicate(channel: Channel, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Enter a region where each rank computes a part from tensors that all have."""
    if channel.size == 1:
        return tensors
    return enter(functools.partial(channel.all_reduce, "replicate.backward"), *tensors)


def reduce(channel: Channel, tensor: Tensor) -> Tensor:
    """Leave it: the parts summed, on all ranks."""
    return (
        tensor
        if channel.size == 1
        else leave(functools.partial(channel.all_reduce, "reduce"), tensor)
    )


def _dense(tensor: Tensor) -> Tensor:
    # contiguous() keeps odd strides along dimensions of size 1, and view(dtype) trips over them
    dense = tensor.is_contiguous() and (tensor.ndim == 0 or tensor.stride(-1) == 1)
    return tensor if dense else tensor.clone(memory_format=torch.contiguous_format)


def _bytes(tensor: Tensor) -> Tensor:
    """``[n, ...]`` contiguous → uint8 ``[n, bytes per row]``, for n = 0 as well."""
    rows, per_row = tensor.shape[0], math.prod(tensor.shape[1:])
    return tensor.reshape(rows, per_row).view(torch.uint8)

"""The code of the converters that ``moe_core.converters`` lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moe_core.activation import sum_dtype
from moe_core.contracts import IdSpace
from moe_core.errors import InputError
from moe_core.layouts import ExpertContiguous, Indexed, SlotList, SlotMajor

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.contracts import BuildContext
    from moe_core.layouts import RankGrouped, TokenMajor


@dataclass(frozen=True)
class PermuteState:
    """Where each slot's row went, and back.

    ``slot_rows`` int64 ``[N, K]``: the row of the buffer that holds (token, slot), -1 = none.
    ``row_slots`` int64 ``[R]``: its inverse, a row's flat slot ``token * K + slot``, -1 in the
    tail.
    """

    slot_rows: Tensor
    row_slots: Tensor


class Permute:
    """``token_major`` → ``expert_contiguous``, and ``expert_contiguous`` → ``slot_major`` back.

    N * K rows whatever the ids are, so shapes are static and the host never waits. Rows are copied,
    never added: both ways and in both backwards every sum runs over a token's K slots in slot
    order, without atomics, so results are the same in each run.
    """

    def __init__(self, context: BuildContext) -> None:
        self.num_local_experts = context.num_local_experts

    def there(self, record: TokenMajor | RankGrouped) -> tuple[ExpertContiguous, PermuteState]:
        """Sorts slots by local expert, stable in (token, slot); no alignment gaps.

        ``rows [N, H]``, ``topk_ids [N, K]`` → ``rows [R, H]``: the valid slots first, then a tail
        of zeros. R is N * K, or the number of valid slots where the record knows it. An id outside
        ``[0, E_local)`` counts as -1. Raises ``InputError`` for ids that aren't local.
        """
        top_k = record.topk_ids.shape[1]
        row_slots, slot_rows, starts = sort_slots(record, self.num_local_experts)
        row_slots = row_slots[: getattr(record, "num_slots", None)]
        state = PermuteState(slot_rows.view(-1, top_k), row_slots)
        tokens = torch.where(row_slots < 0, -1, row_slots // top_k)
        weights = record.topk_weights.reshape(-1, 1)
        permuted = ExpertContiguous(
            rows=gather(record.rows, tokens, state.slot_rows),
            tokens_per_expert=starts.diff(),
            expert_starts=starts,
            row_weights=gather(weights, row_slots, slot_rows.unsqueeze(1)).squeeze(1),
            paid=record.paid,
        )
        return permuted, state

    def back(self, record: ExpertContiguous, state: PermuteState) -> SlotMajor:
        """``rows [N * K, H]`` → ``rows [N, K, H]``, zeros in invalid slots."""
        num_tokens, top_k = state.slot_rows.shape
        rows = gather(record.rows, state.slot_rows.reshape(-1), state.row_slots.unsqueeze(1))
        return SlotMajor(rows=rows.view(num_tokens, top_k, rows.shape[1]), paid=record.paid)


class Index:
    """``token_major`` → ``indexed``; the results, ``slot_major``, go back as they are.

    Only ids are sorted: a kernel that takes ``indexed`` gathers its rows while it loads them.
    """

    def __init__(self, context: BuildContext) -> None:
        self.num_local_experts = context.num_local_experts

    def there(self, record: TokenMajor) -> tuple[Indexed, PermuteState]:
        """Ids as ``Permute.there`` reads them; N * K at most 2**31 - 1. Raises ``InputError`` for
        more, and for ids that aren't local."""
        if record.topk_ids.numel() >= 2**31:
            raise InputError(
                f"{record.topk_ids.numel()} slots in one call: int32 counts up to {2**31 - 1}, "
                "pass fewer tokens at a time"
            )
        row_slots, slot_rows, starts = sort_slots(record, self.num_local_experts)
        state = PermuteState(slot_rows.view_as(record.topk_ids), row_slots)
        indexed = Indexed(
            rows=record.rows,
            sorted_token_ids=row_slots.int(),
            slot_rows=state.slot_rows.int(),
            tokens_per_expert=starts.diff(),
            expert_starts=starts,
            topk_weights=record.topk_weights,
            paid=record.paid,
        )
        return indexed, state

    def back(self, record: SlotMajor, state: PermuteState) -> SlotMajor:
        return record


class PermuteReceived(Permute):
    """``rank_grouped`` → ``expert_contiguous``, and ``expert_contiguous`` → ``slot_list`` back."""

    def back(self, record: ExpertContiguous, state: PermuteState) -> SlotList:  # pyright: ignore[reportIncompatibleMethodOverride]
        """``rows [R, H]`` → the same rows in the order of their slots, and where each slot's is."""
        flat = state.slot_rows.reshape(-1)
        valid = flat >= 0
        places = torch.where(valid, valid.cumsum(0) - 1, -1)
        listed = torch.argsort(valid.to(torch.uint8), stable=True, descending=True)
        source = flat[listed[: record.rows.shape[0]]]
        users = torch.where(state.row_slots < 0, -1, places[state.row_slots.clamp(min=0)])
        return SlotList(
            rows=gather(record.rows, source, users.unsqueeze(1)),
            slot_index=places.view_as(state.slot_rows),
            paid=record.paid,
        )


def sort_slots(
    record: TokenMajor | RankGrouped, num_local_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The slots of ``record`` by local expert, stable in (token, slot). Never waits for the device.

    Returns ``(row_slots, slot_rows, expert_starts)``: int64 ``[N * K]``, the flat slot at each
    place, valid ones first, -1 in the tail; int64 ``[N * K]``, its inverse, -1 for an invalid slot;
    int32 ``[E_local + 1]``. An id outside ``[0, E_local)`` counts as -1. Raises ``InputError`` for
    ids that aren't local.
    """
    if record.id_space is not IdSpace.LOCAL:
        raise InputError(
            f"sorting by expert needs local expert ids and was given {record.id_space} ones"
        )
    ids, experts = record.topk_ids.reshape(-1), num_local_experts
    keys = torch.where((ids < 0) | (ids >= experts), experts, ids)
    keys, order = torch.sort(keys, stable=True)
    bounds = torch.arange(experts + 1, dtype=keys.dtype, device=keys.device)
    starts = torch.searchsorted(keys, bounds, out_int32=True)
    # order is a permutation, so this writes each place once
    positions = torch.arange(order.shape[0], device=order.device)
    slot_rows = torch.full_like(order, -1).scatter(
        0, order, torch.where(keys < experts, positions, -1)
    )
    return torch.where(keys < experts, order, -1), slot_rows, starts


def gather(rows: Tensor, index: Tensor, users: Tensor) -> Tensor:
    """``out[j] = rows[index[j]]``, zeros where ``index[j]`` is -1.

    ``rows [n, H]``, ``index [m]``; ``users [n, k]`` lists the j's that read each row, padded with
    -1: the backward gathers and sums them in float32 (float64), in the order listed, and rounds
    once, where an ``index_add`` would use atomics and round in between. What the gradient holds
    elsewhere is never read.
    """
    return _Gather.apply(rows, index, users)  # pyright: ignore[reportReturnType]


def _take(rows: Tensor, index: Tensor) -> Tensor:
    if not rows.shape[0]:  # nothing to take from, and every index is -1
        return rows.new_zeros(index.shape[0], rows.shape[1])
    taken = rows.index_select(0, index.clamp(min=0))
    return torch.where((index < 0).unsqueeze(1), 0, taken)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, users: Tensor) -> Tensor:
        ctx.save_for_backward(users)
        return _take(rows, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (users,) = ctx.saved_tensors
        used = _take(grads[0], users.reshape(-1))
        total = used.view(*users.shape, used.shape[1]).sum(1, dtype=sum_dtype(used.dtype))
        return total.to(used.dtype), None, None

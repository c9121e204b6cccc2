"""Counting sort of slots by expert: all that the ``indexed`` layout needs, in one launch or three.

Stable, without atomics and without a host sync, for any number of experts.

- Few slots (``ONE_LAUNCH``): a slot's place is how many slots sort before it, counted. Quadratic
  work, but every program is on its own, and one launch is what a decode step can afford.
- Many: slots per (block, expert); running sums of those over the blocks; then each slot's place
  from three counts: slots of lower experts, of its expert in earlier blocks, in its own block.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_core.errors import InputError
from moe_triton.runtime import launch

ONE_LAUNCH = 4096
"""Slots up to which counting pairs (at most 16 M of them) beats two more launches."""
SMALL = {"BLOCK": 32, "CHUNK": 128, "num_warps": 4}
LARGE = {"BLOCK": 256, "CHUNK": 32, "num_warps": 8}
SUMS = {"BLOCK": 128, "CHUNK": 16, "num_warps": 4}
MAX_SLOTS = 2**31 - 2**12
"""int32 counts up to 2**31 - 1, the last block's unused slots included."""

_COUNTS = ["num_slots", "slot_blocks", "num_blocks"]  # one variant for any number of tokens


@triton.jit
def _experts(topk_ids, flat, num_slots, num_experts):
    """int32: the local expert of flat slots, ``num_experts`` for an id of none and past the end."""
    ids = tl.load(topk_ids + flat, mask=flat < num_slots, other=-1)
    return tl.where((ids >= 0) & (ids < num_experts), ids, num_experts).to(tl.int32)


@triton.jit
def _place(sorted_token_ids, slot_rows, flat, expert, place, num_slots, num_experts):
    """Writes a slot and its place. Places of invalid slots, which sort last, make the tail."""
    live, valid = flat < num_slots, expert < num_experts
    tl.store(sorted_token_ids + place, tl.where(valid, flat, -1), mask=live)
    tl.store(slot_rows + flat, tl.where(valid, place, -1), mask=live)


@triton.jit(do_not_specialize=_COUNTS)
def count_pairs_kernel(topk_ids, sorted_token_ids, slot_rows, tokens_per_expert, expert_starts,
                       num_slots, num_experts, slot_blocks,
                       BLOCK: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """The first ``slot_blocks`` programs place slots, the others write counts and starts."""
    program = tl.program_id(0)
    below = tl.zeros((BLOCK, CHUNK), tl.int32)
    if program < slot_blocks:
        flat = program * BLOCK + tl.arange(0, BLOCK)
        mine = _experts(topk_ids, flat, num_slots, num_experts)
        for start in range(0, num_slots, CHUNK):
            other = start + tl.arange(0, CHUNK)
            theirs = _experts(topk_ids, other, num_slots, num_experts)[None, :]
            earlier = other[None, :] < flat[:, None]
            first = (theirs < mine[:, None]) | ((theirs == mine[:, None]) & earlier)
            below += first.to(tl.int32)
        place = tl.sum(below, axis=1)
        _place(sorted_token_ids, slot_rows, flat, mine, place, num_slots, num_experts)
    else:
        here = tl.zeros((BLOCK, CHUNK), tl.int32)
        expert = (program - slot_blocks) * BLOCK + tl.arange(0, BLOCK)
        for start in range(0, num_slots, CHUNK):
            other = start + tl.arange(0, CHUNK)
            theirs = _experts(topk_ids, other, num_slots, num_experts)[None, :]
            below += (theirs < expert[:, None]).to(tl.int32)
            here += (theirs == expert[:, None]).to(tl.int32)
        tl.store(tokens_per_expert + expert, tl.sum(here, axis=1), mask=expert < num_experts)
        tl.store(expert_starts + expert, tl.sum(below, axis=1), mask=expert <= num_experts)


@triton.jit(do_not_specialize=_COUNTS)
def histogram_kernel(topk_ids, counts, num_slots, num_experts,
                     BLOCK: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """``counts [blocks, E + 1]``: slots of each block per expert, those of none in the last."""
    block = tl.program_id(0)
    flat = block * BLOCK + tl.arange(0, BLOCK)
    mine = _experts(topk_ids, flat, num_slots, num_experts)
    mine = tl.where(flat < num_slots, mine, -1)[:, None]
    row = counts + block.to(tl.int64) * (num_experts + 1)
    for start in range(0, num_experts + 1, CHUNK):
        expert = start + tl.arange(0, CHUNK)
        found = tl.sum((mine == expert[None, :]).to(tl.int32), axis=0)
        tl.store(row + expert, found, mask=expert <= num_experts)


@triton.jit(do_not_specialize=_COUNTS)
def running_sum_kernel(counts, totals, num_blocks, num_experts,
                       BLOCK: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """``counts`` in place: slots of an expert in earlier blocks. ``totals [E + 1]``: in all."""
    expert = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    exists = expert <= num_experts
    total = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, num_blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        at = block.to(tl.int64)[:, None] * (num_experts + 1) + expert[None, :]
        inside = (block < num_blocks)[:, None] & exists[None, :]
        count = tl.load(counts + at, mask=inside, other=0)
        tl.store(counts + at, total[None, :] + tl.cumsum(count, axis=0) - count, mask=inside)
        total += tl.sum(count, axis=0)
    tl.store(totals + expert, total, mask=exists)


@triton.jit
def _slots_below(totals, expert, num_experts, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    found = tl.zeros((BLOCK, CHUNK), tl.int32)
    for start in range(0, num_experts, CHUNK):
        other = start + tl.arange(0, CHUNK)
        total = tl.load(totals + other, mask=other < num_experts, other=0)
        found += tl.where(other[None, :] < expert[:, None], total[None, :], 0)
    return tl.sum(found, axis=1)


@triton.jit(do_not_specialize=_COUNTS)
def place_kernel(topk_ids, counts, totals, sorted_token_ids, slot_rows, tokens_per_expert,
                 expert_starts, num_slots, num_experts, slot_blocks,
                 BLOCK: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """The first ``slot_blocks`` programs place slots, the others write counts and starts."""
    program = tl.program_id(0)
    if program < slot_blocks:
        first = program * BLOCK
        flat = first + tl.arange(0, BLOCK)
        mine = _experts(topk_ids, flat, num_slots, num_experts)
        earlier = tl.load(counts + program.to(tl.int64) * (num_experts + 1) + mine)
        same = tl.zeros((BLOCK, CHUNK), tl.int32)
        for start in range(0, BLOCK, CHUNK):
            other = first + start + tl.arange(0, CHUNK)
            theirs = _experts(topk_ids, other, num_slots, num_experts)[None, :]
            same += ((theirs == mine[:, None]) & (other[None, :] < flat[:, None])).to(tl.int32)
        place = _slots_below(totals, mine, num_experts, BLOCK, CHUNK)
        place += earlier + tl.sum(same, axis=1)
        _place(sorted_token_ids, slot_rows, flat, mine, place, num_slots, num_experts)
    else:
        expert = (program - slot_blocks) * BLOCK + tl.arange(0, BLOCK)
        total = tl.load(totals + expert, mask=expert < num_experts, other=0)
        tl.store(tokens_per_expert + expert, total, mask=expert < num_experts)
        below = _slots_below(totals, expert, num_experts, BLOCK, CHUNK)
        tl.store(expert_starts + expert, below, mask=expert <= num_experts)


@torch.library.custom_op("moe_triton::sort_slots", mutates_args=())
def sort_slots(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``topk_ids`` int32 or int64 ``[N, K]``, local; an id outside ``[0, num_experts)`` is none.

    Returns, all int32: ``sorted_token_ids`` ``[N * K]``, ``slot_rows`` ``[N, K]``,
    ``tokens_per_expert`` ``[E]`` and ``expert_starts`` ``[E + 1]``, as ``moe_core.layouts.Indexed``
    says. Raises ``InputError`` past ``MAX_SLOTS``.
    """
    num_slots = topk_ids.numel()
    if num_slots > MAX_SLOTS:
        raise InputError(
            f"{num_slots} slots in one call: int32 indices reach {MAX_SLOTS}, pass fewer tokens at "
            "a time"
        )
    ids, made = topk_ids.contiguous(), _outputs(topk_ids, num_experts)
    if num_slots <= ONE_LAUNCH:
        blocks, grid = _grid(num_slots, num_experts, SMALL["BLOCK"])
        launch(count_pairs_kernel, grid, ids, *made, num_slots, num_experts, blocks, **SMALL)
        return made
    blocks, grid = _grid(num_slots, num_experts, LARGE["BLOCK"])
    counts = made[0].new_empty(blocks, num_experts + 1)
    totals = made[0].new_empty(num_experts + 1)
    launch(histogram_kernel, (blocks,), ids, counts, num_slots, num_experts, **LARGE)
    columns = triton.cdiv(num_experts + 1, SUMS["CHUNK"])
    launch(running_sum_kernel, (columns,), counts, totals, blocks, num_experts, **SUMS)
    launch(place_kernel, grid, ids, counts, totals, *made, num_slots, num_experts, blocks, **LARGE)
    return made


@sort_slots.register_fake
def _(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _outputs(topk_ids, num_experts)


def _outputs(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def empty(*shape: Any) -> Tensor:
        return topk_ids.new_empty(shape, dtype=torch.int32)

    return (
        empty(topk_ids.numel()), empty(*topk_ids.shape), empty(num_experts), empty(num_experts + 1)
    )  # fmt: skip


def _grid(num_slots: int, num_experts: int, block: int) -> tuple[int, tuple[int]]:
    """Programs that place slots; those and the ones that write about experts."""
    blocks = triton.cdiv(num_slots, block)
    return blocks, (blocks + triton.cdiv(num_experts + 1, block),)

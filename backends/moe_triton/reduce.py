"""The sum over a token's slots that ends a combine, and its derivative.

``moe_triton::sum_rows`` reads rows where they are: ``rows [R, H]`` with ``slot_rows [N, K]`` saying
which row is whose, or ``rows [N, K, H]`` of which ``slot_rows`` only says which are valid (>= 0).
Slots are added in ascending order in float32, each product rounded by itself (no fused
multiply-add), the sum rounded once: the bits of ``moe_core.local.sum_slots``. What rows and
weights of invalid slots hold reaches nothing.
"""

# To a type checker kernels aren't Python: constexpr arguments, tensors that are subscripted.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_core.errors import InputError
from moe_triton import runtime
from moe_triton.rounding import round_to
from moe_triton.runtime import launch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UNROLLED = 16
"""Slots up to which the loop over them is unrolled, so that all loads are on their way at once."""


@triton.jit
def _row(rows, index, token, slot, stride_r, stride_k, SLOT_MAJOR: tl.constexpr):
    if SLOT_MAJOR:
        return rows + token * stride_r + slot * stride_k
    else:
        return rows + index.to(tl.int64) * stride_r


@triton.jit
def _add_slot(total, rows, slot_rows, weights, token, slot, column, hidden_size,
              stride_r, stride_k, stride_h, stride_sn, stride_sk, stride_wn, stride_wk,
              SLOT_MAJOR: tl.constexpr, WEIGHTED: tl.constexpr):  # fmt: skip
    index = tl.load(slot_rows + token * stride_sn + slot * stride_sk)
    length = tl.where(index >= 0, hidden_size, 0)
    row = _row(rows, index, token, slot, stride_r, stride_k, SLOT_MAJOR)
    value = tl.load(row + column * stride_h, mask=column < length, other=0.0).to(tl.float32)
    if WEIGHTED:
        weight = tl.load(weights + token * stride_wn + slot * stride_wk)
        value = value * tl.where(index >= 0, weight, 0.0).to(tl.float32)
    return total + value


@triton.jit
def sum_rows_kernel(rows, slot_rows, weights, out, hidden_size,
                    stride_r, stride_k, stride_h, stride_sn, stride_sk, stride_wn, stride_wk,
                    TOP_K: tl.constexpr, SLOT_MAJOR: tl.constexpr, WEIGHTED: tl.constexpr,
                    UNROLL: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    """A token and ``BLOCK_H`` columns of its row per program."""
    token = tl.program_id(0).to(tl.int64)
    column = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    total = tl.zeros((BLOCK_H,), tl.float32)
    if UNROLL:
        for slot in tl.static_range(TOP_K):
            total = _add_slot(
                total, rows, slot_rows, weights, token, slot, column, hidden_size, stride_r,
                stride_k, stride_h, stride_sn, stride_sk, stride_wn, stride_wk, SLOT_MAJOR,
                WEIGHTED,
            )  # fmt: skip
    else:
        for slot in range(TOP_K):
            total = _add_slot(
                total, rows, slot_rows, weights, token, slot, column, hidden_size, stride_r,
                stride_k, stride_h, stride_sn, stride_sk, stride_wn, stride_wk, SLOT_MAJOR,
                WEIGHTED,
            )  # fmt: skip
    tl.store(
        out + token * hidden_size + column,
        round_to(total, out.dtype.element_ty),
        mask=column < hidden_size,
    )


@triton.jit
def sum_rows_backward_kernel(grad, rows, slot_rows, weights, grad_rows, grad_weights,
                             hidden_size, top_k, stride_gn, stride_gh,
                             stride_r, stride_k, stride_h, stride_sn, stride_sk,
                             stride_wn, stride_wk,
                             SLOT_MAJOR: tl.constexpr, WEIGHTED: tl.constexpr,
                             NEED_ROWS: tl.constexpr, NEED_WEIGHTS: tl.constexpr,
                             BLOCK_H: tl.constexpr):  # fmt: skip
    """A slot per program. ``grad_rows`` is contiguous and, but for ``[N, K, H]``, zero before."""
    program = tl.program_id(0).to(tl.int64)
    token, slot = program // top_k, program % top_k
    index = tl.load(slot_rows + token * stride_sn + slot * stride_sk)
    length = tl.where(index >= 0, hidden_size, 0)
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(weights + token * stride_wn + slot * stride_wk)
        weight = tl.where(index >= 0, weight, 0.0).to(tl.float32)
    row = _row(rows, index, token, slot, stride_r, stride_k, SLOT_MAJOR)
    if SLOT_MAJOR:
        made, written = grad_rows + program * hidden_size, hidden_size
    else:
        made, written = grad_rows + index.to(tl.int64) * hidden_size, length
    dot = tl.zeros((BLOCK_H,), tl.float32)
    for start in range(0, hidden_size, BLOCK_H):
        column = (start + tl.arange(0, BLOCK_H)).to(tl.int64)
        given = tl.load(
            grad + token * stride_gn + column * stride_gh, mask=column < length, other=0.0
        ).to(tl.float32)
        if NEED_ROWS:
            result = round_to(given * weight, grad_rows.dtype.element_ty)
            tl.store(made + column, result, mask=column < written)
        if NEED_WEIGHTS:
            value = tl.load(row + column * stride_h, mask=column < length, other=0.0)
            dot += value.to(tl.float32) * given
    if NEED_WEIGHTS:
        total = round_to(tl.sum(dot, axis=0), grad_weights.dtype.element_ty)
        tl.store(grad_weights + program, total)


def block_size(hidden_size: int, device: torch.device) -> tuple[int, int]:
    """``BLOCK_H`` and warps: 16 bytes of bfloat16 per thread and load, whatever the batch."""
    block = min(1024, max(16, triton.next_power_of_2(hidden_size)))
    lanes = 64 if runtime.chip(device).family == "gfx942" else 32
    return block, max(1, block // (8 * lanes))


def run_sum_rows(rows: Tensor, slot_rows: Tensor, weights: Tensor | None) -> Tensor:
    """``sum_rows`` itself, which can be planned on meta tensors."""
    _check(rows, slot_rows, weights)
    num_tokens, top_k = slot_rows.shape
    hidden_size = rows.shape[-1]
    out = rows.new_empty(num_tokens, hidden_size)
    block, warps = block_size(hidden_size, rows.device)
    launch(
        sum_rows_kernel,
        (num_tokens, triton.cdiv(hidden_size, block)),
        rows, slot_rows, weights, out, hidden_size, *_strides(rows), *slot_rows.stride(),
        *_weight_strides(weights),
        TOP_K=top_k,
        SLOT_MAJOR=rows.dim() == 3,
        WEIGHTED=weights is not None,
        UNROLL=top_k <= UNROLLED,
        BLOCK_H=block,
        num_warps=warps,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


@torch.library.custom_op("moe_triton::sum_rows", mutates_args=())
def sum_rows(rows: Tensor, slot_rows: Tensor, weights: Tensor | None) -> Tensor:
    """``rows`` ``[R, H]`` or ``[N, K, H]``, ``slot_rows`` integer ``[N, K]``, ``weights`` float
    ``[N, K]`` or None → ``[N, H]`` in the rows' dtype.

    No two slots may name one row. Derivatives: of rows (0 for a row of no slot) and weights (0 for
    an invalid slot). Raises ``InputError`` for other shapes and for dtypes outside ``DTYPES``.
    """
    return run_sum_rows(rows, slot_rows, weights)


@sum_rows.register_fake
def _(rows: Tensor, slot_rows: Tensor, weights: Tensor | None) -> Tensor:
    _check(rows, slot_rows, weights)
    return rows.new_empty(slot_rows.shape[0], rows.shape[-1])


@torch.library.custom_op("moe_triton::sum_rows_backward", mutates_args=())
def sum_rows_backward(
    grad: Tensor,
    rows: Tensor,
    slot_rows: Tensor,
    weights: Tensor | None,
    need_rows: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of ``rows`` and of ``weights``; empty tensors where they aren't needed."""
    num_tokens, top_k = slot_rows.shape
    hidden_size, slot_major = rows.shape[-1], rows.dim() == 3
    grad_rows, grad_weights = _gradients(rows, slot_rows, weights, need_rows, need_weights)
    if need_rows and not slot_major:
        grad_rows.zero_()  # rows of no slot
    block, warps = block_size(hidden_size, rows.device)
    launch(
        sum_rows_backward_kernel,
        (num_tokens * top_k,),
        grad, rows, slot_rows, weights, grad_rows, grad_weights, hidden_size, top_k,
        *grad.stride(), *_strides(rows), *slot_rows.stride(), *_weight_strides(weights),
        SLOT_MAJOR=slot_major,
        WEIGHTED=weights is not None,
        NEED_ROWS=need_rows,
        NEED_WEIGHTS=need_weights,
        BLOCK_H=block,
        num_warps=warps,
        enable_fp_fusion=False,
    )  # fmt: skip
    return grad_rows, grad_weights


@sum_rows_backward.register_fake
def _(
    grad: Tensor,
    rows: Tensor,
    slot_rows: Tensor,
    weights: Tensor | None,
    need_rows: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor]:
    return _gradients(rows, slot_rows, weights, need_rows, need_weights)


def _gradients(
    rows: Tensor, slot_rows: Tensor, weights: Tensor | None, need_rows: bool, need_weights: bool
) -> tuple[Tensor, Tensor]:
    like = rows if weights is None else weights
    return (
        rows.new_empty(rows.shape if need_rows else (0,)),
        like.new_empty(slot_rows.shape if need_weights else (0,)),
    )


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
    rows, slot_rows, weights = ctx.saved_tensors
    need_rows, _, need_weights = ctx.needs_input_grad
    by_row, by_weight = sum_rows_backward(grad, rows, slot_rows, weights, need_rows, need_weights)
    return by_row if need_rows else None, None, by_weight if need_weights else None


sum_rows.register_autograd(_differentiate, setup_context=_save)


def _strides(rows: Tensor) -> tuple[int, int, int]:
    """Of a row (a token), a slot and an element."""
    if rows.dim() == 3:
        return rows.stride(0), rows.stride(1), rows.stride(2)
    return rows.stride(0), 0, rows.stride(1)


def _weight_strides(weights: Tensor | None) -> tuple[int, int]:
    return (0, 0) if weights is None else (weights.stride(0), weights.stride(1))


def _check(rows: Tensor, slot_rows: Tensor, weights: Tensor | None) -> None:
    faults: list[str] = []
    if rows.dim() not in (2, 3):
        faults.append(f"rows must be [R, H] or [N, K, H], got {list(rows.shape)}")
    if slot_rows.dim() != 2 or (rows.dim() == 3 and rows.shape[:2] != slot_rows.shape):
        wanted = list(rows.shape[:2]) if rows.dim() == 3 else "[N, K]"
        faults.append(f"slot_rows must have shape {wanted}, got {list(slot_rows.shape)}")
    if slot_rows.dtype not in (torch.int32, torch.int64):
        faults.append(f"slot_rows must be int32 or int64, got {slot_rows.dtype}")
    if rows.dtype not in DTYPES:
        faults.append(f"rows must be float32, bfloat16 or float16, got {rows.dtype}")
    if weights is not None and weights.shape != slot_rows.shape:
        faults.append(f"weights must have shape {list(slot_rows.shape)}, got {list(weights.shape)}")
    if weights is not None and weights.dtype not in DTYPES:
        faults.append(f"weights must be float32, bfloat16 or float16, got {weights.dtype}")
    if faults:
        raise InputError("; ".join(faults))

"""The derivatives of the grouped products, without atomics: every sum has one owner and one order.

With u = grad @ w2 (the gradient of an activation before the routing weight), a routing weight on
the output has the gradient <u, act> + <grad, w2_bias>, so the second product itself isn't needed
again; neither is the activation, which is made anew from ``pre``.
"""
# Pyright doesn't know what triton.jit makes of a function.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from moe_triton.activations import (
    activate,
    activate_backward,
    gate_column,
    load_gate_up,
    store_gate_up,
    up_column,
)
from moe_triton.tiles import (
    columns_of,
    find_rows,
    find_tile,
    first_position,
    load_bias,
    load_block,
    load_tile,
    load_weights,
    product,
    row_offsets,
    tile_ends,
)

_WEIGHT_NONE = tl.constexpr(0)
_WEIGHT_OUTPUT = tl.constexpr(1)
_WEIGHT_INPUT = tl.constexpr(2)


@triton.jit
def _finish_backward(grad, pre, grad_pre, act, bias, weight, position, inside, first, inner_size,
                     stride_bn, LAYOUT: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr,
                     LIMIT: tl.constexpr, LIMIT_AFTER: tl.constexpr, ALPHA: tl.constexpr,
                     WEIGHT: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """From u = ``grad`` to what ``down_backward_kernel`` makes, for ``BLOCK_N`` columns from
    ``first`` on. Returns float32 ``[m]``: what they add to the gradient of the routing weights."""
    column = first + tl.arange(0, BLOCK_N)
    mask = inside[:, None] & (column < inner_size)[None, :]
    gate_at = gate_column(column, inner_size, LAYOUT)
    up_at = up_column(column, inner_size, LAYOUT)
    width = inner_size
    if GATED:
        width = 2 * inner_size
    gate_raw, up_raw = load_gate_up(
        pre + position * width, first, inside, inner_size, GATED, LAYOUT, BLOCK_N
    )
    gate, up = gate_raw, up_raw
    if WEIGHT == _WEIGHT_INPUT:
        gate *= weight
        up *= weight
    if bias is not None:
        gate += load_bias(bias, gate_at, column < inner_size, stride_bn)
        if GATED:
            up += load_bias(bias, up_at, column < inner_size, stride_bn)
    part = tl.zeros((grad.shape[0],), tl.float32)
    if act is not None or WEIGHT == _WEIGHT_OUTPUT:
        value = activate(gate, up, NAME, GATED, LIMIT, LIMIT_AFTER, ALPHA)
        if WEIGHT == _WEIGHT_OUTPUT:
            part = tl.sum(tl.where(mask, grad * value, 0.0), axis=1)
            value *= weight
            grad *= weight
        if act is not None:
            to = act + (position * inner_size)[:, None] + column[None, :]
            tl.store(to, value.to(act.dtype.element_ty), mask=mask)
    by_gate, by_up = activate_backward(gate, up, grad, NAME, GATED, LIMIT, LIMIT_AFTER, ALPHA)
    if WEIGHT == _WEIGHT_INPUT:
        products = by_gate * gate_raw
        if GATED:
            products += by_up * up_raw
        part = tl.sum(tl.where(mask, products, 0.0), axis=1)
    if grad_pre is not None:
        rows = grad_pre + position * width
        store_gate_up(rows, by_gate, by_up, first, inside, inner_size, GATED, LAYOUT, BLOCK_N)
    return part


@triton.jit
def down_backward_kernel(grad, w2, w13_bias, row_weights, sorted_token_ids, tokens_per_expert,
                         expert_starts, pre, grad_pre, act, weight_parts,
                         num_experts, capacity, hidden_size, inner_size,
                         period, stride_go, stride_gi, stride_gk, stride_we, stride_wn, stride_wk,
                         stride_be, stride_bn, num_parts,
                         LAYOUT: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr,
                         LIMIT: tl.constexpr, LIMIT_AFTER: tl.constexpr, ALPHA: tl.constexpr,
                         BY: tl.constexpr, WEIGHT: tl.constexpr, W_TMA: tl.constexpr,
                         EVEN_K: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
                         EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                         BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
                         PARTS: tl.constexpr):  # fmt: skip
    """From the gradient of the results to that of what the activation was given, ``grad_pre``.

    Also ``act``, the activation times the weight on the output, which ``w2``'s gradient reads, and
    ``weight_parts [., num_parts]``: of a routing weight's gradient what each tile of columns adds,
    by slot or position. Each may be None. ``w2`` is read as ``[E, I, H]`` by its strides; with
    ``W_TMA`` it is a tensor descriptor of ``[E, H, I]``. ``grad_pre`` is before any weight on the
    input: who multiplies with it applies that.
    """
    ends = tile_ends(tokens_per_expert, num_experts, BLOCK_M, EXPERTS)
    tiles_n = tl.cdiv(inner_size, BLOCK_N)
    for tile in range(tl.program_id(0), tl.max(ends, axis=0) * tiles_n, tl.num_programs(0)):
        expert, row, end, first = find_tile(
            ends, tile, tiles_n, tokens_per_expert, expert_starts, capacity, BLOCK_M, BLOCK_N,
            GROUP_M,
        )  # fmt: skip
        position = row + tl.arange(0, BLOCK_M)
        inside = position < end
        position = tl.where(inside, position, row)
        slot = find_rows(position, sorted_token_ids, 1, BY)
        a_rows = grad + row_offsets(slot, period, stride_go, stride_gi)
        column = first + tl.arange(0, BLOCK_N)
        if not W_TMA:
            w_expert = w2 + expert.to(tl.int64) * stride_we
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, hidden_size, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            a = load_tile(a_rows, k, hidden_size, stride_gk, EVEN_K)
            if W_TMA:
                b = w2.load([expert, start, first]).reshape(BLOCK_K, BLOCK_N)
            else:
                b = load_block(
                    w_expert, k, hidden_size, stride_wk, column, inner_size, stride_wn, EVEN_K
                )
            total = product(a, b, total, PRECISION, UPCAST)
        weight = 1.0
        if WEIGHT != _WEIGHT_NONE:
            weight = load_weights(row_weights, position, sorted_token_ids, BY)[:, None]
        bias = w13_bias
        if w13_bias is not None:
            bias += expert.to(tl.int64) * stride_be
        at = position.to(tl.int64)
        by_weight = tl.zeros((BLOCK_M,), tl.float32)
        for part in tl.static_range(PARTS):
            by_weight += _finish_backward(
                columns_of(total, part, PARTS), pre, grad_pre, act, bias, weight, at, inside,
                first + part * (BLOCK_N // PARTS), inner_size, stride_bn, LAYOUT, NAME, GATED,
                LIMIT, LIMIT_AFTER, ALPHA, WEIGHT, BLOCK_N // PARTS,
            )  # fmt: skip
        if weight_parts is not None:
            to = weight_parts + slot.to(tl.int64) * num_parts + first // BLOCK_N
            tl.store(to, by_weight, mask=inside)


@triton.jit
def outer_kernel(a, b, row_weights, sorted_token_ids, tokens_per_expert, expert_starts, out,
                 num_experts, capacity, top_k, a_size, b_size,
                 a_period, stride_ao, stride_ai, stride_ak,
                 b_period, stride_bo, stride_bi, stride_bk,
                 A_BY: tl.constexpr, B_BY: tl.constexpr, W_BY: tl.constexpr,
                 WEIGHTED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                 GROUP_M: tl.constexpr):  # fmt: skip
    """``out[e] = sum of a[r(p)].T * b[s(p)] (* weight)`` over expert e's positions p, in order.

    ``out`` is dense ``[E, a_size, b_size]``; an expert without rows gets zeros. Rows are found by
    ``A_BY`` and ``B_BY``, and weights, which scale b's, by ``W_BY``.
    """
    tiles_m, tiles_n = tl.cdiv(a_size, BLOCK_M), tl.cdiv(b_size, BLOCK_N)
    each = tiles_m * tiles_n
    for tile in range(tl.program_id(0), num_experts * each, tl.num_programs(0)):
        expert, local = tile // each, tile % each
        group = local // (GROUP_M * tiles_n)
        height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
        inside = local - group * GROUP_M * tiles_n
        m = (group * GROUP_M + inside % height) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = (inside // height) * BLOCK_N + tl.arange(0, BLOCK_N)
        a_columns = a + (m.to(tl.int64) * stride_ak)[None, :]
        b_columns = b + (n.to(tl.int64) * stride_bk)[None, :]
        first = first_position(expert_starts, expert, capacity)
        end = first + tl.load(tokens_per_expert + expert)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(first, end, BLOCK_K):
            position = start + tl.arange(0, BLOCK_K)
            mine = position < end
            position = tl.where(mine, position, first)
            a_row = find_rows(position, sorted_token_ids, top_k, A_BY)
            b_row = find_rows(position, sorted_token_ids, top_k, B_BY)
            a_at = row_offsets(a_row, a_period, stride_ao, stride_ai)[:, None]
            b_at = row_offsets(b_row, b_period, stride_bo, stride_bi)[:, None]
            # past the end a is zero and b repeats a row: what lies there may be anything
            a_mask = mine[:, None] & (m < a_size)[None, :]
            a_tile = tl.load(a_columns + a_at, mask=a_mask, other=0.0)
            b_tile = tl.load(b_columns + b_at, mask=(n < b_size)[None, :], other=0.0)
            if WEIGHTED:
                weight = load_weights(row_weights, position, sorted_token_ids, W_BY)[:, None]
                b_tile = (b_tile.to(tl.float32) * weight).to(b_tile.dtype)
            total = product(tl.trans(a_tile), b_tile, total, PRECISION, UPCAST)
        to = out + (expert.to(tl.int64) * a_size + m.to(tl.int64)[:, None]) * b_size + n[None, :]
        mask = (m < a_size)[:, None] & (n < b_size)[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def bias_backward_kernel(rows, row_weights, sorted_token_ids, tokens_per_expert, expert_starts, out,
                         capacity, size, period, stride_o, stride_i, stride_k,
                         BY: tl.constexpr, WEIGHTED: tl.constexpr,
                         BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """``out[e] = sum of rows[r(p)] (* weight)`` over expert e's positions: dense ``[E, size]``."""
    expert = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = rows + (n.to(tl.int64) * stride_k)[None, :]
    first = first_position(expert_starts, expert, capacity)
    end = first + tl.load(tokens_per_expert + expert)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first, end, BLOCK_M):
        position = start + tl.arange(0, BLOCK_M)
        mine = position < end
        position = tl.where(mine, position, first)
        row = find_rows(position, sorted_token_ids, 1, BY)
        at = row_offsets(row, period, stride_o, stride_i)[:, None]
        mask = mine[:, None] & (n < size)[None, :]
        value = tl.load(columns + at, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= load_weights(row_weights, position, sorted_token_ids, BY)[:, None]
        total += value
    result = tl.sum(total, axis=0).to(out.dtype.element_ty)
    tl.store(out + expert.to(tl.int64) * size + n, result, mask=n < size)


@triton.jit
def bias_product_kernel(grad, bias, sorted_token_ids, tokens_per_expert, expert_starts,
                        weight_parts, num_experts, capacity, size, num_parts,
                        period, stride_o, stride_i, stride_k, stride_be, stride_bn,
                        BY: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr,
                        BLOCK_N: tl.constexpr):  # fmt: skip
    """``<grad[r(p)], bias[e]>`` of each position into the last column of ``weight_parts``."""
    ends = tile_ends(tokens_per_expert, num_experts, BLOCK_M, EXPERTS)
    for tile in range(tl.program_id(0), tl.max(ends, axis=0), tl.num_programs(0)):
        expert, row, end, _ = find_tile(
            ends, tile, 1, tokens_per_expert, expert_starts, capacity, BLOCK_M, BLOCK_N, 1
        )
        position = row + tl.arange(0, BLOCK_M)
        inside = position < end
        position = tl.where(inside, position, row)
        slot = find_rows(position, sorted_token_ids, 1, BY)
        rows = grad + row_offsets(slot, period, stride_o, stride_i)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, size, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            value = load_tile(rows, n, size, stride_k, False).to(tl.float32)
            at = bias + expert.to(tl.int64) * stride_be + n.to(tl.int64) * stride_bn
            total += value * tl.load(at, mask=n < size, other=0.0).to(tl.float32)[None, :]
        to = weight_parts + slot.to(tl.int64) * num_parts + num_parts - 1
        tl.store(to, tl.sum(total, axis=1), mask=inside)

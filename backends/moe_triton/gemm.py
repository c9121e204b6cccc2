"""The two grouped products of the forward. Grids are persistent: any number of programs will do.

R positions (``moe_triton.tiles``), H hidden size, I intermediate size. Only rows of experts are
read and written; a tile's surplus rows repeat its first one and are not stored.
"""
# Pyright doesn't know what triton.jit makes of a function.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from moe_triton.activations import activate, gate_column, store_gate_up, up_column
from moe_triton.tiles import (
    columns_of,
    find_rows,
    find_tile,
    load_bias,
    load_block,
    load_tile,
    load_weights,
    product,
    row_offsets,
    tile_ends,
)

WEIGHT_NONE, WEIGHT_OUTPUT, WEIGHT_INPUT = 0, 1, 2
"""Where the runner applies the routing weight."""

_WEIGHT_INPUT = tl.constexpr(WEIGHT_INPUT)
_INTERLEAVED = tl.constexpr(2)


@triton.jit
def _finish_up(gate, up, act, pre, bias, weight, position, inside, first, inner_size, stride_bn,
               LAYOUT: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
               LIMIT_AFTER: tl.constexpr, ALPHA: tl.constexpr, WEIGHT: tl.constexpr,
               BLOCK_N: tl.constexpr):  # fmt: skip
    """From products to ``act`` and ``pre``, for ``BLOCK_N`` columns from ``first`` on."""
    column = first + tl.arange(0, BLOCK_N)
    if pre is not None:
        width = inner_size
        if GATED:
            width = 2 * inner_size
        rows = pre + position * width
        store_gate_up(rows, gate, up, first, inside, inner_size, GATED, LAYOUT, BLOCK_N)
    if act is not None:
        if WEIGHT == _WEIGHT_INPUT:
            gate *= weight
            up *= weight
        if bias is not None:
            some = column < inner_size
            gate += load_bias(bias, gate_column(column, inner_size, LAYOUT), some, stride_bn)
            if GATED:
                up += load_bias(bias, up_column(column, inner_size, LAYOUT), some, stride_bn)
        value = activate(gate, up, NAME, GATED, LIMIT, LIMIT_AFTER, ALPHA)
        mask = inside[:, None] & (column < inner_size)[None, :]
        to = act + (position * inner_size)[:, None] + column[None, :]
        tl.store(to, value.to(act.dtype.element_ty), mask=mask)


@triton.jit
def up_kernel(x, w13, w13_bias, row_weights, sorted_token_ids, tokens_per_expert, expert_starts,
              act, pre, num_experts, capacity, top_k, hidden_size, inner_size,
              period, stride_xo, stride_xi, stride_xk, stride_we, stride_wn, stride_wk,
              stride_be, stride_bn,
              LAYOUT: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
              LIMIT_AFTER: tl.constexpr, ALPHA: tl.constexpr, BY: tl.constexpr,
              WEIGHT: tl.constexpr, W_TMA: tl.constexpr, EVEN_K: tl.constexpr,
              PRECISION: tl.constexpr, UPCAST: tl.constexpr, EXPERTS: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
              GROUP_M: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """``act[p] = f(x[row(p)] @ w13[e].T)`` in the rows' dtype, the product itself into ``pre``.

    ``pre`` (or None) holds it before bias and weight, as ``w13`` lies. ``act`` may be None too.
    With ``WEIGHT_INPUT`` the routing weight scales the product, which is the product of a scaled
    row. ``w13`` is a tensor descriptor where ``W_TMA``.
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
        source = find_rows(position, sorted_token_ids, top_k, BY)
        a_rows = x + row_offsets(source, period, stride_xo, stride_xi)
        column = first + tl.arange(0, BLOCK_N)
        some = tl.where(column < inner_size, column, 0)
        gate_at = gate_column(some, inner_size, LAYOUT)
        up_at = up_column(some, inner_size, LAYOUT)
        if not W_TMA:
            w_expert = w13 + expert.to(tl.int64) * stride_we
            gate_rows = w_expert + gate_at.to(tl.int64) * stride_wn
            up_rows = w_expert + up_at.to(tl.int64) * stride_wn
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, hidden_size, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            a = load_tile(a_rows, k, hidden_size, stride_xk, EVEN_K)
            if W_TMA:
                # interleaved: a descriptor of [E, I, 2H], a gate and its up side by side
                if LAYOUT == _INTERLEAVED and GATED:
                    b = w13.load([expert, first, start])
                else:
                    b = w13.load([expert, gate_column(first, inner_size, LAYOUT), start])
                b = b.reshape(BLOCK_N, BLOCK_K)
            else:
                b = load_tile(gate_rows, k, hidden_size, stride_wk, EVEN_K)
            gate = product(a, tl.trans(b), gate, PRECISION, UPCAST)
            if GATED:
                if W_TMA:
                    if LAYOUT == _INTERLEAVED:
                        c = w13.load([expert, first, hidden_size + start])
                    else:
                        c = w13.load([expert, up_column(first, inner_size, LAYOUT), start])
                    c = c.reshape(BLOCK_N, BLOCK_K)
                else:
                    c = load_tile(up_rows, k, hidden_size, stride_wk, EVEN_K)
                up = product(a, tl.trans(c), up, PRECISION, UPCAST)
        weight = 1.0
        if WEIGHT == _WEIGHT_INPUT and act is not None:
            weight = load_weights(row_weights, position, sorted_token_ids, BY)[:, None]
        bias = w13_bias
        if w13_bias is not None:
            bias += expert.to(tl.int64) * stride_be
        at = position.to(tl.int64)
        for part in tl.static_range(PARTS):
            _finish_up(
                columns_of(gate, part, PARTS), columns_of(up, part, PARTS), act, pre, bias, weight,
                at, inside, first + part * (BLOCK_N // PARTS), inner_size, stride_bn, LAYOUT, NAME,
                GATED, LIMIT, LIMIT_AFTER, ALPHA, WEIGHT, BLOCK_N // PARTS,
            )  # fmt: skip


@triton.jit
def down_kernel(rows, w, bias, row_weights, sorted_token_ids, tokens_per_expert, expert_starts, out,
                num_experts, capacity, in_size, out_size,
                stride_we, stride_wn, stride_wk, stride_be, stride_bn,
                BY: tl.constexpr, WEIGHTED: tl.constexpr, TMA: tl.constexpr, W_KN: tl.constexpr,
                EVEN_K: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
                EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr):  # fmt: skip
    """``out[r] = weight * (rows[p] @ w[e].T + bias[e])`` for dense ``rows [R, in_size]``.

    ``r`` is the slot of position p with ``BY`` = ``SLOT`` (``out`` is then ``SlotMajor``'s rows),
    else p. ``w`` is read as ``[E, out_size, in_size]`` by its strides. With ``TMA``, ``rows`` and
    ``w`` are tensor descriptors, ``w`` of ``[E, in_size, out_size]`` where ``W_KN``.
    """
    ends = tile_ends(tokens_per_expert, num_experts, BLOCK_M, EXPERTS)
    tiles_n = tl.cdiv(out_size, BLOCK_N)
    for tile in range(tl.program_id(0), tl.max(ends, axis=0) * tiles_n, tl.num_programs(0)):
        expert, row, end, first = find_tile(
            ends, tile, tiles_n, tokens_per_expert, expert_starts, capacity, BLOCK_M, BLOCK_N,
            GROUP_M,
        )  # fmt: skip
        position = row + tl.arange(0, BLOCK_M)
        inside = position < end
        position = tl.where(inside, position, row)
        column = first + tl.arange(0, BLOCK_N)
        if not TMA:
            a_rows = rows + position.to(tl.int64) * in_size
            w_expert = w + expert.to(tl.int64) * stride_we
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, in_size, BLOCK_K):
            if TMA:
                # rows past the expert's last are others' and are not stored
                a = rows.load([row, start])
                if W_KN:
                    b = w.load([expert, start, first]).reshape(BLOCK_K, BLOCK_N)
                else:
                    b = tl.trans(w.load([expert, first, start]).reshape(BLOCK_N, BLOCK_K))
            else:
                k = start + tl.arange(0, BLOCK_K)
                a = load_tile(a_rows, k, in_size, 1, EVEN_K)
                if W_KN:
                    b = load_block(
                        w_expert, k, in_size, stride_wk, column, out_size, stride_wn, EVEN_K
                    )
                else:
                    some = tl.where(column < out_size, column, 0).to(tl.int64)
                    w_rows = w_expert + some * stride_wn
                    b = tl.trans(load_tile(w_rows, k, in_size, stride_wk, EVEN_K))
            total = product(a, b, total, PRECISION, UPCAST)
        if bias is not None:
            at = bias + expert.to(tl.int64) * stride_be
            total += load_bias(at, column, column < out_size, stride_bn)
        slot = find_rows(position, sorted_token_ids, 1, BY)
        if WEIGHTED:
            total *= load_weights(row_weights, position, sorted_token_ids, BY)[:, None]
        to = out + (slot.to(tl.int64) * out_size)[:, None] + column[None, :]
        mask = inside[:, None] & (column < out_size)[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=mask)

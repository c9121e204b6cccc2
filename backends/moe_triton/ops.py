"""The experts as one differentiable operator: ``moe_triton::experts``, and how it launches kernels.

Shapes: R positions (rows sorted by expert, ``moe_triton.tiles``), E experts, H hidden size, I
intermediate size, W = 2I (I without a gate). Three forms, told apart by what is given:

    indexed            x [N, H], sorted_token_ids [N * K], slot_rows [N, K]     -> [N, K, H]
    expert_contiguous  x [R, H], expert_starts [E + 1]                          -> [R, H]
    expert_masked      x [E, C, H]                                              -> [E, C, H]

Memory: a forward makes the activation ``[R, I]``. With ``save`` it also returns the first product
``[R, W]``, which is all that the backward needs besides the operator's arguments; without it the
backward computes that product again. The backward makes ``[R, W]``, ``[R, I]`` and, for x's
gradient, ``[R, H]``. Nothing waits for the device, nothing is summed with atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from moe_triton import tiles
from moe_triton.gemm import WEIGHT_INPUT, WEIGHT_OUTPUT
from moe_triton.launches import (
    launch_bias_backward,
    launch_bias_product,
    launch_down,
    launch_down_backward,
    launch_outer,
    launch_up,
    make_job,
)
from moe_triton.reduce import run_sum_rows


def run_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    row_weights: Tensor | None,
    sorted_token_ids: Tensor | None,
    slot_rows: Tensor | None,
    tokens_per_expert: Tensor,
    expert_starts: Tensor | None,
    w13_layout: str,
    activation: str,
    gated: bool,
    limit: float | None,
    limit_after: bool,
    alpha: float | None,
    weight_on_input: bool,
    save: bool,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor]:
    """``(results, first product)``: shapes as the module says, the product empty without ``save``.

    ``row_weights`` (or None: nobody weighs here) has the shape of the results without H. Rows of
    nobody and of invalid slots are left as the memory was. The activation is
    ``moe_core.config.Activation``'s fields.
    """
    job = make_job(
        x, w13_bias, w2, row_weights, sorted_token_ids, slot_rows, tokens_per_expert, expert_starts,
        w13_layout, activation, gated, limit, limit_after, alpha, weight_on_input, batch_invariant,
    )  # fmt: skip
    out, pre = _results(x, w13, slot_rows, save)
    act = x.new_empty(job.num_positions, job.inner_size)
    launch_up(job, x, w13, w13_bias, act, pre if save else None)
    by, weighted = job.by_slot, job.weight == WEIGHT_OUTPUT
    launch_down(job, act, w2, w2_bias, out, by=by, weighted=weighted)
    return out, pre


experts: Any = torch.library.custom_op("moe_triton::experts", run_experts, mutates_args=())


def _results(x: Tensor, w13: Tensor, slot_rows: Tensor | None, save: bool) -> tuple[Tensor, Tensor]:
    shape = tuple(x.shape) if slot_rows is None else (*slot_rows.shape, x.shape[-1])
    num_positions = 1
    for size in shape[:-1]:
        num_positions *= size
    return x.new_empty(shape), x.new_empty((num_positions, w13.shape[1]) if save else (0,))


@experts.register_fake
def _(x, w13, w2, w13_bias, w2_bias, row_weights, sorted_token_ids, slot_rows, tokens_per_expert,
      expert_starts, w13_layout, activation, gated, limit, limit_after, alpha, weight_on_input,
      save, batch_invariant):  # fmt: skip
    return _results(x, w13, slot_rows, save)


def run_experts_backward(
    grad: Tensor,
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    row_weights: Tensor | None,
    sorted_token_ids: Tensor | None,
    slot_rows: Tensor | None,
    tokens_per_expert: Tensor,
    expert_starts: Tensor | None,
    pre: Tensor,
    w13_layout: str,
    activation: str,
    gated: bool,
    limit: float | None,
    limit_after: bool,
    alpha: float | None,
    weight_on_input: bool,
    batch_invariant: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, w13, w2, w13_bias, w2_bias and row_weights; empty ones where ``needs`` says
    no. Idle experts get zeros, and so do rows of nobody. An empty ``pre`` is computed again."""
    job = make_job(
        x, w13_bias, w2, row_weights, sorted_token_ids, slot_rows, tokens_per_expert, expert_starts,
        w13_layout, activation, gated, limit, limit_after, alpha, weight_on_input, batch_invariant,
    )  # fmt: skip
    made = _gradients(x, w13, w2, w13_bias, w2_bias, row_weights, needs)
    need_x, need_w13, need_w2, need_b13, need_b2, need_weights = needs
    by_x, by_w13, by_w2, by_b13, by_b2, by_weights = made
    positions, width, inner = job.num_positions, job.width, job.inner_size
    if pre.dim() == 1:
        pre = x.new_empty(positions, width)
        launch_up(job, x, w13, w13_bias, None, pre)
    config = job.config("down_backward", inner, job.hidden_size)
    inward = need_x or need_w13 or need_b13
    grad_pre = x.new_empty(positions, width) if inward else None
    act = x.new_empty(positions, inner) if need_w2 else None
    parts = None
    if need_weights:
        owed = w2_bias if job.weight == WEIGHT_OUTPUT else None
        count = triton.cdiv(inner, config.block_n) + (owed is not None)
        parts = x.new_zeros(positions, count, dtype=torch.float32)
        if owed is not None:
            launch_bias_product(job, grad, owed, parts)
    if inward or need_w2 or need_weights:
        launch_down_backward(job, grad, w2, w13_bias, pre, grad_pre, act, parts, config)
    if parts is not None:
        by_weights.view(-1).copy_(parts.sum(1))
    on_input, on_output = job.weight == WEIGHT_INPUT, job.weight == WEIGHT_OUTPUT
    if need_x and grad_pre is not None:
        if slot_rows is None:
            launch_down(
                job, grad_pre, w13.transpose(1, 2), None, by_x.zero_(), by=tiles.NONE,
                weighted=on_input,
            )  # fmt: skip
        else:
            by_slot = x.new_empty(*slot_rows.shape, job.hidden_size)
            launch_down(
                job, grad_pre, w13.transpose(1, 2), None, by_slot, by=tiles.SLOT, weighted=on_input
            )
            by_x = run_sum_rows(by_slot, slot_rows, None)
    if need_w13 and grad_pre is not None:
        launch_outer(
            job, grad_pre, x, by_w13, a_by=tiles.NONE, b_by=job.by_token, weighted=on_input
        )
    if need_w2 and act is not None:
        launch_outer(job, grad, act, by_w2, a_by=job.by_slot, b_by=tiles.NONE, weighted=False)
    if need_b13 and grad_pre is not None:
        launch_bias_backward(job, grad_pre, by_b13, by=tiles.NONE, weighted=False)
    if need_b2:
        launch_bias_backward(job, grad, by_b2, by=job.by_slot, weighted=on_output)
    return by_x, by_w13, by_w2, by_b13, by_b2, by_weights


experts_backward: Any = torch.library.custom_op(
    "moe_triton::experts_backward", run_experts_backward, mutates_args=()
)


def _gradients(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    row_weights: Tensor | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors = (x, w13, w2, w13_bias, w2_bias, row_weights)
    made = [
        x.new_empty(0) if t is None or not need else t.new_empty(t.shape)
        for t, need in zip(tensors, needs, strict=True)
    ]
    return made[0], made[1], made[2], made[3], made[4], made[5]


@experts_backward.register_fake
def _(grad, x, w13, w2, w13_bias, w2_bias, row_weights, sorted_token_ids, slot_rows,
      tokens_per_expert, expert_starts, pre, w13_layout, activation, gated, limit, limit_after,
      alpha, weight_on_input, batch_invariant, needs):  # fmt: skip
    return _gradients(x, w13, w2, w13_bias, w2_bias, row_weights, needs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:10], output[1])
    ctx.how = (*inputs[10:17], inputs[18])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    rest = (None,) * 13
    if grad is None:
        return (None,) * 6 + rest
    needs = list(ctx.needs_input_grad[:6])
    made = experts_backward(grad, *ctx.saved_tensors, *ctx.how, needs)
    return *(g if need else None for g, need in zip(made, needs, strict=True)), *rest


experts.register_autograd(_differentiate, setup_context=_save)

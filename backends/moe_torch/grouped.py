"""One matrix product per expert, over rows sorted by expert: two engines with one contract.

``moe_torch::grouped_mm`` calls ``torch.nn.functional.grouped_mm``; ``moe_torch::grouped_mm_loop``
loops over the experts and takes any dtype and size, at the price of a wait for the device. Both are
custom operators, because Dynamo can't trace a loop over counts, nor ``F.grouped_mm`` in float32 and
float16 (its meta function takes bfloat16 only, torch 2.13). With R rows and E experts:

    grouped_mm*(x [R, C], w [E, N, C], starts [E + 1], counts [E]) -> y [R, N]     y_e = x_e @ w_e^T
    grouped_outer*(y [R, N], x [R, C], starts, counts) -> [E, N, C]                y_e^T @ x_e

Rows past ``starts[E]`` are never read and come back as zeros, in gradients too. The rows of an
alignment gap come back as zeros; ``F.grouped_mm`` reads them, so they have to be finite in
``grouped_mm`` and zero in ``grouped_outer``. An expert without rows gets a gradient of zeros.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

logger = logging.getLogger(__name__)


def row_experts(starts: Tensor, counts: Tensor, num_rows: int) -> Tensor:
    """int32 ``[R]``: the expert of each row, E for a row of a gap or of the tail. No host sync."""
    rows = torch.arange(num_rows, dtype=starts.dtype, device=starts.device)
    owner = torch.searchsorted(starts[1:], rows, right=True, out_int32=True)
    ends = torch.cat([starts[:-1] + counts, starts.new_zeros(1)])
    return torch.where(rows < ends[owner], owner, counts.shape[0])


def _bounds(starts: Tensor, counts: Tensor) -> list[tuple[int, int, int]]:
    """``(expert, first row, end)`` of the experts that have rows. Waits for the device once."""
    firsts, sizes = torch.stack([starts[:-1], counts]).tolist()
    return [(e, s, s + n) for e, (s, n) in enumerate(zip(firsts, sizes, strict=True)) if n]


def _loop_mm(x: Tensor, w: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
    y = x.new_zeros(x.shape[0], w.shape[1])
    for e, first, end in _bounds(starts, counts):
        torch.mm(x[first:end], w[e].t(), out=y[first:end])
    return y


def _loop_outer(y: Tensor, x: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
    out = x.new_zeros(counts.shape[0], y.shape[1], x.shape[1])
    for e, first, end in _bounds(starts, counts):
        torch.mm(y[first:end].t(), x[first:end], out=out[e])
    return out


def _grouped_mm(x: Tensor, w: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
    if not x.shape[0] or not w.shape[0]:
        return x.new_zeros(x.shape[0], w.shape[1])
    if not _readable(w):
        _notice_weights(tuple(w.shape), tuple(w.stride()))
        w = w.clone(memory_format=torch.contiguous_format)
    y = F.grouped_mm(_rows(x), w.transpose(-2, -1), offs=starts[1:])
    nobody = row_experts(starts, counts, x.shape[0]) == w.shape[0]
    return y.masked_fill_(nobody.unsqueeze(1), 0)


def _grouped_outer(y: Tensor, x: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
    if not x.shape[0] or not counts.shape[0]:
        return x.new_zeros(counts.shape[0], y.shape[1], x.shape[1])
    out = F.grouped_mm(_rows(y).t(), _rows(x), offs=starts[1:])
    # pytorch/pytorch#172439: groups without rows were left unwritten on some GPUs
    return out.masked_fill_((counts == 0).view(-1, 1, 1), 0)


def _readable(t: Tensor) -> bool:
    """Whether ``F.grouped_mm`` takes ``t`` as it lies: one of the last two dimensions dense, all
    other strides and the address multiples of 16 bytes, nothing expanded."""
    *_, row, column = t.stride()
    rows, columns = t.shape[-2:]
    if not (column == 1 and row >= columns) and not (row == 1 and column >= rows):
        return False
    others = [s for s in t.stride() if s != 1]
    return t.data_ptr() % 16 == 0 and all(s * t.element_size() % 16 == 0 for s in others)


def _rows(x: Tensor) -> Tensor:
    # clone and not contiguous(): that one keeps the odd strides of a single expanded row
    return x if _readable(x) else x.clone(memory_format=torch.contiguous_format)


@cache
def _notice_weights(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    logger.warning(
        "expert weights %s with strides %s are not laid out on 16-byte boundaries as grouped_mm "
        "needs and are copied in each call: pass contiguous weights, or choose torch[gemm=loop]",
        shape,
        strides,
    )


def _define(suffix: str, mm_kernel: Kernel, outer_kernel: Kernel) -> Kernel:
    """Registers an engine's two operators; each is the other's derivative."""
    mm: Any = torch.library.custom_op(
        f"moe_torch::grouped_mm{suffix}",
        mm_kernel,
        mutates_args=(),
        schema="(Tensor x, Tensor w, Tensor starts, Tensor counts) -> Tensor",
    )
    outer: Any = torch.library.custom_op(
        f"moe_torch::grouped_outer{suffix}",
        outer_kernel,
        mutates_args=(),
        schema="(Tensor y, Tensor x, Tensor starts, Tensor counts) -> Tensor",
    )

    @mm.register_fake
    def _(x: Tensor, w: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
        return x.new_empty(x.shape[0], w.shape[1])

    @outer.register_fake
    def _(y: Tensor, x: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
        return x.new_empty(counts.shape[0], y.shape[1], x.shape[1])

    def save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w, starts, counts = ctx.saved_tensors
        need_x, need_w, *_ = ctx.needs_input_grad
        dx = mm(grad, w.transpose(1, 2), starts, counts) if need_x else None
        dw = outer(grad, x, starts, counts) if need_w else None
        return dx, dw, None, None

    def outer_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, x, starts, counts = ctx.saved_tensors
        need_y, need_x, *_ = ctx.needs_input_grad
        dy = mm(x, grad, starts, counts) if need_y else None
        dx = mm(y, grad.transpose(1, 2), starts, counts) if need_x else None
        return dy, dx, None, None

    mm.register_autograd(mm_backward, setup_context=save)
    outer.register_autograd(outer_backward, setup_context=save)
    return mm


ENGINES: dict[str, Kernel] = {
    "grouped_mm": _define("", _grouped_mm, _grouped_outer),
    "loop": _define("_loop", _loop_mm, _loop_outer),
}

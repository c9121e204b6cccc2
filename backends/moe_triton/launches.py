"""How the grouped products are launched: what a call is, which blocks, which grid, and whether
tiles are loaded through descriptors. Shapes as in ``moe_triton.ops``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_core.errors import InputError
from moe_triton import gemm, gemm_backward, runtime, tiles, tuned
from moe_triton.activations import LAYOUTS
from moe_triton.gemm import WEIGHT_INPUT, WEIGHT_NONE, WEIGHT_OUTPUT

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moe_triton.configs import Config

_ANY = 2**20
"""For sums over rows: blocks don't depend on how many there are."""


@dataclass(frozen=True)
class Job:
    """What every kernel of a call has to know about its rows and its activation."""

    sorted_token_ids: Tensor | None
    tokens_per_expert: Tensor
    expert_starts: Tensor | None
    row_weights: Tensor | None
    num_positions: int
    top_k: int
    capacity: int
    hidden_size: int
    inner_size: int
    layout: str
    activation: dict[str, Any]
    weight: int
    has_bias: bool
    batch_invariant: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def num_experts(self) -> int:
        return self.tokens_per_expert.shape[0]

    @property
    def halves(self) -> int:
        return 2 if self.activation["GATED"] else 1

    @property
    def width(self) -> int:
        """W: rows of an expert's ``w13``."""
        return self.halves * self.inner_size

    @property
    def by_token(self) -> int:
        return tiles.NONE if self.sorted_token_ids is None else tiles.TOKEN

    @property
    def by_slot(self) -> int:
        return tiles.NONE if self.sorted_token_ids is None else tiles.SLOT

    @property
    def numbers(self) -> dict[str, Any]:
        """How products are computed, as kernels are told."""
        return {"PRECISION": "ieee", "UPCAST": runtime.INTERPRETED}

    @property
    def experts_block(self) -> int:
        return max(16, triton.next_power_of_2(self.num_experts))

    @property
    def plain(self) -> bool:
        act = self.activation
        simple = act["LIMIT"] is None and act["ALPHA"] is None
        return simple and not self.has_bias and self.layout != "interleaved"

    def config(self, kernel: str, n: int, k: int) -> Config:
        return tuned.choose(
            kernel,
            runtime.chip(self.device),
            itemsize=self.dtype.itemsize,
            rows_per_expert=self.num_positions / max(self.num_experts, 1),
            n=n,
            k=k,
            halves=self.halves,
            aligned=not any(
                size * self.dtype.itemsize % 16 for size in (self.hidden_size, self.inner_size)
            ),
            plain=self.plain,
            batch_invariant=self.batch_invariant,
        )

    def grid(self, config: Config, n: int) -> tuple[int]:
        """Programs of a persistent grid: no more than there may be tiles."""
        rows, height = self.num_positions, config.block_m
        tiles_m = min(rows, rows // height + min(self.num_experts, rows))
        return self._programs(config, tiles_m * triton.cdiv(n, config.block_n))

    def outer_grid(self, config: Config, m: int, n: int) -> tuple[int]:
        each = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
        return self._programs(config, self.num_experts * each)

    def _programs(self, config: Config, num_tiles: int) -> tuple[int]:
        if num_tiles >= 2**31:
            raise InputError(f"{num_tiles} tiles in one call: pass fewer tokens at a time")
        return (min(runtime.chip(self.device).num_sms * config.per_sm, num_tiles),)

    def descriptors(self, *tensors: Tensor) -> bool:
        """Whether the chip can load these through tensor descriptors as they lie."""
        return runtime.chip(self.device).has_tma and all(map(_describable, tensors))


def _describable(t: Tensor) -> bool:
    *outer, last = t.stride()
    aligned = all(s > 0 and s * t.itemsize % 16 == 0 for s in outer)
    return t.itemsize == 2 and last == 1 and aligned and t.data_ptr() % 16 == 0 and t.numel() > 0


def _describe(t: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), list(block))


def _places(rows: Tensor) -> tuple[int, int, int, int]:
    """Period, its stride, that of a row and that of an element, of ``[n, H]`` or ``[n, m, H]``."""
    if rows.dim() == 2:
        return 1, rows.stride(0), 0, rows.stride(1)
    outer, inner, column = rows.stride()
    return rows.shape[1], outer, inner, column


def _bias_strides(bias: Tensor | None) -> tuple[int, int]:
    return (0, 1) if bias is None else (bias.stride(0), bias.stride(1))


def make_job(
    x: Tensor,
    w13_bias: Tensor | None,
    w2: Tensor,
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
    batch_invariant: bool,
) -> Job:
    num_positions = x.numel() // max(x.shape[-1], 1)
    if slot_rows is not None:
        num_positions = slot_rows.numel()
    if num_positions >= 2**31:
        raise InputError(f"{num_positions} rows in one call: pass fewer tokens at a time")
    weight = WEIGHT_INPUT if weight_on_input else WEIGHT_OUTPUT
    return Job(
        sorted_token_ids=sorted_token_ids,
        tokens_per_expert=tokens_per_expert,
        expert_starts=expert_starts,
        row_weights=None if row_weights is None else row_weights.contiguous(),
        num_positions=num_positions,
        top_k=1 if slot_rows is None else slot_rows.shape[1],
        capacity=x.shape[1] if x.dim() == 3 else 0,
        hidden_size=x.shape[-1],
        inner_size=w2.shape[2],
        layout=w13_layout if gated else "gate_up",
        activation={
            "LAYOUT": LAYOUTS[w13_layout if gated else "gate_up"],
            "NAME": activation,
            "GATED": gated,
            "LIMIT": limit,
            "LIMIT_AFTER": limit_after,
            "ALPHA": alpha,
        },
        weight=WEIGHT_NONE if row_weights is None else weight,
        has_bias=w13_bias is not None,
        batch_invariant=batch_invariant,
        dtype=x.dtype,
        device=x.device,
    )


def launch_up(
    job: Job, x: Tensor, w13: Tensor, bias: Tensor | None, act: Tensor | None, pre: Tensor | None
) -> None:
    hidden, inner = job.hidden_size, job.inner_size
    config = job.config("up", inner, hidden)
    even, strides = hidden % config.block_k == 0, w13.stride()
    weights: Any = w13
    interleaved = job.layout == "interleaved" and job.halves == 2
    if interleaved and w13.stride(1) == hidden and even:
        w13 = w13.view(job.num_experts, inner, 2 * hidden)
    by_descriptor = job.descriptors(w13) and (not interleaved or w13.shape[1] == inner)
    if by_descriptor:
        weights = _describe(w13, 1, config.block_n, config.block_k)
    runtime.launch(
        gemm.up_kernel,
        job.grid(config, inner),
        x, weights, bias, job.row_weights, job.sorted_token_ids, job.tokens_per_expert,
        job.expert_starts, act, pre, job.num_experts, job.capacity, job.top_k, hidden, inner,
        *_places(x), *strides, *_bias_strides(bias),
        **job.activation,
        BY=job.by_token,
        WEIGHT=job.weight,
        W_TMA=by_descriptor,
        PARTS=config.parts,
        EVEN_K=even,
        EXPERTS=job.experts_block,
        **job.numbers,
        **config.blocks(),
        **config.options(),
    )  # fmt: skip


def launch_down(
    job: Job, rows: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, *, by: int, weighted: bool
) -> None:
    """``w [E, out_size, in_size]`` in any strides; ``rows`` and ``out`` dense."""
    out_size, in_size = w.shape[1:]
    config = job.config("down", out_size, in_size)
    strides, w_kn = w.stride(), w.stride(2) != 1
    stored = w.transpose(1, 2) if w_kn else w
    weights, source = w, rows
    by_descriptor = job.descriptors(stored, rows)
    if by_descriptor:
        block = (config.block_k, config.block_n) if w_kn else (config.block_n, config.block_k)
        weights = _describe(stored, 1, *block)
        source = _describe(rows, config.block_m, config.block_k)
    runtime.launch(
        gemm.down_kernel,
        job.grid(config, out_size),
        source, weights, bias, job.row_weights, job.sorted_token_ids, job.tokens_per_expert,
        job.expert_starts, out, job.num_experts, job.capacity, in_size, out_size,
        *strides, *_bias_strides(bias),
        BY=by,
        WEIGHTED=weighted,
        TMA=by_descriptor,
        W_KN=w_kn,
        EVEN_K=in_size % config.block_k == 0,
        EXPERTS=job.experts_block,
        **job.numbers,
        **config.blocks(),
        **config.options(),
    )  # fmt: skip


def launch_down_backward(
    job: Job,
    grad: Tensor,
    w2: Tensor,
    bias: Tensor | None,
    pre: Tensor,
    grad_pre: Tensor | None,
    act: Tensor | None,
    weight_parts: Tensor | None,
    config: Config,
) -> None:
    hidden, inner = job.hidden_size, job.inner_size
    weights: Any = w2
    by_descriptor = job.descriptors(w2)
    if by_descriptor:
        weights = _describe(w2, 1, config.block_k, config.block_n)
    runtime.launch(
        gemm_backward.down_backward_kernel,
        job.grid(config, inner),
        grad, weights, bias, job.row_weights, job.sorted_token_ids, job.tokens_per_expert,
        job.expert_starts, pre, grad_pre, act, weight_parts,
        job.num_experts, job.capacity, hidden, inner,
        *_places(grad), w2.stride(0), w2.stride(2), w2.stride(1), *_bias_strides(bias),
        0 if weight_parts is None else weight_parts.shape[1],
        **job.activation,
        BY=job.by_slot,
        WEIGHT=job.weight,
        W_TMA=by_descriptor,
        PARTS=config.parts,
        EVEN_K=hidden % config.block_k == 0,
        EXPERTS=job.experts_block,
        **job.numbers,
        **config.blocks(),
        **config.options(),
    )  # fmt: skip


def launch_outer(
    job: Job, a: Tensor, b: Tensor, out: Tensor, *, a_by: int, b_by: int, weighted: bool
) -> None:
    _, m, n = out.shape
    config = job.config("outer", n, _ANY)
    runtime.launch(
        gemm_backward.outer_kernel,
        job.outer_grid(config, m, n),
        a, b, job.row_weights, job.sorted_token_ids, job.tokens_per_expert, job.expert_starts, out,
        job.num_experts, job.capacity, job.top_k, m, n, *_places(a), *_places(b),
        A_BY=a_by,
        B_BY=b_by,
        W_BY=job.by_slot,
        WEIGHTED=weighted,
        **job.numbers,
        **config.blocks(),
        **config.options(),
    )  # fmt: skip


def launch_bias_backward(job: Job, rows: Tensor, out: Tensor, *, by: int, weighted: bool) -> None:
    size = out.shape[1]
    runtime.launch(
        gemm_backward.bias_backward_kernel,
        (job.num_experts, triton.cdiv(size, 64)),
        rows, job.row_weights, job.sorted_token_ids, job.tokens_per_expert, job.expert_starts, out,
        job.capacity, size, *_places(rows),
        BY=by,
        WEIGHTED=weighted,
        BLOCK_M=32,
        BLOCK_N=64,
        num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip


def launch_bias_product(job: Job, grad: Tensor, bias: Tensor, weight_parts: Tensor) -> None:
    height = 16
    tiles_m = min(job.num_positions, job.num_positions // height + job.num_experts)
    runtime.launch(
        gemm_backward.bias_product_kernel,
        (min(runtime.chip(job.device).num_sms * 4, tiles_m),),
        grad, bias, job.sorted_token_ids, job.tokens_per_expert, job.expert_starts, weight_parts,
        job.num_experts, job.capacity, job.hidden_size, weight_parts.shape[1],
        *_places(grad), *_bias_strides(bias),
        BY=job.by_slot,
        EXPERTS=job.experts_block,
        BLOCK_M=height,
        BLOCK_N=128,
        num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip

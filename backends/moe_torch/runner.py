"""The experts in plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from moe_core.activation import activate, split_gate_up, sum_dtype
from moe_core.errors import ConfigError, Fault, InputError
from moe_core.interfaces import ExpertRunner
from moe_core.layouts import ExpertContiguous
from moe_torch.checks import grouped_reasons
from moe_torch.grouped import ENGINES, row_experts

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.contracts import BuildContext, ExpertWeights
    from moe_core.layouts import Record


class TorchRunner(ExpertRunner):
    """``expert_contiguous`` in and out: product, activation, product.

    The engine of the products is fixed when the runner is built and stands in ``engine``:
    ``"grouped_mm"`` (``F.grouped_mm``) where the dtype, the sizes and the device allow it,
    else ``"loop"`` (any dtype and size; on CUDA it waits for the device once per product).
    Option ``gemm`` = auto | grouped | loop; ``grouped`` raises ``ConfigError`` where it can't be.

    Roundings to the rows' dtype, per output: after the first product, after the activation, after
    the second product, and once more where a bias is added or the routing weight paid (one more at
    the start if that is on the input). Everything between is float32, or float64 for float64 rows.
    """

    def __init__(self, context: BuildContext) -> None:
        super().__init__(context)
        request = context.request
        share = request.intermediate_size // request.tp_size
        self.gemm = context.options.get("gemm", "auto")
        reasons = grouped_reasons(context.dtype, request.hidden_size, share)
        self.why_not_grouped = "; ".join(f"{axis}={w}: {o}" for axis, w, o, _ in reasons)
        if not reasons:
            self.why_not_grouped = _device_reason(context.device)
        if self.gemm == "grouped" and self.why_not_grouped:
            raise ConfigError(
                [
                    Fault(
                        "backend",
                        "torch[gemm=grouped]",
                        f"F.grouped_mm can't run it ({self.why_not_grouped}): use gemm=loop or "
                        "gemm=auto",
                    )
                ]
            )
        self.engine = "loop" if self.gemm == "loop" or self.why_not_grouped else "grouped_mm"
        self._weighs_input = "weight" in context.pays and request.weight_on_input
        self._weighs_output = "weight" in context.pays and not request.weight_on_input
        self._widths = (request.hidden_size, share, 2 if request.gated else 1)

    def describe(self) -> dict[str, Any]:
        """As JSON: ``gemm`` asked for, ``engine`` in use, ``why_not_grouped`` (or empty)."""
        return {"gemm": self.gemm, "engine": self.engine, "why_not_grouped": self.why_not_grouped}

    def run(self, record: Record, weights: ExpertWeights) -> ExpertContiguous:
        """Rows of no expert come back as zeros. Raises ``InputError`` for another layout, for a
        routing weight that is paid already, and for rows and weights of different dtypes."""
        if not isinstance(record, ExpertContiguous):
            raise InputError(f"the torch runner takes expert_contiguous rows, not {record.layout}")
        x, starts, counts = record.rows, record.expert_starts, record.tokens_per_expert
        if x.dtype != weights.w13.dtype:
            raise InputError(
                f"rows are {x.dtype} and expert weights {weights.w13.dtype}: cast the rows first"
            )
        weighs = self._weighs_input or self._weighs_output
        if weighs and "weight" in record.paid:
            raise InputError(f"the routing weight is paid already: paid={record.paid}")
        wide = sum_dtype(x.dtype)
        gaps = record.expert_alignment > 1
        experts = row_experts(starts, counts, x.shape[0])
        somebody = (experts < counts.shape[0]).unsqueeze(1)
        route = torch.where(somebody, record.row_weights.unsqueeze(1), 0).to(wide)
        if gaps:
            x = torch.where(somebody, x, 0)
        if self._weighs_input:
            x = (x.to(wide) * route).to(x.dtype)
        matmul = ENGINES[self.engine]  # not kept: an operator can't be copied with the layer
        h = matmul(x, weights.w13, starts, counts)
        if weights.w13_bias is not None:
            h = h.to(wide) + _bias_rows(weights.w13_bias, experts, wide)
        h = activate(h, weights.activation, weights.w13_layout, x.dtype)
        y = matmul(h, weights.w2, starts, counts)
        if weights.w2_bias is not None:
            y = y.to(wide) + _bias_rows(weights.w2_bias, experts, wide)
        if self._weighs_output:
            y = y.to(wide) * route
        y = y.to(x.dtype)
        if gaps:  # the gradients of a gap's rows must not reach the products
            y = torch.where(somebody, y, 0)
        return replace(record, rows=y, paid=record.paid + (("weight",) if weighs else ()))

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """A copy whose gate and up are two contiguous halves; itself where they are already."""
        if not weights.activation.gated or weights.w13_layout == "gate_up":
            return weights
        bias = weights.w13_bias
        return replace(
            weights,
            w13=_to_gate_up(weights.w13.transpose(1, 2), weights.w13_layout)
            .transpose(1, 2)
            .contiguous(),
            w13_bias=None if bias is None else _to_gate_up(bias, weights.w13_layout),
            w13_layout="gate_up",
        )

    def workspace_bytes(self, num_tokens: int, top_k: int) -> int:
        """An upper bound of what one forward without gradients allocates at its peak, in bytes.

        There are always ``R = num_tokens * top_k`` rows, however the tokens are routed. With W rows
        of ``w13`` per expert, s bytes per element and a bytes per element of float32 (float64):
        ``R * (max(W, H) * (s + 3a) + H * s + I * (s + a) + 64) + (E_local + 1) * (W + H) * a``: a
        product with its bias at their widest, what stays alive around it, 64 bytes of row numbers,
        and the biases in float32.
        """
        hidden, share, halves = self._widths
        dtype = getattr(torch, self.context.dtype)
        size, wide, rows = dtype.itemsize, sum_dtype(dtype).itemsize, halves * share
        per_row = max(rows, hidden) * (size + 3 * wide) + hidden * size + share * (size + wide) + 64
        biases = (self.context.num_local_experts + 1) * (rows + hidden) * wide
        return num_tokens * top_k * per_row + biases


def _bias_rows(bias: Tensor, experts: Tensor, dtype: torch.dtype) -> Tensor:
    """``[E, N]`` → ``[R, N]``, zeros for rows of no expert. The gradient is summed in ``dtype``."""
    padded = torch.cat([bias.to(dtype), bias.new_zeros(1, bias.shape[1], dtype=dtype)])
    return padded[experts]


def _to_gate_up(x: Tensor, w13_layout: str) -> Tensor:
    return torch.cat(split_gate_up(x, w13_layout), dim=-1)


def _device_reason(device: str) -> str:
    kind = torch.device(device).type
    if kind == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            return f"device={device}: compute capability 8.0 or newer, this is {capability}"
    elif kind not in ("cpu", "meta"):
        return f"device={device}: cpu or cuda"
    return ""

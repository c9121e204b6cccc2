"""What an expert does between its two matrix products: clamp, activate, gate.

Shared by everything written in torch, except the reference, which spells the formulas out once
more so that the two can be compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.config import Activation


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that activations, weightings and sums are computed in: float64 or float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def split_gate_up(x: Tensor, w13_layout: str) -> tuple[Tensor, Tensor]:
    """Views ``(gate, up)``, each ``[..., I]``, of ``x [..., 2I]`` laid out as ``w13_layout``."""
    if w13_layout == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return (first, second) if w13_layout == "gate_up" else (second, first)


def activate(
    x: Tensor, activation: Activation, w13_layout: str, dtype: torch.dtype | None = None
) -> Tensor:
    """``[..., 2I]`` (``[..., I]`` without a gate) → ``[..., I]``.

    Computed in float32 (float64 for float64 input), rounded once to ``dtype`` (default: x's).
    ``limit_form="before"`` is DeepSeek-V4's and GPT-OSS's clamp; ``"after"`` clamps ``act(gate)``;
    ``alpha`` is GPT-OSS's ``gate * sigmoid(alpha * gate) * (up + 1)``
    (transformers, models/gpt_oss/modeling_gpt_oss.py).
    """
    dtype = dtype or x.dtype
    x = x.to(sum_dtype(x.dtype))
    gate, up = split_gate_up(x, w13_layout) if activation.gated else (x, None)
    limit = activation.limit
    if limit is not None and activation.limit_form == "before":
        gate = gate.clamp(max=limit)
    if activation.alpha is not None:
        gate = gate * torch.sigmoid(activation.alpha * gate)
    else:
        gate = _function(activation.name, gate)
    if limit is not None and activation.limit_form == "after":
        gate = gate.clamp(max=limit)
    if up is None:
        return gate.to(dtype)
    if limit is not None:
        up = up.clamp(-limit, limit)
    if activation.alpha is not None:
        up = up + 1
    return (gate * up).to(dtype)


def _function(name: str, x: Tensor) -> Tensor:
    match name:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x).square()
        case "identity":
            return x
        case _:
            raise ValueError(f"unknown activation {name!r}")

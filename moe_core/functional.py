"""Routed experts as a function."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from moe_core import environment, registry
from moe_core.building import resolve_or_raise
from moe_core.checks import check_hidden, check_routing, values_are_checked
from moe_core.config import Activation, MoEConfig, ParallelConfig, dtype_name
from moe_core.contracts import INVALID, ExpertWeights, Routing
from moe_core.errors import InputError
from moe_core.pipeline import Pipeline
from moe_core.placement import Placement

if TYPE_CHECKING:
    from torch import Tensor


def moe_forward(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    w13_layout: str = "gate_up",
    activation: Activation | None = None,
    backend: str | None = None,
) -> Tensor:
    """Routed experts as a function, local only: ``hidden_states [..., H]`` → ``[..., H]``.

    ``topk_ids`` and ``topk_weights`` ``[T, K]``; ``w13 [E, 2I, H]`` (``[E, I, H]`` without a
    gate); ``w2 [E, H, I]``; biases ``[E, 2I]`` and ``[E, H]``, both or neither. The backend is
    chosen once per configuration. Raises ``InputError`` and ``ConfigError`` as ``Experts`` does.
    """
    activation = activation or Activation()
    faults = _weight_faults(w13, w2, w13_bias, w2_bias, activation)
    if topk_ids.ndim != 2:
        faults.append(f"topk_ids must have shape [T, K], not {tuple(topk_ids.shape)}")
    if faults:
        raise InputError("; ".join(faults))
    num_experts, hidden_size, intermediate_size = w2.shape
    needs_grad = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad
        for t in (hidden_states, topk_weights, w13, w2, w13_bias, w2_bias)
    )
    pipeline = _cached_pipeline(
        MoEConfig(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_experts=num_experts,
            top_k=topk_ids.shape[1],
            activation=activation,
            w13_layout=w13_layout,
            bias=w13_bias is not None,
            dtype=dtype_name(w13.dtype),
        ),
        backend,
        (registry.generation(), environment.backend(), environment.plugins()),
        w13.device,
        needs_grad,
    )
    rows = check_hidden(hidden_states, hidden_size, w13).reshape(-1, hidden_size)
    ids, weights = check_routing(rows, topk_ids, topk_weights, num_experts, topk_ids.shape[1])
    if not values_are_checked(ids):
        ids = ids.masked_fill((ids < INVALID) | (ids >= num_experts), INVALID)
    experts = ExpertWeights(w13, w2, w13_bias, w2_bias, w13_layout, activation)
    with torch.autocast(rows.device.type, enabled=False):
        out = pipeline.forward(rows, Routing(topk_ids=ids, topk_weights=weights), experts)
    return out.view(hidden_states.shape)


def _weight_faults(
    w13: Tensor, w2: Tensor, w13_bias: Tensor | None, w2_bias: Tensor | None, act: Activation
) -> list[str]:
    if w13.ndim != 3 or w2.ndim != 3:
        return [f"w13 and w2 must have 3 dimensions, not {w13.ndim} and {w2.ndim}"]
    faults: list[str] = []
    experts, hidden, inner = w2.shape
    rows = inner * (2 if act.gated else 1)
    if tuple(w13.shape) != (experts, rows, hidden):
        faults.append(
            f"w13 must have shape {(experts, rows, hidden)} to go with w2 {tuple(w2.shape)} and "
            f"gated={act.gated}, not {tuple(w13.shape)}"
        )
    if (w13_bias is None) != (w2_bias is None):
        faults.append("w13_bias and w2_bias go together")
    for name, bias, width in (("w13_bias", w13_bias, rows), ("w2_bias", w2_bias, hidden)):
        if bias is not None and tuple(bias.shape) != (experts, width):
            faults.append(f"{name} must have shape {(experts, width)}, not {tuple(bias.shape)}")
    tensors = [t for t in (w13, w2, w13_bias, w2_bias) if t is not None]
    if len({(t.dtype, t.device) for t in tensors}) > 1:
        faults.append("w13, w2 and the biases must share one dtype and one device")
    return faults


@functools.lru_cache(maxsize=128)
def _cached_pipeline(
    config: MoEConfig,
    backend: str | None,
    _read_by_resolve: tuple[Any, ...],
    device: torch.device,
    autograd: bool,
) -> Pipeline:
    """``_read_by_resolve``: what else the choice depends on, and the cache with it."""
    resolution = resolve_or_raise(
        config, ParallelConfig(), backend, device, autograd=autograd, router="none"
    )
    return Pipeline(resolution, Placement(config.num_experts), config.dtype, str(device))

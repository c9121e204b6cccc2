"""Experts that every token passes through: beside the routed ones, or as slots among them.

Shapes: T tokens, H hidden size, S shared experts, W the inner width of one. The canonical weights,
which are the state_dict either way, are those of one MLP of width S * W: ``w13 [2SW, H]`` in the
config's ``w13_layout`` (``[SW, H]`` without a gate), ``w2 [H, SW]`` and, with ``shared_gate``,
``gate [1, H]``. Cut over tp, each expert's W is cut, so that W stands for W/tp on each rank.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moe_core import tracing
from moe_core.activation import activate, sum_dtype
from moe_core.collectives import enter, leave, sum_over, sum_widely
from moe_core.errors import InputError, MoEError
from moe_core.groups import LOCAL, Groups
from moe_core.placement import w13_blocks

if TYPE_CHECKING:
    from moe_core.config import MoEConfig
    from moe_core.experts import Experts
    from moe_core.layer import MoELayer


class SharedExperts(nn.Module):
    """One MLP of the shared experts' widths taken together. No biases, no routing weight.

    The activation is that of the routed experts, its limit included. With ``config.shared_gate``
    the result is scaled by ``sigmoid(x @ gate.T)`` per token (Qwen2-MoE; transformers,
    models/qwen2_moe). With ``config.shared_tp`` this rank has its share of each expert's width, and
    the results are summed over tp in float32 (float64) before the gate.
    """

    def __init__(
        self,
        config: MoEConfig,
        device: torch.device,
        requires_grad: bool = True,
        groups: Groups = LOCAL,
        tp_size: int = 1,
    ) -> None:
        super().__init__()
        self.config = config
        self.tp_size = tp_size if config.shared_tp else 1
        self.groups = groups

        def parameter(*shape: int) -> nn.Parameter:
            data = torch.empty(shape, dtype=getattr(torch, config.dtype), device=device)
            return nn.Parameter(data, requires_grad)

        size = config.shared_size // self.tp_size
        self.w13 = parameter(size * (2 if config.activation.gated else 1), config.hidden_size)
        self.w2 = parameter(config.hidden_size, size)
        self.gate = parameter(1, config.hidden_size) if config.shared_gate else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with standard deviation 1/sqrt(fan in), from torch's generator; the whole is drawn
        and then cut, so that it is the same at any width."""
        self.load_full_weights(*draw_weights(self.config, self.w13))

    def load_full_weights(self, w13: Tensor, w2: Tensor, gate: Tensor | None = None) -> None:
        """Copies this rank's part of the canonical whole. Raises ``InputError`` for shapes."""
        check_shapes(self.config, w13, w2, gate)
        w13, w2 = cut_slots(
            self.config, w13, w2, self.groups.tp_rank if self.tp_size > 1 else 0, self.tp_size
        )
        with torch.no_grad():
            self.w13.copy_(w13_from_slots(self.config, w13))
            self.w2.copy_(w2_from_slots(w2))
            if self.gate is not None and gate is not None:
                self.gate.copy_(gate)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[T, H]`` → ``[T, H]``, complete on every tp rank."""
        if self.tp_size > 1 and self.groups.tp is None:
            raise MoEError("these shared experts are cut over tp, and there is no tp group yet")
        dtype, act = sum_dtype(hidden_states.dtype), self.config.activation
        rows, tp = hidden_states, () if self.groups.tp is None else (self.groups.tp,)
        if self.tp_size > 1:
            (rows,) = enter(functools.partial(sum_over, groups=tp), rows)
        h = activate(F.linear(rows, self.w13), act, self.config.w13_layout)
        out = F.linear(h, self.w2)
        if self.tp_size > 1:
            out = leave(functools.partial(_traced_sum, groups=tp), out.to(dtype))
        if self.gate is not None:
            logit = F.linear(hidden_states.to(dtype), self.gate.to(dtype))
            out = out.to(dtype) * torch.sigmoid(logit)
        return out.to(hidden_states.dtype)


def draw_weights(config: MoEConfig, like: Tensor) -> list[Tensor]:
    """Canonical ``w13``, ``w2`` and, where there is one, ``gate``: fresh, whole."""
    hidden, size = config.hidden_size, config.shared_size
    shapes = [(size * (2 if config.activation.gated else 1), hidden), (hidden, size)]
    shapes += [(1, hidden)] if config.shared_gate else []
    return [like.detach().new_empty(s).normal_(0, 1 / math.sqrt(s[1])) for s in shapes]


def check_shapes(config: MoEConfig, w13: Tensor, w2: Tensor, gate: Tensor | None) -> None:
    """Raises ``InputError`` with every shape that isn't the canonical one."""
    hidden, size = config.hidden_size, config.shared_size
    rows = size * (2 if config.activation.gated else 1)
    faults = [
        f"{name} must have shape {shape}, not {tuple(given.shape)}"
        for name, given, shape in (("w13", w13, (rows, hidden)), ("w2", w2, (hidden, size)))
        if tuple(given.shape) != shape
    ]
    if (gate is not None) != config.shared_gate or (
        gate is not None and tuple(gate.shape) != (1, hidden)
    ):
        given = None if gate is None else tuple(gate.shape)
        wanted = (1, hidden) if config.shared_gate else None
        faults.append(
            f"gate must have shape {wanted} (shared_gate={config.shared_gate}), not {given}"
        )
    if faults:
        raise InputError("; ".join(faults))


def has_halves(config: MoEConfig) -> bool:
    """Whether gate rows and up rows are two blocks of ``w13``."""
    return config.activation.gated and config.w13_layout != "interleaved"


def w13_as_slots(config: MoEConfig, w13: Tensor) -> Tensor:
    """``[2SW, H]`` → ``[S, 2W, H]``: one expert after the other. A view for S = 1."""
    count, hidden = config.num_shared_experts, w13.shape[1]
    if has_halves(config):
        w13 = w13.reshape(2, count, -1, hidden).transpose(0, 1)
    return w13.reshape(count, -1, hidden)


def w13_from_slots(config: MoEConfig, w13: Tensor) -> Tensor:
    """``[S, 2W, H]`` → ``[2SW, H]``."""
    count, _, hidden = w13.shape
    if has_halves(config):
        w13 = w13.reshape(count, 2, -1, hidden).transpose(0, 1)
    return w13.reshape(-1, hidden)


def w2_as_slots(config: MoEConfig, w2: Tensor) -> Tensor:
    """``[H, SW]`` → ``[S, H, W]``."""
    return w2.reshape(w2.shape[0], config.num_shared_experts, -1).transpose(0, 1)


def w2_from_slots(w2: Tensor) -> Tensor:
    """``[S, H, W]`` → ``[H, SW]``."""
    return w2.transpose(0, 1).reshape(w2.shape[1], -1)


def each_expert(config: MoEConfig, name: str, weight: Tensor) -> list[Tensor]:
    """Each shared expert's part of canonical ``w13`` or ``w2``, as views: ``w13 [2, W, H]`` where
    gate and up are blocks, else ``[2W, H]`` (``[W, H]``); ``w2 [H, W]``."""
    count, blocks = config.num_shared_experts, has_halves(config)
    if name == "w2":
        return list(weight.unflatten(1, (count, -1)).unbind(1))
    shape = (2, count, -1) if blocks else (count, -1)
    return list(weight.unflatten(0, shape).unbind(1 if blocks else 0))


def cut_slots(
    config: MoEConfig, w13: Tensor, w2: Tensor, tp_rank: int, tp_size: int
) -> tuple[Tensor, Tensor]:
    """A tp rank's part ``[S, 2W/tp, H]``, ``[S, H, W/tp]`` of the canonical whole."""
    w13, w2 = w13_as_slots(config, w13), w2_as_slots(config, w2)
    width, gated = config.shared_width, config.activation.gated
    blocks = w13_blocks(width, gated, config.w13_layout, tp_rank, tp_size)
    return (
        torch.cat([w13.narrow(1, a, b - a) for a, b in blocks], 1),
        w2.chunk(tp_size, -1)[tp_rank],
    )


# As slots: the last S of an Experts' parameters.


def load_slots(experts: Experts, w13: Tensor, w2: Tensor, gate: Tensor | None = None) -> None:
    """Copies this rank's part of the canonical whole into the shared slots."""
    check_shapes(experts.config, w13, w2, gate)
    first = experts.placement.num_local_experts(experts.groups.ep_rank)
    w13, w2 = cut_slots(experts.config, w13, w2, experts.groups.tp_rank, experts.parallel.tp_size)
    with torch.no_grad():
        experts.w13[first:].copy_(w13)
        experts.w2[first:].copy_(w2)


def keep_slots_canonical(layer: MoELayer) -> None:
    """Makes the layer's state_dict that of one whose shared experts are apart, both ways."""
    layer.register_state_dict_post_hook(_split_state)
    layer.register_load_state_dict_pre_hook(_merge_state)


def _split_state(layer: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    first = layer.experts.placement.num_local_experts(layer.experts.groups.ep_rank)
    for name in ("w13", "w2"):
        whole = state[f"{prefix}experts.{name}"]
        slots, config = whole[first:], layer.config
        shared = w13_from_slots(config, slots) if name == "w13" else w2_from_slots(slots)
        state[f"{prefix}experts.{name}"] = whole[:first]
        state[f"{prefix}shared_experts.{name}"] = shared


def _merge_state(
    layer: Any,
    state: dict[str, Any],
    prefix: str,
    _metadata: Any,
    _strict: bool,
    missing: list[str],
    _unexpected: list[str],
    errors: list[str],
) -> None:
    first = layer.experts.placement.num_local_experts(layer.experts.groups.ep_rank)
    for name, as_slots in (("w13", w13_as_slots), ("w2", w2_as_slots)):
        mine = getattr(layer.experts, name).detach()
        key, shared_key = f"{prefix}experts.{name}", f"{prefix}shared_experts.{name}"
        routed, shared = state.pop(key, None), state.pop(shared_key, None)
        missing += [k for k, part in ((key, routed), (shared_key, shared)) if part is None]
        try:  # what is missing stays as it is
            routed = mine[:first] if routed is None else routed
            slots = mine[first:] if shared is None else as_slots(layer.config, shared)
            state[key] = torch.cat([routed, slots])
        except RuntimeError as error:
            errors.append(f"{key} and {shared_key} don't fit together: {error}")
            state[key] = mine


class SumSharedSlots(torch.autograd.Function):
    """Weights ``[slots, ...]`` of which those from ``first`` on are alike on all ep ranks: the
    gradient of these is summed over the ranks, in float32 (float64). (It costs a copy of the whole
    gradient.)"""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, first: int, group: Any) -> Tensor:
        ctx.first, ctx.group = first, group
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        slots = grad[ctx.first :]
        slots.copy_(sum_widely(slots, lambda t: sum_over(t, (ctx.group,))))
        return grad, None, None


def _traced_sum(part: Tensor, groups: tuple[Any, ...]) -> Tensor:
    call = tracing.current()
    if call is not None:
        call.collectives.append("shared.reduce")
    return sum_over(part, groups)
